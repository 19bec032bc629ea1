"""Products that reduce or differentiate their logits: which calls take them, what runs around them, and themselves."""

import types
import warnings

import pytest
import torch
from test_logprobs import SPEC, draws, inputs_of, trained

from liger_like import ops
from liger_like.ops.losses import divergence_chunks, exponentials, unstored
from liger_like.ops.losses import products as product_parts
from liger_like.ops.losses.linear_token_loss import fused_linear_token_loss_ref
from liger_like.ops.losses.row_kernels import launch_bwd
from liger_like.ops.losses.rows import Options
from liger_like.runtime import tma
from liger_like.runtime.fallback import BROKEN, NotCompiledError
from liger_like.runtime.launcher import recorded
from liger_like.runtime.support import architecture, collected_reasons
from liger_like.testing import SPECS, assert_accurate

DIVERGENCE = next(s for s in SPECS if s.name == "fused_linear_divergence")
KERNELS = {"_linear_rows_hopper_kernel", "_linear_dlogits_hopper_kernel"}


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or architecture(torch.device("cuda", 0)) != 9:
        pytest.skip("needs a Hopper GPU")


def reduce_logits(x, w, order, target, scale, parts, at, kept):
    x, w = x.float(), w.float()
    for i, part in enumerate(w.split(exponentials.WORDS)):
        z = scale * x @ part.T
        top = z.amax(1)
        z = z - top.masked_fill(top == -torch.inf, 0)[:, None]
        parts[0, :, i], parts[1, :, i] = top, z.exp().sum(1)
        if kept is not None:
            start = i * exponentials.WORDS
            e = z.exp() * 2.0**exponentials.LARGEST_EXPONENT
            kept[:, start : start + len(part)] = x @ part.T if kept.dtype == torch.float32 else e
        if len(parts) == 3:
            parts[2, :, i] = (z.exp() * z.where(z.exp() > 0, 0)).sum(1)
    at[: len(x)] = scale * (x * w[target[order].clamp(0, len(w) - 1)]).sum(1)


def differentiate_logits(x, w, order, target, lse, entropy, upstream, options, v_start, vocabulary, dz):
    place = {"order": order, "v_start": v_start, "vocabulary": vocabulary}
    launch_bwd((x.float() @ w.float().T).contiguous(), dz, target, None, lse, entropy, upstream, options, **place)


@pytest.fixture
def in_torch(monkeypatch):
    """Count the calls of the kernels, in whose place torch runs."""
    counts = {"reduce": 0, "differentiate": 0}

    def counted(name, fn):
        def run(*args):
            counts[name] += 1
            fn(*args)

        return run

    kernels = types.SimpleNamespace(
        reduce_logits=counted("reduce", reduce_logits),
        differentiate_logits=counted("differentiate", differentiate_logits),
    )
    monkeypatch.setattr(tma, "DTYPES", (torch.float32, torch.float16))
    monkeypatch.setattr(tma, "_is_hopper", lambda device: True)
    monkeypatch.setattr(unstored, "gluon_module", lambda name: kernels)
    monkeypatch.setattr(exponentials, "WORDS", 16)
    monkeypatch.setattr(product_parts, "SLICE_COLUMNS", 16)
    return counts


@pytest.mark.parametrize("outputs", [("logprob", "lse"), ("logprob", "entropy")], ids=str)
def test_what_runs_around_the_kernels(outputs, in_torch, device, poisoned):
    """Several chunks of tokens and slices of words; ignored tokens and a temperature."""
    options = {"chunk_rows": 16, "temperature": 1.4, "outputs": outputs}
    assert_accurate(SPEC.fn, SPEC.ref, lambda: inputs_of(device, (45,)), options)
    assert in_torch["reduce"] >= 2
    assert in_torch["differentiate"] >= 2


