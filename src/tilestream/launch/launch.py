"""What the launches of all GPU kernels have in common: words for a launch, tables, and which call issues what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from tilestream.arrival.device import Apart, GateWords
from tilestream.arrival.flat import Awaited
from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.core.error_record import op_number
from tilestream.core.operands import Epilogue
from tilestream.core.schedule import Schedule
from tilestream.kernels.device.schedule import RECORD
from tilestream.launch.gate import NO_GATE, GateArguments, chunk_table, queue_table
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import NO_WORDS, Words, captured_words, device_workspace

#: The longest deadline that a kernel can count to in nanoseconds: 30 years.
LONGEST_SECONDS = 1e9

#: Tables of captured launches, which read or copy them at each replay: a graph may live for ever.
_captured_tables: list[torch.Tensor] = []


class Signals(Protocol):
    """What a launch needs of signals: see `tilestream.arrival.device.DeviceSignals`."""

    key: int

    @property
    def copied(self) -> int:
        """Bytes of the words in which a kernel may copy what they signal; 0 where no copies are offered."""

    @property
    def apart(self) -> Apart | None:
        """Rows that stand apart from the others."""

    def use(self, apart: bool = False) -> GateWords:
        """Words for a launch on the current stream; ``apart``: one that reads such rows where they stand."""


class Copied(Signals, Protocol):
    """Of an operand whose copies the kernel may make: see `tilestream.arrival.device.DeviceSignals`."""

    def copying(self) -> AbstractContextManager[None]:
        """Around a launch."""

    def take_copies(self, copiers: int) -> CopyArguments:
        """What a launch on the current stream copies."""


def offered(incoming: Awaited | None) -> list[Copied]:
    """The operands whose copies are offered to kernels, in an order that all launches share.

    Each is locked while a launch is made that may take them: two launches whose operands are swapped, in two threads,
    would else wait for each other.
    """
    operands = () if incoming is None else (incoming.rows, incoming.columns)
    found = {signals.key: signals for signals in operands if signals is not None and signals.copied}
    return [cast("Copied", found[key]) for key in sorted(found)]


class Probe:
    """A log of what each worker of one launch took: see `tilestream.kernels.device.schedule`.

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


class Launch:
    """A GPU kernel for one plan, one layout of the operands and one alignment of their addresses.

    Holds no operand: a call is given all of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.table = Table(plan.schedule.raster.table)
        self._chunks = [Table(chunk_table(plan, i)) for i in (0, 1)]
        self._queues = Table(queue_table(plan))
        self._copies = plan.copies
        if self._copies != "none" and not 1 <= plan.copiers <= plan.workers:
            raise ValueError(
                f"plan: copiers={plan.copiers} of {plan.workers} workers; where the kernel makes the copies, from 1 to "
                "all of its workers do"
            )
        self._wordless = plan.schedule.kind == "static" and plan.gate is None

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue,
        incoming: Awaited | None = None, probe: Probe | SpanLog | None = None,
    ) -> None:  # fmt: skip
        """Issue the launch on the current stream of the current device, which is the operands'."""
        coming = () if self._copied(incoming) is None else offered(incoming)

        def issue(stream: int, words: Words) -> None:
            with contextlib.ExitStack() as around:
                for signals in coming:
                    around.enter_context(signals.copying())
                self.issue(stream, a, b, out, epilogue, words, incoming, probe)

        with_words(a.device, None if self._wordless else self.plan.schedule, self.plan.block, issue)

    def issue(
        self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, words: Words,
        incoming: Awaited | None, probe: Probe | SpanLog | None,
    ) -> None:  # fmt: skip
        """Launch the kernel on ``stream``, with ``words`` to work on."""
        raise NotImplementedError

    def copies(self, incoming: Awaited | None) -> CopyArguments:
        """What a launch on the current stream copies itself; asked before `gate`, which would have it copied."""
        coming = self._copied(incoming)
        return NO_COPIES if coming is None else coming.take_copies(self.plan.copiers)

    def _copied(self, incoming: Awaited | None) -> Copied | None:
        """The signals of the operand whose copies the kernel makes."""
        if incoming is None or self._copies == "none":
            return None
        return cast("Copied", incoming.rows if self._copies == "rows" else incoming.columns)

    def gate(self, device: torch.device, incoming: Awaited | None, apart: bool = False) -> GateArguments:
        """What a launch on the current stream is told of what arrives; ``apart``: see `Signals.use`, of A's rows."""
        if incoming is None:
            return NO_GATE
        rows, columns = (
            (None, None, 1, 0) if signals is None else signals.use(apart and signals is incoming.rows)
            for signals in (incoming.rows, incoming.columns)
        )
        report = channel(device)
        return GateArguments(
            rows[0], rows[1], self._chunks[0].on(device), columns[0], columns[1], self._chunks[1].on(device),
            report.records, report.claims, self._queues.on(device), rows[2], rows[3], columns[2], columns[3],
            int(1e9 * min(incoming.deadline, LONGEST_SECONDS)), op_number(incoming.op),
        )  # fmt: skip


def with_words(
    device: torch.device, schedule: Schedule | None, block: Sequence[int], issue: Callable[[int, Words], None],
    listed: int = 0, floats: int = 0,
) -> None:  # fmt: skip
    """Issue a launch on the current stream, with words to work on; ``schedule`` is None where it needs none.

    Parameters
    ----------
    block
        Of a slot: see `Words`.
    issue
        Told the stream and the words.
    listed
        Elements of either half of a list that the launch makes for itself.
    floats
        Elements of partial results that it asks for, whatever its schedule.
    """
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    if schedule is None:
        issue(stream, NO_WORDS)
    elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        issue(stream, captured_words(device, schedule, block, listed, floats))
    else:
        workspace = device_workspace(device, stream)
        with workspace.lock:
            issue(stream, workspace.open(schedule, block, listed, floats))


def address(x: Any) -> Any:
    """A tensor's address; what is none stays as it is."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


class Table:
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
