"""The policy of Hopper attention that takes values in strips of columns: few queries over many keys, under a promise.

The kernels are in `tilestream.kernels.portable.attention_strips`. They add in the order of an unsplit tile, so they
keep the promise of `tilestream.invariant`, which splits of keys do not. Without the promise shares of keys are faster:
they have no loop over all key blocks.

The model: keys are read by all SMs. Then each strip multiplies its values block by block. The instructions of a strip
are a chain, because a sum is added to by one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan.attention_plan import AttentionCandidate, AttentionPlan, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention as policy
from tilestream.plan.problem import ITEMSIZE

#: What a plan's ``variant`` is, and its name in messages.
VARIANT = "strips"
#: Widths of a strip, the widest first: 16 columns of 16-bit values are a sector of memory.
WIDTHS = (64, 32, 16)
#: The least rows of a matrix instruction, and the most rows of a tile: those of one consumer.
LEAST_ROWS, MOST_ROWS = 16, policy.ROWS
#: The most columns of a head. With more the softmax rescales lazily, so that each block's factor needs all before it.
MOST_COLUMNS = 128
#: The most tiles: programs of a grid's second extent.
MOST_TILES = 2**16 - 1
#: Bytes of shared memory of a strip's program, and the most stages: an H200 takes longer with 4, and no less with 11
#: (`benchmarks/results/h200/strips_variants.json`, copies by other warps).
SHARED, MOST_STAGES = 227 * 1024, 8
#: Floats to which parts of the scratch are rounded up: 128 bytes.
_LINE = 32
#: Seconds of 128 keys in the chain: what the third launch alone takes more for 192 blocks more, and for 48, on an H200
#: (`benchmarks/results/h200/strips_variants.json`, the variant ``four``: 44.5 us and 11.2 us).
CHAIN_SECONDS = 2.3e-7


def refusal(problem: AttentionProblem, device: DeviceProperties, workers: int, kind: Kind) -> str:
    """Why values are not taken in strips; empty if they may be."""
    p = problem
    if workers < device.workers or kind != "dynamic":
        return "its launches take all SMs, as these become free"
    if p.keys is not None:
        return "keys arrive"
    if p.varlen or p.tokens_k:
        return "sequences are packed"
    if policy.is_8bit(p) or p.softcap:
        return "scores have scales or a cap"
    if max(p.head_dim, p.head_dim_v) > MOST_COLUMNS or p.head_dim_v % WIDTHS[-1]:
        return f"{p.head_dim} and {p.head_dim_v} columns; it takes strips of {WIDTHS[-1]}, at most {MOST_COLUMNS}"
    if p.seqlen_q > MOST_ROWS:
        return f"{p.seqlen_q} query rows; a tile has {MOST_ROWS}"
    if p.batch * p.heads_q > MOST_TILES:
        return f"{p.batch * p.heads_q} sequences and heads; it counts {MOST_TILES}"
    return policy.refusal(p, device)


def pack_of(problem: AttentionProblem) -> int:
    """The query heads of a tile."""
    return packed_heads(problem, MOST_ROWS, MOST_ROWS)


def rows_of(problem: AttentionProblem, pack: int) -> int:
    """The rows of a tile: its real ones, rounded up to a power of two and to an instruction's."""
    return max(LEAST_ROWS, 1 << (pack * problem.seqlen_q - 1).bit_length())


def copied_rows(problem: AttentionProblem, pack: int) -> int:
    """The rows of weights that a strip's program copies: the real ones, rounded up to a power of two and to 8."""
    return max(8, 1 << (pack * problem.seqlen_q - 1).bit_length())


def width_of(columns: int, tiles: int, workers: int) -> int:
    """The columns of a strip: as many as leave strips for half of the workers."""
    fitting = [width for width in WIDTHS if columns % width == 0]
    return next((width for width in fitting if 2 * tiles * (columns // width) >= workers), fitting[-1])


def stages_of(block: int, width: int) -> int:
    """The stages of a strip's program: weights of 64 rows, values, and two numbers of 32 bits for each row.

    One is multiplied, the one before may still be read by other warps, and the others are copied ahead.
    """
    stage = 2 * MOST_ROWS * block + 2 * block * width + 8 * MOST_ROWS
    return min(MOST_STAGES, SHARED // stage)


def scratch_of(plan: AttentionPlan) -> list[int]:
    """The floats of a plan's scratch: scores, maxima, weights of 16 bits, factors, sums, and rows' maxima."""
    return _scratch(plan.problem, plan.pack, plan.block[1])


def _scratch(problem: AttentionProblem, pack: int, block: int) -> list[int]:
    rows, blocks = problem.rows * problem.heads_q, cdiv(problem.seqlen_k, block)
    sizes = (rows * blocks * block, rows * blocks, cdiv(rows * blocks * block, 2), rows * blocks, rows * blocks, rows)
    return [cdiv(size, _LINE) * _LINE for size in sizes]


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, blocks: Iterable[int], *, kind: Kind
) -> Iterator[AttentionCandidate]:
    """A candidate for each number of keys of a block, of ``blocks``. They are those of the unsplit candidates."""
    if refusal(problem, device, workers, kind):
        return
    pack = pack_of(problem)
    rows, tiles = rows_of(problem, pack), problem.batch * problem.heads_q // pack
    width = width_of(problem.head_dim_v, tiles, workers)
    for block in sorted(blocks):
        if 4 * sum(_scratch(problem, pack, block)) > policy.SCRATCH_BYTES:
            continue
        schedule = schedule_of(problem, rows // pack, pack, tiles, "static", workers)
        seconds = _seconds(problem, device, tiles, width, block)
        stages = stages_of(block, width)
        yield AttentionCandidate(
            VARIANT, (rows, block), schedule, seconds, pack, 4, stages, downwards=True,
            strips=problem.head_dim_v // width,
        )  # fmt: skip


def _seconds(problem: AttentionProblem, device: DeviceProperties, tiles: int, width: int, block: int) -> float:
    """The predicted time: the keys' bytes, the longer of the values' bytes and the chain, and three launches."""
    p = problem
    keys = min(p.seqlen_k, cdiv(p.pairs, max(p.rows, 1)) + p.seqlen_q)  # that a tile sees
    bandwidth = device.bandwidth * policy.MEMORY_EFFICIENCY
    busy = min(device.workers, tiles * (p.head_dim_v // width))
    reach = min(1.0, policy.MOST_OF_BANDWIDTH * busy / device.workers)
    size = p.batch * keys * p.heads_kv * ITEMSIZE[p.dtype]
    waves = cdiv(tiles * (p.head_dim_v // width), device.workers)
    chain = waves * cdiv(keys, block) * block / 128 * CHAIN_SECONDS
    scratch = 12 * p.rows * p.heads_q * keys / bandwidth
    values = max(chain, size * p.head_dim_v / (bandwidth * reach))
    return policy.LAUNCH_SECONDS + 2 * policy.MERGE_SECONDS + size * p.head_dim / bandwidth + values + scratch
