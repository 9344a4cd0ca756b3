"""What attention's plan chooses from: every tile with and without turns, and groups of heads.

The cost model is fitted to ``variants``; ``blocks`` is the same at short lengths, without turns. ``groups`` goes by the
bytes of keys and values that a group of heads may have, ``sizes`` by how many heads are in a group, causal.
``portable`` has the tiles of the portable kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.attention.bench import SHAPES, Calls, Run, Shape, cudnn, launched, operands_of, problem_of_shape
from tilestream.core.operands import AttentionOperands
from tilestream.plan.attention_plan import AttentionCandidate, of_candidate
from tilestream.plan.policy import hopper_attention, portable_attention

#: Lengths at which groups are timed, and the bytes that a group may have (half of them at short lengths).
LENGTHS, ROOMS = (512, 1024, 2048), (1e6, 4e6, 10e6, 24e6)
#: Bytes of a group's keys and values that are timed, about; and rounds of all workers that its tiles fill.
BYTES, ROUNDS = (2e6, 4e6, 8e6, 10e6, 13e6, 16e6, 20e6, 24e6, 32e6), (1, 2, 3)

RECORD = "attention_tiles"
#: Names candidates, given a problem and a device.
Candidates = Callable[..., Iterable[tuple[str, AttentionCandidate]]]


def launched_as(made: Candidates, backend: str = "hopper") -> Callable[[Shape], Calls]:
    """cuDNN, and a backend's kernel as each of the candidates that ``made`` names for a problem and a device."""
    from tilestream.ops.attention_gpu import launch_of
    from tilestream.runtime.properties import cuda_properties

    device = cuda_properties(torch.cuda.current_device())

    def calls(shape: Shape) -> Calls:
        q, k, v = operands_of(shape)
        problem, layout = problem_of_shape(shape)
        found: Calls = {"cudnn": lambda: cudnn(q, k, v, shape.causal)}
        for label, candidate in made(problem, device):
            plan = of_candidate(problem, device, backend, candidate, "a benchmark's", ())
            x = AttentionOperands(q, k, v, torch.full_like(q, math.nan), 1 / math.sqrt(shape.dim))
            found[label] = launched(launch_of(plan, layout), x)
        return found

    return calls


def variants(
    run: Run, what: str = "variants", lengths: Sequence[int] = (512, 2048, 16384),
    kinds: Sequence[str] = ("ordered", "unordered"),
) -> None:  # fmt: skip
    def made(problem: Any, device: Any) -> Iterable[tuple[str, AttentionCandidate]]:
        for variant in kinds:
            tiles = hopper_attention.candidates(problem, device, device.workers, kind="dynamic", variant=variant)
            for found in tiles:
                yield f"{variant} {found.block[0]}x{found.block[1]}", found

    run.measure(what, (shape for shape in SHAPES if shape.length in lengths), launched_as(made), RECORD)


def blocks(run: Run) -> None:
    variants(run, "blocks", (512, 1024, 2048), ("unordered",))


def portable(run: Run) -> None:
    """The portable kernel's tiles."""

    def made(problem: Any, device: Any) -> Iterable[tuple[str, AttentionCandidate]]:
        for found in portable_attention.candidates(problem, device, device.workers, kind="dynamic"):
            yield f"{found.block[0]}x{found.block[1]}, {found.warps} warps, {found.stages} stages", found

    shapes = (shape for shape in SHAPES if shape.length in (1024, 4096, 16384))
    run.measure("portable", shapes, launched_as(made, "portable"), "attention_portable")


def chosen_where(function: str, values: dict[str, float]) -> Candidates:
    """The plan's choice with a function of its policy replaced by each of these values."""

    def made(problem: Any, device: Any) -> Iterable[tuple[str, AttentionCandidate]]:
        for label, value in values.items():
            with patch.object(hopper_attention, function, lambda *_, value=value: value):
                found = list(hopper_attention.candidates(problem, device, device.workers, kind="dynamic"))
            yield label, min(found, key=lambda one: one.predicted)

    return made


def groups(run: Run) -> None:
    """The plan's tile, with heads grouped by the bytes of their keys and values."""
    made = chosen_where("room_of", {f"{room / 1e6:.0f} MB": room for room in ROOMS})
    run.measure("groups", (shape for shape in SHAPES if shape.length in LENGTHS), launched_as(made), RECORD)


def sizes_of(shape: Shape) -> list[int]:
    """How many heads a group is timed with: by bytes, by tiles of 128 rows a worker of 132, and powers of two."""
    heads, bytes_of_head = shape.batch * shape.heads, 4 * shape.length * shape.dim
    found = {int(room / bytes_of_head) for room in BYTES}
    found |= {rounds * 132 * 128 // shape.length for rounds in ROUNDS}
    found |= {2**power for power in range(11) if min(BYTES) <= 2**power * bytes_of_head <= max(BYTES)}
    return sorted(size for size in found if 0 < size <= heads)


def sizes(run: Run) -> None:
    def calls(shape: Shape) -> Calls:
        return launched_as(chosen_where("heads_together", {f"{n} heads": n for n in sizes_of(shape)}))(shape)

    shapes = (shape for shape in SHAPES if shape.causal and shape.length in (*LENGTHS, 4096))
    run.measure("sizes", shapes, calls, RECORD)
