"""The policy of the Hopper attention kernel: candidates -> cost -> compare.

A candidate is a row of `TILES` with a number of query heads in its rows. The comment at `TILES` gives their bounds.

The model: a key block takes the longer of its multiplications and its exponentials, and a part of the other
(`NOT_HIDDEN`), because one consumer's softmax overlaps with the other's multiplications only in part. A tile's start
and end are added. The rates are of an H100's units; only the order of candidates matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from tilestream.core.chunks import LINK_BYTES
from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan.attention_groups import heads_together
from tilestream.plan.attention_plan import AttentionCandidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import require
from tilestream.plan.problem import ITEMSIZE

#: The operands' dtypes.
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
#: Rows of a consumer: the rows of an instruction of its four warps.
ROWS = 64
#: Bytes of a row of a box: a line of the 128-byte swizzle.
LINE = 128
#: Columns of a box of values. They are multiplied in 16 bits; 8-bit values are converted first.
WIDTH_OF_VALUES = LINE // 2
#: The extent of rows of a tensor map that clips at any row: see `tilestream.kernels.hopper.attention_load`.
BEYOND = 2**30
#: Keys of the smallest page. Its rows, of 128 bytes or of 64, are one pattern of the swizzle.
LEAST_PAGE = 8
#: Bytes of shared memory reserved for barriers and the item ring.
_BARRIER_BYTES = 1024
_MOST_STAGES = 4
#: Positions, rows and keys below this, twice and a block more, are within 31 bits.
_MOST = 2**29
#: A tensor map's strides in bytes are multiples of the first number, and below the second.
_STEP, _MOST_STRIDE = 16, 2**40
#: The most bytes of K and V of a group of heads, so that they stay in L2. The first is for tiles of different length,
#: of which many heads end evenly. The second is for few keys: these are read only a few times, and queries and outputs
#: go through L2 too. The third is for tiles of equal length, which gain nothing by waiting for other heads. (Data that
#: all SMs read is in both halves of an H100's L2. 24e6 and 4e6, full, in TFLOP/s: 128 columns, 512 keys 447 and 523, 2k
#: 672 and 690; 256 columns 441 and 530, 753 and 770: benchmarks/results/h100/attention_groups.json. Group sizes that
#: end evenly, and losses of groups that take all of L2: attention_sizes.json.)
L2_BYTES, L2_BYTES_OF_FEW, L2_BYTES_OF_ALIKE = 24e6, 17e6, 4e6
#: The most keys that are "few"; the share of a launch that their group loses if it takes all of its room, not half.
FEW_KEYS, CROWDING = 1024, 0.02
#: Whether consumers take turns at starting their multiplications.
VARIANTS = ("ordered", "unordered")
# Constants of the cost model: the units' rates, and a fit to runs on an H100 (section `variants` of
# benchmarks/attention/tiles.py). The fit has 41 tiles and shapes of 64, 128 and 256 columns, and an error of 4.4 %
# (root mean square). Later runs on an H200 are 3 % faster on average, and deviate by another 5 %.
#: Exponentials a cycle and SM; other fp32 operations a cycle and SM; the latter's number for a score: scale and
#: subtract, maximum, sum, rounding, and the accumulator's part of the scaling.
EXPONENTIALS, OPERATIONS, OPERATIONS_A_SCORE = 16, 128, 4.0
#: The share of the shorter of multiplications and softmax that does not overlap, by the number of consumers.
NOT_HIDDEN = {2: 0.29, 3: 0.12}
#: Seconds that a tile of three consumers loses with a diagonal. This is measured, and not explained. (It was 2.4e-6
#: when each consumer did all of a tile's blocks.)
DIAGONAL_SECONDS = 1.6e-6
#: Seconds of a tile's start and end, which do not overlap, and the part for each column of values; of a launch; of a
#: key block's barriers.
TILE_SECONDS, COLUMN_SECONDS, LAUNCH_SECONDS, BLOCK_SECONDS = 3.4e-7, 2e-8, 8e-6, 10e-9
#: The last for a block of fewer than 128 keys and at most 128 columns: 0.10 and 0.12 us with 128 and 64 (H200).
SMALL_BLOCK_SECONDS = 1.0e-7
#: The same if registers allow larger blocks (`_are_few`), and a tile's saving by small ones: a fit to both widths on
#: both GPUs. With 64 columns small blocks save a tile 0.14 us at S = 512, and cost 0.40 at 1k; with 128 0.25 and 0.63
#: (H200).
FEW_BLOCK_SECONDS, FEW_DIAGONAL_SECONDS = 1.5e-7, 4.5e-7
#: Seconds of the launch that joins shares of keys.
MERGE_SECONDS = 4e-6
#: The most of the memory's bandwidth that a worker can use, in units of its equal share.
MOST_OF_BANDWIDTH = 2.0
#: The most shares of a tile's keys; the fewest blocks of a share, unless the caller gives the number of shares.
MOST_SHARES, _LEAST_BLOCKS = 128, 2
#: The most shares if keys arrive, and the most bytes of their scratch, which is written and read.
ARRIVING_SHARES, SCRATCH_BYTES = 6, 400 * 2**20
#: What a share of keys that arrive may have of the share before it: see `late_shares`.
GROWTHS = (0.625, 1.0, 1.5, 2.0)
#: How much faster shares grow than a share's time does: later tiles of a share have more keys than its first.
SKEWED = 1.25
#: The shares of the nominal rates that kernels reach.
EFFICIENCY, MEMORY_EFFICIENCY = 0.965, 0.86


class Tile(NamedTuple):
    """A tile: consumers of 64 query rows each, keys of a block, and the most columns of values, queries and keys.

    ``busy``: whether it also suits scores that are capped or have a left bound. They take more registers, which smaller
    blocks leave.
    """

    columns: int
    consumers: int
    block: int
    busy: bool = False


#: A thread has 232 registers with two consumers, 160 with three. Scores of 64 rows take a register for each two keys,
#: their weights half of that, and the accumulator one for each two columns of V. Blocks are as large as this allows.
#: Blocks of half the keys are 3 to 4 % faster at S = 512, causal, because consumers leave out invisible blocks, and 5
#: to 20 % slower in other cases (H200). Three consumers of 64 columns hide each other's exponentials: 587 TFLOP/s at S
#: = 16384, full, but two reach 498. Their tile has a longer diagonal.
TILES = (
    Tile(64, 2, 64, busy=True),
    Tile(64, 2, 128),
    Tile(64, 3, 128),
    Tile(128, 2, 64, busy=True),
    Tile(128, 2, 128),
    Tile(256, 2, 64),
    Tile(256, 2, 32, busy=True),
)


#: Registers of a thread with 8-bit values: of math warps, of warps that convert values, and of the load warp's group.
#: The sum with the first four math warps is 512. At blocks of 128 keys and columns Triton 3.6 and 3.9 spill in the math
#: warps if these have 216, and in the others if those have 24.
REGISTERS_8BIT = (224, 32, 32)


def is_8bit(problem: AttentionProblem) -> bool:
    """Whether values have 8 bits, so that four more warps convert them."""
    return ITEMSIZE[problem.dtype] == 1


def registers(consumers: int, columns: int, block: int, arriving: bool = False) -> tuple[int, int]:
    """Registers of a thread: of the math warps but the first four, and of the load warp's group.

    The first four get the rest. Triton gives 504 to two consumers and the load warp's group, so the first consumer has
    8 less. The accumulator of 256 ``columns`` takes 128. The load warp needs some for pages and sequences, and more for
    a gate. If a ``block`` has 64 keys or fewer, the math warps leave some to the load warp: Triton 3.9 spills there
    with 48, with 56 for a gate or three boxes of keys, and with 88 for 32 keys and both.
    """
    if consumers == 3:
        return 160, 32
    if columns > 128:
        return 240, 32
    if block < 128:
        return (208, 88) if block > 32 else (200, 104)
    return (224, 56) if arriving else (232, 48)


def width(problem: AttentionProblem) -> int:
    """Columns of a box of queries or keys: a line, or half a line if that holds a head's 8-bit columns."""
    columns = LINE // ITEMSIZE[problem.dtype]
    return columns // 2 if is_8bit(problem) and problem.head_dim <= columns // 2 else columns


