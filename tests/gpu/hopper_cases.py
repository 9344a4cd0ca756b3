"""The cases of `test_gpu_hopper.py`: data, so that their kernels can be compiled without a GPU, too.

A kernel is compiled for a tile, a kind of schedule, dtypes, layouts and an epilogue; extents, strides and workers are
not compiled in. So each kernel has several cases.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpu_cases import BF16, E4M3, E5M2, F16, F32, FULL, KINDS, LAYOUTS, OUTS, Case, uniform

from tilestream.core.device import DeviceProperties
from tilestream.plan.policy.hopper import PAIRED, REGISTERS, TILES, TRIPLE, Tile


def hopper_case(m: int, n: int, k: int, variant: str, tile: tuple[int, int], **how: Any) -> Case:
    """By the Hopper kernel; rows of operands are padded so that TMA can address any extents."""
    usual = {"backend": "hopper", "schedule": "dynamic", "pad": None, "out": "rows"}
    return Case(m, n, k, variant=variant, tile=tile, **(usual | how))


def ways(row: Tile) -> list[tuple[int, int]]:
    """The tiles of the output that a row of `TILES` makes: as it is, and with the operands swapped."""
    tiles = [(row.rows, row.columns), (row.columns, row.rows)]
    return tiles[: 1 if row.rows == row.columns else 2]


def _row(variant: str, rows: int, columns: int) -> Tile:
    return next(row for row in TILES if row[:3] == (variant, rows, columns))


#: One tile a variant, and a few more: what most sections are run with. Of the last one the accumulator leaves no
#: registers for stream_k, nor for an epilogue that is to be fast.
FEW = tuple(_row(*name) for name in (("cooperative", 128, 128), ("ping_pong", 64, 128), ("single", 64, 64)))
MORE = tuple(
    _row(*name)
    for name in (
        ("cooperative", 128, 256), ("ping_pong", 128, 128), ("ping_pong", 64, 256), ("cooperative", 256, 96),
        ("cooperative", 256, 192),
    )
)  # fmt: skip
MANY = (*FEW, *MORE)
_ANY = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)


def _case(row: Tile, m: int, n: int, k: int, *, swapped: bool = False, **how: Any) -> Case:
    return hopper_case(m, n, k, row.variant, ways(row)[swapped], swapped=swapped, **how)


def _has(row: Tile, **how: Any) -> bool:
    """Whether the plan has such a tile for this."""
    try:
        _case(row, 512, 512, 512, **how).plan(_ANY)
    except NotImplementedError:
        return False
    return True


def _both(row: Tile) -> tuple[bool, ...]:
    """Whether the operands are swapped, in either way that there is."""
    return (False, True)[: len(ways(row))]


def _tiles() -> Iterator[Case]:
    """Every tile, both ways round, every kind; the layouts in turn."""
    layouts = itertools.cycle(LAYOUTS)
    for row in (*TILES, *TRIPLE):
        for swapped, (bm, bn) in zip(_both(row), ways(row), strict=True):
            bk, how = row.block_k(2), {"swapped": swapped, "layout": next(layouts)}
            # Several items a worker, the last tiles cut off; less than a tile, and than a stage. Stored by TMA.
            yield _case(row, 3 * bm - 5, 3 * bn - 8, 3 * bk + 9, workers=4, **how)
            yield _case(row, max(bm - 3, 1), 8, bk // 2 - 3, **how)
            # One row and a tile and more; an odd part of a tile. Stored from registers.
            yield _case(row, 1, 2 * bn + 1, 5 * bk + 1, schedule="static", **how)
            yield _case(row, bm // 2 + 1, bn // 2 + 1, bk // 2 - 3, schedule="static", **how)
            if _has(row, schedule="stream_k"):
                # Many steps of K, the last of them short, for fewer tiles than workers; one tile.
                yield _case(row, bm + 1, 2 * bn - 8, 13 * bk + 1, workers=7, schedule="stream_k", **how)
                yield _case(row, bm, 8, 5 * bk, schedule="stream_k", **how)


def _layouts() -> Iterator[Case]:
    for row, layout in itertools.product(MANY, LAYOUTS):
        yield _case(row, 1000, 520, 264, layout=layout)
        yield _case(row, 129, 264, 1001, layout=layout)
        if row in FEW:
            yield _case(row, 300, 208, 333, swapped=_both(row)[-1], layout=layout)


def _extents() -> Iterator[Case]:
    """Extents of one, and around a tile's and a stage's; rings of fewer steps than stages, as many, and more."""
    shapes = (
        (1, 1, 1), (1, 1000, 512), (1000, 1, 512), (2, 3, 5000), (16, 16, 16), (17, 15, 33), (127, 129, 63),
        (128, 128, 64), (129, 257, 65), (255, 63, 129), (129, 264, 65), (1, 8, 1),
    )  # fmt: skip
    for row, (m, n, k) in itertools.product(FEW, shapes):
        yield _case(row, m, n, k)
    for row, stages in itertools.product(FEW, (2, 3)):
        for steps in (1, stages, stages + 1, 17):
            yield _case(row, 700, 200, steps * row.block_k(2), stages=stages, workers=3)


def _registers() -> Iterator[Case]:
    """The split that no plan chooses by itself."""
    how: dict[str, Any] = {"registers": REGISTERS[1]}
    for row, kind in itertools.product((*FEW[:2], *MORE), ("static", "dynamic")):
        yield _case(row, 700, 904, 1000, schedule=kind, **how)
        yield _case(row, 333, 264, 1000, dtype=E4M3, layout="nt", scales="row", schedule=kind, **how)
    for row in FEW[:2]:
        yield _case(row, 520, 264, 640, batch=3, bias=True, residual="rows", activation="gelu", **how)
        yield _case(row, 1000, 704, 512, queues=1, **how)


def _dtypes() -> Iterator[Case]:
    for row in MANY:
        yield _case(row, 520, 264, 640, dtype=F16)
        yield _case(row, 333, 520, 201, dtype=F16)
        yield _case(row, 520, 264, 640, out_dtype=F32, workers=2)
        yield _case(row, 333, 516, 201, out_dtype=F32)
    for row in FEW:
        yield _case(row, 333, 264, 201, out_dtype=F16)
        yield _case(row, 333, 264, 201, dtype=F16, out_dtype=BF16, schedule="stream_k")
        yield _case(row, 333, 264, 201, dtype=F16, out_dtype=F32, schedule="stream_k", layout="tt")
        yield _case(row, 333, 517, 201, dtype=F16)
        yield _case(row, 333, 517, 201, out_dtype=F32)


def _fp8() -> Iterator[Case]:
    pairs, scales = itertools.product((E4M3, E5M2), repeat=2), ("none", "tensor", "row")
    for (a, b), (row, scale), fast in itertools.product(pairs, zip(FEW, scales, strict=True), (True, False)):
        how = {"dtype": a, "b_dtype": None if a == b else b, "scales": scale, "fast_accum": fast, "layout": "nt"}
        yield _case(row, 333, 264, 640, **how)
        yield _case(row, 130, 72, 1999, schedule="stream_k" if a == b else "dynamic", **how)
    scaled: dict[str, Any] = {"dtype": E4M3, "scales": "row", "layout": "nt"}
    for row, fast in itertools.product(MANY, (True, False)):
        if _has(row, fast_accum=fast, **scaled):
            yield _case(row, 520, 776, 4096, workers=5, fast_accum=fast, **scaled)
            yield _case(row, 77, 1033, 129, swapped=_both(row)[-1], fast_accum=fast, **scaled)
            yield _case(row, 200, 300, 1024, out_dtype=F32, fast_accum=fast, **scaled)
    for row in FEW:
        how = {"bias": True, "residual": "rows", "beta": 0.5, "activation": "gelu", **scaled}
        yield _case(row, 333, 264, 640, **how)
        yield _case(row, 100, 120, 512, batch=3, schedule="stream_k", **how)


def _tf32() -> Iterator[Case]:
    """Every tile both ways round."""
    how: dict[str, Any] = {"dtype": F32, "layout": "nt"}
    for row in (*TILES, *TRIPLE):
        bk = row.block_k(4)
        for swapped, (bm, bn) in zip(_both(row), ways(row), strict=True):
            yield _case(row, 3 * bm - 5, 3 * bn - 8, 3 * bk + 9, workers=4, swapped=swapped, **how)
            if _has(row, schedule="stream_k", **how):
                split = {"workers": 7, "schedule": "stream_k", "swapped": swapped}
                yield _case(row, bm + 1, 2 * bn - 7, 13 * bk + 1, **split, **how)
    for row in FEW:
        yield _case(row, 520, 776, 4096, workers=5, **how)
        yield _case(row, 333, 264, 1999, out_dtype=BF16, **how)
        yield _case(row, 333, 517, 640, activation="gelu", **FULL, **how)
        yield _case(row, 130, 144, 96, batch=3, schedule="stream_k", activation="relu", **FULL, **how)
        for out in OUTS[2:]:
            yield _case(row, 304, 264, 200, out=out, **how)


def _epilogues() -> Iterator[Case]:
    for row, activation in itertools.product(FEW, ("relu", "gelu", "gelu_tanh", "silu")):
        yield _case(row, 520, 776, 640, layout="nt", activation=activation, **FULL)
        yield _case(row, 333, 520, 201, layout="nt", activation=activation, **FULL)
    for row in FEW:
        split = {"swapped": _both(row)[-1], "schedule": "stream_k"}
        for how in ({"bias": True}, {"residual": "rows", "beta": 2.0}, {"residual": "columns"}, {"alpha": -0.5}):
            yield _case(row, 333, 520, 201, **how)
        yield _case(row, 333, 517, 201, residual="rows", beta=0.0)
        yield _case(row, 333, 517, 201, activation="gelu", **FULL)
        yield _case(row, 520, 776, 640, activation="gelu", **split, **FULL)
        yield _case(row, 130, 1000, 333, activation="gelu", **split, **FULL)
        yield _case(row, 333, 516, 201, dtype=F16, out_dtype=F32, activation="gelu", **FULL)
        yield _case(row, 520, 776, 640, scales="row", activation="silu", **FULL)
        yield _case(row, 77, 520, 200, scales="tensor", **split)
    for row in MORE:
        yield _case(row, 520, 776, 640, activation="silu", **FULL)
        yield _case(row, 333, 517, 201, activation="silu", **FULL)
        if _has(row, schedule="stream_k"):
            yield _case(row, 333, 520, 201, activation="silu", schedule="stream_k", **FULL)


def _outs() -> Iterator[Case]:
    for row, out in itertools.product(FEW, OUTS[1:]):
        for swapped in _both(row):
            yield _case(row, 304, 264, 200, swapped=swapped, out=out)
            yield _case(row, 1000, 40, 129, swapped=swapped, out=out, workers=2)
            yield _case(row, 301, 33, 129, swapped=swapped, out=out)
    for row, out in itertools.product(MORE, ("columns", "odd")):
        yield _case(row, 304, 265, 200, out=out)
        if _has(row, schedule="stream_k"):
            yield _case(row, 304, 265, 200, out=out, schedule="stream_k")
    for row in FEW:
        yield _case(row, 300, 265, 200, out="columns", out_dtype=F32, activation="gelu", **FULL)
        yield _case(row, 300, 265, 200, out="odd", activation="gelu", **FULL)


def _batches() -> Iterator[Case]:
    for row, kind in itertools.product(FEW, KINDS):
        for shared in ("", "a", "b"):
            yield _case(row, 130, 144, 96, batch=5, shared=shared, schedule=kind, workers=7)
        yield _case(row, 33, 8, 200, batch=2, schedule=kind)
    for row in FEW:
        yield _case(row, 33, 1, 200, batch=2)
        for out in ("columns", "odd"):
            yield _case(row, 136, 141, 96, batch=3, out=out)
        yield _case(row, 130, 144, 96, batch=3, layout="tt", activation="relu", schedule="stream_k", **FULL)
        yield _case(row, 130, 144, 96, batch=1)


def _pairs() -> Iterator[Case]:
    """Pairs of CTAs, both ways round: several items a pair, one, none for most; few steps, and many; all stores."""
    layouts = itertools.cycle(LAYOUTS)
    for row in PAIRED:
        for swapped, (bm, bn) in zip(_both(row), ways(row), strict=True):
            how: dict[str, Any] = {"swapped": swapped, "schedule": "static"}
            bk = row.block_k(2)
            for layout in LAYOUTS:
                yield _case(row, 3 * bm - 5, 3 * bn - 8, 3 * bk + 9, workers=4, layout=layout, **how)
            yield _case(row, 8 * bm, 8 * bn, 33 * bk, layout="nt", **how)
            yield _case(row, max(bm - 3, 1), 8, bk // 2 - 3, layout=next(layouts), **how)
            yield _case(row, 1, 2 * bn + 1, 5 * bk + 1, **how)
            yield _case(row, bm // 2 + 1, bn // 2 + 1, 5 * bk, **how)
            yield _case(row, 2 * bm, 2 * bn, 17 * bk, workers=2, stages=2, layout="nt", **how)
            yield _case(row, 2 * bm - 8, bn + 8, 9 * bk, dtype=F16, out_dtype=F32, layout="nt", **how)
            yield _case(row, 2 * bm - 8, bn + 8, 9 * bk, dtype=E4M3, scales="row", layout="nt", **how)
            if bm * bn == 256 * 256:
                yield _case(row, 3 * bm, 2 * bn, 9 * bk, batch=3, workers=7, layout="nt", **how)
                yield _case(row, 520, 776, 640, layout="nt", activation="gelu", **how, **FULL)
                yield _case(row, 520, 264, 640, dtype=E4M3, fast_accum=False, layout="nt", **how)
                yield _case(row, 520, 264, 640, dtype=F32, layout="nt", **how)


def _triples() -> Iterator[Case]:
    """Three consumers, beside `_tiles`: layouts, dtypes, every store, an epilogue, a batch, few stages."""
    for row in TRIPLE:
        for swapped, (bm, bn) in zip(_both(row), ways(row), strict=True):
            how: dict[str, Any] = {"swapped": swapped}
            bk = row.block_k(2)
            for layout in LAYOUTS:
                yield _case(row, 3 * bm - 5, 3 * bn - 8, 3 * bk + 9, workers=4, layout=layout, **how)
            yield _case(row, 8 * bm, 8 * bn, 33 * bk, layout="nt", **how)
            yield _case(row, 2 * bm - 8, bn + 8, 9 * bk, dtype=F16, out_dtype=F32, layout="nt", **how)
            yield _case(row, 2 * bm - 5, 2 * bn - 7, 9 * bk, dtype=F16, layout="nt", **how)
            yield _case(row, 520, 776, 640, layout="nt", activation="gelu", **how, **FULL)
            yield _case(row, 3 * bm, 2 * bn, 9 * bk, batch=3, workers=7, layout="nt", **how)
            yield _case(row, 2 * bm, 2 * bn, 17 * bk, workers=2, stages=2, layout="nt", **how)
            if row.columns <= 160:
                yield _case(row, 2 * bm - 8, bn + 8, 9 * bk, dtype=E4M3, scales="row", layout="nt", **how)


def _orders() -> Iterator[Case]:
    """Several queues, shares, and a caller's own order of tiles, which is a table."""
    for row in FEW:
        for queues in (2, 7):
            yield _case(row, 1000, 520, 200, queues=queues, workers=5)
        for shares in (1, 3, 40):
            yield _case(row, 700, 304, 1000, schedule="stream_k", shares=shares, workers=11)
        for kind in KINDS:
            tiles = -(-500 // ways(row)[0][0]) * -(-704 // ways(row)[0][1])
            order = tuple(random.Random(tiles).sample(range(tiles), tiles))
            yield _case(row, 500, 704, 128, schedule=kind, workers=5, order=order)


SECTIONS = (
    _tiles, _layouts, _extents, _registers, _dtypes, _fp8, _tf32, _epilogues, _outs, _batches, _orders, _pairs,
    _triples,
)  # fmt: skip
CASES = list({case.name: case for section in SECTIONS for case in section()}.values())


def _holds_infinity(dtype: torch.dtype) -> bool:
    """Some dtypes of 8 bits have no such number; torch fills none with it."""
    return bool(torch.tensor(float("inf")).to(dtype).float().isinf())


def _spoiled() -> Iterator[tuple[Any, Case]]:
    """Cases with rows and columns beyond those that are spoiled, and nothing that could hide a NaN."""
    for case in CASES:
        dtypes = (case.dtype, case.b_dtype or case.dtype)
        if case.m > 8 and case.n > 4 and not case.batch and not case.activation and all(map(_holds_infinity, dtypes)):
            yield (case.variant, case.schedule, dtypes), case


#: A case each variant, schedule and pair of dtypes: row 7 of A is to be NaN, column 3 of B infinite.
SPOILED = list(dict(reversed([*_spoiled()])).values())


def spoil(a: torch.Tensor, b: torch.Tensor) -> None:
    """Write what is not finite into operands of a `SPOILED` case."""
    a[7].fill_(float("nan"))
    b[:, 3].fill_(float("inf"))


# What other tests launch ---------------------------------------------------------------------------------------------

#: The order of work, written down by a probe.
PROBE_CASES = [
    _case(row, 1000, 704, 512, schedule=kind, queues=queues)
    for row, (kind, queues) in itertools.product(
        FEW, [("static", None), ("dynamic", None), ("dynamic", 3), ("stream_k", None)]
    )
]
#: A chain of launches, some on what the one before wrote.
CHAINED_CASES = [_case(row, 768, 768, 768, schedule=kind) for row, kind in itertools.product(FEW, KINDS)]
#: Launched again and again: three contributors to a tile and more.
REPEATED = [_case(row, 500, 304, 2000, schedule=kind, bias=True) for row, kind in itertools.product(FEW, KINDS)]
#: More than 2**31 elements: of the output, through TMA and from registers, and of an operand.
LARGE = {
    "output": _case(FEW[0], 66000, 33000, 64),
    "output stored directly": _case(FEW[0], 66000, 33000, 64, out="odd"),
    "operand": _case(FEW[0], 2**20 + 1024, 64, 2048),
}


# What arrives --------------------------------------------------------------------------------------------------------


#: In chunks that are no multiple of a tile, that are one, and in ragged ones, one of them without rows.
_M, _N, _K = 700, 520, 384
_ODD, _WHOLE, _RAGGED = uniform(_M, 150), uniform(_M, 256), (0, 10, 10, 300, 301, _M)
_RAGGED_N = (0, 100, 100, 411, _N)


def _arriving() -> Iterator[Case]:
    """Each variant both ways round, every kind; layouts, chunks and pivots in turn. Half of the SMs stay free."""
    layouts = itertools.cycle(LAYOUTS)
    for row in FEW:
        for swapped, kind in itertools.product(_both(row), KINDS):
            how = {"swapped": swapped, "schedule": kind, "workers": 61}
            yield _case(row, _M, _N, _K, layout=next(layouts), rows=_ODD, pivot=2, **how)
            yield _case(row, _M, _N, _K, layout=next(layouts), columns=_RAGGED_N, pivot=3, **how)
            both = {"rows": _RAGGED, "columns": uniform(_N, 128)}
            if kind != "stream_k":
                yield _case(row, _M, _N, _K, layout=next(layouts), **both, **how)
    for row in FEW:
        how = {"workers": 61, "schedule": "stream_k"}
        yield _case(row, 130, 144, 96, batch=5, rows=uniform(650, 150), pivot=1, workers=61)
        yield _case(row, _M, 517, _K, rows=_WHOLE, pivot=1, layout="nt", activation="relu", **FULL, **how)
        yield _case(
            row, 130, 72, 1999, dtype=E4M3, scales="row", fast_accum=False, layout="nt", rows=(0, 70, 130), **how
        )
    for row in MORE:
        yield _case(row, _M, _N, _K, rows=_ODD, pivot=4, workers=61)
    yield _case(FEW[0], _M, _N, _K, rows=_WHOLE, pivot=1, workers=61, queues=3)
    # Whatever arrives first; and, in arrival order, each chunk the pivot, and few workers, so that each has many items.
    for row in FEW:
        yield _case(row, _M, _N, _K, rows=_ODD, pivot=2, workers=61, schedule="dynamic", order="chunk_major")
        for pivot, workers in itertools.product(range(len(_RAGGED) - 1), (3, 61)):
            yield _case(row, _M, _N, _K, rows=_RAGGED, pivot=pivot, workers=workers, layout="nt", schedule="dynamic")
    yield _case(FEW[0], _M, _N, _K, dtype=F32, layout="nt", rows=_ODD, pivot=1, workers=61)


ARRIVING = list({case.name: case for case in _arriving()}.values())
_LAYOUTS_IN_TURN = itertools.cycle(("nt", "nn", "tn", "tt"))
#: Everything that the gate can do once, of each variant: chunks missing, words of the caller's own, graphs, a probe.
GATED = [
    _case(row, _M, _N, _K, schedule=kind, layout=next(_LAYOUTS_IN_TURN), rows=bounds, pivot=1, workers=61)
    for (row, bounds), kind in itertools.product(zip(FEW, (_ODD, _WHOLE, _RAGGED), strict=True), KINDS)
]


class ApartCase(NamedTuple):
    """What ranks gather, of which a rank's own rows stand apart; and whether the kernel reads them there."""

    case: Case
    first: int
    height: int
    period: int
    there: bool = True

    def has(self, row: int) -> bool:
        """Whether a row of the operand stands apart."""
        return self.first <= row % self.period < self.first + self.height


def _apart() -> Iterator[ApartCase]:
    """Each variant; one batch and three, one chunk a shard and two, each rank's; shards that are no whole tiles."""
    for (i, row), (batches, parts) in itertools.product(enumerate(FEW), ((1, 1), (1, 2), (3, 1))):
        shard, world, rank = 2 * row.rows, 3, (i + parts + batches) % 3
        how = {"rows": uniform(batches * world * shard, shard // parts), "pivot": rank * parts, "workers": 61}
        for kind, layout, dtype in zip(KINDS, ("nn", "nt", "nt"), (BF16, F16, E4M3), strict=True):
            if _has(row, dtype=dtype):
                case = _case(row, batches * world * shard, _N, _K, schedule=kind, layout=layout, dtype=dtype, **how)
                yield ApartCase(case, rank * shard, shard, world * shard, kind != "stream_k")
    for row in FEW:
        case = _case(row, 3 * 200, _N, _K, layout="nt", rows=uniform(600, 200), pivot=1, workers=61)
        yield ApartCase(case, 200, 200, 600, there=False)
    swapped = _case(FEW[1], 768, _N, _K, layout="nt", swapped=True, rows=uniform(768, 256), pivot=2, workers=61)
    yield ApartCase(swapped, 512, 256, 768, there=False)


APART = [*_apart()]

#: Strides or addresses that TMA cannot address, and what the plan says of them.
UNALIGNED = {
    Case(520, 777, 640): "b has strides",
    Case(520, 776, 641): "a has strides",
    Case(777, 520, 640, layout="tn"): "a has strides",
    Case(512, 768, 640, pad=3): "a has strides",
    Case(512, 768, 640, offset=1): "a lies at an address",
    Case(512, 768, 640, F32, tf32=True): "b is not contiguous along K, and the tensor cores take tf32 only so",
    Case(512, 768, 640, F32, "nt"): "it multiplies float32 as tf32, which torch.backends.cuda.matmul does not allow",
}


def launched() -> Iterator[Case]:
    """What the tests launch, but for `PROBE_CASES` and `UNALIGNED`, and with a probe."""
    yield from (*CASES, *REPEATED, *CHAINED_CASES, *LARGE.values())
    yield from (replace(REPEATED[0], bias=bias, residual=residual) for bias, residual in ((True, ""), (False, "rows")))
