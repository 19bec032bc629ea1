import os
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch's import: tensors are small, and each core runs a process

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import init_device_mesh

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before any kernel is decorated: without a GPU the interpreter runs the kernels
    )
    from interpreter import quicken

    quicken()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_GPU = pytest.StashKey[int]()  # the number of tests left out
# Every run draws the same examples, so a failure comes from a commit, not from chance.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True, max_examples=100 if DEVICE == "cuda" else 10
)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Run the tests in one process on a GPU, and otherwise in one for each core."""
    return 0 if DEVICE == "cuda" else None


def pytest_collection_modifyitems(config, items):
    """Leave out the tests that need a GPU where there is none."""
    runnable = [item for item in items if DEVICE == "cuda" or "gpu" not in item.keywords]
    config.stash[NEEDS_GPU] = len(items) - len(runnable)
    items[:] = runnable


def pytest_sessionfinish(session):
    """Tell the process that started this one, if one did, how many tests were left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["needs_gpu"] = session.config.stash.get(NEEDS_GPU, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Keep how many tests a worker left out, which is the same number for each."""
    node.config.stash[NEEDS_GPU] = getattr(node, "workeroutput", {}).get("needs_gpu", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Print how many tests were not run, and why."""
    why = Counter({"needs a GPU: make test-gpu": config.stash.get(NEEDS_GPU, 0)})
    why.update(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if why.total():
        terminalreporter.write_line(f"not run: {', '.join(f'{n} ({reason})' for reason, n in why.items() if n)}")


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(scope="module")
def mesh():
    """Return a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _surface_errors(monkeypatch):
    """Patching reports an exception of any kind as a module left alone; in the tests it is a mistake and is raised."""
    monkeypatch.setattr("liger_like.patching.raise_errors", True)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """No op repeats what it did in another test, which may have changed how it works."""
    from liger_like.runtime import replay

    monkeypatch.setattr(replay, "PLANS", {})


@pytest.fixture
def poisoned():
    """Memory that torch hands out unfilled holds NaN (integers: their maximum), so that a read of it shows.

    Ops that have a way which repeats bit for bit, and one that does not, take the former.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def references(monkeypatch):
    """Run the references of the ops on a CPU: their kernels have tests of their own, and take long to interpret."""
    from liger_like.runtime import support

    monkeypatch.setattr(support, "INTERPRET", False)


@pytest.fixture
def calls(monkeypatch):
    """Calls of ``moe_experts`` by patched experts; on a CPU its definition runs, since its kernels have their tests."""
    from liger_like.patches import experts, own_experts, separate_experts

    made, op = [], experts.moe_experts

    def noted(*args, **options):
        made.append(options)
        return op(*args, **options)

    for module in (experts, own_experts, separate_experts):
        monkeypatch.setattr(module, "moe_experts", noted)
    return made


@pytest.fixture
def graphs(monkeypatch):
    """Return the number of replays of each graph of a decode step; on a CPU a tape is replayed."""
    from tapes import Graphs

    from liger_like.patches import decode_graphs

    made = Graphs()
    if DEVICE == "cuda":
        capture = decode_graphs.capture

        def counted(work, device):
            replay, place = capture(work, device), len(made)
            made.append(0)

            def count():
                made[place] += 1
                return replay()

            return count

        monkeypatch.setattr(decode_graphs, "capture", counted)
    else:
        monkeypatch.setattr(decode_graphs, "capture", made.capture)
        monkeypatch.setattr(decode_graphs, "DEVICES", {"cpu"})
        monkeypatch.setattr(decode_graphs, "free_memory", lambda device: (1 << 40, 1 << 40))
    return made


@pytest.fixture
def defined(references, calls, monkeypatch):
    """Let ``moe_experts`` run where no kernel can."""
    from liger_like.patches import experts, own_experts, separate_experts

    for module in (experts, own_experts, separate_experts):
        monkeypatch.setattr(module, "use_kernel", lambda x: True)
    return calls


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Replace the folder of results and the pages of the sweeps by temporary ones."""
    from benchmark.common import markdown, measure
    from benchmark.training import sweeps_report

    for module in (markdown, measure, sweeps_report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    for name in ("FIGURES", "NOTES"):
        page = tmp_path / f"{name}.md"
        page.write_text(f"before\n{sweeps_report.BEGIN}old\n{sweeps_report.END}after\n")
        monkeypatch.setattr(sweeps_report, name, page)
    return tmp_path / "results"


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are launched, and their grids; no op repeats launches, which would be missed."""
    from liger_like.ops.attention import sums
    from liger_like.ops.attention.hopper import backward_256 as hopper_backward_256
    from liger_like.ops.attention.hopper import forward as hopper_forward
    from liger_like.ops.attention.hopper import key_blocks
    from liger_like.ops.attention.portable import backward as portable_backward
    from liger_like.ops.attention.portable import bias as portable_bias
    from liger_like.ops.attention.portable import delta as portable_delta
    from liger_like.ops.attention.portable import forward as portable_forward
    from liger_like.runtime import registry

    monkeypatch.setattr(registry, "signature", lambda args: None)
    kernels = []
    for module in (
        portable_forward,
        hopper_forward,
        portable_backward,
        key_blocks,
        hopper_backward_256,
        portable_bias,
        portable_delta,
        sums,
    ):

        def launch(kernel, grid, *args, true=module.launch, **options):
            kernels.append((kernel.fn.__name__, grid))
            true(kernel, grid, *args, **options)

        monkeypatch.setattr(module, "launch", launch)
    return kernels
