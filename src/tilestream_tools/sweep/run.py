"""The sweep: each way of running each shape, interleaved, with more and more of the device taken away.

::

    for shape, for units taken:
      each way once, on all of the device: compiled, loaded, its answer checked
      with the units taken:  all ways in turn, in another order each round;  each way once more, into NaN
      those answers are checked; figures above the peak of the rest of the device are refused
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tilestream._version import __version__
from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.plan.api import plan
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.clock import GpuClock, Timing, WallClock, quartiles
from tilestream_tools.sweep.contention import Taker
from tilestream_tools.sweep.record import Point, Sweep
from tilestream_tools.sweep.suite import Shape, Suite

Call = Callable[[], Any]
#: Ways of running a shape: ``auto`` is the plan's own, ``told`` dynamic with as many workers as there are units left.
OURS = ("auto", "static", "dynamic", "stream_k", "told")
PEERS = ("torch", "quack", "quack-dynamic")
#: Seconds of samples a way and point, and how many samples that may be.
SECONDS, LEAST_ROUNDS, MOST_ROUNDS = 0.15, 5, 40


@dataclass(frozen=True)
class Way:
    """An implementation; ``queues`` of dynamic."""

    implementation: str
    queues: int = 1

    def __str__(self) -> str:
        return f"{self.implementation}, {self.queues} queues" if self.queues > 1 else self.implementation


def ways(names: Iterable[str], queues: Sequence[int] = (1,)) -> list[Way]:
    """Those that are named; dynamic with each number of queues.

    Raises
    ------
    ValueError
        If there is no such implementation, or a number of queues is not positive.
    """
    found = []
    for name in names:
        if name not in (*OURS, *PEERS):
            raise ValueError(f"implementation {name!r}: it must be one of {', '.join((*OURS, *PEERS))}")
        found += [Way(name, count) for count in queues] if name == "dynamic" else [Way(name)]
    for count in queues:
        if count < 1:
            raise ValueError(f"queues {count}: it must be a positive whole number")
    return found


def installed(name: str) -> bool:
    """Whether a peer can be run here."""
    if not name.startswith("quack"):
        return True
    try:
        import quack.gemm_interface  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class Prepared:
    """A way of running a shape, ready to be called."""

    call: Call
    out: torch.Tensor
    plan: str = ""
    tiles: int = 0


def prepare(
    way: Way, shape: Shape, dtype: str, left: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None,
    told: bool = False,
) -> Prepared:  # fmt: skip
    """A way of computing ``a @ b``, planned for where it is asked for.

    Parameters
    ----------
    left
        Units that there will be: for the ways that are told.
    out
        ``[m, n]``; None: a new one.
    told
        Plan for ``left`` whatever the way is.
    """
    if out is None:
        out = a.new_empty((shape.m, shape.n))
    name = way.implementation
    if name == "torch":
        return Prepared(lambda: torch.mm(a, b, out=out), out)
    if name.startswith("quack"):
        from quack.gemm_interface import gemm

        return Prepared(lambda: gemm(a, b, tuned=False, dynamic_scheduler=name == "quack-dynamic"), out)
    schedule = {"auto": "auto", "told": "dynamic"}.get(name, name)
    found = plan(
        shape.m, shape.n, shape.k, dtype=dtype, device=a.device.type, layout="nt", schedule=schedule,
        workers=left if told or name == "told" else None, queues=way.queues if way.queues > 1 else None,
    )  # fmt: skip
    return Prepared(lambda: found.run(a, b, out=out), out, found.label, found.schedule.grid.tiles)


def answer(one: Prepared) -> torch.Tensor:
    """One more answer, into what was NaN; some ways make an output of their own."""
    one.out.fill_(float("nan"))
    one.out = one.call()
    return one.out


class CpuClock(WallClock):
    """The host's clock, for as many rounds as it is asked."""

    def interleave(self, functions: dict[str, Call], *, rounds: int, warmup: int = 3, graphs: bool = False) -> Timing:
        """As `GpuClock.interleave`."""
        return GpuClock.interleave(self, functions, rounds=rounds, warmup=warmup)


class StreamClock(GpuClock):
    """A clock that waits for its own stream, not for the device: a neighbour that holds SMs would not end meanwhile."""

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream().synchronize()


