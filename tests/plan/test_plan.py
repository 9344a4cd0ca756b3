"""`plan`: what is chosen and why, what is refused and why (invariant 12), on a device made up for the purpose."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import dataclasses
import gc
import logging
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilestream
from tilestream import Arrival, Plan, plan
from tilestream.core import raster
from tilestream.plan import SCHEDULES, Incoming, Problem, Refusal, plan_problem
from tilestream.schedule import Raster

extents = st.sampled_from([0, 1, 2, 31, 32, 33, 100, 257, 512, 1000, 2048, 2049, 8192])
policy = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def lines(made: Plan, name: str) -> list[str]:
    """What `explain` says under ``name``."""
    return [line[12:] for line in made.explain().splitlines()[1:] if line[2:12].strip() == name]


def reason(made: Plan, what: str) -> str | None:
    return next((refusal.why for refusal in made.refused if refusal.what == what), None)


def test_planning_imports_neither_torch_nor_numpy_nor_triton():
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'triton', 'numpy']))\n"
        "from tilestream import Arrival, plan\n"
        "made = plan(4096, 512, 300, arrival=Arrival.ragged([0, 100, 4096], 1), dtype='bfloat16')\n"
        "print(made.explain()); assert made.gate is not None; list(made.schedule.items())"
    )
    src = Path(tilestream.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False,
        env={"PYTHONPATH": str(src), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("matmul [4096, 300] @ [300, 512], bfloat16 -> bfloat16\n")


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"schedule": "greedy"}, ValueError, "schedule='greedy'; it is one of auto, static, dynamic, stream_k"),
            ({"device": "xpu"}, NotImplementedError, "device='xpu': this version has backends for the CPU and for CUDA and ROCm GPUs; use torch.matmul there. Without the device there are plans for h100, h200, mi300x, mi325x, mi350x, mi355x"),
            ({"device": torch.device("mps", 1)}, NotImplementedError, "device='mps:1': this version has backends for the CPU and for CUDA and ROCm GPUs; use torch.matmul there. Without the device there are plans for h100, h200, mi300x, mi325x, mi350x, mi355x"),
            ({"workers": 0}, ValueError, "workers=0; it is a positive whole number, or None for the plan's choice"),
            ({"workers": -2}, ValueError, "workers=-2; it is a positive whole number, or None for the plan's choice"),
            ({"workers": 2.0}, ValueError, "workers=2.0; it is a positive whole number, or None for the plan's choice"),
            ({"queues": 0}, ValueError, "queues=0; it is a positive whole number, or None for the plan's choice"),
            ({"queues": "2"}, ValueError, "queues='2'; it is a positive whole number, or None for the plan's choice"),
            ({"shares": 0}, ValueError, "shares=0; it is a positive whole number, or None for the plan's choice"),
            ({"tile": (0, 4)}, ValueError, "tile=(0, 4); a tile has (rows, columns), both positive whole numbers"),
            ({"tile": (4, -4)}, ValueError, "tile=(4, -4); a tile has (rows, columns), both positive whole numbers"),
            ({"tile": (4,)}, ValueError, "tile=(4,); a tile has (rows, columns), both positive whole numbers"),
            ({"tile": (4, 4, 4)}, ValueError, "tile=(4, 4, 4); a tile has (rows, columns), both positive whole numbers"),
            ({"dtype": "int8"}, TypeError, "dtype: int8; tilestream multiplies float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz: convert first, or use torch.matmul"),
            ({"dtype": torch.complex64}, TypeError, "dtype: torch.complex64; tilestream multiplies float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz: convert first, or use torch.matmul"),
            ({"out_dtype": torch.int32}, TypeError, "dtype: torch.int32; tilestream multiplies float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz: convert first, or use torch.matmul"),
            ({"batch": -1}, ValueError, "batch=-1; an extent is a whole number, and not negative"),
            ({"queues": 2, "shares": 2}, ValueError, "queues=2, shares=2; queues are dynamic's, shares are stream_k's: force one of them"),
            ({"queues": 2, "schedule": "static"}, ValueError, "queues=2 with schedule='static'; it belongs to schedule='dynamic'"),
            ({"queues": 2, "schedule": "stream_k"}, ValueError, "queues=2 with schedule='stream_k'; it belongs to schedule='dynamic'"),
            ({"shares": 2, "schedule": "dynamic"}, ValueError, "shares=2 with schedule='dynamic'; it belongs to schedule='stream_k'"),
            ({"arrival": Arrival.uniform(30, 3)}, ValueError, "arrival: 3 chunks of 30 rows bring 61 to 90 rows, the input has 100; it takes num_chunks=4"),
            ({"weight_arrival": Arrival.ragged([0, 30])}, ValueError, "arrival: its bounds end at row 30, the input has 60 rows; the last bound is the number of rows"),
            ({"arrival": Arrival.uniform(100, 1), "batch": 2}, ValueError, "arrival: 1 chunks of 100 rows bring 1 to 100 rows, the input has 200; it takes num_chunks=2"),
            ({"tile": (50, 30), "order": [0, 1, 2]}, ValueError, "order: 3 entries; missing [3]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ({"arrival": 3}, TypeError, "arrival=3; it is a tilestream.Arrival, or None for what is there"),
            ({"weight_arrival": 3}, TypeError, "weight_arrival=3; it is a tilestream.Arrival, or None for what is there"),
            ({"order": 3}, TypeError, "order=3; it is a function of a position, or a sequence of tiles"),
            ({"device": "cuda:x"}, ValueError, "device='cuda:x'; a GPU is 'cuda', or 'cuda:' and its number"),
            ({"backend": "hopper"}, ValueError, "backend='hopper' with device=cpu: it is for GPUs; leave it away"),
            ({"stages": 4}, ValueError, "stages=4 with device=cpu: it is for GPUs; leave it away"),
            ({"device": "h100", "dtype": "bfloat16", "backend": "portable", "stages": 4}, ValueError, "variant=None, stages=4 with backend='portable': only 'hopper' and 'cdna' have them; leave them away"),
            ({"tile": (50, 30), "order": "0123"}, ValueError, "order='0123'; by name it is one of arrival, chunk_major"),
        ],
    )  # fmt: skip
    def test_bad_arguments(self, arguments, error, message):
        with refused(error, message):
            plan(100, 60, 40, **arguments)

    @pytest.mark.parametrize(("m", "n", "k", "name"), [(-1, 2, 3, "m"), (1, -2, 3, "n"), (1, 2, -3, "k")])
    def test_negative_extents(self, m, n, k, name):
        with refused(ValueError, f"{name}={min(m, n, k)}; an extent is a whole number, and not negative"):
            plan(m, n, k)

    def test_more_tiles_than_31_bits(self):
        with pytest.raises(ValueError, match="schedules count in 31 bits: use larger tiles"):
            plan(2**20, 2**20, 1, tile=(16, 16))

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [({"tile": 32}, "tile=32"), ({"tile": (32.5, 32)}, "tile="), ({"workers": True}, "workers=True")],
        ids=str,
    )
    def test_odd_arguments(self, arguments, match):
        with pytest.raises((ValueError, TypeError), match=match):
            plan(64, 64, 64, **arguments)

    @pytest.mark.parametrize("arguments", [{"tile": [32, 32]}, {"tile": (32, 32), "order": [[1, 1], [0, 0], [1, 0], [0, 1]]}], ids=str)  # fmt: skip
    def test_lists_for_tuples(self, arguments):
        assert plan(64, 64, 64, **arguments).tile == (32, 32)


class TestForced:
    @pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
    def test_schedule(self, kind):
        made = plan(1000, 900, 800, schedule=kind)
        assert made.schedule.kind == kind
        assert made.variant == "workers"
        assert reason(made, "inline") == "schedule given"
        assert lines(made, "schedule")[0].startswith(f"{kind}, 4 workers")

    def test_every_schedule_can_be_asked_for(self):
        assert SCHEDULES == ("auto", "static", "dynamic", "stream_k")

    @pytest.mark.parametrize("workers", [1, 3, 4, 7, 100])
    def test_workers(self, workers):
        made = plan(1000, 900, 800, workers=workers)
        assert made.workers == made.schedule.workers == workers
        assert reason(made, "inline") == "workers given"

    @pytest.mark.parametrize("tile", [(32, 64), (7, 13), (1000, 900), (5000, 5000)])
    def test_tile(self, tile):
        made = plan(1000, 900, 800, tile=tile)
        assert made.tile == tile
        assert (made.schedule.grid.num_m, made.schedule.grid.num_n) == (-(-1000 // tile[0]), -(-900 // tile[1]))
        assert lines(made, "tiles") == [
            f"1 x {made.schedule.grid.num_m} x {made.schedule.grid.num_n} of {tile[0]}x{tile[1]}"
        ]

    @pytest.mark.parametrize("queues", [1, 2, 5, 50])
    def test_queues_are_dynamic_s_and_split_columns(self, queues):
        made = plan(1000, 900, 800, queues=queues, tile=(100, 100))
        assert (made.schedule.kind, made.schedule.queues) == ("dynamic", queues)
        assert made.schedule.split == ("columns" if queues > 1 else "items")
        assert f"{queues} queue{'s' if queues > 1 else ''}" in lines(made, "schedule")[0]
        assert ("queues" in made.label) == (queues > 1)

    def test_queues_split_what_does_not_arrive(self):
        rows, columns = Arrival.uniform(100, 10), Arrival.uniform(90, 10)
        by_rows = plan(1000, 900, 800, queues=3, tile=(50, 90), arrival=rows)
        by_columns = plan(1000, 900, 800, queues=3, tile=(50, 90), weight_arrival=columns)
        assert by_rows.schedule.split == "columns"
        assert by_columns.schedule.split == "rows"

    def test_shares_are_stream_k_s(self):
        made = plan(1024, 512, 2560, shares=7, tile=(512, 512), workers=3)
        assert (made.schedule.kind, made.schedule.num_shares) == ("stream_k", 7)
        assert lines(made, "schedule") == ["stream_k, 3 workers, 1 queue; 2 tiles split along K into 7 shares"]

    @pytest.mark.parametrize("order", [[3, 1, 2, 0], [(1, 1), (0, 1), (1, 0), (0, 0)], lambda t, m, n: [3, 1, 2, 0][t]])
    def test_the_caller_s_order_in_each_batch(self, order):
        made = plan(64, 64, 64, batch=2, tile=(32, 32), order=order)
        assert [item.tile for item in made.schedule.items()] == [3, 1, 2, 0, 7, 5, 6, 4]
        assert lines(made, "raster") == ["a table of 4 tiles"]
        assert reason(made, "inline") == "tile, order given"

    def test_the_caller_s_order_is_taken_where_chunks_arrive_too(self):
        made = plan(64, 64, 64, tile=(32, 32), order=[3, 1, 2, 0], arrival=Arrival.uniform(32, 2, pivot=1))
        assert [item.tile for item in made.schedule.items()] == [3, 1, 2, 0]
        assert made.gate is not None

    def test_an_order_as_a_leaf_of_ours(self):
        made = plan(
            96, 96, 8, tile=(32, 32), order=lambda t, num_m, num_n: raster.longest_first(t, num_m, num_n, num_n)
        )
        assert [item.pm for item in made.schedule.items()] == [2, 2, 2, 1, 1, 1, 0, 0, 0]

    def test_all_that_was_forced_is_named(self):
        made = plan(64, 64, 64, workers=2, schedule="dynamic", tile=(32, 32), order=[0, 1, 2, 3], queues=2)
        assert reason(made, "inline") == "workers, schedule, tile, order, queues given"
        assert made.schedule.split == "items", "a table's positions are split as items"


class TestChoice:
    @policy
    @given(extents, extents, extents, st.integers(0, 3), st.sampled_from([None, 1, 2, 16]))
    def test_any_problem_gets_a_plan_whose_tiles_lie_within_it(self, m, n, k, batch, workers):
        made = plan(m, n, k, batch=batch, workers=workers)
        for size, extent in zip(made.tile, (m, n), strict=True):
            assert 1 <= size <= max(extent, 1)
        assert made.schedule.grid.tiles == batch * -(-m // made.tile[0]) * -(-n // made.tile[1])
        assert made.backend == "cpu"
        assert made.gate is None
        assert lines(made, "arrival") == ["none: no gate code runs"]

    @policy
    @given(extents, extents, st.sampled_from([64, 257, 1024, 8192]), st.sampled_from([None, 1, 4]))
    def test_the_model_expects_no_less_than_the_floor_where_k_is_not_tiny(self, m, n, k, workers):
        made = plan(m, n, k, workers=workers)
        if made.floor.binds == "operations":
            assert made.predicted >= made.floor.seconds

    @pytest.mark.parametrize(("m", "n", "k"), [(8192, 8192, 1), (4096, 4096, 8), (8192, 1, 8192)])
    def test_the_model_expects_no_less_than_the_floor(self, m, n, k):
        made = plan(m, n, k, workers=4)
        assert made.predicted >= made.floor.seconds

    def test_a_small_problem_runs_inline(self):
        made = plan(4, 4, 4)
        assert made.variant == "inline"
        assert made.label == "cpu inline"
        assert made.schedule.grid.tiles == 1
        assert re.fullmatch(r"the cost model expects [\d.e-]+ ms, inline 0\.03 ms", reason(made, "workers"))
        assert lines(made, "schedule") == lines(made, "tiles") == lines(made, "raster") == []

    def test_workers_take_what_arrives_however_small(self):
        made = plan(4, 4, 4, arrival=Arrival.uniform(2, 2))
        assert made.variant == "workers"
        assert reason(made, "inline") == "chunks are waited for by workers, not by the calling thread"

    def test_the_chosen_is_the_least_of_the_candidates(self):
        candidates = importlib_cpu().candidates
        for m, n, k in [(64, 64, 64), (1000, 1000, 1000), (4096, 512, 300)]:
            made = plan(m, n, k)
            found = list(
                candidates(made.problem, made.device, made.device.workers, kinds=("dynamic", "stream_k"), inline=True)
            )
            assert made.predicted == min(c.predicted for c in found)
            assert made.why == f"least of {len(found)} candidates in the cost model"

    def test_static_is_refused_with_a_reason(self):
        assert (
            reason(plan(1000, 900, 800), "static")
            == "no faster than a queue here, and a late worker would hold up its tiles"
        )

    def test_stream_k_is_refused_for_want_of_a_remainder(self):
        made = plan(1024, 1024, 512, tile=(256, 256), workers=4)
        assert made.schedule.kind == "dynamic"
        assert reason(made, "stream_k") == "16 tiles on 4 workers leave no remainder"

    def test_stream_k_is_refused_by_its_cost(self):
        made = plan(192, 64, 64, tile=(64, 64), workers=4)
        assert made.schedule.kind == "dynamic"
        assert re.fullmatch(r"the cost model expects [\d.]+ ms, dynamic [\d.]+ ms", reason(made, "stream_k"))

    def test_stream_k_is_taken_for_a_deep_tile_alone(self):
        made = plan(256, 256, 100_000, tile=(256, 256), workers=4)
        assert made.schedule.kind == "stream_k"
        assert "1 tiles split along K into 4 shares" in made.explain()

    def test_no_gpu_backend_is_passed_over_in_silence(self):
        assert Refusal("GPU backends", "the operands are on the CPU") in plan(64, 64, 64).refused

    @policy
    @given(extents, extents, st.sampled_from(["auto", "static", "dynamic", "stream_k"]))
    def test_every_refusal_is_explained(self, m, n, schedule):
        made = plan(m, n, 300, schedule=schedule)
        assert lines(made, "refused") == [f"{refusal.what}: {refusal.why}" for refusal in made.refused]


def importlib_cpu():
    import importlib

    return importlib.import_module("tilestream.plan.policy.cpu")


class TestArrivals:
    def test_no_arrival_no_gate(self):
        assert plan(1000, 900, 800, schedule="dynamic").gate is None

    def test_the_gate_has_the_problem_s_chunks_and_the_plan_s_tiles(self):
        rows, columns = Arrival.uniform(300, 4, pivot=2), Arrival.ragged([0, 0, 450, 900], 1)
        made = plan(1000, 900, 800, arrival=rows, weight_arrival=columns)
        gate = made.gate
        assert (gate.m, gate.n, gate.block_m, gate.block_n) == (1000, 900, *made.tile)
        assert (gate.rows, gate.columns, gate.row_of_batch) == (rows.chunks(1000), columns.chunks(900), ())
        assert lines(made, "arrival") == [
            "rows in 4 chunks of 300 rows, pivot 2; a tile waits for the chunks it reads",
            "columns in 3 chunks of uneven columns, pivot 1; a tile waits for the chunks it reads",
        ]

    def test_each_batch_s_rows_begin_behind_the_one_before(self):
        made = plan(100, 90, 80, batch=3, arrival=Arrival.uniform(70, 5))
        assert made.gate.row_of_batch == (0, 100, 200)

    def test_shared_rows_are_the_same_for_each_batch(self):
        chunks = Arrival.uniform(25, 4).chunks(100)
        made = plan_problem(Problem(100, 90, 80, 3, rows=Incoming(chunks, 3), shared_rows=True))
        assert made.gate.row_of_batch == ()

    @policy
    @given(st.data(), st.integers(1, 3000), st.integers(1, 9), st.booleans())
    def test_the_first_tile_needs_the_pivot_and_each_chunk_s_tiles_follow_in_turn(self, data, rows, count, columns):
        # With all chunks longer than a tile, whatever needs an earlier chunk only is done before what needs a later.
        size = -(-rows // count)
        chunks = Arrival.uniform(size, -(-rows // size), data.draw(st.integers(0, -(-rows // size) - 1)))
        made = plan(300, rows, 64, weight_arrival=chunks) if columns else plan(rows, 300, 64, arrival=chunks)
        steps = []
        for item in made.schedule.items():
            needs = [(wait.chunk - chunks.pivot) % chunks.num_chunks for wait in made.gate.needs(item)]
            steps.append(max(needs))
        block = made.tile[columns]
        assert steps[0] == min(steps)
        if size % block == 0:
            assert steps[0] == 0, "the pivot's first tile needs the pivot alone"
        if size % block == 0 or chunks.num_chunks == 1 or made.schedule.raster.order == "table":
            assert steps == sorted(steps), "in the order in which they arrive"

    def test_ragged_chunks_follow_in_the_order_in_which_they_arrive(self):
        arrival = Arrival.ragged([0, 10, 10, 300, 1000], pivot=3)
        made = plan(1000, 300, 64, arrival=arrival, tile=(64, 100))
        steps = [max((w.chunk - 3) % 4 for w in made.gate.needs(item)) for item in made.schedule.items()]
        assert steps == sorted(steps)
        assert made.schedule.raster.order == "table"
        assert lines(made, "raster") == ["a table of 48 tiles"]

    @pytest.mark.parametrize(("transposed", "word"), [(False, "row"), (True, "column")])
    def test_the_raster_starts_at_the_pivot(self, transposed, word):
        arrival = Arrival.uniform(128, 8, pivot=5)
        given_ = {"weight_arrival": arrival} if transposed else {"arrival": arrival}
        made = plan(1024, 1024, 64, tile=(64, 64), **given_)
        assert made.schedule.raster == Raster("chunk_major", 4, 10, 2, transposed)
        assert lines(made, "raster") == [f"chunk_major from {word} tile 10, group 4"]
        first = next(made.schedule.items())
        assert (first.pn if transposed else first.pm) == 10

    @pytest.mark.parametrize("rows_per_chunk", [2**30, 2**40])
    def test_one_huge_chunk_stays_in_31_bits(self, rows_per_chunk):
        made = plan(1024, 2**16, 64, tile=(64, 64), arrival=Arrival.uniform(rows_per_chunk, 1))
        assert made.schedule.raster.band * made.schedule.grid.num_n < 2**31


class TestPlan:
    def test_frozen(self):
        made = plan(64, 64, 64)
        for name in ("variant", "predicted", "schedule"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, name, None)

    def test_the_same_question_gets_the_same_plan(self):
        assert plan(64, 64, 64, dtype=torch.float32) is plan(64, 64, 64, dtype="float32")
        assert plan(64, 64, 64) is not plan(64, 64, 65)
        listed = plan(64, 64, 64, tile=(32, 32), order=[3, 2, 1, 0])
        assert listed == plan(64, 64, 64, tile=(32, 32), order=(3, 2, 1, 0))

    def test_the_cache_keeps_no_order_function_alive(self):
        def order(t: int, num_m: int, num_n: int) -> tuple[int, int]:
            return t // num_n, t % num_n

        gone = weakref.ref(order)
        plan(64, 64, 64, tile=(32, 32), order=order)
        del order
        gc.collect()
        assert gone() is None

    def test_arrivals_that_are_alike_share_a_plan_and_the_plan_holds_neither(self):
        import gc
        import weakref

        first, second = Arrival.uniform(16, 4, 1), Arrival.uniform(16, 4, 1)
        made = plan(64, 64, 64, arrival=first)
        assert made is plan(64, 64, 64, arrival=second)
        assert made is not plan(64, 64, 64, arrival=Arrival.uniform(16, 4, 2))
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None, "caches hold nothing of the caller's alive"

    def test_logged_once(self, caplog):
        with caplog.at_level(logging.INFO, logger="tilestream"):
            plan(640, 64, 64)
            plan(640, 64, 64)
        assert len([r for r in caplog.records if "m=640" in r.getMessage()]) == 1
        assert "refused: static: no faster" in caplog.text

    def test_dtypes(self):
        made = plan(64, 64, 64, dtype=torch.bfloat16, out_dtype="float32")
        assert (made.problem.dtype, made.problem.out_dtype) == ("bfloat16", "float32")
        assert made.explain().startswith("matmul [64, 64] @ [64, 64], bfloat16 -> float32\n")

    def test_explain_in_full(self):
        made = plan(1024, 512, 2560, batch=2, tile=(512, 512), workers=3, schedule="stream_k", shares=5)
        assert made.explain() == "\n".join([
            "matmul 2 x [1024, 2560] @ [2560, 512], float32 -> float32",
            "  device    a test's CPU, 4 workers (nominal: made up)",
            "  backend   cpu, variant workers: least of 1 candidates in the cost model",
            "  tiles     2 x 2 x 1 of 512x512",
            "  schedule  stream_k, 3 workers, 1 queue; 1 tiles split along K into 5 shares",
            "  raster    grouped, group 4",
            "  arrival   none: no gate code runs",
            f"  floor     5.37 GFLOP, 35.7 MB, 151 FLOP/B: {made.floor.seconds * 1e3:.3g} ms, bound by operations",
            f"  expected  {made.predicted * 1e3:.3g} ms by the cost model, with everything arrived",
            "  refused   inline: workers, schedule, tile, shares given",
            "  refused   GPU backends: the operands are on the CPU",
        ])  # fmt: skip

    def test_label(self):
        assert plan(64, 64, 64, tile=(32, 16), workers=2, queues=2).label == "cpu dynamic, 2 queues, 2 workers, 32x16 tiles, grouped raster"  # fmt: skip

    def test_docstring_s_example(self):
        assert plan(2048, 2048, 2048, workers=2, schedule="dynamic", tile=(512, 512)).schedule.grid.tiles == 16