def test_a_part_without_scores(in_torch, device):
    """All scores of some words may be -inf; a chunk of ignored tokens has results of 0."""
    inputs = {name: t.detach() for name, t in inputs_of(device, (40,)).items()}
    inputs["x"][:, 0], inputs["weight"][16:48, 0], inputs["weight"][:16, 0] = 1.0, -torch.inf, 0.0
    inputs["weight"][48:, 0] = 0.0
    inputs["target"][:] = torch.arange(40, device=device) % 16
    inputs["target"][7:] = -100
    out = ops.fused_linear_logprobs(**inputs, outputs=("logprob", "entropy", "lse"))
    logp = (inputs["x"] @ inputs["weight"].T).log_softmax(-1)[:7]
    torch.testing.assert_close(out.logprob[:7], logp.gather(1, inputs["target"][:7, None])[:, 0])
    torch.testing.assert_close(out.entropy[:7], -(logp.exp() * logp.where(logp.exp() > 0, 0)).sum(1))
    assert not any(t[7:].any() for t in (out.logprob, out.entropy, out.lse))
    assert in_torch["reduce"] == 1


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"bias": True}, {}),
        ({"rank": 4}, {}),
        ({"ids": 2}, {}),
        ({"H": 20}, {}),
        ({}, {"softcap": 5.0}),
        ({}, {"keep_logits": 2**12}),
        ({}, {"topk": 2}),
        ({}, {"outputs": ("logprob", "correct")}),
        ({}, {"outputs": ("logprob", "mean_logit")}),
        ({}, {"outputs": ("logprob", "log_sum_sq_prob")}),
    ],
    ids=str,
)
def test_calls_that_store_logits(shape, options, in_torch, device):
    """In the forward, and in the backward if it needs them, too; numbers without a gradient are for the forward."""
    inputs = inputs_of(device, (20,), **shape)
    if shape == {"rank": 4}:
        options = {"lora": (inputs.pop("lora_a"), inputs.pop("lora_b"), 0.5)}
    out = ops.fused_linear_logprobs(**inputs, **options, chunk_rows=16)
    sum(t.sum() for t in (out.logprob, out.logprob_at) if t is not None).backward()
    assert not in_torch["reduce"]
    assert bool(in_torch["differentiate"]) == ("outputs" in options or "topk" in options)


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.float16], ids=str)
def test_rounded_logits_are_stored(logits_dtype, in_torch, device):
    inputs = inputs_of(device, (20,), torch.float16)
    with collected_reasons() as reasons:
        ops.fused_linear_logprobs(**inputs, logits_dtype=logits_dtype, chunk_rows=16).logprob.sum().backward()
    rounded = logits_dtype != torch.float32
    assert bool(in_torch["reduce"]) == bool(in_torch["differentiate"]) != rounded
    assert any("take logits_dtype float32" in reason for reason in reasons) == rounded


def test_cross_entropy_has_no_reason_against_kernels_of_another_op(in_torch, device):
    inputs = inputs_of(device, (20,), torch.float16)
    with collected_reasons() as reasons:
        ops.fused_linear_cross_entropy(**inputs, reduction="none").sum().backward()
    assert not [reason for reason in reasons if "store no logits" in reason]


def test_exponentials_hold_scores(device):
    """Blocks of words that all tokens fill, and that the last ones do not; a score of -inf has no probability."""
    z, target = torch.randn(3, 5000, device=device) * 4, torch.tensor([4, 4999, -100], device=device)
    z[0, 300:900] = -torch.inf
    kept, tops = z.new_empty(3, 5000, dtype=torch.float16), z.new_empty(3, exponentials.parts_of(5000))
    exponentials.store_exponentials(z, 1.5, kept, tops)
    lse, (g, h) = (1.5 * z).logsumexp(1), torch.randn(2, 3, device=device)
    logp = 1.5 * z - lse[:, None]
    entropy = -(logp.exp() * logp.where(logp.exp() > 0, 0)).sum(1)
    grads = []
    for scores, largest in ((z, None), (kept, tops)):
        dz = torch.empty_like(z)
        options, rows = Options(-100, 0.0, 0.0, None, 1.5), (lse, torch.zeros_like(lse))
        launch_bwd(scores, dz, target, None, rows, entropy, (None, g, h), options, unit=0.0, tops=largest)
        grads.append(dz)
    torch.testing.assert_close(*grads, rtol=2e-3, atol=1e-6)
    assert not grads[1][0, 300:900].any()


