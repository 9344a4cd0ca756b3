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
from made_up import lines, reason, refused

import tilestream
from tilestream import Arrival, plan
from tilestream.core import raster
from tilestream.plan import SCHEDULES, Incoming, Problem, plan_problem
from tilestream.plan.policy import cpu
from tilestream.schedule import Raster

extents = st.sampled_from([0, 1, 2, 31, 32, 33, 100, 257, 512, 1000, 2048, 2049, 8192])
policy = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def test_planning_imports_neither_torch_nor_numpy_nor_triton():
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'triton', 'numpy']))\n"
        "from tilestream import Arrival, plan\n"
        "made = plan(4096, 512, 300, arrival=Arrival.ragged([0, 100, 4096], 1), dtype='bfloat16')\n"
        "print(made.explain()); assert made.gate is not None; list(made.schedule.items())"
    )
    src = Path(tilestream.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=850, check=False,
        env={"PYTHONPATH": str(src), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("matmul [4096, 300] @ [300, 512], bfloat16 -> bfloat16\n")


WHOLE = "{}={!r}; it must be a positive whole number, or None for the plan's choice"
TILE = "tile={!r}; a tile has (rows, columns), both positive whole numbers"
DTYPE = "dtype: {}; tilestream multiplies float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz: convert first, or use torch.matmul"
DEVICE = "device={!r}: there are backends for the CPU and for CUDA and ROCm GPUs; use torch.matmul there"
UNKNOWN = "device={!r} is unknown: give 'cpu', 'cuda', 'cuda:1', a DeviceProperties, or, for a plan without the GPU, one of a100, l40s, rtx4090, h100, h200, b200, b300, thor, rtx5090, mi300x, mi325x, mi350x, mi355x"
WHOLE_NUMBERS = [
    ("workers", 0),
    ("workers", -2),
    ("workers", 2.0),
    ("workers", True),
    ("queues", 0),
    ("queues", "2"),
    ("shares", 0),
]
ON_GPU = {"device": "h100", "dtype": "bfloat16"}
REFUSED = [
    *(({name: x}, ValueError, WHOLE.format(name, x)) for name, x in WHOLE_NUMBERS),
    *(({"tile": x}, ValueError, TILE.format(x)) for x in ((0, 4), (4, -4), (4,), (4, 4, 4), 32, (32.5, 32))),
    *(({"dtype": x}, TypeError, DTYPE.format(x)) for x in ("int8", torch.complex64)),
    *(({"device": x}, NotImplementedError, DEVICE.format(str(x))) for x in ("xpu", torch.device("mps", 1))),
    *(({"device": x}, ValueError, UNKNOWN.format(x)) for x in ("v100", "cudaa", "H 100")),
    *(({name: -x}, ValueError, f"{name}={-x}; an extent is a whole number, and not negative") for x, name in enumerate(("m", "n", "k", "batch"), 1)),
    *(({name: 3}, TypeError, f"{name}=3; it must be a tilestream.Arrival, or None for what is there") for name in ("arrival", "weight_arrival")),
    *(({name: x}, ValueError, f"{name}={x!r} with device=cpu: it is for GPUs; leave it away") for name, x in (("backend", "hopper"), ("stages", 4), ("registers", (24, 240)))),
    ({"out_dtype": torch.int32}, TypeError, DTYPE.format("torch.int32")),
    ({"schedule": "greedy"}, ValueError, "schedule='greedy'; it must be one of auto, static, dynamic, stream_k"),
    ({"queues": 2, "shares": 2}, ValueError, "queues=2, shares=2; queues are dynamic's, shares are stream_k's: force one of them"),
    ({"queues": 2, "schedule": "static"}, ValueError, "queues=2 with schedule='static'; it belongs to schedule='dynamic'"),
    ({"queues": 2, "schedule": "stream_k"}, ValueError, "queues=2 with schedule='stream_k'; it belongs to schedule='dynamic'"),
    ({"shares": 2, "schedule": "dynamic"}, ValueError, "shares=2 with schedule='dynamic'; it belongs to schedule='stream_k'"),
    ({"arrival": Arrival.uniform(30, 3)}, ValueError, "arrival: 3 chunks of 30 rows bring 61 to 90 rows, the input has 100; it takes num_chunks=4"),
    ({"weight_arrival": Arrival.ragged([0, 30])}, ValueError, "arrival: its bounds end at row 30, the input has 60 rows; the last bound is the number of rows"),
    ({"arrival": Arrival.uniform(100, 1), "batch": 2}, ValueError, "arrival: 1 chunks of 100 rows bring 1 to 100 rows, the input has 200; it takes num_chunks=2"),
    ({"tile": (50, 30), "order": [0, 1, 2]}, ValueError, "order: 3 entries; missing [3]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
    ({"tile": (50, 30), "order": "0123"}, ValueError, "order='0123'; by name it is one of arrival, chunk_major"),
    ({"order": 3}, TypeError, "order=3; it must be a function of a position, or a sequence of tiles"),
    ({"order": "arrival"}, ValueError, "order='arrival': nothing arrives; give arrival or weight_arrival, or your own order of tiles"),
    ({"device": "cuda:x"}, ValueError, "device='cuda:x'; a GPU is 'cuda', or 'cuda:' and its number"),
    ({"m": 2**20, "n": 2**20, "tile": (16, 16)}, ValueError, "Grid: 4294967296 tiles of 1 K steps; schedules count in 31 bits: use larger tiles"),
    ({"layout": "row"}, ValueError, "layout='row'; it must be 'nn', 'nt', 'tn' or 'tt': 't' for a transposed operand, A's first"),
    ({**ON_GPU, "backend": "cuda"}, ValueError, "backend='cuda'; it must be 'hopper', 'cdna', 'portable', or None for the plan's choice"),
    ({**ON_GPU, "backend": "portable", "stages": 4}, ValueError, "variant=None, stages=4 with backend='portable': only 'hopper' and 'cdna' have them; leave them away"),
    ({**ON_GPU, "variant": "pingpong"}, ValueError, "variant='pingpong'; it must be one of cooperative, triple, ping_pong, single, paired, one_tile, or None for the plan's choice"),
    ({"device": "mi300x", "variant": "ping_pong"}, ValueError, "variant='ping_pong'; it must be one of direct, staged, or None for the plan's choice"),
    *(({**ON_GPU, "stages": x}, ValueError, f"stages={x}; a ring has two stages at least, or None for as many as fit") for x in (1, 2.5)),
    ({**ON_GPU, "registers": (24, 232)}, ValueError, "registers=(24, 232); it must be (40, 232) or (24, 240), of a thread of the load warp and of the math warps, or None for the plan's choice"),
    *(({**ON_GPU, "registers": (24, 240), **how}, ValueError, f"registers=(24, 240) with backend={name!r}: only 'hopper' splits them so") for how, name in (({"backend": "portable"}, "portable"), ({"device": "mi300x"}, "cdna"))),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_bad_arguments_are_refused(arguments, error, message):
    with refused(error, message):
        plan(**{"m": 100, "n": 60, "k": 40, **arguments})


def test_lists_stand_for_tuples():
    assert plan(64, 64, 64, tile=[32, 32]).tile == (32, 32)
    assert plan(64, 64, 64, tile=(32, 32), order=[[1, 1], [0, 0], [1, 0], [0, 1]]).tile == (32, 32)


class TestForced:
    @pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
    def test_schedule(self, kind):
        assert SCHEDULES == ("auto", "static", "dynamic", "stream_k")
        made = plan(1000, 900, 800, schedule=kind)
        assert (made.schedule.kind, made.variant, reason(made, "inline")) == (kind, "workers", "schedule given")
        assert lines(made, "schedule")[0].startswith(f"{kind}, 4 workers")

    @pytest.mark.parametrize("workers", [1, 3, 4, 7, 100])
    def test_workers(self, workers):
        made = plan(1000, 900, 800, workers=workers)
        assert made.workers == made.schedule.workers == workers
        assert reason(made, "inline") == "workers given"

    @pytest.mark.parametrize("tile", [(32, 64), (7, 13), (1000, 900), (5000, 5000)])
    def test_tile(self, tile):
        made, (rows, columns) = plan(1000, 900, 800, tile=tile), (-(-1000 // tile[0]), -(-900 // tile[1]))
        assert (made.tile, made.schedule.grid.num_m, made.schedule.grid.num_n) == (tile, rows, columns)
        assert lines(made, "tiles") == [f"1 x {rows} x {columns} of {tile[0]}x{tile[1]}"]

    @pytest.mark.parametrize("queues", [1, 2, 5, 50])
    def test_queues_are_dynamic_s_and_split_columns(self, queues):
        made = plan(1000, 900, 800, queues=queues, tile=(100, 100))
        split = "columns" if queues > 1 else "items"
        assert (made.schedule.kind, made.schedule.queues, made.schedule.split) == ("dynamic", queues, split)
        assert f"{queues} queue{'s' if queues > 1 else ''}" in lines(made, "schedule")[0]
        assert ("queues" in made.label) == (queues > 1)

    def test_queues_split_what_does_not_arrive(self):
        rows, columns = {"arrival": Arrival.uniform(100, 10)}, {"weight_arrival": Arrival.uniform(90, 10)}
        for arrives, split in ((rows, "columns"), (columns, "rows")):
            assert plan(1000, 900, 800, queues=3, tile=(50, 90), **arrives).schedule.split == split

    def test_shares_are_stream_k_s(self):
        made = plan(1024, 512, 2560, shares=7, tile=(512, 512), workers=3)
        assert (made.schedule.kind, made.schedule.num_shares) == ("stream_k", 7)
        assert lines(made, "schedule") == ["stream_k, 3 workers, 1 queue; 2 tiles split along K into 7 shares"]

    @pytest.mark.parametrize("order", [[3, 1, 2, 0], [(1, 1), (0, 1), (1, 0), (0, 0)], lambda t, m, n: [3, 1, 2, 0][t]])
    def test_the_caller_s_order_in_each_batch_and_where_chunks_arrive(self, order):
        made = plan(64, 64, 64, batch=2, tile=(32, 32), order=order)
        assert [item.tile for item in made.schedule.items()] == [3, 1, 2, 0, 7, 5, 6, 4]
        assert lines(made, "raster") == ["a table of 4 tiles"]
        assert reason(made, "inline") == "tile, order given"
        made = plan(64, 64, 64, tile=(32, 32), order=order, arrival=Arrival.uniform(32, 2, pivot=1))
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
        batches = min(batch, 1) if made.variant == "inline" else batch  # which the BLAS takes together
        assert made.schedule.grid.tiles == batches * -(-m // made.tile[0]) * -(-n // made.tile[1])
        assert (made.backend, made.gate, lines(made, "arrival")) == ("cpu", None, ["none: no gate code runs"])

    @policy
    @given(extents, extents, st.sampled_from([64, 257, 1024, 8192]), st.sampled_from([None, 1, 4]))
    def test_the_model_expects_no_less_than_the_floor_where_k_is_not_tiny(self, m, n, k, workers):
        made = plan(m, n, k, workers=workers)
        assert made.floor.binds != "operations" or made.predicted >= made.floor.seconds

    @pytest.mark.parametrize(("m", "n", "k"), [(8192, 8192, 1), (4096, 4096, 8), (8192, 1, 8192)])
    def test_the_model_expects_no_less_than_the_floor(self, m, n, k):
        made = plan(m, n, k, workers=4)
        assert made.predicted >= made.floor.seconds

    def test_a_small_problem_runs_inline(self):
        made = plan(4, 4, 4)
        assert (made.variant, made.label, made.schedule.grid.tiles) == ("inline", "cpu inline", 1)
        assert re.fullmatch(r"the cost model expects [\d.e-]+ ms, inline 0\.03 ms", reason(made, "workers"))
        assert lines(made, "schedule") == lines(made, "tiles") == lines(made, "raster") == []

    def test_workers_take_what_arrives_however_small(self):
        made = plan(4, 4, 4, arrival=Arrival.uniform(2, 2))
        assert made.variant == "workers"
        assert reason(made, "inline") == "chunks are waited for by workers, not by the calling thread"

    def test_the_chosen_is_the_least_of_the_candidates(self):
        kinds = ("dynamic", "stream_k")
        for m, n, k in [(64, 64, 64), (1000, 1000, 1000), (4096, 512, 300)]:
            made = plan(m, n, k)
            found = list(cpu.candidates(made.problem, made.device, made.device.workers, kinds=kinds, inline=True))
            assert made.predicted == min(c.predicted for c in found)
            assert made.why == f"least of {len(found)} candidates in the cost model"

    @pytest.mark.parametrize(
        ("extents", "how", "kind", "what", "why"),
        [
            ((1000, 900, 800), {}, None, "static", "no faster than a queue here, and a late worker would hold up its tiles"),
            ((1024, 1024, 512), {"tile": (256, 256), "workers": 4}, "dynamic", "stream_k", "16 tiles on 4 workers leave no remainder"),
            ((192, 64, 64), {"tile": (64, 64), "workers": 4}, "dynamic", "stream_k", r"the cost model expects [\d.]+ ms, dynamic [\d.]+ ms"),
            ((64, 64, 64), {}, None, "GPU backends", "the operands are on the CPU"),
        ],
    )  # fmt: skip
    def test_what_is_not_taken_is_refused_with_a_reason(self, extents, how, kind, what, why):
        made = plan(*extents, **how)
        assert kind in (None, made.schedule.kind)
        assert re.fullmatch(why, reason(made, what))

    def test_stream_k_is_taken_for_a_deep_tile_alone(self):
        made = plan(256, 256, 100_000, tile=(256, 256), workers=4)
        assert made.schedule.kind == "stream_k"
        assert "1 tiles split along K into 4 shares" in made.explain()

    @policy
    @given(extents, extents, st.sampled_from(["auto", "static", "dynamic", "stream_k"]))
    def test_every_refusal_is_explained(self, m, n, schedule):
        made = plan(m, n, 300, schedule=schedule)
        assert lines(made, "refused") == [f"{refusal.what}: {refusal.why}" for refusal in made.refused]


class TestArrivals:
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
        assert plan(1000, 900, 800, schedule="dynamic").gate is None

    def test_each_batch_s_rows_begin_behind_the_one_before_but_for_shared_ones(self):
        assert plan(100, 90, 80, batch=3, arrival=Arrival.uniform(70, 5)).gate.row_of_batch == (0, 100, 200)
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
        steps = [
            max((wait.chunk - chunks.pivot) % chunks.num_chunks for wait in made.gate.needs(item))
            for item in made.schedule.items()
        ]
        whole = size % made.tile[columns] == 0
        assert steps[0] == min(steps)
        assert not whole or steps[0] == 0, "the pivot's first tile needs the pivot alone"
        if whole or chunks.num_chunks == 1 or made.schedule.raster.order == "table":
            assert steps == sorted(steps), "in the order in which they arrive"

    def test_ragged_chunks_follow_in_the_order_in_which_they_arrive(self):
        arrival = Arrival.ragged([0, 10, 10, 300, 1000], pivot=3)
        made = plan(1000, 300, 64, arrival=arrival, tile=(64, 100))
        steps = [max((w.chunk - 3) % 4 for w in made.gate.needs(item)) for item in made.schedule.items()]
        assert steps == sorted(steps)
        assert made.schedule.raster.order == "table"
        assert lines(made, "raster") == ["a table of 48 tiles"]

    @pytest.mark.parametrize(("argument", "word"), [("arrival", "row"), ("weight_arrival", "column")])
    def test_the_raster_starts_at_the_pivot(self, argument, word):
        made = plan(1024, 1024, 64, tile=(64, 64), **{argument: Arrival.uniform(128, 8, pivot=5)})
        assert made.schedule.raster == Raster("chunk_major", 4, 10, 2, word == "column")
        assert lines(made, "raster") == [f"chunk_major from {word} tile 10, group 4"]
        first = next(made.schedule.items())
        assert (first.pn if word == "column" else first.pm) == 10

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
        assert len([r for r in caplog.records if r.getMessage().startswith("matmul [640, 64] @")]) == 1
        assert "refused: static: no faster" in caplog.text

    def test_dtypes(self):
        made = plan(64, 64, 64, dtype=torch.bfloat16, out_dtype="float32")
        assert (made.problem.dtype, made.problem.out_dtype) == ("bfloat16", "float32")
        assert made.explain().startswith("matmul [64, 64] @ [64, 64], bfloat16 -> float32\n")
        assert made.problem.b_dtype == "", "that of A"
        mixed = plan(64, 64, 64, dtype="float8_e4m3fn", b_dtype="float8_e5m2", device="h100")
        assert mixed.problem.b_dtype == "float8_e5m2"

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
        assert plan(2048, 2048, 2048, workers=2, schedule="dynamic", tile=(512, 512)).schedule.grid.tiles == 16
        assert plan(64, 64, 64, tile=(32, 16), workers=2, queues=2).label == "cpu dynamic, 2 queues, 2 workers, 32x16 tiles, grouped raster"  # fmt: skip
