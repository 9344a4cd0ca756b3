"""Ways to compute the same rows: each kernel of the plan's space, forced, and the places that a row is put in.

A `Way` runs one kernel for one K (or one head). It yields what it made of the pool's rows, first all of them in order,
then some at other places, in other batches: the same rows should have the same bits each time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import tilestream as ts
from tilestream.launch.cache import launch_cache
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.candidate import FREE, Candidate, Forced
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import hopper, hopper_attention, portable, portable_attention

#: Rows of the pool; columns, a number that no tile divides.
ROWS, COLUMNS = 300, 336
#: Extents of K: one stage and less, tails of a stage, and long ones.
EXTENTS = (64, 80, 1008, 4096, 11008)
#: The pool's rows as calls have them: all, in reverse, few of them, one.
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda rows: rows,
    "reversed": lambda rows: rows.flip(0),
    "17 from 100": lambda rows: rows[100:117],
    "one": lambda rows: rows[5:6],
}
#: Heads of the attention pool: queries, keys, rows of queries and keys.
HEADS, HEADS_KV, LENGTH = 8, 2, 1100
Made = Iterator[tuple[str, torch.Tensor]]


class Way(NamedTuple):
    """A kernel that computes a group's rows.

    Attributes
    ----------
    group
        What is computed: ways of one group are compared.
    name
        Which kernel.
    inputs
        The extents of K, or none for attention.
    run
        Makes the answers for one of the inputs: the name of each place, and its rows as the pool has them.
    """

    group: str
    name: str
    inputs: tuple[int, ...]
    run: Callable[[int], Made]


# Products -------------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """What is computed: dtypes, how B lies, the epilogue."""

    dtype: str = "bfloat16"
    out: str = "float32"
    layout: str = "nt"
    fast: bool = True
    full: bool = False

    def __str__(self) -> str:
        words = [self.dtype, f"to {self.out}", self.layout]
        if self.dtype.startswith("float8"):
            words.append("fast" if self.fast else "promoted")
        return " ".join([*words, *["bias, residual, gelu"] * self.full])


@functools.lru_cache(maxsize=8)
def pool(dtype: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[ROWS, k]`` and ``[COLUMNS, k]``: numbers of many sizes and both signs, so that each order of adding shows."""
    made = torch.Generator().manual_seed(k)
    found = []
    for rows in (ROWS, COLUMNS):
        x = torch.randn(rows, k, generator=made) * torch.exp2(torch.randint(-4, 4, (rows, k), generator=made).float())
        found.append(x.to("cuda").to(getattr(torch, dtype)))
    return found[0], found[1]


def run_plan(product: Product, make: Callable[[Any], Plan], k: int) -> Made:
    """Rows of the pool at each of `PLACES`, by the plan that ``make`` makes of a problem."""
    rows, weight = pool(product.dtype, k)
    b = weight.t() if product.layout == "nt" else weight.t().contiguous()
    full: dict[str, Any] = {}
    extra = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to("cuda")
    if product.full:
        full = {"bias": extra[0].clone().to(torch.bfloat16), "alpha": 0.37, "beta": 1.7, "activation": "gelu"}
    with tf32(product.dtype == "float32"):
        for place, put in PLACES.items():
            a = put(rows).contiguous()
            out = torch.full((a.shape[0], COLUMNS), float("nan"), device="cuda", dtype=getattr(torch, product.out))
            if product.full:
                full["residual"] = put(extra).contiguous().to(out.dtype)
            plan = make(problem_of(product, a.shape[0], k))
            yield place, plan.run(a, b, out=out, **full)


def problem_of(product: Product, m: int, k: int) -> Any:
    from dataclasses import replace

    asked = ts.plan(
        m, COLUMNS, k, dtype=product.dtype, out_dtype=product.out, device="cuda", layout=product.layout,
        use_fast_accum=product.fast,
    )  # fmt: skip
    return replace(asked.problem, plain=not product.full, tf32=product.dtype == "float32")


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def device() -> Any:
    return ts.plan(64, 64, 64, device="cuda").device


def forced(
    policy: Any, backend: str, kind: str, chosen: Callable[[Candidate], bool], problem: Any, forced: Forced = FREE
) -> Plan:  # fmt: skip
    """The plan of a backend's candidate."""
    found = policy.candidates(problem, device(), device().workers, kinds=(kind,), forced=forced)
    one = next((one for one in found if chosen(one)), None)
    if one is None:
        raise NotImplementedError(f"{backend} has no such candidate")
    return of_candidate(problem, device(), backend, one, "a benchmark's")


