"""Comparison rule for accuracy; tests and benchmarks use it.

The rule: for every output and every gradient under a random upstream gradient,
``||kernel - fp64|| <= k ||torch in the same dtype - fp64|| + 1e-6 ||fp64||``, with k = 2 for attention, else k = 1.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_like.testing.inputs import Inputs


@dataclass(frozen=True)
class Comparison:
    """Error norms of one output or gradient against float64, and the norm of the float64 result."""

    name: str
    kernel: float
    torch: float
    norm: float

    def allowed(self, k: float = 1.1) -> float:
        """Return the largest error that the rule allows."""
        return k * self.torch + 1e-6 * self.norm

    def passes(self, k: float = 1.1) -> bool:
        """Return True if the rule holds; it never holds for a NaN."""
        return self.kernel <= self.allowed(k)


def run(fn: Callable[..., Any], inputs: Mapping[str, Tensor], options: Mapping[str, Any], seed: int = 0) -> Inputs:
    """Return the outputs of ``fn`` and its inputs' gradients by name, for upstream gradients drawn from ``seed``."""
    leaves = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    result = fn(**leaves, **options)
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    pairs = [(t, g) for t, g in zip(outputs, upstream, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    grads = {f"d{name}": t.grad for name, t in leaves.items() if t.requires_grad and t.grad is not None}
    return {f"out{i}": t.detach() for i, t in enumerate(outputs)} | grads


def _error(a: Tensor, b: Tensor) -> float:
    """Return the squared norm of a - b; for integers the number of unequal elements."""
    return float((a.double() - b).square().sum() if b.is_floating_point() else (a != b).sum())


def compare(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    options: Mapping[str, Any],
    draws: int = 1,
) -> list[Comparison]:
    """Return the errors of ``fn`` and of ``ref`` in the dtype of the inputs, against ``ref`` in float64.

    The norms run over ``draws`` independent inputs and upstream gradients: on small tensors the rounding errors of a
    single draw are mostly chance. Raises AssertionError if shapes or dtypes differ.
    """
    sums: dict[str, list[float]] = {}
    for seed in range(draws):
        inputs = make_inputs()
        double = {
            name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for name, t in inputs.items()
        }
        got, same, exact = (run(f, i, options, seed) for f, i in ((fn, inputs), (ref, inputs), (ref, double)))
        if {n: (t.shape, t.dtype) for n, t in got.items()} != {n: (t.shape, t.dtype) for n, t in same.items()}:
            raise AssertionError(f"shapes and dtypes differ: {got} against {same}")
        for name, t in exact.items():
            new = _error(got[name], t), _error(same[name], t), _error(t, torch.zeros_like(t))
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 3), new, strict=True)]
    return [Comparison(name, *(s**0.5 for s in three)) for name, three in sums.items()]


def assert_accurate(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    options: Mapping[str, Any],
    draws: int = 1,
    k: float = 1.1,
) -> None:
    """Raise AssertionError if an output or gradient breaks the rule."""
    failures = [c for c in compare(fn, ref, make_inputs, options, draws) if not c.passes(k)]
    assert not failures, "\n".join(
        f"{c.name}: {c.kernel:.3e}, torch {c.torch:.3e}, norm {c.norm:.3e}" for c in failures
    )
