"""Gluon kernels that a Triton newer than the tested ones cannot import or compile give way to the portable ones."""

import os
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton

from liger_like import cli, explain
from liger_like.ops import flash_attention
from liger_like.ops.attention import choice, flash_attention_ref, forward
from liger_like.ops.losses import dw_sum
from liger_like.runtime import fallback
from liger_like.runtime.fallback import NotCompiledError, gluon_module, start
from liger_like.testing.inputs import attention_inputs

HEADS = {"B": 1, "S": 200, "Sk": 200, "H": 2, "Hk": 1, "D": 64}
MODULES = (*choice.MODULES, dw_sum.HOPPER)
REASON = "AttributeError: module 'gluon' has no attribute 'gone'"


@pytest.fixture
def newer(monkeypatch):
    """A Triton newer than the tested ones."""
    monkeypatch.setattr(triton, "__version__", "97.0.0")
    monkeypatch.setattr(fallback, "BROKEN", {})
    for module in (dw_sum, choice, cli):
        monkeypatch.setattr(module, "BROKEN", fallback.BROKEN)
    gluon_module.cache_clear()
    dw_sum._try_hopper_kernel.cache_clear()
    yield
    gluon_module.cache_clear()
    dw_sum._try_hopper_kernel.cache_clear()


class Kernel:
    """A kernel in Gluon, or not, that does not compile."""

    __module__ = "liger_like.ops.attention.hopper.forward"

    def __init__(self, gluon=True):
        self.is_gluon = lambda: gluon

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            try:
                raise AttributeError(REASON.partition(": ")[2] + "\nmore")
            except AttributeError as error:
                raise RuntimeError("at 6:11:\n code") from error

        return compile_and_run