def parts_of(problem: AttentionProblem) -> int:
    """The number of boxes of a head's columns of queries and keys, each copied and multiplied by itself."""
    return cdiv(problem.head_dim, width(problem))


def columns_of(problem: AttentionProblem) -> int:
    """Columns of V in its product: a power of two, and at least a box."""
    columns = WIDTH_OF_VALUES
    while columns < problem.head_dim_v:
        columns *= 2
    return columns


def share_dtype(problem: AttentionProblem, shares: int) -> str:
    """The dtype of a tile's stored output. Shares of keys are joined in float32."""
    return "float32" if shares > 1 else problem.out_dtype


def out_buffers(problem: AttentionProblem, shares: int = 1) -> int:
    """The C buffers of a consumer: two if its output has several strips."""
    return min(2, columns_of(problem) * ITEMSIZE[share_dtype(problem, shares)] // LINE)


def variant_of(problem: AttentionProblem, consumers: int) -> str:
    """The default of `VARIANTS`: whether consumers take turns.

    With sums of 256 columns turns are equally fast or up to 4 % faster (H200).
    """
    return "ordered" if consumers == 3 or columns_of(problem) > 128 else "unordered"


def leaves_out(problem: AttentionProblem, consumers: int, block: int, pack: int) -> bool:
    """Whether consumers leave out key blocks of a tile that none of their rows sees.

    With blocks of 128 keys, two consumers' tiles seldom have them, and the search took 2 % of a launch at 1024 keys. A
    cap with a window leaves no registers for it.
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
    """The share of a launch that is lost if a group takes all of `room_of`."""
    return 0.0 if _are_alike(problem) or problem.seqlen_k > FEW_KEYS else CROWDING


def _are_alike(problem: AttentionProblem) -> bool:
    """Whether tiles take equally long: they see the same number of keys, and wait for none."""
    return problem.keys is None and problem.alike


def shared_bytes(
    problem: AttentionProblem, consumers: int, block: int, stages: int, queries: int, shares: int = 1
) -> int:
    """Bytes of shared memory: the queries of ``queries`` items, stages, C buffers, barriers."""
    keys = parts_of(problem) * width(problem) * ITEMSIZE[problem.dtype]
    rows = consumers * ROWS * (queries * keys + LINE * out_buffers(problem, shares))
    values = columns_of(problem) // WIDTH_OF_VALUES
    # The unconverted values, and barriers and scales for them.
    converted = stages * block * columns_of(problem) + _BARRIER_BYTES // 2 if is_8bit(problem) else 0
    return rows + stages * block * (keys + LINE * values) + converted + _BARRIER_BYTES


def stages_of(problem: AttentionProblem, consumers: int, block: int, shared: int, shares: int = 1) -> int:
    """The number of stages that fit into shared memory with the queries of one item."""
    stages = _MOST_STAGES
    while stages and shared_bytes(problem, consumers, block, stages, 1, shares) > shared:
        stages -= 1
    return stages


def queries_of(problem: AttentionProblem, consumers: int, block: int, stages: int, shared: int, shares: int = 1) -> int:
    """The number of items whose queries fit: two if possible, so that the next item's queries load early."""
    return 2 if shared_bytes(problem, consumers, block, stages, 2, shares) <= shared else 1


def unsplit(problem: AttentionProblem, shares: int) -> str:
    """Why a tile's keys cannot be split into ``shares``; empty if they can."""
    if shares * problem.rows * problem.heads_q >= 2**30:
        return f"{problem.rows} rows of {problem.heads_q} heads; it counts those of all shares in 30 bits"
    return ""


def shares_of(problem: AttentionProblem, tiles: int, blocks: float, workers: int, splits: int | None) -> list[int]:
    """The numbers of shares to consider for a tile's keys: 1, and numbers that fill idle workers once or twice.

    If keys arrive, shares of the first keys are done before later keys come; an unsplit tile would hold its worker
    until the last. So these are split independently of the number of tiles, if the scratch is not too large.

    ``blocks`` is the number of a tile's blocks; ``splits`` is the caller's number of shares, or None.
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


def late_shares(problem: AttentionProblem, shares: int, seconds: float) -> tuple[int, ...]:
    """The bounds of a tile's shares if keys arrive: `AttentionCandidate.late`.

    A worker idles until the first share's keys have come, and the last share is left when all have. While the items of
    a share are done, the next one's keys should come. So sizes are in a ratio, of attention's ``seconds`` to those of
    the keys on the link. A share's items are done one after the other, and a later one finds more keys than the first:
    the bounds move with the tile's place, from one to the next.
    """
    if problem.keys is None or shares == 1:
        return ()
    row = problem.heads_kv * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    ratio = SKEWED * seconds * LINK_BYTES / max(1, problem.keys.chunks.rows * row)
    growth = min(GROWTHS, key=lambda one: abs(one - ratio))
    sizes = [growth**share for share in range(shares)]
    ends = [round(256 * sum(sizes[: share + 1]) / sum(sizes)) for share in range(shares)]
    steps = [later - end for end, later in pairwise(ends)]
    inner = chain.from_iterable(zip(ends[:-1], steps, strict=True))
    return (0, 0, *inner, 256, 0)


def refusal(problem: AttentionProblem, device: DeviceProperties) -> str:
    """Why this kernel does not support a problem; empty if it does."""
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
    """Why TMA cannot address operands by their strides of sequence (page), row and head; empty if it can.

    ``out_address`` is the output's address, modulo 16.
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
    """All candidates that match the caller's choices.

    ``variant`` is one of `VARIANTS`. ``splits`` is the number of shares of a tile's keys; None leaves it to the model.
    Keys that arrive are taken from the first on, unless the plan ``promises`` one order for all calls: see
    `tilestream.plan.invariance`.
    """
    if variant not in (None, *VARIANTS):
        raise ValueError(
            f"variant={variant!r}; it must be one of {', '.join(VARIANTS)}, or None for the model's choice"
        )
    require(refusal(problem, device))
    keys = parts_of(problem) * width(problem)
    # Keys' columns take shared memory, but no registers. More than 128 columns leave room for small blocks only.
    columns = max(columns_of(problem), keys if keys > 128 else 0)
    for tile in TILES:
        if not tile.columns // 2 < max(columns, 64) <= tile.columns or tile.busy < _is_busy(problem):
            continue
        # Three consumers leave 32 registers to the load warp, and none to warps that convert values.
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
                shares, late_shares(problem, shares, seconds), downwards=promises or problem.keys is None,
            )  # fmt: skip


