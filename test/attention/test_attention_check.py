"""Wrong values: with LIGER_LIKE_CHECK=1 they raise; without it kernels stay within their tensors."""

import importlib

import pytest
import torch
from conftest import DEVICE

from liger_like import ops
from liger_like.ops.attention import checks
from liger_like.testing import run
from liger_like.testing.inputs import attention_inputs, attention_varlen_inputs

ROWS = 35
MARGIN = 300  # more rows than any block has
CANARY = 7


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(checks, "VALUES", True)


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
        assert expected == importlib.reload(checks).VALUES
    monkeypatch.undo()
    importlib.reload(checks)


@pytest.fixture
def fenced(monkeypatch):
    """Put new tensors, filled with zeros, between canaries; return what surrounds each."""
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
    """Return a copy of ``t`` whose memory lies between rows of NaN."""
    rows = torch.full((MARGIN, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
    return torch.cat((rows, t.detach(), rows))[MARGIN:-MARGIN].requires_grad_()


GARBAGE = {
    "outside": ([-5, 20, 90], 0),
    "falling": ([90, 20, 25], ROWS),
    "falling in the middle": ([0, 26, 9, 31], 2**62),
    "as large as integers": ([0, 2**31 - 1, ROWS], ROWS),
    "as small as integers": ([-(2**31), 2**31 - 1, 3, ROWS], 0),
    "lengths": ([13, 10, 12], 13),
    "one": ([71], 0),
    "before the first row": ([0, -7, 20, ROWS], ROWS),
    "up and down": ([34, 1, ROWS, 2, 36, 0], ROWS),
}
WIDTHS = (16,) if DEVICE == "cpu" else (16, 64, 128, 256)


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("name", GARBAGE)
def test_wrong_offsets_touch_nothing_outside(name, D, fenced, device):
    cu, longest = GARBAGE[name]
    inputs = attention_varlen_inputs(torch.float16, device, ((ROWS, ROWS),), H=2, Hk=1, D=D, sinks=True)
    inputs |= {name: within_nan(inputs[name]) for name in ("q", "k", "v")}
    dtype = torch.int64 if longest else torch.int32
    wrong, right = (torch.tensor(t).to(device, dtype) for t in (cu, [*range(len(cu))]))
    for cu_q, cu_k in ((wrong, wrong), (wrong, right), (right, wrong)):
        offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = ops.flash_attention_varlen(**inputs | offsets, causal=cu_q is wrong)
        out.backward(within_nan(torch.ones_like(out)))
        for t in (out, *(inputs[name].grad for name in ("q", "k", "v", "sinks"))):
            assert t.isfinite().all()
    assert len(fenced) > 5
    assert all(t.eq(CANARY).all() for pair in fenced for t in pair)


def test_sequences_of_less_than_no_rows_take_no_blocks(device, poisoned):
    x, cu = torch.randn(200, 1, 16, device=device), torch.tensor([0, 200, 1, 200], device=device)
    assert ops.flash_attention_varlen(x, x, x, cu, cu, 200, 200).isfinite().all()


def test_wrong_spans_touch_nothing_outside(fenced, device):
    inputs = attention_inputs(torch.float32, device, B=1, S=40, Sk=70, H=2, Hk=1, D=16)
    inputs = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    inputs["spans"] = torch.randint(-(2**31), 2**31 - 1, (2, 1, 40), device=device).int()
    assert all(t.isfinite().all() for t in run(ops.flash_attention, inputs, {}).values())
    assert all(t.eq(CANARY).all() for pair in fenced for t in pair)


def test_numbers_that_torch_compile_does_not_know(device):
    """A window that changes, and a length that depends on data, are traced without a break."""
    inputs = attention_varlen_inputs(torch.float32, device, H=2, Hk=1, D=16, lengths=((5, 5), (3, 3)))
    q, k, v, cu = (inputs[name] for name in ("q", "k", "v", "cu_seqlens_q"))

    def attend(left):
        longest = cu.diff().max().item()
        return ops.flash_attention_varlen(q, k, v, cu, cu, longest, longest, window=(left, 0))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for left in (3, 2, 4):
            torch.testing.assert_close(compiled(left), attend(left))
