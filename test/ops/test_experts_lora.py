"""Adapters of experts: factors in place of sums of weights."""

import pytest
import torch
from test_experts import GPT_OSS, LORA, SPEC, Ops, close, inputs
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_like.testing import assert_accurate, run


def folded(gate_up, down, gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b, **kwargs):
    """The experts with their adapters added to the weights, as PEFT does; the factors are those of ``SPEC.fn``."""
    gate_up = torch.baddbmm(gate_up, gate_up_lora_b, gate_up_lora_a, alpha=0.7)
    down = torch.baddbmm(down, down_lora_b, down_lora_a, alpha=1.2)
    return SPEC.ref(gate_up=gate_up, down=down, **kwargs)


# pairs of rank, options and dtype
ADAPTERS = [
    (rank, options, (torch.float32, torch.float16)[(i + j) % 2])
    for i, rank in enumerate((1, 4, 16, 40))
    for j, options in enumerate(({}, GPT_OSS | {"limit": None}))  # a limit passes gradients by chance
]


@pytest.mark.parametrize(("rank", "options", "dtype"), ADAPTERS, ids=str)
def test_adapters_are_as_exact_as_sums_of_weights(rank, options, dtype, device, poisoned):
    make = lambda: inputs(device, dtype, lead=(60,), bias=True, elsewhere=1, rank=rank)  # noqa: E731
    assert_accurate(SPEC.fn, folded, make, options, draws=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, GPT_OSS | {"limit": None}], ids=str)
@pytest.mark.parametrize("rank", [4, 64, 80])
@pytest.mark.parametrize("widths", [{"H": 512, "I": 256}, {"H": 456, "I": 328}, {"H": 100, "I": 75}], ids=str)
def test_several_tiles_of_each_expert(widths, rank, options, dtype, poisoned):
    make = lambda: inputs("cuda", dtype, lead=(1500,), E=5, K=3, bias=True, elsewhere=1, rank=rank, **widths)  # noqa: E731
    assert_accurate(SPEC.fn, folded, make, options)


def test_the_same_bits_compiled_and_again(device, poisoned):
    given = inputs(device, rank=4, bias=True)
    torch._dynamo.reset()
    compiled = torch.compile(SPEC.fn, fullgraph=True, backend="aot_eager")
    expected = run(SPEC.fn, given, GPT_OSS)
    for fn in (SPEC.fn, compiled):
        close(run(fn, given, GPT_OSS), expected, rtol=0, atol=0)


def test_a_second_derivative_raises(device):
    given = inputs(device, rank=4)
    (grad,) = torch.autograd.grad(SPEC.fn(**given).sum(), given["down_lora_b"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(grad.sum(), given["down_lora_a"])


class Recorded(TorchDispatchMode):
    """Notes the arguments of each of the library's ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_like":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def test_opcheck(device):
    with Recorded() as mode:
        SPEC.fn(**inputs(device, rank=4)).sum().backward()
    for func, args in mode.calls:
        torch.library.opcheck(func, tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args))


def test_the_adapter_of_one_matrix(device):
    whole = inputs(device, rank=4)
    for names in (LORA[:2], LORA[2:]):
        given = {n: t for n, t in whole.items() if n not in LORA or n in names}
        close(run(SPEC.fn, given, {}), run(SPEC.ref, given, {}), rtol=1e-5, atol=1e-5)


def test_adapters_take_no_memory_of_the_size_of_the_experts(device):
    """Nothing is kept but z, the product of x and A, and the factors."""
    given = inputs(device, H=64, I=48, E=16, rank=4)
    given = {n: t.detach().requires_grad_(n in ("x", *LORA)) for n, t in given.items()}
    kept, largest = {}, []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            own = {t.untyped_storage().data_ptr() for t in given.values()}
            made = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            largest.extend(t.numel() for t in made if t.untyped_storage().data_ptr() not in own)
            return result

    with Sizes(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        SPEC.fn(**given).sum().backward()
    assert max(largest) < min(given[name].numel() for name in ("gate_up", "down"))
    own = {t.data_ptr() for t in given.values()}
    sizes = sorted(t.numel() for at, t in kept.items() if at not in own and t.is_floating_point())
    assert sizes == sorted([*(16 * 16 * width for width in (64, 96, 48, 64)), 60 * 16, 60 * 96])


def test_a_checkpoint_with_adapters(device):
    given = inputs(device, rank=4)
    expected = run(SPEC.fn, given, {})
    with Ops() as mode:
        got = run(lambda **kwargs: checkpoint(SPEC.fn, use_reentrant=False, **kwargs), given, {})
    close(got, expected, rtol=0, atol=0)
    assert [mode.calls.count(name) for name in ("moe_gate_up", "moe_low_rank", "moe_combine")] == [2, 6, 2]


def test_flops_of_adapters(device):
    given, unit = inputs(device, rank=16), 2 * 60 * 16
    base = 2 * 60 * 32 * 16
    given = {n: t.detach().requires_grad_(n in ("x", *LORA)) for n, t in given.items()}
    with FlopCounterMode(display=False) as forward:
        out = SPEC.fn(**given)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    widths = 32 + 32 + 16 + 32
    # backward: the two products with each factor, and the gradient of each; dB of down also the product with A again
    assert forward.get_total_flops() == 3 * base + unit * widths
    assert backward.get_total_flops() == 3 * base + unit * (2 * widths + 16)


def test_factors_of_another_dtype(device):
    given = inputs(device, torch.float16, rank=4)
    wide = {n: given[n].detach().float().requires_grad_() for n in LORA}
    got, expected = run(SPEC.fn, given | wide, {}), run(SPEC.fn, given, {})
    assert {got[f"d{name}"].dtype for name in LORA} == {torch.float32}
    close({n: t.half() for n, t in got.items()}, expected, rtol=0, atol=0)


@pytest.mark.parametrize("plain", [(), LORA, [n for n in inputs("cpu", rank=2) if n not in LORA]])
def test_adapters_beside_dtensors_are_refused(plain, mesh):
    given = {n: t.detach() for n, t in inputs("cpu", rank=2).items()}
    given |= {n: distribute_tensor(t, mesh, [Replicate()]) for n, t in given.items() if n not in plain}
    with pytest.raises(TypeError, match="gate_up_lora must be None beside DTensors"):
        SPEC.fn(**given)
