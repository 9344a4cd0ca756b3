"""`Plan`: the frozen answer to "how do we run this problem on this device", and `plan`, which finds it."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.gate import Gate
from tilestream.plan import cpu, hopper, portable, tma
from tilestream.plan.candidate import Candidate
from tilestream.plan.device import DeviceProperties, cpu_properties
from tilestream.plan.explain import explain
from tilestream.plan.floor import Floor
from tilestream.plan.problem import FP8, Incoming, Problem, Scales, dtype_name, result_name
from tilestream.schedule.order import TileOrder
from tilestream.schedule.schedule import Kind, Schedule

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: What a caller may ask for as ``schedule=``.
SCHEDULES = ("auto", *get_args(Kind))
#: What a caller may ask for as ``scales=``.
SCALES: tuple[Scales, ...] = get_args(Scales)


@dataclass(frozen=True)
class Refusal:
    """Something that was considered and not taken, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Plan:
    """How a problem is run: every knob, in one place.

    Attributes
    ----------
    problem
        Extents, dtypes, arrivals.
    device
        What the plan was made for.
    backend
        Which package of `tilestream.kernels` runs it.
    variant
        ``workers``: persistent workers, one intra-op thread each. ``inline``: one tile, in the calling thread with
        torch's own threads, where starting workers would cost more than it wins. ``persistent``: on a GPU, resident
        programs, one a worker. Of those on Hopper, ``cooperative``, ``ping_pong`` and ``single``: see
        `tilestream.kernels.hopper.gemm`.
    block
        ``(block_m, block_n, block_k)``: a tile's rows and columns, and the length of a K step.
    schedule
        Schedule, raster, workers, queues.
    why
        Why this and not another.
    refused
        What else was considered.
    predicted
        Seconds the cost model expects, with everything arrived.
    warps, stages
        GPUs: warps of a worker (Hopper: of a math loop), stages of its ring.
    swapped
        Hopper: whether the tensor cores' rows are B's columns, and their columns A's rows.
    strip
        Hopper: columns of the accumulator that go through a C buffer at a time.
    buffers
        Hopper: C buffers of a math loop.
    """

    problem: Problem
    device: DeviceProperties
    backend: str
    variant: str
    block: tuple[int, int, int]
    schedule: Schedule
    why: str
    refused: tuple[Refusal, ...]
    predicted: float
    warps: int = 0
    stages: int = 0
    swapped: bool = False
    strip: int = 0
    buffers: int = 0

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.block[:2]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.schedule.workers

    @property
    def floor(self) -> Floor:
        """What cannot be gone below on this device."""
        return Floor.of(self.problem, self.device, self.device.workers if self.variant == "inline" else self.workers)

    @property
    def gate(self) -> Gate | None:
        """What items wait for; None, and then no gate code runs, where all is there at launch."""
        problem = self.problem
        if problem.rows is None and problem.columns is None:
            return None
        rows = problem.rows.chunks if problem.rows is not None else None
        columns = problem.columns.chunks if problem.columns is not None else None
        return Gate(problem.m, problem.n, *self.tile, rows, columns, problem.row_of_batch)

    @property
    def label(self) -> str:
        """The plan in a line."""
        schedule = self.schedule
        if self.variant == "inline":
            return f"{self.backend} inline"
        queues = f", {schedule.queues} queues" if schedule.queues > 1 else ""
        backend = f"hopper {self.variant}" if self.backend == "hopper" else self.backend
        return (
            f"{backend} {schedule.kind}{queues}, {self.workers} workers, {self.tile[0]}x{self.tile[1]} tiles, "
            f"{schedule.raster.order} raster"
        )

    def explain(self) -> str:
        """What was chosen, what was refused and why, and the floor, for people."""
        return explain(self)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        activation: str | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        arrival: Arrival | None = None,
        weight_arrival: Arrival | None = None,
        deadline: float | None = None,
    ) -> torch.Tensor:
        """Run this plan on operands of its shape; arguments as for `tilestream.matmul`, nothing broadcast.

        Eager, and without autograd: for benchmarks, and for those who choose the plan themselves.

        Parameters
        ----------
        a, b
            ``[m, k]`` and ``[k, n]``; ``[batch, m, k]`` and ``[batch, k, n]`` where the plan has several batches.
        scale_a, scale_b
            As the plan's ``scales`` has them: of one element, or of one a row of A and one a column of B. A plan for
            more takes less: one element where there could be one a row, None where there could be a scale.

        Raises
        ------
        ValueError, TypeError
            If an operand is not what the plan was made for.
        RuntimeError
            If an operand requires a gradient.
        ArrivalTimeout, Exception
            As from `tilestream.matmul`.
        """
        import torch  # when something is computed, not before

        from tilestream.ops.execute import run_plan, uncompiled_run_plan

        run = uncompiled_run_plan() if torch.compiler.is_compiling() else run_plan
        result: torch.Tensor = run(
            self, a, b, out=out, bias=bias, residual=residual, alpha=alpha, beta=beta, activation=activation,
            scale_a=scale_a, scale_b=scale_b, arrival=arrival, weight_arrival=weight_arrival, deadline=deadline,
        )  # fmt: skip
        return result


