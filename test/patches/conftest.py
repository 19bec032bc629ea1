"""Fixtures of the patched experts."""

import pytest

from liger_like.patches import experts, own_experts


@pytest.fixture
def calls(monkeypatch):
    """Calls of the op; on a CPU its definition runs, since its kernels have tests of their own."""
    made, op = [], experts.moe_experts

    def noted(*args, **options):
        made.append(options)
        return op(*args, **options)

    for module in (experts, own_experts):
        monkeypatch.setattr(module, "moe_experts", noted)
    return made


@pytest.fixture
def defined(references, calls, monkeypatch):
    """Let the op run where no kernel can."""
    for module in (experts, own_experts):
        monkeypatch.setattr(module, "use_kernel", lambda x: True)
    return calls
