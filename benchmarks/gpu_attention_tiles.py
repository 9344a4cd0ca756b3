"""What the plan of attention chooses from, timed on a GPU: every tile with and without turns, and groups of heads.

``python benchmarks/gpu_attention_tiles.py [section,section] [folder] [seconds]``

Sections: ``variants`` (16k tokens at few lengths, each tile, with turns and without, beside cuDNN: what the cost model
is fitted to), ``blocks`` (the same at short ones, without turns), ``groups`` (the plan's tile, by the bytes of keys and
values that heads which are taken together may have), ``sizes`` (causal ones, by how many heads these are). Timed and
checked as `gpu_attention` does it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from gpu_attention import SHAPES, Run, Shape, cudnn, launched, operands_of, problem_of_shape, run_sections
from tilestream.core.operands import Operands
from tilestream.plan.attention_plan import AttentionCandidate, of_candidate
from tilestream.plan.policy import hopper_attention

#: Lengths at which groups are timed, and the room that they are given; where keys are few they may take half of it.
LENGTHS, ROOMS = (512, 1024, 2048), (1e6, 4e6, 10e6, 24e6)
#: Bytes of keys and values that so many heads are timed with, about, and how often they have all workers' tiles.
BYTES, ROUNDS = (2e6, 4e6, 8e6, 10e6, 13e6, 16e6, 20e6, 24e6, 32e6), (1, 2, 3)

Calls = dict[str, Callable[[], Any]]


def run_shape(run: Run, what: str, shape: Shape, made: Callable[..., Iterable[tuple[str, AttentionCandidate]]]) -> None:
    """A row: cuDNN, and the Hopper kernel as each of the candidates that ``made`` names for a problem and a device."""
    from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch
    from tilestream.runtime.properties import cuda_properties

    name = f"{what} D{shape.dim} {'causal' if shape.causal else 'full'} S{shape.length}"
    if not run.left(name):
        return
    device = cuda_properties(torch.cuda.current_device())
    q, k, v = operands_of(shape)
    problem, layout = problem_of_shape(shape)
    calls: Calls = {"cudnn": lambda: cudnn(q, k, v, shape.causal)}
    for label, found in made(problem, device):
        plan = of_candidate(problem, device, "hopper", found, "a benchmark's", ())
        x = Operands(q, k, v, torch.full_like(q, math.nan), 1 / math.sqrt(shape.dim))
        calls[label] = launched(HopperAttentionLaunch(plan, layout), x)
    run.row(name, shape.operations, calls, **shape._asdict())


def variants(
    run: Run, what: str = "variants", lengths: Sequence[int] = (512, 2048, 16384),
    kinds: Sequence[str] = ("turns", "apart"),
) -> None:  # fmt: skip
    """Every tile of the plan, with turns and without."""

    def made(problem: Any, device: Any) -> Iterable[tuple[str, AttentionCandidate]]:
        for variant in kinds:
            tiles = hopper_attention.candidates(problem, device, device.workers, kind="dynamic", variant=variant)
            for found in tiles:
                yield f"{variant} {found.block[0]}x{found.block[1]}", found

    for shape in (s for s in SHAPES if s.length in lengths):
        run_shape(run, what, shape, made)


def chosen_where(function: str, values: dict[str, float]) -> Callable[..., Iterable[tuple[str, AttentionCandidate]]]:
    """What the plan chooses where a function of its policy gives each of these values."""

    def made(problem: Any, device: Any) -> Iterable[tuple[str, AttentionCandidate]]:
        for label, value in values.items():
            with patch.object(hopper_attention, function, lambda *_, value=value: value):
                found = list(hopper_attention.candidates(problem, device, device.workers, kind="dynamic"))
            yield label, min(found, key=lambda one: one.seconds)

    return made


def groups(run: Run) -> None:
    """The plan's tile, with as many heads together as so many bytes hold the keys and values of."""
    made = chosen_where("room_of", {f"{room / 1e6:.0f} MB": room for room in ROOMS})
    for shape in (s for s in SHAPES if s.length in LENGTHS):
        run_shape(run, "groups", shape, made)


def sizes_of(shape: Shape) -> list[int]:
    """How many heads a group is timed with: by bytes, by tiles of 128 rows a worker of 132, and powers of two."""
    heads, bytes_of_head = shape.batch * shape.heads, 4 * shape.length * shape.dim
    found = {int(room / bytes_of_head) for room in BYTES}
    found |= {rounds * 132 * 128 // shape.length for rounds in ROUNDS}
    found |= {2**power for power in range(11) if min(BYTES) <= 2**power * bytes_of_head <= max(BYTES)}
    return sorted(size for size in found if 0 < size <= heads)


def sizes(run: Run) -> None:
    """The plan's tile, with so many heads together."""
    for shape in (s for s in SHAPES if s.causal and s.length in (*LENGTHS, 4096)):
        run_shape(run, "sizes", shape, chosen_where("heads_together", {f"{n} heads": n for n in sizes_of(shape)}))


SECTIONS: dict[str, Callable[[Run], None]] = {
    "variants": variants,
    "blocks": functools.partial(variants, what="blocks", lengths=(512, 1024, 2048), kinds=("apart",)),
    "groups": groups,
    "sizes": sizes,
}


def main() -> None:
    run_sections(SECTIONS, "variants,groups", "gpu_attention_tiles")


if __name__ == "__main__":
    main()
