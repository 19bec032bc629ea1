"""Expert parallelism: models whose experts are spread over processes compute what one process does."""

import copy
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from distributed import run
from test_parallel_fsdp import MAX_NORM, assert_same, full, gradients, shares
from test_parallel_mixtures import mixture
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from liger_like import nn, patch, unpatch
from liger_like.parallel import expert_parallel
from liger_like.runtime import support

H, E, K = 16, 4, 2
TOKENS = 24  # of a process in the batches of ``shares``


def groups_of(model):
    """The parameters, in groups that share a mesh: torch's optimizers and norms take one group at a time."""
    groups = defaultdict(list)
    for parameter in model.parameters():
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())


def clipped_step(model):
    """The step of test_parallel_fsdp, by groups."""
    groups = groups_of(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1, eps=0.01, fused=True)
    norm = torch.stack([full(get_total_norm([p.grad for p in group])) for group in groups]).norm()
    assert norm > MAX_NORM
    for group in groups:
        clip_grads_with_norm_(group, MAX_NORM, norm)
    optimizer.step()
    return {"norm": norm, **{name.removeprefix("module."): full(p) for name, p in model.named_parameters()}}


def by_ddp(model, mesh, **options):
    expert_parallel(model, mesh, **options)
    return DistributedDataParallel(model)


def by_fsdp(model, mesh, **options):
    experts = expert_parallel(model, mesh, **options)
    for module in (*model.model.layers, model):
        fully_shard(module, ignored_params=experts)
    return model


def by_grid(model, mesh, **options):
    """The experts are sharded over one dimension by this, and over the other by FSDP."""
    expert_parallel(model, mesh["ep"], **options)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_transfers(counts):
    """All-gathers, and all-to-alls."""
    names = "c10d_functional.all_gather_into_tensor", "c10d_functional.all_to_all_single"
    return [sum(n for op, n in counts.items() if name in str(op)) for name in names]


def compare_models(rank, wrap, shape, families, settings, device="cpu"):
    processes = dist.get_world_size()
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
    whole, rows = shares(processes, device=device)
    for family in families:
        original = mixture(family, device)
        single = copy.deepcopy(original)
        _, expected, _ = gradients(single, whole)
        expected |= clipped_step(single)
        for options, checkpointed in settings:
            model = copy.deepcopy(original)
            patch(model, strict=True)
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model = wrap(model, mesh, **options)
            _, got, counts = gradients(model, rows[rank], processes)
            default = "all_gather" if shape[-1] <= K else "all_to_all"
            # x, index, weights and numbers of tokens, again in a checkpoint; the output, and the three gradients
            there = (3 if "tokens" in options else 4) * (1 + checkpointed)
            by_gather = options.get("exchange", default) == "all_gather"
            assert own_transfers(counts) == ([there + 1, 3] if by_gather else [0, there + 4])
            assert_same(got | clipped_step(model), expected)
    options = StateDictOptions(full_state_dict=True)
    state = {name: t.cpu() for name, t in get_model_state_dict(model, options=options).items()}
    assert_same(state, {name: t for name, t in expected.items() if name in state})
    set_model_state_dict(model, original.state_dict(), options=options)
    assert_same(get_model_state_dict(model, options=options), original.state_dict(), tolerance=0)


def block():
    """A mixture, the same in all processes, and tokens [2, 3, H]."""
    experts = nn.Experts(E, H, 8, limit=7.0, alpha=1.702, transposed=True, interleaved=True, bias=True)
    model = nn.MoE(nn.Router(H, E, K), experts, shared_experts=nn.SwiGLUMLP(H, 8))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model, torch.randn(2, 3, H)


