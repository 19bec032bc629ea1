import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import init_device_mesh

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before any kernel is decorated: without a GPU the same kernels are interpreted
    )

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the same examples in every run: a failure is a commit's, not a day's
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True, max_examples=100 if DEVICE == "cuda" else 10
)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords and DEVICE == "cpu":
            item.add_marker(skip)


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(scope="module")
def mesh():
    """Of this process alone."""
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
def results(monkeypatch, tmp_path):
    """Instead of the folder of results and the pages of the sweeps."""
    from benchmark import markdown, measure, sweeps_report

    for module in (markdown, measure, sweeps_report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    for name in ("README", "NOTES"):
        page = tmp_path / f"{name}.md"
        page.write_text(f"before\n{sweeps_report.BEGIN}old\n{sweeps_report.END}after\n")
        monkeypatch.setattr(sweeps_report, name, page)
    return tmp_path / "results"


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are launched, and their grids."""
    from liger_like.ops.attention import (
        _backward,
        _backward_hopper,
        _backward_hopper_256,
        _bias,
        _forward,
        _forward_hopper,
    )

    kernels = []
    for module in (_forward, _forward_hopper, _backward, _backward_hopper, _backward_hopper_256, _bias):

        def launch(kernel, grid, *args, true=module.launch, **options):
            kernels.append((kernel.fn.__name__, grid))
            true(kernel, grid, *args, **options)

        monkeypatch.setattr(module, "launch", launch)
    return kernels
