"""`Model`: processes over shared memory. A subclass defines the meaning of each operation.

A state is a tuple: the local state of each process, then the shared memory. A step is one operation of one process, or
one event of the environment (a chunk arrives, a deadline expires, a load lands).

With reductions, a step is a chain: *delayed* operations, one operation, then *eager* operations of the same process.

- An operation may be **delayed** until just before the next operation of its process if delaying removes no behaviour
  of other processes and adds no fault that could not happen anyway.
- An operation may be **eager**, done directly after the previous operation, if no other process can tell the
  difference, and if doing it at once shows at least the faults that doing it later would show.

Each model gives the reasons for its choices. Tests compare the verdicts with and without reductions at small sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.processes import LEFT, Locals, Process

State = tuple[Any, ...]
Memory = list[Any]

#: An operation's role in a chain. LAZY is delayed even if the next operation is blocked: the step then does nothing.
STOP, EAGER, DELAYED, LAZY = range(4)


class Model:
    """Base of the models.

    Attributes
    ----------
    eager, delayed, lazy
        The types of operations that may be chained; see the module.
    progress
        The types of operations that take new work. A circle of states without any of them is a livelock.
    asked, performed
        The tables of `answers_of` and `performer_of`: methods by the type of their operation.
    """

    eager: ClassVar[frozenset[type]] = frozenset()
    delayed: frozenset[type] = frozenset()
    lazy: ClassVar[frozenset[type]] = frozenset()
    progress: ClassVar[frozenset[type]] = frozenset()
    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {}
    performed: ClassVar[dict[type, Callable[..., None]]] = {}

    def __init__(self, processes: Sequence[Process], reduce: bool = True, symmetry: bool = True) -> None:
        self.processes = list(processes)
        self.reduce = reduce
        self.symmetry = symmetry
        self._chain: list[int] = [STOP]
        self._answers: list[Callable[[int, Any, Memory], Sequence[Any]] | None] = [None]
        self._perform: list[Callable[[int, Any, Any, Memory], None] | None] = [None]
        self._progresses: list[bool] = [False]
        self._minimised = False
        self.locals = Locals(self.processes, self._bind, merge=reduce, remember=self.remember)

    # A subclass's methods -------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """The shared memory at the start."""
        raise NotImplementedError

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """The possible events of the environment."""
        return []

    def canonical(self, state: State) -> State:
        """The representative of all states that differ only in the names of interchangeable processes."""
        return state

    def at_rest(self, m: Memory) -> None:
        """Raise `Fault` for a state without steps, unless it is a good end or the environment can continue it."""
        here = self.blocked(m)
        if not here:
            self.at_end(m)
        elif not self.environment(m):
            raise Fault("deadlock", "; ".join(here))

    def at_end(self, m: Memory) -> None:
        """Raise `Fault` if the memory is wrong after all processes have left."""

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """``(process, op, memory) -> possible answers``, empty if ``op`` blocks; None if the answer is always 0."""
        ask = self.asked.get(type(op))
        return None if ask is None else partial(ask, self)

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """``(process, op, answer, memory)``: changes the memory in place or raises `Fault`; None if nothing changes."""
        perform = self.performed.get(type(op))
        return None if perform is None else partial(perform, self)

    def format_step(self, pid: int, op: Any, answer: Any) -> str:
        """A process, an operation and its answer as a line of a trace."""
        return f"{self.processes[pid].name}: {self.describe(op)}{self.describe_answer(op, answer)}"

    def describe(self, op: Any) -> str:
        """An operation in a trace."""
        return describe(op)

    def describe_answer(self, op: Any, answer: Any) -> str:
        """What follows an operation in a trace: its answer, if there are several."""
        return f" -> {answer}" if len(self.domain(op, None)) > 1 else ""

    def remember(self, op: Any, answer: Any) -> Hashable:
        """The part of an answer that a property needs later, even if the program forgets it; None for nothing."""
        return None

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """All possible answers of ``op`` after ``past``. Extra ones are harmless; missing ones cost merging."""
        return (0,)

    def urgent(self, pid: int, m: Memory) -> bool:
        """Whether the next step of this process never concerns another process. It then goes first, alone."""
        return False

    def blocked(self, m: Memory, pids: Iterable[int] | None = None) -> list[str]:
        """The processes (None: all) that have not left, with their current operations."""
        here = (pid for pid in pids or range(len(self.processes)) if m[pid] != LEFT)
        return [f"{self.processes[pid].name} at {self.describe(self.locals.op[m[pid]])}" for pid in here]

    # The methods of all models ---------------------------------------------------------------------------------------

    def start(self) -> State:
        """The state at the start."""
        if self.reduce and not self._minimised:
            self.locals.minimise(self.domain)
            self._minimised = True
        return (*self.locals.start(), *self.memory())

    def steps(self, state: State, log: list[list[str]] | None = None) -> list[tuple[State, bool]]:
        """The states one step away, and whether the step takes new work. ``log`` gets the lines of each step.

        Raises
        ------
        Fault
            If a step breaks a property, or the state has no step and is not a good end.
        """
        out: list[tuple[State, bool]] = []
        pids = [pid for pid in range(len(self.processes)) if state[pid] != LEFT]
        if self.reduce:
            m = list(state)
            for pid in pids:
                if self.urgent(pid, m):
                    self._advance(pid, state, out, log, alone=True)
                    return out
        for pid in pids:
            self._advance(pid, state, out, log)
        if not out:
            self.at_rest(list(state))
        for line, m in self.environment(list(state)):
            out.append((tuple(m), False))
            if log is not None:
                log.append([line])
        return out

    def _bind(self, local: int) -> None:
        op = self.locals.op[local]
        kind = type(op)
        chain = STOP
        if self.reduce:
            chain = (
                EAGER
                if kind in self.eager
                else DELAYED
                if kind in self.delayed
                else LAZY
                if kind in self.lazy
                else STOP
            )
        self._chain.append(chain)
        self._answers.append(self.answers_of(op))
        self._perform.append(self.performer_of(op))
        self._progresses.append(kind in self.progress)

    def _advance(
        self, pid: int, state: State, out: list[tuple[State, bool]], log: list[list[str]] | None, alone: bool = False
    ) -> None:
        """All chains of process ``pid`` from ``state``; ``alone``: only up to an operation that others can see."""
        nexts, ops, chains, all_answers, performs = (
            self.locals.next, self.locals.op, self._chain, self._answers, self._perform,
        )  # fmt: skip
        stack: list[tuple[Memory, bool, bool, bool, list[str]]] = [(list(state), False, False, False, [])]
        while stack:
            m, begun, committed, progressed, lines = stack.pop()
            local = m[pid]
            chain = chains[local]
            if begun and (local == LEFT or (committed and chain != EAGER) or (alone and chain == STOP)):
                out.append((tuple(m), progressed))
                if log is not None:
                    log.append(lines)
                continue
            op = ops[local]
            ask = all_answers[local]
            options: Sequence[Any] = (0,) if ask is None else ask(pid, op, m)
            if not options and begun and chains[state[pid]] != LAZY:  # blocked inside the chain: it ends here
                out.append((tuple(m), progressed))
                if log is not None:
                    log.append(lines)
                continue
            perform = performs[local]
            for answer in options:
                n = m.copy() if len(options) > 1 else m
                if perform is not None:
                    try:
                        perform(pid, op, answer, n)
                    except Fault as fault:
                        fault.step = [*lines, self.format_step(pid, op, answer)]
                        raise
                n[pid] = nexts(local, answer)
                stack.append(
                    (
                        n,
                        True,
                        committed or chain <= EAGER,
                        progressed or self._progresses[local],
                        lines if log is None else [*lines, self.format_step(pid, op, answer)],
                    )
                )


def describe(op: Any) -> str:
    """An operation in a trace: its name and its fields."""
    return f"{type(op).__name__.lower()}({', '.join(f'{name} {value}' for name, value in op._asdict().items())})"
