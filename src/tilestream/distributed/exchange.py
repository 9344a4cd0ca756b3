"""The messages of one call between the ranks of a gloo group, with all peers at once, each peer in its own thread.

::

    calling thread:   send the handshake to every peer; start a thread for each
    a peer's thread:  receive its handshake; if it differs: fail, and exchange nothing with that peer
                      for each round: post all receives; send, as data become ready; after each receive: landed

If two handshakes differ, both ranks of the pair see it, and neither posts data. So no rank hangs, and all connections
and the group stay usable. If not all ranks make the same call, each rank differs from some peer, and raises.

A gloo wait that times out closes every connection of the group. A rank that gives up informs all others in this way
(`_close`), and the group is broken (invariants 5 and 6).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tilestream.core.errors import NO_ITEM, ArrivalTimeout, GroupBroken, TilestreamError
from tilestream.core.protocols.handshake import HANDSHAKE_BYTES, difference
from tilestream.distributed.collective import as_bytes, first_line
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import Call
from tilestream.runtime import shutdown

T = TypeVar("T")

#: Tags of data, of handshakes, and of a message that no rank sends: waiting for it forces a timeout.
_DATA, _HANDSHAKE, _NEVER_SENT = 0x74731, 0x74732, 0x74733
#: Seconds by which gloo's waits exceed the call's deadline, so that the wait for the chunk raises first.
_EXTRA_SECONDS = 0.25


def ignore() -> None:
    """``landed`` of a tensor that is not the last of its chunk."""


class Receive(NamedTuple):
    """The destination of a message, and a function to call after its arrival."""

    into: torch.Tensor
    landed: Callable[[], None] = ignore


class Round(NamedTuple):
    """The messages of one round with one peer."""

    incoming: Sequence[Receive]  # the peer's messages, in order
    #: The messages to the peer, in the order of its receives. It may wait for data that are still computed, if these do
    #: not depend on this round's ``incoming``.
    outgoing: Iterable[torch.Tensor]


class Traffic(Protocol):
    """The messages of a call."""

    def rounds(self, peer: int) -> Iterable[Round]:
        """The rounds with ``peer``; each is taken after the previous one has landed, and may depend on it."""

    def failed(self, peer: int, error: BaseException) -> None:
        """Note that no more messages will come from ``peer``."""


class Exchange:
    """The exchange of one call, performed by `run`; no thread outlives the call. See the module's docstring.

    Parameters
    ----------
    seconds
        The deadline of the whole exchange.
    """

    def __init__(self, state: GroupState, call: Call, traffic: Traffic, seconds: float) -> None:
        self._op, self._state, self._mine, self._traffic = call.op, state, call.handshake, traffic
        self._group = state.group
        self._begin, self._seconds = time.perf_counter(), seconds
        self._end = self._begin + seconds + _EXTRA_SECONDS
        self._landed: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._sends: dict[int, Any] = {}
        self._receives: dict[int, tuple[torch.Tensor, Any]] = {}
        self._message = torch.frombuffer(bytearray(self._mine), dtype=torch.uint8)
        self._lock = threading.Lock()
        self.errors: dict[int, BaseException] = {}

    def run(self, compute: Callable[[], T]) -> T:
        """Return ``compute()``, during which the exchange runs.

        Raises
        ------
        GroupBroken, ArrivalTimeout, ValueError
            The error of the exchange with a peer. It breaks the group, unless it is a difference between the ranks'
            calls.
        """
        try:
            self._start()
            result = compute()
            self.finish()
        except BaseException as error:
            if isinstance(error, ValueError):  # a peer's call differs; the exchange with other peers completes
                self._join()
                lost = next((e for e in self.errors.values() if isinstance(e, TilestreamError)), None)
                if lost is None:
                    raise
                error = lost
            self._state.break_(error.reason if isinstance(error, GroupBroken) else f"{type(error).__name__}: {error}")
            self._close()
            raise
        return result

    def finish(self) -> None:
        """Wait until all messages are exchanged; bounded, like every wait in the threads.

        Raises
        ------
        GroupBroken, ArrivalTimeout, ValueError
            The error of the exchange with a peer: a difference before a loss, the lowest rank first.
        """
        self._join()
        for peer in sorted(self.errors, key=lambda peer: (isinstance(self.errors[peer], TilestreamError), peer)):
            raise self.errors[peer]

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        for thread in self._threads:
            thread.join(timeout)

    def _start(self) -> None:
        """Send the handshake to every peer, and start the threads."""
        shutdown.register(self)
        peers = [(self._state.rank + x) % self._state.world for x in range(1, self._state.world)]
        try:
            for peer in peers:
                into = torch.empty(HANDSHAKE_BYTES, dtype=torch.uint8)
                self._receives[peer] = into, self._group.recv([into], peer, _HANDSHAKE)
                self._sends[peer] = self._group.send([self._message], peer, _HANDSHAKE)
        except RuntimeError as error:  # a connection is already closed
            raise self._state.break_(first_line(error)) from error
        for peer in peers:
            thread = threading.Thread(target=self._run, args=(peer,), name=f"tilestream-peer-{peer}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _close(self) -> None:
        """Give up: close every connection of the group, so that all ranks notice, and wait for the threads."""
        if self._state.world > 1:
            peer = (self._state.rank + 1) % self._state.world
            with contextlib.suppress(RuntimeError):  # a timeout, or connections that are already closed
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self._join()

    def _run(self, peer: int) -> None:
        try:
            with torch.inference_mode():
                self._exchange(peer)
        except BaseException as error:
            if isinstance(error, RuntimeError):  # from gloo
                error = self._lost(peer, error)
            with self._lock:
                self.errors[peer] = error
            self._traffic.failed(peer, error)

    def _lost(self, peer: int, error: BaseException) -> BaseException:
        if time.perf_counter() < self._end - 0.05:  # gloo counts in whole milliseconds
            return GroupBroken(self._state.name, f"{self._op}: lost rank {peer}: {first_line(error)}")
        waited, chunk, whose = time.perf_counter() - self._begin, self._landed.get(peer, 0), f"rank {peer}'s part"
        return ArrivalTimeout(self._op, 0, chunk, NO_ITEM, waited, self._seconds, self._state.rank, whose)

    def _exchange(self, peer: int) -> None:
        theirs, received = self._receives[peer]
        self._wait(received)
        error = difference(self._op, self._mine, self._state.rank, bytes(theirs.tolist()), peer)
        if error is None:
            sends: list[Any] = []
            for incoming, outgoing in self._traffic.rounds(peer):
                receives = [(receive, self._receive(receive.into, peer)) for receive in incoming]
                sends += [self._group.send([as_bytes(x)], peer, _DATA) for x in outgoing if x.numel()]
                for receive, work in receives:
                    if work is not None:
                        self._wait(work)
                    receive.landed()
                    self._landed[peer] = self._landed.get(peer, 0) + 1
            for work in sends:
                self._wait(work)
        self._wait(self._sends[peer])
        if error is not None:
            raise error

    def _receive(self, into: torch.Tensor, peer: int) -> Any:
        return self._group.recv([as_bytes(into)], peer, _DATA) if into.numel() else None

    def _wait(self, work: Any) -> None:
        left = self._end - time.perf_counter()
        work.wait(timedelta(seconds=max(left, 0.001)))
