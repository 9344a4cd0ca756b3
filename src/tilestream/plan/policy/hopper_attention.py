"""The policy of the Hopper attention kernel: candidates -> cost -> compare.

A candidate is a row of `TILES` with a number of query heads in its rows. What bounds a row stands beside it.

The model: a key block takes its multiplications or its exponentials, whichever is the longer, and a part of the other
(`NOT_HIDDEN`), because one consumer's softmax runs under the other's multiplications, but not all of it. A tile's start
and end are added. Rates are of an H100's units; what matters is the order they put candidates in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan.attention_groups import heads_together
from tilestream.plan.attention_plan import AttentionCandidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import require
from tilestream.plan.problem import ITEMSIZE

#: Operands.
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
#: Rows of a consumer: an instruction of its four warps has 64.
ROWS = 64
#: Bytes of a row of a box: a line of the 128-byte swizzle.
LINE = 128
#: Columns of a box of values: they are multiplied in 16 bits, those of 8 are converted first.
WIDTH_OF_VALUES = LINE // 2
#: The extent of the rows of a map that clips at any row: see `tilestream.kernels.hopper.attention_load`.
BEYOND = 2**30
#: Keys of the smallest page: its rows, of 128 bytes or of 64, are one pattern of the swizzle.
LEAST_PAGE = 8
#: Bytes of shared memory kept free: barriers and the item ring.
_BARRIER_BYTES = 1024
_MOST_STAGES = 4
#: Positions, rows and keys below this, twice and a block more, are within 31 bits.
_MOST = 2**29
#: Strides in bytes that a tensor map has: multiples of the first, below the second.
_STEP, _MOST_STRIDE = 16, 2**40
#: Bytes of K and V that the heads of a group may have, so that they stay in L2: where a tile's place says how long it
#: takes, and many heads end evenly; where keys are few, so that each is read a few times only, and queries and outputs
#: go through L2 too; and where tiles are alike, which gain nothing by waiting for other heads.
#: (An H100's L2 is two halves, and what all SMs read is in both. 24e6 and 4e6, full, in TFLOP/s: 128 columns, 512 keys
#: 447 and 523, 2k 672 and 690; 256 columns 441 and 530, 753 and 770: benchmarks/results/h100/attention_groups.json. For
#: how many heads end evenly, and what groups that take all of L2 lose: attention_sizes.json.)
L2_BYTES, L2_BYTES_OF_FEW, L2_BYTES_OF_ALIKE = 24e6, 17e6, 4e6
#: Keys that are few; and the share of a launch that is lost where such a group takes all of that room instead of half.
FEW_KEYS, CROWDING = 1024, 0.02
#: Whether consumers take turns at starting their multiplications.
VARIANTS = ("ordered", "unordered")
# Constants of the cost model: the units' rates, and a fit to runs on an H100, as section `variants` of
# benchmarks/attention/tiles.py makes them: 41 tiles and shapes of 64, 128 and 256 columns, to 4.4 % (root of the
# mean square). What was measured on an H200 since is 3 % faster than that on average, and 5 % off beside.
#: Exponentials a cycle and SM; other operations of fp32, and how many a score takes: scale and subtract, largest, sum,
#: rounding, and the accumulator's part of the scaling.
EXPONENTIALS, OPERATIONS, OPERATIONS_A_SCORE = 16, 128, 4.0
#: Share of the shorter of multiplications and softmax that the longer does not hide, by consumers.
NOT_HIDDEN = {2: 0.29, 3: 0.12}
#: Seconds that a tile of three consumers loses where it has a diagonal: measured, and not explained. (It was 2.4e-6
#: while each consumer did all of a tile's blocks.)
DIAGONAL_SECONDS = 1.6e-6
#: Seconds of a tile's start and end that nothing hides, and for each column of values; of a launch; of a key block's
#: barriers.
TILE_SECONDS, COLUMN_SECONDS, LAUNCH_SECONDS, BLOCK_SECONDS = 3.4e-7, 2e-8, 8e-6, 10e-9
#: The latter where it has fewer than 128 keys, of 128 columns or fewer: 0.10 and 0.12 us with 128 and 64 (H200).
SMALL_BLOCK_SECONDS = 1.0e-7
#: The same where it need not have fewer (`_are_few`), and what a tile saves by them: a fit to both widths on both GPUs.
#: With 64 columns a tile takes 0.14 us less so at S = 512, 0.40 more at 1k; with 128 0.25 less, 0.63 more (H200).
FEW_BLOCK_SECONDS, FEW_DIAGONAL_SECONDS = 1.5e-7, 4.5e-7
#: Seconds of the launch that joins shares of keys.
MERGE_SECONDS = 4e-6
#: How much of the memory's bandwidth a worker can have, in units of its fair part.
MOST_OF_BANDWIDTH = 2.0
#: Shares that a tile's keys are split into, at most; blocks of a share, at least, where none are forced.
MOST_SHARES, _LEAST_BLOCKS = 128, 2
#: Shares where keys arrive, at most, and the bytes of scratch that they may take: written and read once more.
ARRIVING_SHARES, SCRATCH_BYTES = 8, 320 * 2**20
#: Share of the nominal rates that kernels reach.
EFFICIENCY, MEMORY_EFFICIENCY = 0.965, 0.86


class Tile(NamedTuple):
    """A tile: consumers of 64 query rows each, keys of a block, and the most columns of values, queries and keys.

    ``busy``: for scores that are capped, or masked at both ends, too: they take more registers, smaller blocks less.
    """

    columns: int
    consumers: int
    block: int
    busy: bool = False


#: Registers of a thread are 232 with two consumers, 160 with three. Scores of 64 rows take a register for each two
#: keys, their weights half of that, the accumulator one for each two columns of V. Blocks are as large as that leaves
#: room for: of half the keys they are 3 to 4 % faster at S = 512, causal, where consumers leave out what their rows do
#: not see, and 5 to 20 % slower at all else (H200). Three consumers of 64 columns hide each other's exponentials: 587
#: TFLOP/s at S = 16384, full, where two do 498; a tile of theirs has the longer diagonal.
TILES = (
    Tile(64, 2, 64, busy=True),
    Tile(64, 2, 128),
    Tile(64, 3, 128),
    Tile(128, 2, 64, busy=True),
    Tile(128, 2, 128),
    Tile(256, 2, 64),
    Tile(256, 2, 32, busy=True),
)


#: Of a thread, where values have 8 bits: of math warps, of warps that convert values, of the load warp's group; 512 in
#: all, the first four math warps' counted in. With 216 for the math warps Triton 3.6 and 3.9 spill at blocks of 128
#: keys and columns; with 24 for the others, there.
REGISTERS_8BIT = (224, 32, 32)


def is_8bit(problem: AttentionProblem) -> bool:
    """Whether values have 8 bits: then four more warps convert them."""
    return ITEMSIZE[problem.dtype] == 1


def registers(consumers: int, columns: int, block: int, arriving: bool = False) -> tuple[int, int]:
    """Of a thread: of the math warps but the first four, and of the load warp's group; the first have what is left.

    Triton gives out 504 to two consumers and the load warp's group, so that the first has 8 less. The accumulator of
    256 ``columns`` takes 128; the load warp wants some for what it knows of pages and sequences, and more for a gate.
    Where a ``block`` has 64 keys or fewer, scores leave the math warps some, and the load warp gets them: with 48, and
    with a gate or three boxes of keys with 56, Triton 3.9 spills there; with 32 keys and both, with 88 too.
    """
    if consumers == 3:
        return 160, 32
    if columns > 128:
        return 240, 32
    if block < 128:
        return (208, 88) if block > 32 else (200, 104)
    return (224, 56) if arriving else (232, 48)


def width(problem: AttentionProblem) -> int:
    """Columns of a box of queries or keys: a line, or of 8 bits half of one, where that is all of a head."""
    columns = LINE // ITEMSIZE[problem.dtype]
    return columns // 2 if is_8bit(problem) and problem.head_dim <= columns // 2 else columns


def parts_of(problem: AttentionProblem) -> int:
    """Boxes that a head's columns of queries and keys are copied and multiplied in."""
    return cdiv(problem.head_dim, width(problem))