KINDS = {
    "frozen head": ((lambda fn: lambda **kwargs: fn(**kwargs).logprob), {}, ("x",)),
    "uniform": ((lambda fn: lambda **kwargs: fn(**kwargs).logprob.mean()), {"uniform_gradient": True}, ("x", "weight")),
    "kept": ((lambda fn: fn), {"keep_logits": 2**40, "outputs": ("logprob", "entropy")}, ("x", "weight")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_exponentials_take_the_place_of_logits(kind, in_torch, device, poisoned):
    """Gradients from exponentials are as exact as from logits in fp32: the rule allows no rounded logits."""
    take, options, names = KINDS[kind]
    make = lambda: trained(inputs_of(device, (41,), torch.float16), *names)  # noqa: E731
    options = options | {"chunk_rows": 16, "temperature": 0.3}
    assert_accurate(take(SPEC.fn), take(SPEC.ref), make, options, draws(device))
    assert in_torch["reduce"] >= 2
    assert not in_torch["differentiate"]


@pytest.mark.parametrize("entropy", [False, True])
def test_token_loss_from_exponentials(entropy, in_torch, device):
    outputs = ("entropy",) * entropy
    loss_fn = lambda tokens: tokens.logprob * 2 + (tokens.entropy.square() if entropy else 0)  # noqa: E731

    def summed(fn):
        def call(**kwargs):
            out = fn(**kwargs, loss_fn=loss_fn, outputs=outputs)
            return out[0] if entropy else out

        return call

    make = lambda: inputs_of(device, (41,), torch.float16)  # noqa: E731
    one, ref = summed(ops.fused_linear_token_loss), summed(fused_linear_token_loss_ref)
    assert_accurate(one, ref, make, {"chunk_rows": 16, "temperature": 0.3}, draws(device))
    assert in_torch["reduce"] >= 3
    assert not in_torch["differentiate"]
    in_torch["reduce"] = 0
    one(**{name: t.detach() for name, t in make().items()})
    assert not in_torch["reduce"]


def test_logits_in_memory_where_no_kernel_can_load_the_operands(in_torch, device, monkeypatch):
    """Rows of 16-bit gradients have memory for no fp32 logits, which get memory of their own."""
    monkeypatch.setattr(unstored, "moved_by_tma", lambda t: False)
    make = lambda: trained(inputs_of(device, (41,), torch.float16), "x")  # noqa: E731
    take = KINDS["frozen head"][0]
    assert_accurate(take(SPEC.fn), take(SPEC.ref), make, {"chunk_rows": 16}, draws(device))
    assert in_torch == {"reduce": 0, "differentiate": 0}


@pytest.mark.parametrize("imports", [True, False])
def test_kernels_that_a_newer_triton_does_not_compile(imports, in_torch, device, monkeypatch):
    """Chunks whose memory is for exponentials get them from logits, also outside of the op of all chunks."""
    monkeypatch.setitem(BROKEN, unstored.HOPPER, "")
    del BROKEN[unstored.HOPPER]

    def fail(*args):
        raise NotCompiledError(unstored.HOPPER, AttributeError("gone"))

    module = lambda name: types.SimpleNamespace(reduce_logits=fail) if imports else fail()  # noqa: E731
    monkeypatch.setattr(unstored, "gluon_module", module)
    make = lambda: inputs_of(device, (41,), torch.float16)  # noqa: E731
    one, ref = (
        lambda fn=fn, **kwargs: fn(**kwargs, loss_fn=lambda tokens: tokens.logprob * 2)
        for fn in (ops.fused_linear_token_loss, fused_linear_token_loss_ref)
    )
    with pytest.warns(RuntimeWarning, match="do not compile"):
        one(**make(), chunk_rows=16)
    del BROKEN[unstored.HOPPER]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_accurate(one, ref, make, {"chunk_rows": 16}, draws(device))
        take, options, names = KINDS["uniform"]
        make_trained = lambda: trained(make(), *names)  # noqa: E731
        del BROKEN[unstored.HOPPER]
        assert_accurate(take(SPEC.fn), take(SPEC.ref), make_trained, options | {"chunk_rows": 16}, draws(device))
    assert unstored.HOPPER in BROKEN


def distilled(device, dtype=torch.float16, T=41, **shape):
    return DIVERGENCE.inputs(dtype, device, lead=(T,), **{"H": 24, "Ht": 16, "V": 97, "mask": True, **shape})


@pytest.mark.parametrize(("beta", "reduction"), [(0.0, "mean"), (0.5, "none"), (1.0, "mean")])
def test_divergence_whose_products_reduce_the_rows(beta, reduction, in_torch, device, poisoned, monkeypatch):
    """Several chunks, the teacher's in parts; heads of different widths and scales, and ignored tokens."""
    monkeypatch.setattr(divergence_chunks, "PART_ROWS", 5)
    options = {"beta": beta, "reduction": reduction, "chunk_rows": 16, "temperature": 0.7, "teacher_logit_scale": 1.2}
    assert_accurate(DIVERGENCE.fn, DIVERGENCE.ref, lambda: distilled(device), options)
    assert in_torch["reduce"] >= 12  # a chunk of 16 tokens has four parts


def test_results_of_both_models_whose_products_reduce_the_rows(in_torch, device):
    options = {"chunk_rows": 16, "outputs": ("divergence", "entropy", "teacher_entropy"), "teacher_logit_scale": 0.8}
    inputs = {name: t.detach() for name, t in distilled(device).items()}
    got, want = (fn(**inputs, **options) for fn in (DIVERGENCE.fn, DIVERGENCE.ref))
    assert in_torch["reduce"] == 6
    for name in ("loss", *options["outputs"]):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5)


def test_a_teacher_in_another_dtype(in_torch, device):
    """A teacher in fp16 of a student in fp32, which on a GPU would be in bf16."""
    inputs = distilled(device, torch.float32)
    inputs |= {name: inputs[name].half() for name in ("teacher_x", "teacher_weight")}
    got, want = (fn(**inputs, chunk_rows=16) for fn in (DIVERGENCE.fn, DIVERGENCE.ref))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert in_torch["reduce"] == 6


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"bias": True}, {"teacher_bias": None}),
        ({"bias": True}, {"bias": None}),
        ({"rank": 4}, {}),
        ({}, {"softcap": 5.0}),
        ({}, {"teacher_softcap": 5.0}),
        ({}, {"outputs": ("agree",)}),
        ({"H": 20}, {}),
        ({"Ht": 20}, {}),
    ],
    ids=str,
)
def test_divergences_whose_products_store_logits_alone(shape, options, in_torch, device):
    DIVERGENCE.fn(**distilled(device, **shape) | options, chunk_rows=16)
    assert not in_torch["reduce"]