def grads(out, model, *others):
    """Gradients of the mean square, whole; those of replicated parameters are averaged, as DDP does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.square().mean(), [*others, *trained])
    for t in found[len(others) :]:
        if not isinstance(t, DTensor):
            dist.all_reduce(t)
            t /= dist.get_world_size()
    return [full(t) for t in found]


def check_modules(mesh, *cases):
    """A compiled block, and one with frozen experts, run on any leading dimensions."""
    n, rank, (single, x) = mesh.size(), mesh.get_rank(), block()
    leaf, everything = x.clone().requires_grad_(), torch.cat([x] * n).requires_grad_()
    for frozen, compiled, exchange in cases:
        alone = copy.deepcopy(single)
        alone.experts.requires_grad_(not frozen)
        model = copy.deepcopy(alone)
        assert len(expert_parallel(model, mesh, exchange=exchange)) == 4
        assert all(p.requires_grad is not frozen and p.placements == (Shard(0),) for p in model.experts.parameters())
        assert model.experts.down_proj.to_local().untyped_storage().nbytes() == E // n * 8 * H * 4
        call = torch.compile(model, fullgraph=exchange is None, backend="aot_eager") if compiled else model
        factors = torch.linspace(-1, 1, n)  # tokens of others differ
        out = call(leaf * factors[rank])
        whole = alone(everything * factors.repeat_interleave(2)[:, None, None])
        torch.testing.assert_close(out, whole[2 * rank : 2 * rank + 2])
        got, (dx, *expected) = grads(out, model, leaf), grads(whole, alone, everything)
        torch.testing.assert_close(got[1:], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(got[0], dx[2 * rank : 2 * rank + 2] * n, rtol=1e-4, atol=1e-6)


def check_numbers_of_tokens(mesh):
    rank, (single, x) = mesh.get_rank(), block()
    x, model = x.flatten(0, 1), copy.deepcopy(single)
    expert_parallel(model, mesh)
    with pytest.raises(RuntimeError, match="must have the same number of tokens: pass tokens="):
        model(x[rank:])
    assert model(x[:0]).shape == (0, H)
    model = copy.deepcopy(single)
    expert_parallel(model, mesh, tokens=len(x))
    for count in (len(x), 3 + rank, rank, 0):
        torch.testing.assert_close(model(x[:count]), single(x[:count]))
        with torch.no_grad(), CommDebugMode() as transfers:
            model.experts(x[:count], *model.gate(x[:count])[:0:-1])
        assert own_transfers(transfers.get_comm_counts()) == [3, 1]
    with pytest.raises(ValueError, match=f"tokens must be at least .* got {len(x)} for {len(x) + 1}"):
        model(torch.cat((x, x[:1])))


class Sent(TorchDispatchMode):
    """Collects the sizes of all-to-alls, and the rows that the experts' first product has memory for."""

    def __init__(self):
        super().__init__()
        self.numbers, self.rows = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "all_to_all_single" in str(func):
            self.numbers.append(args[0].numel())
        if func.namespace == "liger_like" and "moe_gate_up" in str(func):
            self.rows.append(len(result[1]))
        return result


