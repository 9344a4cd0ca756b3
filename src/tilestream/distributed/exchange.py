"""Messages of one call between the ranks of a gloo group: all peers at once, none held up by another.

::

    calling thread:   greet every peer; start a thread a peer
    a peer's thread:  their greeting; not like ours: fail, and exchange nothing with that peer
                      post all receives; send, as there is something to send; as each receive is done: landed

Both ranks of a pair see that their greetings differ, and neither posts data: so nobody hangs, all connections are as
they were, and the group works on. A rank that differs from one differs from that one at both ends; so if not all ranks
call alike, each of them raises.

A wait of gloo's that times out closes every connection of the group: that is how one who gives up tells all others
(`close`), and why the group is broken then (invariants 5 and 6).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from tilestream.core.errors import NO_ITEM, ArrivalTimeout, GroupBroken, TilestreamError
from tilestream.distributed.group_state import Member
from tilestream.distributed.handshake import GREETING_BYTES, differ
from tilestream.runtime import shutdown

#: Messages of ours; of greetings; and of nobody: what is waited for in order to time out.
_DATA, _GREETING, _NOTHING = 0x74731, 0x74732, 0x74733
#: Seconds that gloo waits longer than the call's deadline: who waits for the chunk shall be the one who raises.
_LONGER = 0.25


class Receive(NamedTuple):
    """Where a message goes, and what is done when it is there."""

    into: torch.Tensor
    landed: Callable[[], None]


class Traffic(Protocol):
    """What a call exchanges."""

    def incoming(self, peer: int) -> Sequence[Receive]:
        """What comes from ``peer``, in order."""

    def outgoing(self, peer: int) -> Iterable[torch.Tensor]:
        """What goes to ``peer``, in the order in which it receives; may wait for what is not computed yet."""

    def failed(self, peer: int, error: BaseException) -> None:
        """Nothing more will come from ``peer``."""


class Exchange:
    """See the module. `start`, then `finish` or `close`: no thread outlives the call.

    Parameters
    ----------
    op
        For messages.
    greeting
        Of this rank: see `tilestream.distributed.handshake`.
    seconds
        Until everything must be there.
    """

    def __init__(self, op: str, member: Member, greeting: bytes, traffic: Traffic, seconds: float) -> None:
        self._op, self._member, self._greeting, self._traffic = op, member, greeting, traffic
        self._group = member.group
        self._begin, self._seconds = time.perf_counter(), seconds
        self._end = self._begin + seconds + _LONGER
        self._landed: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._ours: dict[int, Any] = {}
        self._theirs: dict[int, tuple[torch.Tensor, Any]] = {}
        self._said = torch.frombuffer(bytearray(greeting), dtype=torch.uint8)
        self._lock = threading.Lock()
        self.errors: dict[int, BaseException] = {}

    def start(self) -> None:
        """Greet everybody, and go on in threads."""
        shutdown.register(self)
        peers = [(self._member.rank + x) % self._member.world for x in range(1, self._member.world)]
        try:
            for peer in peers:
                into = torch.empty(GREETING_BYTES, dtype=torch.uint8)
                self._theirs[peer] = into, self._group.recv([into], peer, _GREETING)
                self._ours[peer] = self._group.send([self._said], peer, _GREETING)
        except RuntimeError as error:  # a connection that is closed already
            raise self._member.break_(_first_line(error)) from error
        for peer in peers:
            thread = threading.Thread(target=self._run, args=(peer,), name=f"tilestream-peer-{peer}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """Wait until everything is exchanged; bounded, since every wait in the threads is.

        Raises
        ------
        GroupBroken, ArrivalTimeout, ValueError
            What the exchange with a peer ended with: the first rank's, a difference before a loss. Then nobody may
            go on with this group but after `close`.
        """
        self.join()
        for peer in sorted(self.errors, key=lambda peer: (isinstance(self.errors[peer], TilestreamError), peer)):
            raise self.errors[peer]

    def join(self) -> None:
        """Wait for the threads."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Give up: close every connection of the group, so that all ranks know, and wait for the threads."""
        if self._member.world > 1:
            peer = (self._member.rank + 1) % self._member.world
            with contextlib.suppress(RuntimeError):  # it times out, or the connections are closed already
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOTHING).wait(timedelta(milliseconds=1))
        self.join()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self, peer: int) -> None:
        try:
            with torch.inference_mode():
                self._exchange(peer)
        except BaseException as error:
            if isinstance(error, RuntimeError):  # gloo's
                error = self._lost(peer, error)
            with self._lock:
                self.errors[peer] = error
            self._traffic.failed(peer, error)

    def _lost(self, peer: int, error: BaseException) -> BaseException:
        if time.perf_counter() < self._end - 0.05:  # gloo counts in whole milliseconds
            return GroupBroken(self._member.name, f"{self._op}: lost rank {peer}: {_first_line(error)}")
        waited, me = time.perf_counter() - self._begin, self._member.rank
        return ArrivalTimeout(
            self._op, 0, self._landed.get(peer, 0), NO_ITEM, waited, self._seconds, me, f"rank {peer}'s part"
        )

    def _exchange(self, peer: int) -> None:
        theirs, greeted = self._theirs[peer]
        self._wait(greeted)
        error = differ(self._op, self._greeting, self._member.rank, bytes(theirs.tolist()), peer)
        if error is None:
            receives = [(receive, self._receive(receive.into, peer)) for receive in self._traffic.incoming(peer)]
            sends = [self._group.send([_bytes(x)], peer, _DATA) for x in self._traffic.outgoing(peer) if x.numel()]
            for receive, work in receives:
                if work is not None:
                    self._wait(work)
                receive.landed()
                self._landed[peer] = self._landed.get(peer, 0) + 1
            for work in sends:
                self._wait(work)
        self._wait(self._ours[peer])
        if error is not None:
            raise error

    def _receive(self, into: torch.Tensor, peer: int) -> Any:
        return self._group.recv([_bytes(into)], peer, _DATA) if into.numel() else None

    def _wait(self, work: Any) -> None:
        left = self._end - time.perf_counter()
        work.wait(timedelta(seconds=max(left, 0.001)))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes: gloo sends those of any dtype, those of 8 bits too."""
    return x.view(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