@pytest.mark.parametrize("lacks", ["student", "teacher"])
def test_a_head_that_no_kernel_can_load(lacks, in_torch, device, monkeypatch):
    width = {"student": 24, "teacher": 16}[lacks]
    monkeypatch.setattr(unstored, "moved_by_tma", lambda t: t.shape[1] != width)
    assert_accurate(DIVERGENCE.fn, DIVERGENCE.ref, lambda: distilled(device), {"chunk_rows": 16}, 1)
    assert not in_torch["reduce"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_kernels_of_a_divergence(beta, dtype, hopper, monkeypatch):
    """Words that fill no tile; chunks and parts of them that end within a tile of rows."""
    monkeypatch.setattr(divergence_chunks, "PART_ROWS", 70)
    make = lambda: distilled("cuda", dtype, T=300, H=200, Ht=72, V=1003)  # noqa: E731
    options = {"beta": beta, "chunk_rows": 130, "temperature": 0.7}
    with recorded() as launches:
        DIVERGENCE.fn(**make(), **options)
    assert "_linear_stored_rows_hopper_kernel" in {kernel.__name__ for kernel, *_ in launches}
    assert_accurate(DIVERGENCE.fn, DIVERGENCE.ref, make, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("H", "V"), [(64, 256), (200, 1003), (256, 8200)])
def test_kernels(H, V, dtype, hopper, monkeypatch):
    """Tiles that the tokens and the words fill, and that they do not; several slices."""
    monkeypatch.setattr(product_parts, "SLICE_COLUMNS", 256)
    make = lambda: inputs_of("cuda", (300,), dtype, H=H, V=V)  # noqa: E731
    for outputs in (("logprob",), ("logprob", "entropy")):
        options = {"chunk_rows": 128, "temperature": 1.4, "outputs": outputs}
        with recorded() as launches:
            ops.fused_linear_logprobs(**make(), **options).logprob.sum().backward()
        assert {kernel.__name__ for kernel, *_ in launches} >= KERNELS
        assert_accurate(SPEC.fn, SPEC.ref, make, options, draws("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_store_exponentials(kind, dtype, hopper):
    """Words that fill no tile; chunks that end within a tile of rows."""
    take, options, names = KINDS[kind]
    make = lambda: trained(inputs_of("cuda", (300,), dtype, H=200, V=1003), *names)  # noqa: E731
    options = options | {"chunk_rows": 130, "temperature": 0.7}
    with recorded() as launches:
        take(SPEC.fn)(**make(), **options)
    assert "_linear_stored_rows_hopper_kernel" in {kernel.__name__ for kernel, *_ in launches}
    assert_accurate(take(SPEC.fn), take(SPEC.ref), make, options, draws("cuda"))


@pytest.mark.gpu
def test_kernels_repeat_bit_for_bit(hopper):
    inputs = inputs_of("cuda", (700,), torch.bfloat16, H=128, V=5000)
    leaves = inputs["x"], inputs["weight"]
    runs = []
    for _ in range(2):
        out = ops.fused_linear_logprobs(**inputs, outputs=("logprob", "entropy"))
        runs.append((out.logprob, out.entropy, *torch.autograd.grad((out.logprob + out.entropy).sum(), leaves)))
    assert all(map(torch.equal, *runs))
