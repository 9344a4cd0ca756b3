"""Each fault of the table on GPUs ends as its row says, and the next call is right; those of ranks need two GPUs.

The pass ``faults`` of record.py makes them; FAULTS names the folder of its record, ``<device>/faults.json``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from fault_table import record, rows  # noqa: F401
from fault_table.engine import params
from fault_table.ranks import ranks_of, why_not

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def ranks():
    with ranks_of("cuda") as made:
        yield made


@pytest.fixture(scope="module")
def written():
    """The record of this run; None where none is asked for."""
    folder = os.environ.get("FAULTS")
    return record.Record("faults", Path(folder)) if folder else None


@pytest.mark.parametrize("row", list(params("cuda")))
def test_a_fault_on_gpus(row, ranks, written):
    if why := why_not(row, "cuda"):
        if written:
            record.leave_out(written, why)
        pytest.skip(why)
    outcome = record.made(row, "cuda", ranks)
    if written:
        record.note(written, row.on("cuda"), outcome)
    assert not outcome.wrong, outcome.wrong
