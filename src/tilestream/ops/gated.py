"""The native call path of calls whose operands arrive, and of products that publish their rows.

`tilestream.ops.native` has the calls that wait for nothing. Here a key also holds a number for each chunking. What
differs from call to call (signals, epochs, the deadline) is passed to the extension as integers. First the extension
says whether it has a launch for the call. Then the steps before a launch follow: stream waits, the beginning of a
publication.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch._C import _increment_version

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.flat import DEFAULT_DEADLINE
from tilestream.launch.gate import bounds_of
from tilestream.launch.observe import WORDS, Call, observe
from tilestream.ops import native
from tilestream.runtime.channel import check_device

if TYPE_CHECKING:
    from tilestream.launch.native import Extension

native.FILES.add(__file__)

#: Numbers of what decides a kernel. No number is used twice.
_numbers: dict[tuple[object, ...], int] = {}
_MOST_NUMBERS = 4096
_next_number = itertools.count(1)

#: The launch's words for an operand that does not arrive, and for an output that is not published.
_NO_SIGNALS, _NO_PUBLICATION = (None, None, 1, 0), (None, None, 1)

T = TypeVar("T")


def number(*what: object) -> int:
    """A number for what decides a kernel in addition to the call's arguments."""
    found = _numbers.get(what)
    if found is None:
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        found = _numbers.setdefault(what, next(_next_number))
    return found