def columns_of(problem: AttentionProblem) -> int:
    """Columns of V as it is multiplied: a power of two, and a box at least."""
    columns = WIDTH_OF_VALUES
    while columns < problem.head_dim_v:
        columns *= 2
    return columns


def share_dtype(problem: AttentionProblem, shares: int) -> str:
    """What a tile's output is stored as: shares of keys are joined in float32."""
    return "float32" if shares > 1 else problem.out_dtype


def out_buffers(problem: AttentionProblem, shares: int = 1) -> int:
    """C buffers of a consumer: two, if there are strips to alternate."""
    return min(2, columns_of(problem) * ITEMSIZE[share_dtype(problem, shares)] // LINE)


def variant_of(problem: AttentionProblem, consumers: int) -> str:
    """Whether consumers take turns, where neither is forced.

    With sums of 256 columns they are as fast or up to 4 % faster in turns (H200).
    """
    return "ordered" if consumers == 3 or columns_of(problem) > 128 else "unordered"


def leaves_out(problem: AttentionProblem, consumers: int, block: int, pack: int) -> bool:
    """Whether a tile has whole key blocks that some consumer's rows do not see, and consumers leave those out.

    Of 128 keys, two consumers' tiles seldom do, and to look for them took 2 % of a launch at 1024 keys. A cap and a
    window leave no registers for that.
    """
    if (problem.left is not None and problem.softcap > 0) or (problem.left is None and problem.right is None):
        return False
    return (consumers - 1) * (ROWS // pack) >= block


def room_of(problem: AttentionProblem) -> float:
    """Bytes of L2 for the keys and values of a group of heads."""
    if _are_alike(problem):
        return L2_BYTES_OF_ALIKE
    return L2_BYTES if problem.seqlen_k > FEW_KEYS else L2_BYTES_OF_FEW


def crowding_of(problem: AttentionProblem) -> float:
    """Share of a launch that is lost where a group takes all of `room_of`."""
    return 0.0 if _are_alike(problem) or problem.seqlen_k > FEW_KEYS else CROWDING


def _are_alike(problem: AttentionProblem) -> bool:
    """Whether tiles take equally long: they see as many keys, and wait for none."""
    return problem.keys is None and problem.alike


def shared_bytes(
    problem: AttentionProblem, consumers: int, block: int, stages: int, queries: int, shares: int = 1
) -> int:
    """Bytes of shared memory: queries of so many items, stages, C buffers, barriers."""
    keys = parts_of(problem) * width(problem) * ITEMSIZE[problem.dtype]
    rows = consumers * ROWS * (queries * keys + LINE * out_buffers(problem, shares))
    values = columns_of(problem) // WIDTH_OF_VALUES
    # As they come, and for barriers and scales.
    converted = stages * block * columns_of(problem) + _BARRIER_BYTES // 2 if is_8bit(problem) else 0
    return rows + stages * block * (keys + LINE * values) + converted + _BARRIER_BYTES


def stages_of(problem: AttentionProblem, consumers: int, block: int, shared: int, shares: int = 1) -> int:
    """Stages that fit the shared memory, beside the queries of one item."""
    stages = _MOST_STAGES
    while stages and shared_bytes(problem, consumers, block, stages, 1, shares) > shared:
        stages -= 1
    return stages


def queries_of(problem: AttentionProblem, consumers: int, block: int, stages: int, shared: int, shares: int = 1) -> int:
    """Items whose queries fit beside the stages: two, if there is room, so that the next item's come early."""
    return 2 if shared_bytes(problem, consumers, block, stages, 2, shares) <= shared else 1


def unsplit(problem: AttentionProblem, shares: int) -> str:
    """Why a tile's keys are not split into so many shares; empty if they may be."""
    if shares * problem.rows * problem.heads_q >= 2**30:
        return f"{problem.rows} rows of {problem.heads_q} heads; it counts those of all shares in 30 bits"
    return ""


def shares_of(problem: AttentionProblem, tiles: int, blocks: float, workers: int, splits: int | None) -> list[int]:
    """Into how many shares a tile's keys may be split: one, and where workers are idle what fills them once or twice.

    Where keys arrive, the shares of the first keys are done before the later ones come; whole, a tile would hold its
    worker until the last of them. So they are split there whatever the tiles, while scratch for that is not too large.

    ``blocks`` are a tile's; ``splits`` is what the caller asks for, None for nothing.
    """
    if splits is not None:
        return [1 if unsplit(problem, splits) else splits]
    most = min(int(blocks) // _LEAST_BLOCKS, MOST_SHARES)
    if problem.keys is not None:
        bytes_of_share = 4 * problem.rows * problem.heads_q * (problem.head_dim_v + 1)
        late = min(most, ARRIVING_SHARES, problem.keys.chunks.count, SCRATCH_BYTES // bytes_of_share)
        if late > 1 and not unsplit(problem, late):
            return [late]
    wanted = (waves * workers // max(tiles, 1) for waves in (1, 2))
    found = {max(1, min(most, shares)) for shares in wanted}
    return [1, *sorted(shares for shares in found if shares > 1 and not unsplit(problem, shares))]


def refusal(problem: AttentionProblem, device: DeviceProperties) -> str:
    """Why this kernel does not do such a problem; empty if it does."""
    p = problem
    if device.arch != "sm_90":
        return f"it is for sm_90, this is {device.arch or device.backend}"
    if p.dtype not in DTYPES:
        return f"it multiplies {', '.join(DTYPES)}, not {p.dtype}"
    if p.keys is not None and columns_of(p) > 128:
        return f"keys arrive, and sums of {p.head_dim_v} columns leave no registers for a gate"
    if p.scaled and not is_8bit(p):
        return "q, k or v has scales, which it applies to 8 bits"
    if p.keys is not None and is_8bit(p):
        return "keys arrive, and warps that convert values of 8 bits leave no registers for a gate"
    if is_8bit(p) and max(p.head_dim, p.head_dim_v) > 128:
        return (
            f"{max(p.head_dim, p.head_dim_v)} columns; in 8 bits it takes 128, which leave room for warps that convert "
            "values"
        )
    if why := p.unfit(_MOST):
        return why
    if p.page_size and p.page_size < LEAST_PAGE:
        return f"pages of {p.page_size} keys; a copy brings {LEAST_PAGE} at least"
    if p.rows * p.heads_q >= 2**31:
        return f"{p.rows} rows of {p.heads_q} heads; it counts log-sum-exps in 31 bits"
    return p.no_tma or ("" if p.aligned else "a stride or an address is no multiple of 16 bytes, TMA's rule")


def refuse_strides(
    problem: AttentionProblem, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], out: tuple[int, ...],
    out_address: int = 0,
) -> str:  # fmt: skip
    """Why TMA cannot address operands of such strides, those of sequence or page, row and head; empty if it can.

    ``out_address`` is the output's, modulo 16.
    """
    p = problem
    if out_address:
        return f"out begins {out_address} bytes behind a multiple of {_STEP}: TMA's rule"
    several = p.batch > 1 and not p.varlen, p.seqlen_q > 1 or p.varlen, p.heads_q > 1
    keys = (p.pages if p.page_size else p.batch * (not p.tokens_k)) > 1, True, p.heads_kv > 1
    ragged = bool(p.tokens_k or p.page_size or p.lengths)
    for name, strides, there in (("q", q, several), ("k", k, keys), ("v", v, keys), ("out", out, several)):
        size = ITEMSIZE[p.out_dtype if name == "out" else p.dtype]
        for stride, moves in zip(strides, there, strict=True):
            if moves and (stride * size % _STEP or not 0 < stride * size < _MOST_STRIDE):
                return f"{name} has strides {tuple(strides)}: TMA's are positive multiples of {_STEP} bytes"
        if name in ("k", "v") and ragged and keys[0]:
            count = p.pages if p.page_size else p.batch
            if strides[0] % strides[1]:
                return f"{name} has strides {tuple(strides)}: sequences or pages do not begin whole rows apart"
            if strides[0] // strides[1] * count >= BEYOND:
                return f"{name} has strides {tuple(strides)}: its last sequence or page is {BEYOND} rows off"
    return ""


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, *, kind: Kind, variant: str | None = None,
    splits: int | None = None, promises: bool = False,
) -> Iterator[AttentionCandidate]:  # fmt: skip
    """Every way the model knows.

    ``variant`` is one of `VARIANTS`. ``splits``: the number of shares of a tile's keys; None: by the model. Keys that
    arrive are taken from the first on, unless the plan ``promises`` one order for all calls: see
    `tilestream.plan.invariance`.
    """
    if variant not in (None, *VARIANTS):
        raise ValueError(f"variant={variant!r}; it is one of {', '.join(VARIANTS)}, or None for the model's choice")
    require(refusal(problem, device))
    keys = parts_of(problem) * width(problem)
    # Keys' columns take no registers, but shared memory: more than 128 of them leave room for small blocks alone.
    columns = max(columns_of(problem), keys if keys > 128 else 0)
    for tile in TILES:
        if not tile.columns // 2 < max(columns, 64) <= tile.columns or tile.busy < _is_busy(problem):
            continue
        # Three leave the load warp 32 registers, and warps that convert values none.
        if tile.consumers == 3 and (problem.keys is not None or is_8bit(problem)):
            continue
        rows = tile.consumers * ROWS
        pack = packed_heads(problem, rows, ROWS)
        if _is_smaller(problem, tile) and not _are_few(problem, tile, pack):
            continue
        beside = _ends(problem, tile) / _step(problem, device, tile)
        group = heads_together(
            problem, kind, rows, pack, room_of(problem), workers, tile.block, beside, crowding_of(problem)
        )  # fmt: skip
        tiles = schedule_of(problem, rows // pack, pack, group, kind, workers).grid.tiles
        for shares in shares_of(problem, tiles, _blocks(problem, tile, rows / pack), workers, splits):
            if shares > 1 and _is_smaller(problem, tile):
                continue
            stages = stages_of(problem, tile.consumers, tile.block, device.shared, shares)
            if stages < 2:
                continue
            schedule = schedule_of(problem, rows // pack, pack, group, kind, workers, shares=shares)
            seconds = _seconds(problem, device, tile, pack, schedule.grid.tiles, workers, shares)
            yield AttentionCandidate(
                variant or variant_of(problem, tile.consumers), (rows, tile.block), schedule, seconds, pack, 4, stages,
                shares, downwards=promises or problem.keys is None,
            )  # fmt: skip


def _is_busy(problem: AttentionProblem) -> bool:
    """Whether scores are capped, or cut off at the left too."""
    return problem.left is not None or problem.softcap > 0


def _is_smaller(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether the tile's blocks are smaller than they need be."""
    return tile.busy and not _is_busy(problem)


def _are_few(problem: AttentionProblem, tile: Tile, pack: int) -> bool:
    """Whether there are so few keys, on a diagonal, that smaller blocks than need be may be faster.

    They are where consumers leave out such blocks: few queries, whose heads are packed, have none. With 256 columns, 8
    bits, and keys that arrive they were not timed.
    """
    timed = tile.columns <= 128 and not is_8bit(problem) and problem.keys is None
    few = problem.right is not None and problem.seqlen_k <= FEW_KEYS
    return timed and few and problem.seqlen_q > tile.block and leaves_out(problem, tile.consumers, tile.block, pack)


def _own_positions(problem: AttentionProblem, tile: Tile, pack: int) -> float:
    """Query positions whose blocks a consumer does: its own, where it leaves out what they do not see."""
    return ROWS / pack if leaves_out(problem, tile.consumers, tile.block, pack) else tile.consumers * ROWS / pack


def _blocks(problem: AttentionProblem, tile: Tile, positions: float) -> float:
    """Key blocks of so many query positions.

    Of one on average; and at each masked end what only half of them see, and half a block.
    """
    keys = cdiv(problem.pairs, max(problem.rows, 1))
    ends = (problem.left is not None) + (problem.right is not None)
    return (keys + ends * 0.5 * (positions + tile.block)) / tile.block


def _step(problem: AttentionProblem, device: DeviceProperties, tile: Tile) -> float:
    """Seconds of a key block of a tile."""
    rate = device.peak("float16", 1)
    clock = rate / 4096
    rows = tile.consumers * ROWS
    # Q's and K's columns of 8 bits at twice the rate.
    columns = parts_of(problem) * width(problem) * ITEMSIZE[problem.dtype] // 2 + columns_of(problem)
    multiply = 2 * rows * tile.block * columns / (rate * EFFICIENCY)
    softmax = rows * tile.block * (1 / EXPONENTIALS + OPERATIONS_A_SCORE / OPERATIONS) / clock
    beside = BLOCK_SECONDS
    if tile.block < 128 and columns_of(problem) <= 128:
        beside = FEW_BLOCK_SECONDS if _is_smaller(problem, tile) else SMALL_BLOCK_SECONDS
    return max(multiply, softmax) + NOT_HIDDEN[tile.consumers] * min(multiply, softmax) + beside


def _ends(problem: AttentionProblem, tile: Tile) -> float:
    """Seconds of a tile's start and end."""
    ends = TILE_SECONDS + COLUMN_SECONDS * columns_of(problem)
    if problem.right is None:
        return ends
    if tile.consumers == 3:
        return ends + DIAGONAL_SECONDS
    return ends - FEW_DIAGONAL_SECONDS if _is_smaller(problem, tile) else ends


def _seconds(
    problem: AttentionProblem, device: DeviceProperties, tile: Tile, pack: int, items: int, workers: int, shares: int
) -> float:
    """What a launch takes: items in waves, or memory, whichever is the longer; and the launch that joins shares."""
    step, ends = _step(problem, device, tile), _ends(problem, tile)
    blocks = _blocks(problem, tile, _own_positions(problem, tile, pack)) / shares
    busy = min(workers, items)
    total = (max(blocks, 1.0) * step + ends) * items / busy
    # Items differ: what the last of them leaves undone is on average half of one.
    tail = 0.5 * step * blocks if items > workers else 0.0
    reach = min(1.0, MOST_OF_BANDWIDTH * busy / device.workers)
    memory = problem.bytes / (device.bandwidth * MEMORY_EFFICIENCY * reach)
    merge = 0.0
    if shares > 1:  # written and read, mostly in L2
        floats = shares * problem.rows * problem.heads_q * (problem.head_dim_v + 1)
        merge = MERGE_SECONDS + 8 * floats / device.bandwidth
    return LAUNCH_SECONDS + max(total + tail, memory) + merge
