"""`Launch`: a kernel of a GPU backend, for one plan and one layout.

In a call `tilestream.launch.cache.signature` finds the `Launch`; `Launch.__call__` provides its words; `Launch.issue`
packs addresses and numbers; a `Kernel`, on Hopper a `tilestream.launch.launcher.Launcher`, calls the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.flat import Awaited
from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.kernels.device.jit import INTERPRETED
from tilestream.kernels.device.schedule import RECORD
from tilestream.launch import compiling
from tilestream.launch.gate import NO_GATE, GateArguments, bounds_of, chunk_table, queue_table
from tilestream.launch.launcher import Launcher, watched
from tilestream.launch.native import issued, launcher_of, varying_of
from tilestream.launch.observe import observation
from tilestream.launch.trace import SpanLog
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.plan import Copies, Plan
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import NO_WORDS, Words, captured_words, device_workspace, words_of
from tilestream.runtime.outliving import outliving

#: Tables of captured launches, which each replay reads or copies. A graph may live as long as the process.
_captured_tables: list[torch.Tensor] = []


class Probe:
    """A log of the items that each worker of one launch took: see `tilestream.kernels.device.schedule`.

    Parameters
    ----------
    capacity
        The largest number of records of a worker.
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

    The arguments that a plan and a layout decide are computed once. A call gives the operands and keeps none of them.

    Parameters
    ----------
    plan
        None for a launch without counters and without waits.
    counts
        Whether the launch needs words: counters, partial results, lists.
    listed
        Elements of each half of a list that the launch itself makes.
    floats
        Elements of partial results that it needs with every schedule.
    copies
        The operand that the kernel copies; None if it copies none.
    """

    #: Why the kernel cannot wait for what arrives; empty if it can.
    refuses = ""

    def __init__(
        self, plan: Plan | AttentionPlan | None, counts: bool, listed: int = 0, floats: int = 0,
        copies: Copies = "none",
    ) -> None:  # fmt: skip
        self.plan: Any = plan
        self._schedule = plan.schedule if counts and plan is not None else None
        self._listed, self._floats, self._copies = listed, floats, copies

    def __call__(self, x: Any, awaited: Awaited | None = None, probe: Probe | SpanLog | None = None) -> None:
        """Issue the launch on the current stream of the current device, which is the operands'.

        Parameters
        ----------
        x
            `GemmOperands`, `AttentionOperands`, or `MergeOperands`.
        awaited
            The signals of what arrives, if and only if the plan has arriving operands.
        probe
            A log to write. Another kernel is launched then.
        """
        if awaited is not None and self.refuses:
            raise ValueError(self.refuses)
        device, schedule = x[0].device, self._schedule
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        if schedule is None:
            self._issue(stream, x, NO_WORDS, awaited, probe)
        elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            words = captured_words(device, schedule, self.plan.block, self._listed, self._floats)
            self._issue(stream, x, words, awaited, probe)
        else:
            workspace = device_workspace(device, stream)
            with workspace.lock:
                words = workspace.open(schedule, self.plan.block, self._listed, self._floats)
                self._issue(stream, x, words, awaited, probe)
        if (seen := observation()) is not None:
            seen.launches.append(self)

    @property
    def needs(self) -> tuple[int, int, int, int, int]:
        """The launch's needs of a workspace: tickets, counters, counts, partials, elements of half a list.

        All are 0 for a launch without words.
        """
        schedule = self._schedule
        if schedule is None:
            return 0, 0, 0, 0, 0
        block = self.plan.block
        partials = max(self._floats, schedule.slots * block[0] * block[1])
        return schedule.most_tickets, words_of(schedule), 2 * schedule.slots, partials, self._listed

    @property
    def tables(self) -> list[torch.Tensor]:
        """The tables of the launches so far."""
        return []

    def _issue(self, stream: int, x: Any, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None) -> None:
        """`issue`, while the operands whose copies are offered to the kernel are locked.

        All launches lock them in one order. Otherwise two threads with swapped operands could deadlock.
        """
        if awaited is None or self._copies == "none":
            self.issue(stream, x, words, awaited, probe)
            return
        found = {one.key: one for one in (awaited.rows, awaited.columns) if one is not None and one.copied}
        with contextlib.ExitStack() as around:
            for key in sorted(found):
                around.enter_context(found[key].copying())
            self.issue(stream, x, words, awaited, probe)

    def issue(self, stream: int, x: Any, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None) -> None:
        """Launch the kernel on ``stream`` with ``words``."""
        raise NotImplementedError

    def _copied(self, awaited: Awaited | None) -> DeviceSignals | None:
        """The signals of the operand whose copies the kernel makes."""
        if awaited is None or self._copies == "none":
            return None
        signals: DeviceSignals | None = awaited.rows if self._copies == "rows" else awaited.columns
        return signals


class GemmLaunch(Launch):
    """The arguments that the launches of all GEMM kernels share: tables, the gate, copies."""

    def __init__(self, plan: Plan) -> None:
        counts = plan.schedule.kind != "static" or plan.gate is not None or bool(plan.realigned)
        super().__init__(plan, counts, copies=plan.copies)
        self.table = Table(plan.schedule.raster.table)
        self._chunks = [Table(chunk_table(plan, i)) for i in (0, 1)]
        self._queues = Table(queue_table(plan))
        if self._copies != "none" and not 1 <= plan.copiers <= plan.workers:
            raise ValueError(
                f"plan: copiers={plan.copiers} of {plan.workers} workers; where the kernel makes the copies, from 1 to "
                "all of its workers do"
            )

    @property
    def tables(self) -> list[torch.Tensor]:
        """See `Launch`."""
        return [one.there for one in (self.table, *self._chunks, self._queues) if one.there is not None]

    def copies(self, awaited: Awaited | None) -> CopyArguments:
        """The copies that a launch on the current stream makes. Call it before `gate`, which starts other copies."""
        signals = self._copied(awaited)
        return NO_COPIES if signals is None else signals.take_copies(self.plan.copiers)

    def gate(self, device: torch.device, awaited: Awaited | None, local_rows: bool = False) -> GateArguments:
        """The gate's arguments of a launch on the current stream; ``local_rows``: see `DeviceSignals.use`."""
        if awaited is None:
            return NO_GATE
        rows, columns = (
            (None, None, 1, 0) if signals is None else signals.use(local_rows and signals is awaited.rows)
            for signals in (awaited.rows, awaited.columns)
        )
        return GateArguments(
            rows[0], rows[1], self._chunks[0].on(device), columns[0], columns[1], self._chunks[1].on(device),
            *records_of(device), self._queues.on(device), rows[2], rows[3], columns[2], columns[3],
            *bounds_of(awaited.deadline, awaited.op),
        )  # fmt: skip


