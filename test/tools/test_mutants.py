"""The list of planted bugs fits the code, and that of their fates the list."""

import mutants
import mutants_report
from mutants import MUTANTS, PACKAGE, ROOT
from mutants_report import CAUGHT, NEEDS_GPU, SURVIVED, Fate

KEYS = [(mutant.file, mutant.why) for mutant in MUTANTS]


def test_every_bug_has_one_place():
    assert not [mutant for mutant in MUTANTS if (ROOT / PACKAGE / mutant.file).read_text().count(mutant.old) != 1]


def test_every_bug_has_a_name():
    assert len({*KEYS}) == len(KEYS)


def test_every_bug_has_tests():
    assert all(mutant.tests() for mutant in MUTANTS)


def test_list_of_fates(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants_report, "LIST", tmp_path / "MUTANTS.md")
    keys = [("a.py", "x | y"), ("b.py", "eps"), ("b.py", "of a GPU"), ("c.py", "new")]
    mutants_report.keep(keys[2], Fate(CAUGHT, "test_gpu[1|2]"), keys)
    mutants_report.keep(keys[2], Fate(NEEDS_GPU), keys)
    mutants_report.keep(("b.py", "gone"), Fate(SURVIVED), [*keys, ("b.py", "gone")])
    for fate in (Fate(CAUGHT, "test_a"), Fate(SURVIVED)):  # the later fate replaces the earlier
        mutants_report.keep(keys[0], fate, keys)
    text = mutants_report.LIST.read_text()
    assert text.startswith("# 1 of 2 planted bugs caught, 1 SURVIVED, 2 not planted yet\n")
    fates = {keys[0]: Fate(SURVIVED), keys[2]: Fate(CAUGHT, "test_gpu[1|2]")}
    assert mutants_report.read(text) == fates
    mutants_report.keep(keys[1], Fate(NEEDS_GPU), keys)
    text = mutants_report.LIST.read_text()
    assert text.startswith("# 1 of 2 planted bugs caught, 1 SURVIVED, 1 needs a GPU, 1 not planted yet\n")
    assert [*mutants_report.read(text)] == keys[:3]


def test_list_is_of_these_bugs():
    if mutants_report.LIST.exists():
        text = mutants_report.LIST.read_text()
        assert mutants_report.written(mutants_report.known(), KEYS) == text, "run make mutants for what has changed"


def test_fate_of_a_bug(tmp_path, monkeypatch):
    """Plant in a copy: a test with a bug, without one, and in too little time."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "FILES", ("test_it.py",))
    (tmp_path / PACKAGE).mkdir(parents=True)
    (tmp_path / PACKAGE / "a.py").write_text("value = 1\n")
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        f"from pathlib import Path\n"
        "def test_it(tmp_path):\n"
        f"    assert Path('{PACKAGE}/a.py').read_text() == 'value = 1\\n'\n"
        "    assert tmp_path.is_relative_to(Path.cwd().parent)\n"
        "    assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
    )
    bug = mutants.Mutant("a.py", "1", "2", "another value")
    assert mutants.hunt(None, "test_it", 100, True) == (SURVIVED, "")
    assert mutants.hunt(bug, "test_it", 100, True) == (CAUGHT, "test_it")
    assert mutants.hunt(bug, "test_it", 0.01, True).fate == mutants.TIMED_OUT
    assert mutants.hunt(bug._replace(gpu_tests="test_it"), "test_it", 100, True).fate == NEEDS_GPU
    assert (tmp_path / PACKAGE / "a.py").read_text() == "value = 1\n"
