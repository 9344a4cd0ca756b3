"""Launching the portable GEMM: what a plan and a layout decide is worked out once, a call fills in the addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton

from tilestream.arrival.device import GateWords
from tilestream.kernels.epilogue import Epilogue
from tilestream.kernels.portable.arguments import NO_GATE, Arguments, GateArguments, Layout, chunk_table
from tilestream.kernels.portable.gemm import gemm
from tilestream.kernels.portable.jit import INTERPRETED
from tilestream.kernels.portable.schedule import RECORD
from tilestream.plan.plan import Plan
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import NO_WORDS, Words, captured_words, device_workspace
from tilestream.runtime.record import op_number

#: The longest deadline that a kernel can count to in nanoseconds: 30 years.
_LONGEST_SECONDS = 1e9
#: Tables of captured launches, which read or copy them at each replay: a graph may live for ever.
_captured_tables: list[torch.Tensor] = []


class Signals(Protocol):
    """What a launch needs of signals: see `tilestream.arrival.device.DeviceSignals`."""

    def use(self) -> GateWords:
        """Words for a launch on the current stream."""


class Incoming(NamedTuple):
    """How the operands of a call arrive.

    Attributes
    ----------
    rows, columns
        The signals of A's rows and of B's columns; None where all is there.
    deadline
        Seconds from the start of each worker.
    op
        For messages.
    """

    rows: Signals | None
    columns: Signals | None
    deadline: float
    op: str


class Probe:
    """A log of what each worker of one launch took: see `tilestream.kernels.portable.schedule`.

    Parameters
    ----------
    capacity
        Records a worker has room for.
    """

    def __init__(self, workers: int, capacity: int, device: torch.device) -> None:
        self.workers, self.capacity = workers, capacity
        self.words = torch.full((workers, capacity, RECORD.value), -1, dtype=torch.int32, device=device)

    def log(self, worker: int) -> list[list[int]]:
        """The records of a worker, in order."""
        rows: list[list[int]] = self.words[worker].tolist()
        return [row for row in rows if row[0] >= 0]


class GemmLaunch:
    """The portable GEMM for one plan, one layout of the operands and one alignment of their addresses.

    Holds no operand: a call is given all of them. The compiled kernel is looked up by Triton at the first call and then
    launched directly, which takes a third of the time.
    """

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self.plan, self.layout = plan, layout
        self._arguments = Arguments(plan, layout)
        self._grid = (plan.schedule.workers, 1, 1)
        self._compiled: Callable[[int, tuple[Any, ...]], None] | None = None
        self._tables = [_Table(plan.schedule.raster.table), *(_Table(chunk_table(plan, i)) for i in (0, 1))]
        self._wordless = plan.schedule.kind == "static" and plan.gate is None

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue,
        incoming: Incoming | None = None, probe: Probe | None = None,
    ) -> None:  # fmt: skip
        """Issue the launch on the current stream of the current device, which is the operands'."""
        device = a.device
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        gate = NO_GATE if incoming is None else self._gate(device, incoming)
        if self._wordless:
            self._issue(stream, a, b, out, epilogue, NO_WORDS, gate, probe)
        elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            words = captured_words(device, self.plan.schedule, self.plan.block)
            self._issue(stream, a, b, out, epilogue, words, gate, probe)
        else:
            workspace = device_workspace(device, stream)
            with workspace.lock:
                words = workspace.open(self.plan.schedule, self.plan.block)
                self._issue(stream, a, b, out, epilogue, words, gate, probe)

    def _issue(
        self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, words: Words,
        gate: GateArguments, probe: Probe | None,
    ) -> None:  # fmt: skip
        operands = (
            a, b, out, epilogue.bias, epilogue.residual, words.partials, words.counts, words.counters,
            self._tables[0].on(a.device), None if probe is None else probe.words, words.base, words.reset,
            epilogue.alpha, epilogue.beta,
        )  # fmt: skip
        scales = epilogue.scale_a, epilogue.scale_b
        if probe is not None:
            probing = Arguments(self.plan, self.layout, probe=True)
            gemm[self._grid](
                *probing.fill(*operands, capacity=probe.capacity, gate=gate, scales=scales), **probing.options
            )
        elif self._compiled is not None:
            # Addresses and no tensors: the launcher asks the driver about each tensor.
            if gate is not NO_GATE:
                gate = GateArguments(*map(_address, gate))
            scales = _address(scales[0]), _address(scales[1])
            self._compiled(stream, self._arguments.fill(*map(_address, operands), gate=gate, scales=scales))
        else:
            filled = self._arguments.fill(*operands, gate=gate, scales=scales)
            kernel = gemm[self._grid](*filled, **self._arguments.options)
            self._compiled = None if INTERPRETED else _direct(kernel, self._grid)

    def _gate(self, device: torch.device, incoming: Incoming) -> GateArguments:
        rows, columns = (
            (None, None, 1, 0) if signals is None else signals.use() for signals in (incoming.rows, incoming.columns)
        )
        report = channel(device)
        return GateArguments(
            rows[0], rows[1], self._tables[1].on(device), columns[0], columns[1], self._tables[2].on(device),
            report.records, report.claims, rows[2], rows[3], columns[2], columns[3],
            int(1e9 * min(incoming.deadline, _LONGEST_SECONDS)), op_number(incoming.op),
        )  # fmt: skip


def _direct(kernel: Any, grid: tuple[int, int, int]) -> Callable[[int, tuple[Any, ...]], None]:
    """A compiled kernel's own launcher, without what Triton does around it each time."""
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    hooks = triton.knobs.runtime

    def launch(stream: int, filled: tuple[Any, ...]) -> None:
        if _calls(hooks.launch_enter_hook) or _calls(hooks.launch_exit_hook):  # a profiler, say
            kernel[grid](*filled, stream=stream)
        else:
            run(*grid, stream, function, metadata, None, None, None, *filled)

    return launch


def _address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def _calls(hook: Any) -> bool:
    """Whether one of Triton's hooks does anything."""
    return hook is not None and bool(getattr(hook, "calls", True))


class _Table:
    """Integers that a launch reads from the device's memory, brought there at its first call."""

    def __init__(self, values: Sequence[int] | None) -> None:
        self._values = values
        self._there: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor | None:
        """The table on ``device``, for the current stream."""
        if self._values is None:
            return None
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and self._there is not None:
            _captured_tables.append(self._there)
        if self._there is None and capturing:
            # A copy that is captured happens at each replay, and not before: it serves this launch only.
            source = torch.tensor(self._values, dtype=torch.int32, pin_memory=True, device="cpu")
            _captured_tables.append(source)
            return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source, non_blocking=True)
        if self._there is None:
            with torch.inference_mode(False):
                self._there = torch.tensor(self._values, dtype=torch.int32, device="cpu").to(device)
        elif device.type == "cuda":
            self._there.record_stream(torch.cuda.current_stream(device))
        return self._there