def hopper_way(product: Product, tile: hopper.Tile, swap_ab: bool, shares: int = 0) -> Way:
    """A row of Hopper's table, either way round, whole or with each tile's K cut into so many equal shares.

    ``shares`` of -1: cut by the number of workers.
    """

    def chosen(one: Candidate) -> bool:
        rows = one.block[1] if swap_ab else one.block[0]
        columns = one.block[0] if swap_ab else one.block[1]
        return (one.variant, rows, columns, one.swap_ab) == (tile.variant, tile.rows, tile.columns, swap_ab)

    def make(problem: Any) -> Plan:
        if not shares:
            return forced(hopper, "hopper", "static", chosen, problem)
        plan = forced(hopper, "hopper", "stream_k", chosen, problem)
        if shares < 0:
            return plan
        count = plan.schedule.remainder * shares
        return forced(hopper, "hopper", "stream_k", chosen, problem, FREE._replace(shares=count))

    cut = f", {shares} shares" if shares > 0 else ", shares by workers" if shares else ""
    widths = "+".join(
        map(str, hopper.widths(tile.columns, 128 if product.dtype[:6] == "float8" and not product.fast else 256))
    )
    name = f"{tile.variant} {tile.rows}x{tile.columns} ({widths}), K {tile.lines}{', swapped' * swap_ab}{cut}"
    inputs = EXTENTS if not shares else EXTENTS[2:]
    return Way(str(product), name, inputs, lambda k: run_plan(product, make, k))


def portable_ways(product: Product, kinds: tuple[str, ...] = ("static",)) -> Iterator[Way]:
    """The portable kernel's tiles."""
    problem = problem_of(product, ROWS, 4096)
    for row, kind in itertools.product(portable.tiles(problem, device()), kinds):

        def make(problem: Any, row: Any = row, kind: str = kind) -> Plan:
            def chosen(one: Candidate) -> bool:
                return one.block == (row.block_m, row.block_n, row.block_k)

            return forced(portable, "portable", kind, chosen, problem)

        name = f"portable {row.block_m}x{row.block_n}x{row.block_k}, {row.warps} warps" + f", {kind}" * (
            kind != "static"
        )
        yield Way(str(product), name, EXTENTS, lambda k, make=make: run_plan(product, make, k))


def cublas(product: Product) -> Way:
    """What `torch.mm` keeps, which promises nothing."""

    def run(k: int) -> Made:
        rows, weight = pool(product.dtype, k)
        for place, put in PLACES.items():
            yield place, torch.mm(put(rows).contiguous(), weight.t(), out_dtype=torch.float32)

    return Way(str(product), "torch.mm (cuBLAS)", EXTENTS, run)


def turned(tiles: Iterable[hopper.Tile]) -> Iterator[tuple[hopper.Tile, bool]]:
    """Tiles either way round; square ones are the same."""
    for tile in tiles:
        yield tile, False
        if tile.rows != tile.columns:
            yield tile, True


def products() -> Iterator[Way]:
    """Ways to multiply, the most telling first."""
    tiles = hopper.TILES
    few = [tiles[i] for i in (0, 3, 4, 8, 10, 11, 12, 13, 15, 17, 19)]
    plain = Product()
    for tile, swap_ab in turned(tiles):
        yield hopper_way(plain, tile, swap_ab)
    yield from portable_ways(plain, ("static", "stream_k"))
    yield cublas(plain)
    for tile, swap_ab in turned((tiles[4], tiles[13], tiles[14], tiles[17])):
        for shares in (2, 4, -1):
            yield hopper_way(plain, tile, swap_ab, shares)
    fp8 = Product("float8_e4m3fn")
    for product in (fp8, fp8._replace(fast=False)):
        for tile, swap_ab in turned(few):
            yield hopper_way(product, tile, swap_ab)
        yield from portable_ways(product)
    full = Product(out="bfloat16", full=True)
    for tile, swap_ab in turned(few):
        yield hopper_way(full, tile, swap_ab)
    yield from portable_ways(full)
    yield hopper_way(full, tiles[14], True, 2)
    yield hopper_way(full, tiles[4], False, 2)
    for product in (Product("float32"), Product("float16"), Product(layout="nn")):
        for tile, swap_ab in turned(few):
            yield hopper_way(product, tile, swap_ab)
        yield from portable_ways(product)


# Attention ------------------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """What attention computes."""

    columns: int = 128
    causal: bool = True
    left: int | None = None
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        window = f", window of {self.left}" if self.left is not None else ""
        return f"attention {self.columns}, {self.dtype}{', causal' * self.causal}{window}"


@functools.lru_cache(maxsize=8)
def heads_of(columns: int, dtype: str) -> tuple[torch.Tensor, ...]:
    """q, k and v of one sequence, and those of another one."""
    made = torch.Generator().manual_seed(columns)
    shapes = [(1, LENGTH, count, columns) for count in (HEADS, HEADS_KV, HEADS_KV)]
    return tuple(
        (1.5 * torch.randn(shape, generator=made)).to("cuda").to(getattr(torch, dtype)) for shape in 2 * shapes
    )


#: What of attention's calls is a way of its own, so that no process has to compile more than a kernel or two.
PARTS = ("dense", "few", "packed", "pages")


