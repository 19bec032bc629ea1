"""The accuracy rule and the table of ops that it is applied to.

Tests, benchmarks and the docs are driven by ``SPECS``.
"""

from liger_like.testing.specs import SPECS, Comparison, OpSpec, assert_accurate, compare, run

__all__ = ["SPECS", "Comparison", "OpSpec", "assert_accurate", "compare", "run"]