def _is_busy(problem: AttentionProblem) -> bool:
    """Whether scores are capped or have a left bound."""
    return problem.left is not None or problem.softcap > 0


def _is_smaller(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether registers allow larger blocks than the tile's."""
    return tile.busy and not _is_busy(problem)


def _are_few(problem: AttentionProblem, tile: Tile, pack: int) -> bool:
    """Whether there are so few keys, with a diagonal, that small blocks may be faster than registers require.

    They are faster if consumers leave out invisible blocks, which a few queries with packed heads do not have. They
    were not timed with 256 columns, with 8 bits, and with keys that arrive.
    """
    timed = tile.columns <= 128 and not is_8bit(problem) and problem.keys is None
    few = problem.right is not None and problem.seqlen_k <= FEW_KEYS
    return timed and few and problem.seqlen_q > tile.block and leaves_out(problem, tile.consumers, tile.block, pack)


def _own_positions(problem: AttentionProblem, tile: Tile, pack: int) -> float:
    """The query positions whose blocks a consumer processes: its own if it leaves out blocks, else the tile's."""
    return ROWS / pack if leaves_out(problem, tile.consumers, tile.block, pack) else tile.consumers * ROWS / pack


def _blocks(problem: AttentionProblem, tile: Tile, positions: float) -> float:
    """The average number of key blocks of ``positions`` query positions.

    It has the keys of one position, and at each masked end half of the positions and half a block.
    """
    keys = cdiv(problem.pairs, max(problem.rows, 1))
    ends = (problem.left is not None) + (problem.right is not None)
    return (keys + ends * 0.5 * (positions + tile.block)) / tile.block


def _step(problem: AttentionProblem, device: DeviceProperties, tile: Tile) -> float:
    """Seconds of a tile's key block."""
    rate = device.peak("float16", 1)
    clock = rate / 4096
    rows = tile.consumers * ROWS
    # 8-bit columns of Q and K are multiplied at twice the rate.
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
    """The predicted time: the longer of items in waves and memory, and the launch that joins shares."""
    step, ends = _step(problem, device, tile), _ends(problem, tile)
    blocks = _blocks(problem, tile, _own_positions(problem, tile, pack)) / shares
    busy = min(workers, items)
    total = (max(blocks, 1.0) * step + ends) * items / busy
    # Items differ in length: the last ones add half an item on average.
    tail = 0.5 * step * blocks if items > workers else 0.0
    reach = min(1.0, MOST_OF_BANDWIDTH * busy / device.workers)
    memory = problem.bytes / (device.bandwidth * MEMORY_EFFICIENCY * reach)
    merge = 0.0
    if shares > 1:  # scratch is written and read, mostly in L2
        floats = shares * problem.rows * problem.heads_q * (problem.head_dim_v + 1)
        merge = MERGE_SECONDS + 8 * floats / device.bandwidth
    return LAUNCH_SECONDS + max(total + tail, memory) + merge
