"""Each fault of the table ends as its row says, and the next call is right; the page is of the record."""

from __future__ import annotations

import re

import pytest
import torch

from fault_table import rows  # noqa: F401
from fault_table.engine import RIGHT, TABLE, Place, run
from fault_table.record import pool_of_ranks


@pytest.fixture(scope="module")
def pool():
    with pool_of_ranks() as made:
        yield made


def params(device):
    for row in TABLE:
        if device in row.where:
            marks = [pytest.mark.slow] if row.is_slow else []
            yield pytest.param(row, id=f"{row.part}: {row.name}", marks=marks)


def happens(row, device, folder, pool):
    torch.manual_seed(0)
    outcome = run(row, Place(device, folder, pytest.MonkeyPatch(), pool))
    assert not outcome.wrong, outcome.wrong


@pytest.mark.parametrize("row", list(params("cpu")))
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fault_on_the_cpu(row, tmp_path, pool):
    happens(row, "cpu", tmp_path, pool)


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
    return Place("cpu", tmp_path, pytest.MonkeyPatch(), lambda: None)


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