@dataclass
class Runner:
    """A sweep under way.

    Parameters
    ----------
    taker
        What takes units away.
    device
        All of it.
    rounds
        Samples of each way; None: as many as fit `SECONDS`.
    tell
        Called with a line for people as things are done.
    """

    taker: Taker
    device: DeviceProperties
    rounds: int | None = None
    tell: Callable[[str], object] = lambda _: None
    clock: GpuClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = CpuClock() if self.device.backend == "cpu" else StreamClock()
        # What a sample launches is loaded here: loading a kernel waits for those that run, so for a neighbour.
        self.clock.interleave({"nothing": lambda: None}, rounds=1)

    def run(self, sweep: Sweep, suite: Suite, taken: Sequence[int], todo: Sequence[Way], after: Call) -> None:
        """All points of a suite; ``after`` is called after each number of units taken, to keep what there is."""
        for shape in suite.shapes:
            how = {"device": self.clock.device, "dtype": getattr(torch, suite.dtype)}
            a, w = (torch.randn(rows, shape.k, **how) for rows in (shape.m, shape.n))
            check = Check.of_product(a, w.t(), torch.mm(a, w.t()))
            for count in taken:
                self._points(sweep, shape, suite.dtype, count, todo, a, w.t(), check)
                after()

    def _points(
        self, sweep: Sweep, shape: Shape, dtype: str, count: int, todo: Sequence[Way], a: torch.Tensor,
        b: torch.Tensor, check: Check,
    ) -> None:  # fmt: skip
        def refuse(way: Way, error: Exception) -> None:
            why = f"{type(error).__name__}: {error}"[:300]
            sweep.refused.append({
                "shape": str(shape), "by": self.taker.name, "taken": count, "way": str(way), "why": why
            })  # fmt: skip
            self.tell(f"{shape}, {count} taken, {way}: refused: {why}")

        left = self.taker.left(count)
        prepared: dict[Way, Prepared] = {}
        for way in todo:
            try:
                # Where plans will know what is left, those are compiled: a module belongs to one context.
                prepared[way] = one = prepare(way, shape, dtype, left, a, b, told=self.taker.tells)
                check(answer(one))
                one.call()  # what it allocates is there from now on
            except Exception as error:
                prepared.pop(way, None)
                refuse(way, error)
        if not prepared:
            return
        try:
            timing, left = self._timed(prepared, shape, dtype, count, left, a, b)
        except RuntimeError as error:
            for way in prepared:
                refuse(way, error)
            return
        units = self.taker.units
        reachable = units if self.taker.shares else left
        spot, points = Spot(shape, dtype, self.taker.name, count, left, units, reachable), []
        for way, one in prepared.items():
            try:
                points.append(point_of(spot, way, one, timing, check(one.out)["max"], self.device))
            except AssertionError as error:
                refuse(way, error)
        sweep.points += points
        rates = ", ".join(f"{point.label} {point.tflops:.4g}" for point in points)
        self.tell(f"{shape}, {count} of {self.taker.units} taken: TFLOP/s: {rates}")

    def _timed(
        self, prepared: dict[Way, Prepared], shape: Shape, dtype: str, count: int, left: int, a: torch.Tensor,
        b: torch.Tensor,
    ) -> tuple[Timing, int]:  # fmt: skip
        """The samples, and one more answer of each way, made while the units are taken."""
        expected = shape.operations / self.device.peak(dtype, left)
        rounds = self.rounds or max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / (2 * expected + 1e-3))))
        with self.taker.taking(count) as there:
            for way, one in prepared.items():
                # Asked for again: where the taker reports it, the plan is one for the rest of the device.
                prepared[way] = prepare(way, shape, dtype, left, a, b, one.out)
            calls = {str(way): one.call for way, one in prepared.items()}
            timing = self.clock.interleave(calls, rounds=rounds, warmup=2)
            for one in prepared.values():
                answer(one)
            self.clock.synchronize()
        return timing, there


class Spot(NamedTuple):
    """A shape, and what of the device is taken while it is measured: the first fields of a `Point`.

    Attributes
    ----------
    reachable
        Units that the measured kernel may use: more than ``left`` where units are shared.
    """

    shape: Shape
    dtype: str
    by: str
    taken: int
    left: int
    units: int
    reachable: int


def point_of(
    spot: Spot, way: Way, one: Prepared, timing: Timing, error: float, device: DeviceProperties, samples: str = "",
    **more: float,
) -> Point:  # fmt: skip
    """A way's point, of the samples that are called ``samples``, or as the way is.

    Raises
    ------
    AssertionError
        If its rate is above the peak of what the kernel may use.
    """
    samples = samples or str(way)
    seconds, (low, high) = timing.median(samples), quartiles(timing.seconds[samples])
    rate, peak = spot.shape.operations / seconds, device.peak(spot.dtype, spot.reachable)
    if rate > peak:
        raise AssertionError(
            f"{rate / 1e12:.4g} TFLOP/s, above the peak of {peak / 1e12:.4g} of the {spot.reachable} units that were "
            "left: the answer or the timing is wrong"
        )
    tiles = {"tiles": one.tiles} if one.tiles and not more else {}
    return Point(
        str(spot.shape), spot.shape.name, spot.dtype, spot.by, spot.taken, spot.left, spot.units, way.implementation,
        way.queues, seconds, low, high, timing.rounds, rate / 1e12, one.plan, error, tiles | more,
    )  # fmt: skip


def about(device: DeviceProperties) -> dict[str, Any]:
    """What ran where. COMMIT names the commit where the tree is a copy without its history."""
    found = {
        "device": device.name,
        "units": device.workers,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilestream": __version__,
        "commit": os.environ.get("COMMIT", ""),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.backend != "cpu":
        import triton

        found["triton"] = triton.__version__
    return found


def device_of(backend: str) -> DeviceProperties:
    """The CPU, or all of the current GPU.

    Raises
    ------
    NotImplementedError
        If there is no GPU.
    """
    if backend == "cpu":
        return cpu_properties()
    from tilestream.runtime.properties import cuda_properties

    return cuda_properties()
