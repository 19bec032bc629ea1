"""The list of planted bugs fits the code."""

from mutants import MUTANTS, OPS, ROOT


def test_every_bug_has_one_place():
    assert not [mutant for mutant in MUTANTS if (ROOT / OPS / mutant.file).read_text().count(mutant.old) != 1]