def plan(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    dtype: object = "float32",
    b_dtype: object | None = None,
    out_dtype: object | None = None,
    scales: Scales = "none",
    use_fast_accum: bool = True,
    device: object = "cpu",
    workers: int | None = None,
    schedule: str = "auto",
    tile: tuple[int, int] | None = None,
    order: TileOrder | None = None,
    queues: int | None = None,
    shares: int | None = None,
    arrival: Arrival | None = None,
    weight_arrival: Arrival | None = None,
    layout: str | None = None,
    backend: str | None = None,
    variant: str | None = None,
    stages: int | None = None,
) -> Plan:
    """How ``[batch, m, k] @ [batch, k, n]`` would be run.

    Parameters
    ----------
    m, n, k, batch
        Extents, at least 0.
    dtype, b_dtype, out_dtype
        Of the operands, of B where it is another (both of 8 bits), and of the output (default: the operands', bfloat16
        where those are of 8 bits), as torch dtypes or their names.
    scales
        ``"tensor"`` where ``scale_a`` and ``scale_b`` of `tilestream.matmul` have one element each, ``"row"`` where
        they have one a row and one a column, else ``"none"``.
    use_fast_accum
        As for `tilestream.matmul`.
    device
        ``"cpu"``, a GPU (``"cuda"``, ``"cuda:1"``, a ``torch.device``), or `DeviceProperties`, for a plan without the
        device.
    workers
        Workers to use; None: what `tilestream.matmul` uses, ``torch.get_num_threads()``, or the device's cores where
        torch has not been imported.
    schedule
        ``"static"``, ``"dynamic"``, ``"stream_k"``, or ``"auto"`` for the one the cost model favours.
    tile
        ``(rows, columns)`` of a tile; None: the cost model's choice.
    order
        Your own order of tiles: a function ``(t, num_m, num_n) -> (pm, pn)``, or the tiles as ids ``pm * num_n + pn``
        or pairs, in order (give ``tile`` too, so that you know how many there are). Each batch is done in this order.
    queues, shares
        Force the number of queues (dynamic), and into how many shares the last wave is cut (stream_k).
    arrival, weight_arrival
        How A's rows, and B's columns (a weight's rows), come in.
    layout
        How A and B lie, in BLAS's letters: ``"nn"`` row-major, ``"t"`` for one that is the transpose of a row-major
        matrix. A weight ``[N, K]`` of a linear layer makes ``"nt"``. Of use to GPUs, which cannot address all of them
        alike where an extent is odd. None: ``"nn"``; of 8 bits ``"nt"``, as tensor cores take them.
    backend
        GPUs: force ``"hopper"`` or ``"portable"``; None: the fast one if it can.
    variant, stages
        Hopper: force ``"cooperative"``, ``"ping_pong"`` or ``"single"``, and the depth of the ring.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError, TypeError
        If an argument is out of range, or two exclude each other.
    NotImplementedError
        If there is no backend for the device, or the one that is forced does not do this problem.

    Examples
    --------
    >>> plan(2048, 2048, 2048, workers=2, schedule="dynamic", tile=(512, 512)).schedule.grid.tiles
    16
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; it is one of {', '.join(SCHEDULES)}")
    properties = device_properties(device)
    for name, extent in (("m", m), ("n", n), ("k", k), ("batch", batch)):
        if not _whole(extent) or extent < 0:
            raise ValueError(f"{name}={extent!r}; an extent is a whole number, and not negative")
    for name, value in (("workers", workers), ("queues", queues), ("shares", shares)):
        if value is not None and (not _whole(value) or value < 1):
            raise ValueError(f"{name}={value!r}; it is a positive whole number, or None for the plan's choice")
    if tile is not None:
        if not isinstance(tile, tuple | list) or len(tile) != 2 or not all(_whole(x) and x > 0 for x in tile):
            raise ValueError(f"tile={tile!r}; a tile has (rows, columns), both positive whole numbers")
        tile = (operator.index(tile[0]), operator.index(tile[1]))
    m, n, k, batch = (operator.index(extent) for extent in (m, n, k, batch))
    name = dtype_name(dtype)
    layout = layout or ("nt" if name in FP8 else "nn")
    if layout not in ("nn", "nt", "tn", "tt"):
        raise ValueError(f"layout={layout!r}; it is 'nn', 'nt', 'tn' or 'tt': 't' for a transposed operand, A's first")
    if backend not in (None, "hopper", "portable"):
        raise ValueError(f"backend={backend!r}; it is 'hopper', 'portable', or None for the plan's choice")
    if variant is not None and variant not in hopper.VARIANTS:
        raise ValueError(
            f"variant={variant!r}; it is one of {', '.join(hopper.VARIANTS)}, or None for the plan's choice"
        )
    if stages is not None and (not _whole(stages) or stages < 2):
        raise ValueError(f"stages={stages!r}; a ring has two stages at least, or None for as many as fit")
    if backend is None and (variant is not None or stages is not None):
        backend = "hopper"
    other = name if b_dtype is None else dtype_name(b_dtype)
    if scales not in SCALES:
        raise ValueError(f"scales={scales!r}; it is one of {', '.join(SCALES)}")
    if not isinstance(use_fast_accum, bool):
        raise TypeError(f"use_fast_accum={use_fast_accum!r}; it is True or False")
    problem = Problem(
        m, n, k, batch, name, result_name(name, None if out_dtype is None else dtype_name(out_dtype)),
        None if arrival is None else Incoming(arrival.chunks(batch * m), arrival.pivot),
        None if weight_arrival is None else Incoming(weight_arrival.chunks(n), weight_arrival.pivot),
        tf32=name == "float32" and _uses_tf32(device, properties),
        aligned=properties.backend == "cpu" or (k % 16 == 0 and n % 16 == 0),  # as contiguous operands are
        no_tma="" if properties.backend == "cpu" else tma.refuse_contiguous(m, n, k, layout, (name, other)),
        b_dtype=other if other != name else "", scales=scales, fast_accum=use_fast_accum or name not in FP8,
    )  # fmt: skip
    default = None if isinstance(device, DeviceProperties) else _default_workers(properties)
    if order is not None:
        # Not from the cache: it would keep alive what the function closes over, and call it pure.
        return plan_problem.__wrapped__(
            problem, workers, schedule, tile, order, queues, shares, default, properties, backend, variant, stages
        )
    return plan_problem(
        problem, workers, schedule, tile, order, queues, shares, default, properties, backend, variant, stages
    )


def _default_workers(device: DeviceProperties) -> int | None:
    torch = sys.modules.get("torch")  # not imported for this question's sake
    return torch.get_num_threads() if torch is not None and device.backend == "cpu" else None


def _uses_tf32(device: object, properties: DeviceProperties) -> bool:
    if isinstance(device, DeviceProperties) or not properties.arch.startswith("sm_"):
        return False
    from tilestream.runtime.properties import allows_tf32

    return allows_tf32()


def device_properties(device: object) -> DeviceProperties:
    """What `plan` takes for a device, as its properties.

    Raises
    ------
    NotImplementedError
        If there is no backend for it.
    """
    if isinstance(device, DeviceProperties):
        return device
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return cpu_properties()
    if kind == "cuda":
        from tilestream.runtime.properties import cuda_properties  # imports torch, and asks the driver

        return cuda_properties(int(index) if index else None)
    raise NotImplementedError(
        f"device={str(device)!r}: this version has backends for the CPU and for CUDA and ROCm GPUs; use "
        "torch.matmul there"
    )


def _whole(x: object) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


@functools.lru_cache(maxsize=1024)
def plan_problem(
    problem: Problem,
    workers: int | None = None,
    schedule: str = "auto",
    tile: tuple[int, int] | None = None,
    order: TileOrder | None = None,
    queues: int | None = None,
    shares: int | None = None,
    default_workers: int | None = None,
    device: DeviceProperties | None = None,
    backend: str | None = None,
    variant: str | None = None,
    stages: int | None = None,
) -> Plan:
    """`plan` for a `Problem`; the same object for the same question."""
    device = device or cpu_properties()
    kinds, refused = _kinds(schedule, queues, shares)
    count = workers or default_workers or device.workers
    forced = [
        name
        for name, given in (
            ("workers", workers), ("schedule", schedule != "auto"), ("tile", tile), ("order", order is not None),
            ("queues", queues), ("shares", shares),
        )
        if given
    ]  # fmt: skip
    name = device.backend
    if device.backend == "cpu":
        arriving = problem.rows is not None or problem.columns is not None
        inline = not arriving and not forced
        found = list(
            cpu.candidates(
                problem, device, count, kinds=kinds, inline=inline, tile=tile, order=order, queues=queues, shares=shares
            )
        )
        best = _best(found)
        refused += (_other_variant(best, found, arriving, forced),)
        elsewhere = Refusal("GPU backends", "the operands are on the CPU")
    else:
        refused = tuple(Refusal(r.what, portable.NO_STATIC) if r.what == "static" else r for r in refused)
        name, found, why_not = _on_gpu(
            problem, device, count, backend, kinds=kinds, auto=schedule == "auto", tile=tile, order=order,
            queues=queues, shares=shares, variant=variant, stages=stages,
        )  # fmt: skip
        best = _best(found)
        refused += _other_tiles(best, found)
        if name == "portable" and not problem.aligned:
            refused += (Refusal("vector loads", "a stride, an extent or an address is no multiple of 16"),)
        elsewhere = why_not
    if "stream_k" in kinds and best.schedule.kind != "stream_k" and best.variant != "inline":
        refused += (_no_stream_k(best, found),)
    refused += (elsewhere,)
    made = of_candidate(problem, device, name, best, f"least of {len(found)} candidates in the cost model", refused)
    # Once per problem, since plans are cached: what runs, and what does not and why (invariant 12).
    logger.info("%s: %s; refused: %s", problem, made.label, "; ".join(f"{r.what}: {r.why}" for r in refused))
    return made


def _on_gpu(
    problem: Problem, device: DeviceProperties, workers: int, backend: str | None, *, kinds: tuple[Kind, ...],
    auto: bool, tile: tuple[int, int] | None, order: TileOrder | None, queues: int | None, shares: int | None,
    variant: str | None, stages: int | None,
) -> tuple[str, list[Candidate], Refusal]:  # fmt: skip
    """Which backend, its candidates, and why not the other one."""
    why = hopper.refusal(problem, device)
    if backend != "portable" and not why:
        found = list(
            hopper.candidates(
                problem, device, workers, kinds=kinds, auto=auto, tile=tile, order=order, queues=queues, shares=shares,
                variant=variant, stages=stages,
            )
        )  # fmt: skip
        if found:
            return "hopper", found, Refusal("portable", "the Hopper kernel does this")
        why = f"it has no {'x'.join(map(str, tile))} tile here" if tile else "no tile of it fits"
        if variant or stages:
            why += f" with variant={variant}, stages={stages}"
    if backend == "hopper":
        raise NotImplementedError(f"backend='hopper': {why}; leave backend=, variant= and stages= away")
    found = list(
        portable.candidates(problem, device, workers, kinds=kinds, tile=tile, order=order, queues=queues, shares=shares)
    )
    return "portable", found, Refusal("hopper", why or "backend='portable' given")


def of_candidate(
    problem: Problem, device: DeviceProperties, backend: str, candidate: Candidate, why: str,
    refused: tuple[Refusal, ...] = (),
) -> Plan:  # fmt: skip
    """A candidate as a plan."""
    return Plan(
        problem, device, backend, candidate.variant, candidate.block, candidate.schedule, why, refused,
        candidate.seconds, candidate.warps, candidate.stages, candidate.swapped, candidate.strip,
        candidate.buffers,
    )  # fmt: skip


def _best(found: list[Candidate]) -> Candidate:
    return min(found, key=lambda candidate: candidate.seconds)


def _other_variant(best: Candidate, found: list[Candidate], arriving: bool, forced: list[str]) -> Refusal:
    if arriving:
        return Refusal("inline", "chunks are waited for by workers, not by the calling thread")
    if forced:
        return Refusal("inline", f"{', '.join(forced)} given")
    other = _best([c for c in found if c.variant != best.variant])
    return Refusal(other.variant, _costs(other, best))


def _other_tiles(best: Candidate, found: list[Candidate]) -> tuple[Refusal, ...]:
    """The next best tile, if there was a choice."""
    others = [c for c in found if c.block != best.block]
    if not others:
        return ()
    other = _best(others)
    return (Refusal(f"{other.block[0]}x{other.block[1]} tiles", _costs(other, best)),)


def _costs(other: Candidate, best: Candidate) -> str:
    name = best.variant if best.variant != other.variant else f"{best.block[0]}x{best.block[1]}"
    return f"the cost model expects {other.seconds * 1e3:.3g} ms, {name} {best.seconds * 1e3:.3g} ms"


def _kinds(schedule: str, queues: int | None, shares: int | None) -> tuple[tuple[Kind, ...], tuple[Refusal, ...]]:
    if queues is not None and shares is not None:
        raise ValueError(
            f"queues={queues}, shares={shares}; queues are dynamic's, shares are stream_k's: force one of them"
        )
    for name, value, kind in (("queues", queues, "dynamic"), ("shares", shares, "stream_k")):
        if value is not None and schedule not in ("auto", kind):
            raise ValueError(f"{name}={value} with schedule={schedule!r}; it belongs to schedule={kind!r}")
    for kind in get_args(Kind):
        if (
            schedule == kind
            or (kind == "dynamic" and queues is not None)
            or (kind == "stream_k" and shares is not None)
        ):
            return (kind,), ()
    return ("dynamic", "stream_k"), (
        Refusal("static", "no faster than a queue here, and a late worker would hold up its tiles"),
    )


def _no_stream_k(best: Candidate, found: list[Candidate]) -> Refusal:
    same = next((c for c in found if c.schedule.kind == "stream_k" and c.block == best.block), None)
    if same is not None and not same.schedule.remainder:
        return Refusal(
            "stream_k", f"{best.schedule.grid.tiles} tiles on {best.schedule.workers} workers leave no remainder"
        )
    others = [c for c in found if c.schedule.kind == "stream_k"]
    if not others:
        return Refusal("stream_k", f"no registers for it beside a tile of {best.block[0]}x{best.block[1]}")
    other = _best(others)
    return Refusal(
        "stream_k", f"the cost model expects {other.seconds * 1e3:.3g} ms, dynamic {best.seconds * 1e3:.3g} ms"
    )
