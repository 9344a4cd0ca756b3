"""The runner of torch's own tests of async TP, over stand-ins for torch's files; on the CPU, whose ranks are gloo's."""

from __future__ import annotations

import collections
import importlib.util
import json
import sys
import textwrap
import time
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "gpu"

RANKS = """
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class AsyncTPTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_fused_all_gather_matmul(self):
        a, b, name = torch.rand(4, 8), torch.rand(8, 4), dist.group.WORLD.group_name
        exact = symmetric._fused_all_gather_matmul_fallback(a, [b], 0, name)
        try:
            found = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, name)
        except NotImplementedError:  # torch has none for the CPU
            return
        assert torch.allclose(exact[1][0], found[1][0]), "wrong"

    def test_multimem_all_gather_matmul(self):
        raise AssertionError("it must not run")


class SymmetricMemoryTest(MultiProcContinuousTest):
    def test_of_no_async_tp(self):
        raise AssertionError("it must not run")
"""
PASS = """
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


class MicroPipelineTPTest(unittest.TestCase):
    def setUp(self):
        dist.init_process_group(backend="fake", world_size=2, rank=0, store=FakeStore())

    def tearDown(self):
        dist.destroy_process_group()

    def test_that_calls(self):
        import torch.distributed._symmetric_memory

        name = dist.group.WORLD.group_name
        try:
            torch.ops.symm_mem.fused_matmul_reduce_scatter(torch.rand(4, 8), torch.rand(8, 4), "avg", 0, name)
        except NotImplementedError:
            pass

    def test_that_kills(self):
        import os

        os._exit(7)
"""


@pytest.fixture
def runner():
    """The runner's module."""
    spec = importlib.util.spec_from_file_location("torch_own_tests", GPU / "torch_own_tests.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("test_symmetric_memory", RANKS), ("tensor/test_micro_pipeline_tp", PASS)):
        path = tmp_path / "theirs" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path / "theirs"


def test_tests_run_without_the_handle_and_with_it(runner, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert runner.main([str(folder), str(tmp_path / "record.json")]) == 1
    record = json.loads((tmp_path / "record.json").read_text())
    rows = {row["test"]: row for row in record["rows"]}
    assert set(rows) == {
        "AsyncTPTest.test_fused_all_gather_matmul", "AsyncTPTest.test_multimem_all_gather_matmul",
        "MicroPipelineTPTest.test_that_calls", "MicroPipelineTPTest.test_that_kills",
    }  # fmt: skip
    gather = rows["AsyncTPTest.test_fused_all_gather_matmul"]
    assert (gather["without"], gather["with"], gather["calls"]) == ("passed", "passed", 2), "a call a rank"
    calls = rows["MicroPipelineTPTest.test_that_calls"]
    assert (calls["without"], calls["with"], calls["calls"]) == ("passed", "passed", 1)
    assert record["left_out"] == {
        "AsyncTPTest.test_multimem_all_gather_matmul": "it uses NVLink multicast, which stays off"
    }
    assert record["failed"] == {way: ["MicroPipelineTPTest.test_that_kills"] for way in ("without", "with")}
    assert "the process ended with 7" in rows["MicroPipelineTPTest.test_that_kills"]["why_with"]
    assert record["counts"]["with"] == {"passed": 2, "left out": 1, "failed": 1}
    assert record["calls"] == 3
    assert not record["green"]
    assert record["wrong"] == ["with the handle 1 tests fail or are not run: MicroPipelineTPTest.test_that_kills"]


def seen(runner, outcomes: dict[str, str], began: tuple[str, ...] = ()):
    noted = {name: (outcome, "") for name, outcome in outcomes.items()}
    return runner.Seen([], noted, collections.Counter(), [*outcomes, *began])


def test_what_torch_skips_behind_a_failure_is_run_again(runner):
    asked = []

    def run(names):
        asked.append(names)
        if len(names) == 3:
            return seen(runner, {"C.a": "failed", "C.b": "poisoned", "C.c": "poisoned"}), ""
        return seen(runner, dict.fromkeys(names, "passed")), ""

    found, _ = runner.all_of(["C.a", "C.b", "C.c"], run)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "C.a": "failed",
        "C.b": "passed",
        "C.c": "passed",
    }
    assert asked == [["C.a", "C.b", "C.c"], ["C.b", "C.c"]]


def test_a_test_without_an_end_has_failed_and_the_others_are_run(runner):
    def run(names):
        if "C.b" in names:
            return seen(runner, {"C.a": "passed"}, began=("C.b",)), "no end in 150 s"
        return seen(runner, dict.fromkeys(names, "skipped")), ""

    found, _ = runner.all_of(["C.a", "C.b", "C.c"], run)
    assert found == {"C.a": ("passed", ""), "C.b": ("failed", "no end in 150 s"), "C.c": ("skipped", "")}


@pytest.mark.parametrize(
    ("why", "outcome"), [("the process ended with 1: no GPU", "failed"), ("the time is over", "not run")]
)
def test_a_process_that_runs_nothing_is_not_asked_again(runner, why, outcome):
    found, _ = runner.all_of(["C.a", "C.b"], lambda names: (seen(runner, {}), why))
    assert found == {"C.a": (outcome, why), "C.b": (outcome, why)}


def row(without: str, with_: str) -> dict[str, str]:
    return {"test": "C.a", "without": without, "with": with_}


@pytest.mark.parametrize(
    ("rows", "calls", "says"),
    [
        ([row("passed", "passed")], 1, []),
        ([row("passed", "passed"), row("skipped", "skipped"), row("passed", "left out")], 1, []),
        ([row("passed", "passed")], 0, ["replaced nothing"]),
        ([row("failed", "passed"), row("passed", "failed")], 1, ["1 tests fail"]),
        ([row("passed", "passed"), row("passed", "skipped")], 1, ["skipped with it"]),
        ([row("passed", "passed"), row("passed", "not run")], 1, ["not run: C.a"]),
        ([row("skipped", "skipped")], 0, ["no test passes", "replaced nothing"]),
    ],
)
def test_when_a_run_is_green(runner, rows, calls, says):
    found = runner.verdict(rows, calls)
    assert len(found) == len(says)
    assert all(part in text for part, text in zip(says, found, strict=True))


@pytest.mark.parametrize(
    ("test", "with_", "without"),
    [
        ("AsyncTPTest.test_multimem_all_gather_matmul", True, True),
        ("AsyncTPTest.test_fused_all_gather_matmul_native_symm_mem_input_True_is_b_row_major_True", True, False),
        ("AsyncTPTest.test_fused_all_gather_matmul_native_graph_capture", False, False),
        ("AsyncTPTest.test_fused_all_gather_matmul_gather_dim_0", False, False),
    ],
)
def test_what_is_left_out(runner, test, with_, without):
    assert (bool(runner.left_out(test, True)), bool(runner.left_out(test, False))) == (with_, without)


def test_a_process_past_its_time_is_killed(runner, folder):
    _, why = runner.process(folder, False, "import time; time.sleep(60)", [], time.monotonic() + 0.6)
    assert why == "the time is over"


def test_a_folder_without_torchs_files_is_refused(runner, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"test_symmetric_memory\.py: 0 files below .*; it is in torch's source"
    ):
        runner.found_in(tmp_path)