def test_an_op_runs_again_without_the_kernel(newer, device, monkeypatch):
    def hopper_kernels(name, *_):
        return name not in fallback.BROKEN and SimpleNamespace(
            attention_fwd_hopper=lambda *_: start(Kernel(), (), (), {})
        )

    monkeypatch.setattr(forward, "hopper_kernels", hopper_kernels)
    inputs = attention_inputs(torch.float16, device, B=1, S=70, Sk=70, H=2, Hk=1, D=16)
    with pytest.warns(RuntimeWarning, match=rf"{Kernel.__module__}.*Triton 97.0.0.*{REASON}\. Portable kernels"):
        out = flash_attention(**inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a second call neither tries the kernel nor warns
        assert torch.equal(flash_attention(**inputs), out)
    torch.testing.assert_close(out, flash_attention_ref(**inputs), atol=1e-2, rtol=0)


def test_only_the_first_warns(newer):
    with pytest.warns(RuntimeWarning, match="one"):
        NotCompiledError("one", ValueError("a")).fall_back()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NotCompiledError("two", ValueError("b\nc")).fall_back()
    assert fallback.BROKEN["two"] == "does not compile with Triton 97.0.0: ValueError: b"


def test_errors_that_are_defects(newer, monkeypatch):
    """Errors of other kernels are raised as they are, and so is every error with a tested Triton."""
    with pytest.raises(NotCompiledError):
        start(Kernel(), (1,), (), {})
    with pytest.raises(RuntimeError, match="at 6:11"):
        start(Kernel(gluon=False), (1,), (), {})
    with pytest.raises(NotCompiledError):
        gluon_module("liger_like.ops.there_is_none")
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    with pytest.raises(RuntimeError, match="at 6:11"):
        start(Kernel(), (1,), (), {})
    with pytest.raises(ModuleNotFoundError):
        gluon_module("liger_like.ops.there_is_none")


def test_explain_and_env_say_so(newer, device, monkeypatch):
    monkeypatch.setattr(choice, "architecture", lambda device: 9)
    monkeypatch.setattr(choice, "INTERPRET", False)
    for name in MODULES:
        fallback.BROKEN[name] = f"does not compile with Triton 97.0.0: {REASON}"
    found = explain("flash_attention", HEADS, dtype=torch.float16, device=device)
    for name in MODULES[:2]:
        assert f"{name} does not compile with Triton 97.0.0: {REASON}" in found.reasons
    monkeypatch.setattr(cli, "try_gluon", lambda: None)
    rows = dict(cli.env_rows())
    assert "newer than tested" in rows["triton"]
    assert f"{MODULES[0]} does not compile with Triton 97.0.0: {REASON}" in rows["Gluon"]


def run_alone(code, **environment):
    """Run ``code`` in a process of its own, which must warn once."""
    command = [sys.executable, "-W", "default", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("do not compile with Triton 97.0.0") == 1


def test_a_triton_without_gluon(device):
    """The package imports, and attention runs, where Gluon has other names."""
    run_alone(
        f"""
        import torch, triton
        from triton.experimental.gluon.language.nvidia import hopper
        del hopper.warpgroup_mma
        triton.__version__ = "97.0.0"
        import liger_like
        from liger_like.ops.attention import choice
        from liger_like.runtime import fallback
        choice.INTERPRET, choice.architecture = False, lambda device: 9
        q = torch.randn(1, 200, 2, 64, dtype=torch.float16, device="{device}", requires_grad=True)
        out = liger_like.flash_attention(q, q, q, causal=True)
        out.backward(out)
        expected = torch.nn.functional.scaled_dot_product_attention(*[q.mT.mT.transpose(1, 2)] * 3, is_causal=True)
        assert torch.allclose(out, expected.transpose(1, 2), atol=1e-2)
        assert sorted(fallback.BROKEN) == sorted([choice.FORWARD, choice.BACKWARD]), fallback.BROKEN
        """,
        TRITON_INTERPRET=str(int(device == "cpu")),
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper")
@pytest.mark.parametrize(("D", "backward"), [(64, "BACKWARD"), (256, "BACKWARD_256")])
def test_on_hopper(D, backward):
    """Attention and the fused losses are as exact as ever when the compiler raises for Gluon."""
    run_alone(
        f"""
        import torch, triton
        from triton.experimental.gluon._runtime import GluonASTSource
        triton.__version__ = "97.0.0"
        def make_ir(*args, **kwargs):
            raise AttributeError("module 'gluon' has no attribute 'gone'")
        GluonASTSource.make_ir = make_ir
        from liger_like import testing
        from liger_like.ops.attention import choice
        from liger_like.ops.losses import dw_sum, unstored
        from liger_like.runtime import fallback
        from liger_like.testing.inputs import attention_inputs
        specs = {{spec.name: spec for spec in testing.SPECS}}
        attention, loss = specs["flash_attention"], specs["fused_linear_cross_entropy"]
        make = lambda: attention_inputs(torch.bfloat16, "cuda", B=2, S=300, Sk=300, H=4, Hk=2, D={D})
        testing.assert_accurate(attention.fn, attention.ref, make, {{"causal": True, "deterministic": False}}, 2, 2)
        make = lambda: loss.inputs(torch.bfloat16, "cuda", lead=(4096,), H=256, V=1000)
        testing.assert_accurate(loss.fn, loss.ref, make, {{"chunk_rows": 1024}}, 2, loss.k)
        for name in ("fused_linear_logprobs", "fused_linear_divergence"):
            fallback.BROKEN.pop(unstored.HOPPER, None)
            spec, teacher = specs[name], {{"Ht": 128}} if name == "fused_linear_divergence" else {{}}
            make = lambda: spec.inputs(torch.bfloat16, "cuda", lead=(300,), H=256, V=1000, **teacher)
            testing.assert_accurate(spec.fn, spec.ref, make, {{"chunk_rows": 128}}, 2, spec.k)
            assert unstored.HOPPER in fallback.BROKEN, name
        broken = {{choice.FORWARD, choice.{backward}, dw_sum.HOPPER, unstored.HOPPER}}
        assert fallback.BROKEN.keys() == broken, fallback.BROKEN
        """,
        TRITON_ALWAYS_COMPILE="1",
    )