def attend(heads: Heads, only: Callable[[], Any], part: str) -> Made:
    """Rows of a sequence, alone, beside others, as a chunk of a prefill, as one row of decoding, packed, in pages."""
    q, k, v, other_q, other_k, other_v = heads_of(heads.columns, heads.dtype)
    how: dict[str, Any] = {"causal": heads.causal}
    if heads.left is not None:
        how["window"] = (heads.left, 0 if heads.causal else None)
    last = slice(LENGTH - 300, LENGTH)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        with only():
            return ts.attention(q, k, v, **how, **more)

    def among(rows: torch.Tensor, at: slice) -> torch.Tensor:
        whole = torch.full((1, LENGTH, HEADS, heads.columns), float("nan"), device="cuda", dtype=rows.dtype)
        whole[:, at] = rows
        return whole

    if part == "dense":
        yield "all", call(q, k, v)
        yield "last 300", among(call(q[:, last], k, v), last)
        if heads.causal and heads.left is None:
            yield "chunk 517 to 800", among(call(q[:, 517:800], k[:, :800], v[:, :800]), slice(517, 800))
        two = [torch.cat(pair) for pair in ((other_q, q), (other_k, k), (other_v, v))]
        yield "second of a batch", call(*two)[1:]
    elif part == "few":
        yield "last 7", among(call(q[:, -7:], k, v), slice(LENGTH - 7, LENGTH))
        yield "last", among(call(q[:, -1:], k, v), slice(LENGTH - 1, LENGTH))
    elif part == "packed":
        cu = torch.tensor([0, 77, 77 + LENGTH], dtype=torch.int32, device="cuda")
        packed = [torch.cat((x[0, :77], y[0])) for x, y in ((other_q, q), (other_k, k), (other_v, v))]
        made = call(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH)
        yield "packed", made[None, 77:]
    else:
        pages, where = in_pages(k, v)
        yield "last 300, in pages", among(call(q[:, last], *pages, **where), last)
        yield "last, in pages", among(call(q[:, -1:], *pages, **where), slice(LENGTH - 1, LENGTH))


def in_pages(*given: torch.Tensor, page: int = 16) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Keys, values of one sequence in pages in no order; the arguments that say so."""
    count = -(-LENGTH // page)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(2)).to("cuda")
    pages = []
    for x in given:
        padded = torch.nn.functional.pad(x[0], (0, 0, 0, 0, 0, count * page - LENGTH))
        of = torch.empty(count, page, *x.shape[2:], device="cuda", dtype=x.dtype)
        of[table] = padded.view(of.shape)
        pages.append(of)
    lengths = torch.tensor([LENGTH], dtype=torch.int32, device="cuda")
    return pages, {"block_table": table[None].int(), "seqlens_k": lengths}


def attention_ways(heads: Heads, backend: str, tile: tuple[Any, ...], shares: int = 1) -> Iterator[Way]:
    """A backend's tile, with a tile's keys in so many shares: a way for each of `PARTS`."""
    variant, rows, block = tile
    policy = hopper_attention if backend == "hopper" else portable_attention
    all_of = policy.candidates

    @contextmanager
    def only() -> Iterator[None]:
        def candidates(problem: Any, *given: Any, **more: Any) -> Iterator[Any]:
            if backend == "hopper":
                more |= {"variant": variant, "splits": shares}
            for one in all_of(problem, *given, **more):
                if one.block == (rows, block) and one.shares == shares:
                    yield one

        launch_cache.clear()
        plan_attention.cache_clear()
        with (
            patch.object(policy, "candidates", candidates),
            patch.object(hopper_attention, "_are_few", lambda *_: True),
            patch.object(hopper_attention, "refusal", lambda *_: "" if backend == "hopper" else "not asked"),
        ):
            yield
        launch_cache.clear()
        plan_attention.cache_clear()

    cut = f", {shares} shares" if shares > 1 else ""
    name = f"{backend} {variant or ''} {rows}x{block}{cut}".replace("  ", " ")
    for part in PARTS:
        if shares == 1 or part in ("dense", "few"):
            yield Way(str(heads), name, (0,), lambda _, part=part: attend(heads, only, part))


def attentions() -> Iterator[Way]:
    """Ways to attend, the most telling first."""
    of = {
        128: (("unordered", 128, 128), ("unordered", 128, 64), ("ordered", 128, 128)),
        64: (("ordered", 192, 128), ("unordered", 128, 128), ("unordered", 128, 64)),
        256: (("ordered", 128, 64), ("ordered", 128, 32)),
    }
    wide = Heads()
    for tile in of[128]:
        yield from attention_ways(wide, "hopper", tile)
    for rows in (128, 64, 16):
        yield from attention_ways(wide, "portable", ("", rows, 64))
    for shares in (2, 4):
        yield from attention_ways(wide, "hopper", of[128][0], shares)
    for tile in of[64]:
        yield from attention_ways(Heads(64), "hopper", tile)
    for tile in of[256]:
        yield from attention_ways(Heads(256), "hopper", tile)
    for columns, tile in ((128, ("unordered", 128, 64)), (256, ("ordered", 128, 32))):
        yield from attention_ways(Heads(columns, True, 200), "hopper", tile)
    for tile in of[128][:2]:
        yield from attention_ways(Heads(causal=False), "hopper", tile)
    yield from attention_ways(Heads(64, True, 200), "portable", ("", 64, 64))
    yield from attention_ways(Heads(dtype="float8_e4m3fn"), "hopper", of[128][0])
    yield from attention_ways(Heads(64, dtype="float16"), "hopper", of[64][0])
