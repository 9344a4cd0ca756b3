"""What models of several ranks share: whose an operation is, and a rank that may be lost at any moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import LEFT

#: ``(model, rank, op, memory) -> possible answers``, empty if ``op`` blocks.
Asked = Callable[[Any, int, Any, Memory], Sequence[int]]
#: ``(model, rank, op, answer, memory)``: changes the memory in place or raises `Fault`.
Does = Callable[[Any, int, Any, int, Memory], None]


class RankedModel(Model):
    """Processes of ranks: ``roles`` of each rank, rank by rank. A lost rank does nothing.

    The functions in ``asked`` and ``performed`` are `Asked` and `Does`. Other operations are answered by 0.
    """

    case: Any
    roles: int
    #: Whether a state without steps is no deadlock if the environment can continue it.
    may_be_continued = True

    def at(self, rank: int, name: str) -> int:
        """Where a word of a rank is; ``"dead"``: whether it is lost."""
        raise NotImplementedError

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """See `Model.answers_of`: a lost rank does nothing."""
        ask = self.asked.get(type(op))

        def answers(pid: int, op: Any, m: Memory) -> Sequence[Any]:
            rank = pid // self.roles
            if m[self.at(rank, "dead")]:
                return ()
            return (0,) if ask is None else ask(self, rank, op, m)

        return answers

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """See `Model.performer_of`."""
        done = self.performed.get(type(op))
        return None if done is None else lambda pid, op, answer, m: done(self, pid // self.roles, op, answer, m)

    def impatient(self, rank: int, m: Memory) -> list[tuple[str, Memory]]:
        """The events by which a rank gives up waiting."""
        return []

    def lose(self, rank: int, m: Memory) -> None:
        """What else becomes of a rank that is lost."""

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """See `Model.environment`: ranks give up waiting, and one is lost."""
        out: list[tuple[str, Memory]] = []
        for rank in self.alive(m):
            out += self.impatient(rank, m)
            if rank == self.case.lost:
                n = m.copy()
                n[self.at(rank, "dead")] = 1
                self.lose(rank, n)
                out.append((f"rank {rank} is lost", n))
        return out

    def alive(self, m: Memory) -> list[int]:
        """The ranks that are not lost."""
        return [rank for rank in range(self.case.world) if not m[self.at(rank, "dead")]]

    def at_rest(self, m: Memory) -> None:
        """See `Model.at_rest`."""
        alive = self.alive(m)
        here = [pid for pid in range(len(self.processes)) if pid // self.roles in alive and m[pid] != LEFT]
        if not here:
            self.all_have_left(alive, m)
        elif not (self.may_be_continued and self.environment(m)):
            raise Fault("deadlock", "; ".join(self.blocked(m, here)))

    def all_have_left(self, alive: list[int], m: Memory) -> None:
        """Raise `Fault` if the memory is wrong when all processes of the ranks ``alive`` have left."""
        raise NotImplementedError
