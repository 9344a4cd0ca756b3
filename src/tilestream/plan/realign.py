"""Operands that are copied before a product, into rows that TMA can address.

TMA takes rows that begin at multiples of 16 bytes, and 8-bit and tf32 operands along K alone. L2 feeds rows best that
begin at its lines of 128 bytes. What lies otherwise (K odd, columns of a wider matrix, a transpose) can be *realigned*:
copied first, by a kernel ahead of the product, into scratch of the launch. A copy moves each byte twice; the portable
kernel, which reads operands as they lie, has a fraction of the tensor cores' rate. The cost model compares both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from tilestream.core.device import DeviceProperties
from tilestream.plan.candidate import Candidate, Forced
from tilestream.plan.policy import hopper
from tilestream.plan.policy.hopper_costs import LINE, Costs, Model, costs_of
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.tma import ALIGNMENT, row_multiple

#: The most bytes of copies. A stream's workspace keeps them from call to call.
MOST_BYTES = 2**28
#: The least gain, by the cost model, for which an operand is realigned that TMA can address as it lies. That model's
#: costs of rows that begin elsewhere are within this of what an H100 took (benchmarks/results/h100/gemm_pitch.json).
LEAST_GAIN = 0.1
#: The tiles that read least of L2, which gains by rows at its lines.
LARGE = ((128, 256), (256, 128), (256, 160), (256, 192))
#: The most that a row grows, as a share of it, in order to begin at a line.
_MOST_PADDING = 0.125


def pitch_of(extent: int, size: int) -> int:
    """Elements from one row of a copy to the next, for rows of ``extent`` elements of ``size`` bytes.

    The pitch is a multiple of an L2 line, or for short rows of less, down to 16 bytes.
    """
    multiple = LINE
    while multiple > ALIGNMENT and -extent * size % multiple > _MOST_PADDING * extent * size:
        multiple //= 2
    return (extent * size + multiple - 1) // multiple * multiple // size


def copied_bytes(problem: Problem, operands: str) -> tuple[int, int]:
    """Bytes that are read, and that are written, to realign ``operands``, whose rows in the copy are along K."""
    size, read, written = ITEMSIZE[problem.dtype], 0, 0
    pitch = pitch_of(problem.k, size)
    for name, rows in (("a", problem.m), ("b", problem.n)):
        if name in operands:
            batch = 1 if name == "a" and problem.shared_rows else problem.batch
            read += batch * rows * problem.k * size
            written += batch * rows * pitch * size
    return read, written


def seconds(problem: Problem, device: DeviceProperties, operands: str, costs: Costs | None = None) -> float:
    """The time of the copies, by the cost model; ``costs``: not the device's."""
    if not operands:
        return 0.0
    costs = costs or costs_of(device)
    return costs.copy + sum(copied_bytes(problem, operands)) / (costs.copied * device.bandwidth)


def realigned(problem: Problem, operands: str) -> Problem:
    """The problem that is left when ``operands`` have been realigned."""
    if not operands:
        return problem
    size = ITEMSIZE[problem.dtype]
    begins = row_multiple(pitch_of(problem.k, size) * size)
    of_a, of_b = (
        begins if name in operands else at for name, at in zip("ab", problem.row_multiples, strict=True)
    )  # fmt: skip
    left = "".join(name for name in problem.not_by_tma if name not in operands)
    return replace(
        problem, no_tma=problem.no_tma if left else "", not_by_tma=left, aligned=problem.aligned or not left,
        vectors=(1, 1), row_multiples=(of_a, of_b),
    )  # fmt: skip


def refusal(problem: Problem, device: DeviceProperties) -> str:
    """Why the Hopper kernel does not do a problem, even where operands are realigned; empty if it does."""
    why, operands = hopper.refusal(problem, device), problem.not_by_tma
    if not why or not operands or hopper.refusal(realigned(problem, operands), device):
        return why
    if type(problem) is not Problem or problem.arriving or problem.publishes is not None:
        return why
    written = copied_bytes(problem, operands)[1]
    if written > MOST_BYTES:
        return f"{why}; a copy that it can would be {written / 2**20:.0f} MiB, more than {MOST_BYTES / 2**20:.0f}"
    return ""


def candidates(
    problem: Problem, device: DeviceProperties, forced: Forced,
    make: Callable[[Problem, Forced, str, float], Iterable[Candidate]],
) -> Iterator[Candidate]:  # fmt: skip
    """Candidates of the Hopper kernel, with the operands realigned that must be, and with those that may gain by it.

    ``make`` returns those for a problem whose ``operands`` are realigned first, in so many seconds.
    """
    must = problem.not_by_tma
    least = seconds(problem, device, must)
    found = list(make(realigned(problem, must), forced, must, least))
    yield from found
    if not found or problem.arriving or problem.publishes is not None or type(problem) is not Problem:
        return
    may = [name for name, at in zip("ab", problem.row_multiples, strict=True) if at < LINE and name not in must]
    if not may:
        return
    chosen = min(found, key=attrgetter("predicted"))
    best, most = chosen.predicted, (1 - LEAST_GAIN) * chosen.predicted
    floor = Model(problem, device).floor
    tiles = {chosen.tile, *LARGE} if forced.tile is None else {forced.tile}
    for count in range(1, len(may) + 1):
        for more in itertools.combinations(may, count):
            operands = "".join(sorted((*must, *more)))
            before = seconds(problem, device, operands)
            # At most half of the time is lost to rows that begin elsewhere.
            if copied_bytes(problem, operands)[1] > MOST_BYTES or before - least > best / 2:
                continue
            if before + floor >= most:  # none of these can gain enough
                continue
            left = realigned(problem, operands)
            for tile in tiles:
                of_tile = make(left, forced._replace(tile=tile), operands, before)
                yield from (one for one in of_tile if one.predicted < most)


def realigned_text(problem: Problem, operands: str) -> str:
    """What is realigned, in words; empty if nothing is."""
    if not operands:
        return ""
    names, size = " and ".join(operands.upper()), ITEMSIZE[problem.dtype]
    begins = row_multiple(pitch_of(problem.k, size) * size)
    why = problem.no_tma or "rows that begin at lines of L2 are read faster"
    written = copied_bytes(problem, operands)[1] / 1e6
    return f"{names} first, {written:.3g} MB, to rows of multiples of {begins} bytes: {why}"