def gate_of(device: torch.device, awaited: Awaited | None, what: str) -> GateArguments:
    """What a launch on the current stream is told of rows by source (``"row"``) or of B's matrices (``"column"``)."""
    if awaited is None:
        return NO_GATE
    signals = awaited.rows if what == "row" else awaited.columns
    words, quarantine, epoch, key = signals.use()
    records, claims = records_of(device)
    allowed, op = bounds_of(awaited.deadline, awaited.op)
    its = {f"{what}_signals": words, f"{what}_quarantine": quarantine, f"{what}_epoch": epoch, f"{what}_key": key}
    return NO_GATE._replace(**its, records=records, claims=claims, allowed=allowed, op=op)


def records_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The records and the claims of the device's error channel, for a gate."""
    if device.type == "meta":  # for `tilestream.launch.compiling.ahead`: nothing runs
        nothing = torch.empty(1, dtype=torch.int64, device=device)
        return nothing, nothing
    report = channel(device)
    return report.records, report.claims


class Kernel:
    """A Triton kernel with a grid. The first launch compiles it, or finds it in Triton's cache.

    Later launches call the compiled kernel's own launcher directly, which takes a third of the time. They pass
    addresses: for a tensor the launcher would ask the driver.

    ``cluster``, ``room``: see `tilestream.launch.launcher.Launcher`, which launches kernels that have them.
    """

    def __init__(
        self, function: Any, grid: tuple[int, int, int], options: dict[str, Any] | None = None, cluster: int = 1,
        room: int = 0,
    ) -> None:  # fmt: skip
        self._function, self._grid, self._options = function, grid, options or {}
        self._cluster, self._room = cluster, room
        self._compiled: Any = None
        #: Of a cluster: its launcher, and which arguments a launch gives.
        self._launcher: tuple[Launcher, list[bool]] | None = None

    def take(self, values: Iterable[Any]) -> Iterable[Any]:
        """Arguments of the next launch: tensors for the first launch, later their addresses."""
        return values if self._compiled is None else map(address, values)

    def __call__(self, stream: int, filled: Sequence[Any]) -> None:
        """Launch with all arguments. Tensors have gone through `take`."""
        if self._compiled is None:
            self.compile(filled)
        compiled = self._compiled
        if compiled is None:
            self._function[self._grid](*filled, **self._options)
        elif compiling.is_ahead():
            return
        elif self._cluster > 1:
            filled = [address(value) for value in filled]
            launcher, varies = self._launcher = self._launcher or launcher_of(
                compiled, self._grid, filled, self._cluster, self._room
            )
            launcher(stream, *varying_of(varies, filled))
            return  # the launcher tells observers itself
        elif watched():
            compiled[self._grid](*filled, stream=stream)
        else:
            compiled.run(
                *self._grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *filled
            )  # fmt: skip
        if (seen := observation()) is not None:
            values = [address(value) for value in filled]
            seen.issued.append(None if self._compiled is None else issued(self._compiled, self._grid, values))

    def compile(self, filled: Sequence[Any]) -> None:
        """Compile the kernel before the first launch, for arguments like these."""
        if self._compiled is None and not INTERPRETED:
            self._compiled = compiling.compiled(self._function, filled, self._options)

    def load(self, filled: Sequence[Any]) -> None:
        """Load the kernel on the device before the first launch, for arguments like these."""
        self.compile(filled)
        if self._compiled is not None and not compiling.is_ahead():
            _ = self._compiled.run  # Triton loads the kernel for this attribute


def address(x: Any) -> Any:
    """A tensor's address; any other value as it is."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


class Table:
    """Integers that a launch reads from device memory. The first call copies them there."""

    def __init__(self, values: Sequence[int] | None) -> None:
        self._values = values
        #: The table on the device, after the first call.
        self.there: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor | None:
        """The table on ``device``, for the current stream."""
        if self._values is None:
            return None
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and self.there is not None:
            _captured_tables.append(self.there)
        if self.there is None and capturing:
            # A captured copy runs at each replay, and not before: it serves this launch only.
            source = torch.tensor(self._values, dtype=torch.int32, pin_memory=True, device="cpu")
            _captured_tables.append(source)
            return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source, non_blocking=True)
        if self.there is None:
            values = self._values
            self.there = outliving(device, lambda: torch.tensor(values, dtype=torch.int32, device="cpu").to(device))
        elif device.type == "cuda":
            self.there.record_stream(torch.cuda.current_stream(device))
        return self.there