def check_what_is_sent(mesh):
    """Only rows of chosen experts travel and have memory, whatever the processes' numbers of tokens and choices."""
    n, rank, local = mesh.size(), mesh.get_rank(), 2 * E // mesh.size()
    experts = nn.Experts(2 * E, H, 8, bias=True)
    alone = copy.deepcopy(experts)
    expert_parallel(experts, mesh, exchange="all_to_all")
    drawn = torch.rand(n, 6, 2 * E).topk(3).indices
    drawn[:, 0] = torch.tensor([-1, 2 * E, 2 * E + 1])  # ids of nobody
    drawn[0, 1], drawn[0, 2] = -1, torch.tensor([1, 0, -7])
    one = drawn * 0 + 1  # all tokens to one expert
    for index, sizes in (drawn, [6] * n), (drawn, [3 * r for r in range(n)]), (one, [6] * n), (drawn, [0] * n):
        choices = [i[:size] if (i != 1).any() else i[:, :1] for i, size in zip(index, sizes, strict=True)]
        owners = [{(t, e // local) for t, ids in enumerate(i.tolist()) for e in ids if 0 <= e < 2 * E} for i in choices]
        x, weights = (torch.randn(*choices[rank].shape[:1], k, requires_grad=True) for k in (H, choices[rank].shape[1]))
        with Sent() as sent:
            out = experts(x, choices[rank], weights)
            grads = torch.autograd.grad(out.square().sum(), (x, weights, *experts.parameters()))
        rows, back = len(owners[rank]), sum(owner == rank for own in owners for _, owner in own)
        K = choices[rank].shape[1]
        assert sent.numbers == [2 * n, rows * K, rows * H, rows * K, back * H, rows * H, *sorted((back * K, back * H))]
        if support.INTERPRET:
            assert sent.rows == [sum(int((i.div(local, rounding_mode="floor") == rank).sum()) for i in choices)]
        torch.testing.assert_close(out, expected := alone(x, choices[rank], weights))
        wanted = torch.autograd.grad(expected.square().sum(), (x, weights, *alone.parameters()))
        for t in wanted[2:]:
            dist.all_reduce(t)
            t /= n  # of the mean of the processes' losses
        for got, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(full(got), want, rtol=1e-4, atol=1e-6)


def check_precision(rank):
    """Outputs and gradients are summed in fp32, so that a small part is not lost, and rounded once."""
    for exchange in "all_gather", "all_to_all":
        compare_sums(exchange)


def compare_sums(exchange):
    mesh, bf16 = init_device_mesh("cpu", (4,)), torch.bfloat16
    experts = nn.Experts(4, 2, 1)
    for p in experts.parameters():
        torch.nn.init.ones_(p)
    alone = copy.deepcopy(experts.to(bf16))
    expert_parallel(experts, mesh, exchange=exchange)
    x, index = torch.ones(1, 2, dtype=bf16, requires_grad=True), torch.arange(4)[None]
    weights = torch.tensor([[256.0, 1.0, 1.0, 1.0]]) / alone(x, index[:, :1], torch.ones(1, 1)).detach()[:, :1].float()
    out = experts(x, index, weights)
    assert torch.equal(out, torch.full((1, 2), 259.0, dtype=bf16))
    (dx,) = torch.autograd.grad(out.sum(), x)
    parts = [alone(x, index[:, e : e + 1], weights[:, e : e + 1]).sum() for e in range(4)]
    assert torch.equal(dx, sum(torch.autograd.grad(part, x)[0].float() for part in parts).to(bf16))
    with torch.autocast("cpu", bf16):
        assert experts.float()(x.float(), index, weights).tolist() == [[259.0] * 2]  # not rounded to bf16


def check_errors(mesh):
    model = mixture("Qwen3Moe", num_local_experts=3)
    patch(model)
    with pytest.raises(ValueError, match=r"must divide the 3 experts of model.layers.0.mlp.experts, got \d processes"):
        expert_parallel(model, mesh)
    model = mixture("Qwen3Moe")
    patch(model)
    first = model.model.layers[0].mlp.experts
    if mesh.get_rank():
        torch.nn.init.zeros_(first.down_proj)
    expert_parallel(model, mesh)
    assert full(first.down_proj).count_nonzero() == first.down_proj.numel()  # of the first process
    with pytest.raises(ValueError, match="are sharded: call expert_parallel once, and before fully_shard"):
        expert_parallel(model, mesh)
    assert {row.status for row in patch(model).patched} == {"already patched"}
    with pytest.raises(RuntimeError, match="experts expert_parallel has sharded cannot be unpatched"):
        unpatch(model)
    first.act_fn = torch.nn.Tanh()
    with pytest.raises(RuntimeError, match="the gate of experts must not change after expert_parallel"):
        model(torch.zeros(1, 3, dtype=torch.long))


def check_generate(mesh):
    rank, single = mesh.get_rank(), mixture("Qwen3Moe").eval()
    model = copy.deepcopy(single)
    patch(model)
    expert_parallel(model, mesh, tokens=16)
    ids = torch.arange(3, 24).view(3, 7)[: 1 + rank % 2, : 7 - rank]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), single.generate(ids, **options))


def check(rank, *checks):
    mesh = init_device_mesh("cpu", (2,))
    for each in checks:
        each(mesh)


def check_interpreted(mesh):
    check_modules(mesh, (False, True, None), (True, False, "all_to_all"))
    check_what_is_sent(mesh)


def check_four(rank):
    mesh = init_device_mesh("cpu", (4,))
    check_modules(mesh, (False, True, "all_to_all"))
    check_what_is_sent(mesh)  # last, since the processes draw different numbers of random values


@pytest.fixture
def plain(monkeypatch):
    """Processes that start now run the references of the ops: interpreted kernels take a hundred times as long."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("wrap", [by_ddp, by_fsdp])
def test_two_processes(wrap):
    settings = [({}, False), ({"tokens": TOKENS}, True), ({"exchange": "all_to_all"}, True)]
    run(compare_models, 2, wrap, (2,), ("Qwen3Moe", "GptOss"), settings)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("wrap", "shape", "settings"),
    [
        (by_ddp, (4,), [({}, False), ({"exchange": "all_gather"}, False)]),
        (by_grid, (2, 2), [({"tokens": TOKENS}, True), ({"exchange": "all_to_all"}, True)]),
    ],
)
def test_four_processes(wrap, shape, settings):
    run(compare_models, 4, wrap, shape, ("GptOss",), settings)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("wrap", [by_ddp, by_fsdp])
def test_over_nccl(wrap):
    settings = [({}, False), ({"tokens": TOKENS}, True), ({"exchange": "all_to_all"}, True)]
    run(compare_models, 2, wrap, (2,), ("Qwen3Moe", "GptOss"), settings, "cuda", backend="cpu:gloo,cuda:nccl")


def test_compiled_and_frozen():
    run(check, 2, check_interpreted)


@pytest.mark.usefixtures("plain")
def test_what_four_processes_send():
    run(check_four, 4)


@pytest.mark.usefixtures("plain")
def test_tokens_errors_and_generate():
    run(check, 2, check_numbers_of_tokens, check_errors, check_generate)


@pytest.mark.usefixtures("plain")
def test_precision():
    run(check_precision, 4)


def test_arguments(mesh):
    experts = nn.Experts(E, H, 8)
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
    for args, error, message in (
        (("model", mesh), TypeError, "model must be a Module, got str"),
        ((experts, "mesh"), TypeError, "mesh must be a DeviceMesh, got str"),
        ((experts, grid), ValueError, r"mesh must have one dimension, got 2: take one by its name, as mesh\['ep'\]"),
        ((mixture("Qwen3Moe"), mesh), ValueError, r"found no experts: patch the model with liger_like\.patch"),
    ):
        with pytest.raises(error, match=message):
            expert_parallel(*args)
    with pytest.raises(ValueError, match="exchange must be one of None, 'all_gather', 'all_to_all', got 'ring'"):
        expert_parallel(experts, mesh, exchange="ring")
    for tokens, error in (0, ValueError), (1.5, TypeError):
        with pytest.raises(error, match="tokens must be"):
            expert_parallel(experts, mesh, tokens=tokens)
    assert not any(isinstance(p, DTensor) for p in experts.parameters())
    assert expert_parallel(experts, grid["ep"]) == {*experts.parameters()}
    assert [*experts._ddp_params_and_buffers_to_ignore] == [name for name, _ in experts.named_parameters()]


def test_adapters_are_refused(mesh):
    import peft

    model = mixture("Qwen3Moe")
    options = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    patch(model)
    with pytest.raises(ValueError, match=r"merge adapters \(LoRA\) first"):
        expert_parallel(model, mesh)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj_bias"])
def test_parametrised_experts_are_refused(name, mesh):
    experts = nn.Experts(E, H, 8, bias=True)
    torch.nn.utils.parametrize.register_parametrization(experts, name, torch.nn.Identity())
    with pytest.raises(ValueError, match="the weights of ParametrizedExperts must be plain parameters"):
        expert_parallel(experts, mesh)
    assert not any(isinstance(p, DTensor) for p in experts.parameters())
