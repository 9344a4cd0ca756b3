"""What is measured: the buffers of one problem, and each way to run it once.

The same five ways wherever the input comes from. The first has a name of its own, ``read`` or ``copy``: the input
alone, by the producer that also streams. ``multiply``: `ts.matmul` alone, with everything there. ``torch``: torch.mm
alone. ``sequential``: the input, then the multiply. ``streamed``: both at once, ``ts.matmul(x, w, arrival=...)``. All
use the same buffers, so that page faults cost nobody.

One clock for all: the host's, from the call until the answer is there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import tilestream as ts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilestream.cli.demo.settings import Settings
    from tilestream.trace.record import LaunchTrace

    Tell = Callable[[str], None]
    Watcher = Callable[[int, int, int, int], None]

_SEED = 7


class Bench(ABC):
    """The buffers of one problem, and each way to run it once. A context manager: leaving it stops the producer.

    Attributes
    ----------
    bring
        The name of the first way.
    stream
        The producer, and the tensor it fills.
    x, w, out, by_torch
        ``[M, K]``, ``[K, N]``; what all ways write; torch's answer, to compare with.
    truth
        ``[M, K]``: the input as it should have arrived.
    deadline
        Seconds that anything may wait.
    n_is
        Whether ``n`` was ``given``, is the ``default``, or was ``calibrated``.
    trace
        What each worker did in the last streamed run, where launches are traced.
    """

    bring: ClassVar[str]
    n_is = "given"
    trace: LaunchTrace | None = None

    def __init__(self, stream: ts.Stream, truth: torch.Tensor | None, settings: Settings, deadline: float) -> None:
        self.stream, self.settings, self.deadline = stream, settings, deadline
        tensor = stream.tensor
        self.x = tensor.view(-1, tensor.shape[-1])
        self.truth = self.x if truth is None else truth
        self.w = self.out = self.by_torch = torch.empty(0)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    # The problem ---------------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Columns of the weight."""
        return self.w.shape[-1]

    def set_n(self, n: int) -> None:
        """Make the weight ``[K, n]``, scaled so that outputs are of the input's size, and the outputs' buffers."""
        (rows, k), dtype, device = self.x.shape, self.x.dtype, self.x.device
        generator = torch.Generator(device).manual_seed(_SEED)
        self.w = torch.randn(k, n, generator=generator, device=device).mul_(k**-0.5).to(dtype)
        self.out = torch.full((rows, n), float("nan"), dtype=dtype, device=device)
        self.by_torch = torch.empty_like(self.out)

    def options(self) -> dict[str, Any]:
        """What both matmuls and the plan are given."""
        return {"schedule": self.settings.schedule, "workers": self.settings.workers}

    def plan(self) -> ts.Plan:
        """The plan of the streamed matmul."""
        (rows, k), arrival = self.x.shape, self.stream.arrival
        return ts.plan(rows, self.n, k, dtype=self.x.dtype, device=self.x.device, arrival=arrival, **self.options())

    @abstractmethod
    def about(self) -> list[tuple[str, str]]:
        """Where the input comes from and how, for people: names, and what to say."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The same for JSON."""

    @abstractmethod
    def prepare(self, tell: Tell, watcher: Watcher) -> None:
        """All that is not to be timed: ``n``, first touches, compilation. Leaves torch's answer, and a streamed one."""

    # The five ways -------------------------------------------------------------------------------------------------

    def ways(self) -> dict[str, Callable[[], float]]:
        """Each way by its name: runs it once, and returns its seconds."""
        return {
            self.bring: self.bring_alone,
            "multiply": self.multiply,
            "torch": self.torch_mm,
            "sequential": self.sequential,
            "streamed": self.streamed,
        }

    def bring_alone(self) -> float:
        """Seconds until all of the input is there."""
        self._forget()
        return self._time(self._bring)

    def multiply(self) -> float:
        """Seconds of the matmul with everything there."""
        return self._time(self._multiply)

    def torch_mm(self) -> float:
        """Seconds of torch.mm."""
        return self._time(lambda: torch.mm(self.x, self.w, out=self.out))

    def sequential(self) -> float:
        """Seconds of the input, and the matmul after it."""
        self._forget()
        return self._time(self._bring_in_turn, self._multiply)

    def streamed(self) -> float:
        """Seconds of both at once."""
        self._forget_all()
        seconds = self._time(self.stream.restart, self._multiply_arriving)
        self.stream.wait(self.deadline)
        return seconds

    def _time(self, *steps: Callable[[], object]) -> float:
        self._settle()
        begin = time.perf_counter()
        for step in steps:
            step()
        self._settle()
        return time.perf_counter() - begin

    @abstractmethod
    def _settle(self) -> None:
        """Wait for what was issued, where calls return before they are done."""

    def _forget(self) -> None:
        # Poisoned: whoever reads a row before it has arrived reads NaN, not the round before.
        self.x.fill_(float("nan"))

    def _forget_all(self) -> None:
        self.out.fill_(float("nan"))
        self._forget()

    def _bring(self) -> None:
        self.stream.restart()
        self.stream.wait(self.deadline)

    def _bring_in_turn(self) -> None:
        self._bring()

    def _multiply(self) -> None:
        ts.matmul(self.x, self.w, out=self.out, **self.options())

    def _multiply_arriving(self) -> None:
        ts.matmul(self.x, self.w, out=self.out, arrival=self.stream.arrival, deadline=self.deadline, **self.options())
