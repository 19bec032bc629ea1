"""The accuracy rule and the table of ops that it is applied to.

Tests, benchmarks and the docs are driven by ``SPECS``.
"""

from liger_like.testing.accuracy import Comparison, assert_accurate, compare, run
from liger_like.testing.specs import SPECS, OpSpec

__all__ = ["SPECS", "Comparison", "OpSpec", "assert_accurate", "compare", "run"]
