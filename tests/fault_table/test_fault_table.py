"""Each fault of the table ends as its row says, and the next call is right; the page is of the record."""

from __future__ import annotations

import re

import pytest
import torch

from fault_table import record, rows  # noqa: F401
from fault_table.engine import RIGHT, TABLE, Place, params, run
from fault_table.ranks import Ranks, ranks_of, why_not


@pytest.fixture(scope="module")
def ranks():
    with ranks_of("cpu") as made:
        yield made


@pytest.fixture(scope="module")
def two_ranks():
    with ranks_of("cuda") as made:
        yield made


@pytest.mark.parametrize("row", list(params("cpu")))
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fault_on_the_cpu(row, ranks):
    outcome = record.made(row, "cpu", ranks)
    assert not outcome.wrong, outcome.wrong


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pass faults of tests/gpu/record.py makes them on GPUs")
@pytest.mark.parametrize("row", [one for one in params("cuda") if one.values[0].part == "ranks"])
def test_the_steps_of_a_fault_of_two_gpus_over_gloo(row, two_ranks):
    outcome = record.made(row, "cuda", two_ranks)
    assert not outcome.wrong, outcome.wrong
    assert two_ranks.world == 2


def test_every_fault_of_ranks_is_made_on_gpus_too(monkeypatch):
    """And left out by name where there is one."""
    of_ranks = [row for row in TABLE if row.part == "ranks"]
    assert {row.name for row in of_ranks} == {"late", "lost", "killed", "restarted", "stopped", "with other shapes"}
    for count in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        for row in of_ranks:
            assert row.where == ("cpu", "cuda")
            assert why_not(row, "cpu") == ""
            said = f"ranks: {row.name}: needs two GPUs, here is {count}" if count < 2 else ""
            assert why_not(row, "cuda") == said
        assert not any(why_not(row, "cuda") for row in TABLE if row.part != "ranks")


def test_a_row_may_end_otherwise_on_gpus():
    row = TABLE[0]._replace(ends="a", within=1.0, on_gpus=("b", 2.0))
    assert (row.on("cpu").ends, row.on("cpu").within) == ("a", 1.0)
    assert (row.on("cuda").ends, row.on("cuda").within) == ("b", 2.0)
    assert row._replace(on_gpus=None).on("cuda").ends == "a"


def test_the_table_is_whole():
    assert len(TABLE) >= 30
    assert len({(row.part, row.name) for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.ends == RIGHT or re.compile(row.ends)
        assert row.where
        assert set(row.where) <= {"cpu", "cuda"}


# The engine can fail --------------------------------------------------------------------------------------------------


def made(do, ends=RIGHT, **how):
    return TABLE[0]._replace(do=do, ends=ends, **how)


def place(tmp_path):
    return Place("cpu", tmp_path, pytest.MonkeyPatch(), Ranks("cpu"))


def failing(error):
    def do(where):
        where.next = lambda: None
        raise error

    return do


def test_another_end_is_wrong(tmp_path):
    assert "ended otherwise: right" in run(made(lambda where: None, "ValueError"), place(tmp_path)).wrong
    assert "ended otherwise: ValueError: x" in run(made(failing(ValueError("x"))), place(tmp_path)).wrong
    assert "ended otherwise" in run(made(failing(ValueError("x")), "ValueError: y"), place(tmp_path)).wrong
    assert not run(made(failing(ValueError("x")), "ValueError: x"), place(tmp_path)).wrong


def test_a_wrong_next_call_a_late_end_and_a_file_left_open_are_wrong(tmp_path):
    opened = []

    def do(where):
        where.next = lambda: 1 / 0
        where.took(1e6)
        opened.append((tmp_path / "fault").open("w"))

    wrong = run(made(do), place(tmp_path)).wrong
    opened[0].close()
    assert "it took 1000000.0 s" in wrong
    assert "the next call: ZeroDivisionError" in wrong
    assert "files are left open" in wrong


def test_a_result_that_is_not_right_is_seen(tmp_path):
    def do(where):
        feed = where.feed()(0, 1, 2, 3)
        feed.tensor[3, 3] += 1
        where.call(feed)

    assert "ended otherwise: AssertionError" in run(made(do), place(tmp_path)).wrong