class Gate(NamedTuple):
    """What a call on a GPU waits for, or publishes."""

    #: rows, columns: the signals of A's rows, or of attention's keys; those of B's columns.
    rows: DeviceSignals | None
    columns: DeviceSignals | None
    publish: DeviceSignals | None
    #: The numbers of four chunkings: of rows, of columns, of what is published, of the local rows.
    chunking: list[int]
    pivot: int  # of the publication
    deadline: float
    op: str
    #: Whether a launch raises what the device has reported. A call that has begun already does not.
    checks: bool = True

    @classmethod
    def of(
        cls, op: str, device: int, rows: Arrival | None, columns: Arrival | None, publish: Arrival | None,
        deadline: float | None,
    ) -> Gate | None:  # fmt: skip
        """The gate of a call; None for wrong arguments, for a call without one, and where the kernel itself copies."""
        if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline < math.inf):
            return None
        if (rows is None and columns is None) == (publish is None) or (publish is not None and deadline is not None):
            return None
        signals: list[DeviceSignals | None] = []
        chunking = []
        for one in (rows, columns, publish):
            if one is None:
                signals.append(None)
                chunking.append(0)
                continue
            found = one._signals if isinstance(one, Arrival) else None
            if not isinstance(found, DeviceSignals) or found.index != device or found.copies is not None:
                return None
            signals.append(found)
            chunking.append(number(one.pivot, one.num_chunks, one.rows_per_chunk, one.bounds, found.linked))
        of_rows, of_columns, published = signals
        local = None if of_rows is None else of_rows.local_rows
        chunking.append(0 if local is None else number(
            local.rows.shape, local.rows.dtype, local.rows.data_ptr() % 16 == 0, *local[1:4]
        ))  # fmt: skip
        return cls(
            of_rows, of_columns, published, chunking, 0 if publish is None else publish.pivot,
            DEFAULT_DEADLINE if deadline is None else float(deadline), op,
        )  # fmt: skip

    def words(self) -> list[int]:
        """The words of an eager launch in the present epochs, in the order of `tilestream.launch.observe.WORDS`."""
        rows = _NO_SIGNALS if self.rows is None else self.rows.eager_words
        columns = _NO_SIGNALS if self.columns is None else self.columns.eager_words
        published = _NO_PUBLICATION if self.publish is None else self.publish.eager_publication
        bounds = bounds_of(self.deadline, self.op) if self.publish is None else (0, 0)
        addresses = [0 if x is None else x.data_ptr() for x in (*rows[:2], *columns[:2])]
        counted = [0 if x is None else x.data_ptr() for x in published[:2]]
        return [*addresses, *rows[2:], *columns[2:], *bounds, *counted, published[2]]

    @property
    def local_rows(self) -> torch.Tensor | None:
        """The local rows; None if there are none."""
        local = None if self.rows is None else self.rows.local_rows
        return None if local is None else local.rows

    def launch(
        self, extension: Extension, ticket: int, of_rows: tuple[torch.Tensor, ...], of_columns: tuple[torch.Tensor, ...]
    ) -> tuple[bool, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """Launch on the current stream what the extension has found.

        Parameters
        ----------
        ticket
            What the extension has found: 0 for nothing, odd if the kernel reads local rows in place.
        of_rows, of_columns
            The operands that arrive. A matmul that fills one may have allocated it on its own stream.

        Returns
        -------
        tuple[bool, torch.Tensor | None, torch.Tensor | None]
            Whether it was launched; a new output; the log-sum-exp.
        """
        nothing = False, None, None
        if not ticket:
            return nothing
        if self.checks:
            check_device(of_rows[0].get_device())
        for signals, operands in ((self.rows, of_rows), (self.columns, of_columns)):
            if signals is not None:
                if signals.by_matmul:
                    for operand in operands:
                        operand.record_stream(torch.cuda.current_stream(operand.device))
                signals.use(local_rows=bool(ticket & 1) and signals is self.rows)
        if self.publish is not None:
            self.publish.publish()
        answer: tuple[bool, torch.Tensor | None, torch.Tensor | None] = nothing
        try:
            local = self.local_rows
            words = [*self.words(), 0 if local is None else local.data_ptr()]
            with contextlib.suppress(*native.REFUSALS):
                answer = extension.launch_found(of_rows[0], ticket, words)
        finally:  # after an interrupt, too: else the next publication would take this one for another thread's
            if self.publish is not None:
                if answer[0]:
                    self.publish.published(self.pivot)
                else:
                    self.publish.stopped()
        return answer


def _ticket(find: Callable[..., int], *call: Any) -> int:
    """The extension's ticket for a call; 0 for a call that it refuses, as for a number that is too large."""
    try:
        return find(*call)
    except native.REFUSALS:
        return 0


def _written(out: torch.Tensor | None, made: Any) -> torch.Tensor:
    """The output of a launch: a new one, or the caller's, whose version counter goes up."""
    if out is None:
        return made  # type: ignore[no-any-return]
    _increment_version((out,))
    return out


def product(call: tuple[Any, ...], gate: Gate | None, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The product, launched by the extension. The first call of its kind is ``run`` on the Python path.

    Parameters
    ----------
    call
        The arguments of `tilestream.ops.native.product`.
    """
    arguments = None if gate is None else native.wanted(*call)
    extension = native.loaded()
    if arguments is None or gate is None or extension is None:
        return run()
    _, a, b, out, bias, residual, alpha, beta, _, _, scale_a, scale_b, *_ = call
    ticket = _ticket(extension.find_gated_matmul, out, gate.chunking, *arguments)
    launched, made, _ = gate.launch(extension, ticket, (a,), (b,))
    if launched:
        return _written(out, made)
    with observe() as seen:
        result = run()
    if seen.launches:
        operands = {
            "a": a, "b": b, "out": result, "bias": bias, "residual": residual, "scale_a": scale_a, "scale_b": scale_b,
            "local": gate.local_rows,
        }  # fmt: skip
        observed = Call(operands, (float(alpha), float(beta)), dict(zip(WORDS, gate.words(), strict=True)))
        native.remember(observed, out is not None, seen, (gate.chunking, *arguments))
    return result


def attention(call: tuple[Any, ...], gate: Gate | None, run: Callable[[], T]) -> T:
    """`product` for attention whose keys and values arrive: the arguments of `tilestream.ops.native.attention`."""
    arguments = None if gate is None else native.wanted_attention(*call)
    extension = native.loaded()
    if arguments is None or gate is None or extension is None:
        return run()
    out = call[len(native.INPUTS)]
    ticket = _ticket(extension.find_gated_attention, out, gate.chunking, *arguments)
    launched, made, lse = gate.launch(extension, ticket, call[1:3], ())
    if launched:
        written = _written(out, made)
        return written if lse is None else (written, lse)  # type: ignore[return-value]
    with observe() as seen:
        answer = run()
    if seen.launches:
        observed = Call(native.operands_of(call, answer), words=dict(zip(WORDS, gate.words(), strict=True)))
        native.remember(observed, out is not None, seen, (gate.chunking, *arguments))
    return answer
