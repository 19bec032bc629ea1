"""The table of Nsight Compute's counters."""

import pytest

from benchmark.common.markdown import RESULTS
from benchmark.kernels import attention_profile

FILE = RESULTS / "attention-profile-nvidia-h200.csv"


def test_table_of_what_was_measured():
    lines = FILE.read_text().splitlines()
    table = attention_profile.report(["==PROF== Connected to process 1", *lines]).splitlines()
    assert table[0].startswith("| shape | kernel | us | tensor % | exp % |")
    assert table[2] == (
        "| B 4 S 4096 H 32 Hk 8 D 128, causal | _attention_fwd_hopper_kernel | 844 | 73 | 39 | 39 | 8 | 1.71"
        " | barrier 3.0, wait 1.5 |"
    )
    assert [*dict.fromkeys(row.split(" | ")[0] for row in table[2:])] == SHAPES


SHAPES = [
    "| B 4 S 4096 H 32 Hk 8 D 128, causal",
    "| B 4 S 4096 H 32 Hk 8 D 128",
    "| B 1 S 16384 H 32 Hk 8 D 128, causal",
    "| B 4 S 4096 H 32 Hk 8 D 64, causal",
    "| B 4 S 4096 H 16 Hk 8 D 256, causal",
]


def test_counters_that_are_missing():
    """Rename the counters, as another version of ncu does."""
    with pytest.raises(KeyError, match="gpu__time_duration"):
        attention_profile.report(["ID,Kernel Name", ",", "0,_attention_fwd"])
