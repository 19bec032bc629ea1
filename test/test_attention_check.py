"""Wrong values: with LIGER_LIKE_CHECK=1 they raise; without it kernels stay within their tensors."""

import importlib

import pytest
import torch

from liger_like import ops
from liger_like._cases import attention_inputs, attention_varlen_inputs
from liger_like.ops.attention import _checks
from liger_like.testing import run

ROWS, MARGIN = 70, 300  # more than the rows of a block
CANARY = 7.0


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(_checks, "VALUES", True)


def packed(cu_q, cu_k=None, longest=(9, 9)):
    q, k = torch.randn(9, 2, 16), torch.randn(12, 2, 16)
    cu_q = torch.tensor(cu_q)
    return ops.flash_attention_varlen(q, k, k, cu_q, cu_q if cu_k is None else torch.tensor(cu_k), *longest)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("cu_seqlens_q must start with 0, got 5: offsets are needed, not lengths", ([5, 4], [0, 4])),
        ("cu_seqlens_k must start with 0, got -1", ([0, 4], [-1, 4])),
        ("cu_seqlens_q must not fall, got 9 before 5 at index 1", ([0, 9, 5],)),
        ("cu_seqlens_q must not pass the 9 rows, got 10", ([0, 10], [0, 4], (99, 99))),
        ("cu_seqlens_k must not pass the 12 rows, got 13", ([0, 9], [0, 13], (99, 99))),
        ("max_seqlen_q must be at least the longest sequence, 5, got 4", ([0, 4, 9], [0, 3, 3], (4, 9))),
        ("max_seqlen_k must be at least the longest sequence, 9, got 8", ([0, 4, 9], [0, 3, 12], (9, 8))),
    ],
)
def test_values_of_offsets(message, arguments, checked):
    with pytest.raises(ValueError, match=message):
        packed(*arguments)


def test_values_that_fit(checked):
    packed([0, 4, 9], [0, 3, 12])
    packed([0])
    with torch.device("meta"):
        q, cu = torch.randn(9, 2, 16), torch.tensor([3, 1])
        assert ops.flash_attention_varlen(q, q, q, cu, cu, 9, 9).is_meta


def test_values_of_spans(checked):
    inputs = attention_inputs(torch.float32, "cpu", B=2, S=3, Sk=9, H=1, Hk=1, D=16, spans=True)
    ops.flash_attention(**inputs)
    inputs["spans"][0, 1] = torch.tensor([0, 4, 0])
    inputs["spans"][1, 1] = 9
    with pytest.raises(ValueError, match=r"spans must not fall along a row, got 4 before 0 in spans\[0, 1\]"):
        ops.flash_attention(**inputs)


def test_values_are_not_read_unless_asked_for(monkeypatch):
    packed([0, 9, 5])
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("LIGER_LIKE_CHECK", value)
        assert importlib.reload(_checks).VALUES == expected
    monkeypatch.undo()
    importlib.reload(_checks)


@pytest.fixture
def fenced(monkeypatch):
    """New tensors lie between canaries, and are filled with zeros; return the surroundings of all of them."""
    around = []
    true = torch.empty

    def empty(*shape, dtype=None, device=None, **options):
        shape = torch.Size(shape[0] if shape and not isinstance(shape[0], int) else shape)
        n = shape.numel()
        whole = true(n + 2 * MARGIN * 64, dtype=dtype, device=device).fill_(CANARY)
        around.append((whole[: MARGIN * 64], whole[MARGIN * 64 + n :]))
        return whole[MARGIN * 64 : MARGIN * 64 + n].view(shape).zero_()

    def new_empty(self, *shape, dtype=None, device=None, **options):
        return empty(*shape, dtype=dtype or self.dtype, device=device or self.device)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return around


def within_nan(t):
    """``t`` as a part of a tensor whose rest is NaN."""
    rows = torch.full((MARGIN, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
    return torch.cat((rows, t.detach(), rows))[MARGIN:-MARGIN].requires_grad_()


GARBAGE = (
    [-5, 20, 90], [90, 20, 40], [0, 60, 50, 65], [0, 2**31 - 1, 70], [-(2**31), 2**31 - 1, 3, 70], [30, 40, 70], [71],
    [69, 1, 70, 2, 71, 0],
)  # fmt: skip


@pytest.mark.parametrize("longest", [0, ROWS, 2**62])
@pytest.mark.parametrize("cu", GARBAGE, ids=str)
def test_wrong_offsets_touch_nothing_outside(cu, longest, fenced, device):
    wide = device == "cuda"
    inputs = attention_varlen_inputs(
        torch.float16, device, ((ROWS, ROWS),), H=2, Hk=1, D=128 if wide else 16, sinks=True
    )
    inputs |= {name: within_nan(inputs[name]) for name in ("q", "k", "v")}
    dtype = torch.int64 if longest else torch.int32
    wrong, right = torch.tensor(cu, dtype=torch.int64).to(device, dtype), torch.arange(len(cu), device=device)
    for cu_q, cu_k in ((wrong, wrong), (wrong, right), (right, wrong)) if wide else ((wrong, wrong), (wrong, right)):
        offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k.to(dtype)}
        options = {"causal": bool(longest), "max_seqlen_q": longest, "max_seqlen_k": longest, "deterministic": wide}
        leaves = {name: t for name, t in (inputs | offsets).items() if t.requires_grad}
        result = ops.flash_attention_varlen(**inputs | offsets, **options)
        result.backward(within_nan(torch.ones_like(result)))
        for name, t in leaves.items():
            assert t.grad.isfinite().all(), name
            t.grad = None
        assert result.isfinite().all()
    assert all(t.eq(torch.tensor(CANARY).to(t.dtype)).all() for pair in fenced for t in pair)
    assert len(fenced) > 5


def test_wrong_spans_touch_nothing_outside(fenced, device):
    inputs = attention_inputs(torch.float32, device, B=1, S=40, Sk=70, H=2, Hk=1, D=16)
    inputs = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    inputs["spans"] = torch.randint(-(2**31), 2**31 - 1, (2, 1, 40), device=device).int()
    assert all(t.isfinite().all() for t in run(ops.flash_attention, inputs, {}).values())
    assert all(t.eq(torch.tensor(CANARY).to(t.dtype)).all() for pair in fenced for t in pair)

