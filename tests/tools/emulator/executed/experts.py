"""The kernels of a mixture of experts over ranks, executed on the emulator: a rank's own; the host plays its peers.

What a peer sees signalled it reads at once, so that what is not in memory by then is a fault. Launches are those of
`tilestream.launch.portable.experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from executed.problems import LINE, Operands, answer, bits, name_of
from executed.small import Launch
from tilestream.core.error_record import EXPIRED, FIELDS, QUARANTINED, RECORDS
from tilestream.core.protocols.experts import signals, sources
from tilestream.core.protocols.replay import BROKEN, MARKS, STAMP, control_words
from tilestream.launch.choices import Chosen, sort
from tilestream.launch.layout import Layout
from tilestream.launch.portable import experts, rank_calls
from tilestream_tools.emulator import Machine, Tensor

_WORLD, _RANK, _TOKENS, _TOP_K, _WIDTH, _WORKERS, _FORM, _KEY = 3, 1, 11, 2, 40, 3, 5, 41
#: Experts that tokens choose at most: several rows for each, which are several waves'.
_CHOSEN = 6
#: Seconds until the deadline, if nothing is lost; and of the wait for what is.
_LONG, _SHORT = 1.0, 2e-5
#: Instructions from one thing that a peer brings to the next.
_EVERY = 300


class _Given(Tensor):
    """As much of a torch tensor as a launch asks."""

    device = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._like.shape

    def numel(self) -> int:
        return self._like.size

    def __len__(self) -> int:
        return len(self._like)


class _Tokens(NamedTuple):
    """A rank's tokens, and their choices sorted by expert."""

    x: torch.Tensor
    weights: torch.Tensor
    chosen: Any

    @classmethod
    def random(cls, seed: int, count: int) -> _Tokens:
        made = torch.Generator().manual_seed(seed)
        x = torch.randn(_TOKENS, _WIDTH, generator=made).bfloat16()
        few = torch.randperm(count, generator=made)[:_CHOSEN]
        choices = few[torch.randint(len(few), (_TOKENS, _TOP_K), generator=made)]
        choices[3, 1] = count  # which does not exist
        return cls(x, torch.rand(_TOKENS, _TOP_K, generator=made), sort(choices, count))

    def rows(self, expert: int) -> torch.Tensor:
        """Those that go to an expert."""
        begin, end = self.chosen.starts[expert : expert + 2].tolist()
        return self.x[self.chosen.order[begin:end] // _TOP_K]

    def expected(self) -> torch.Tensor:
        """The sum of what the experts make of the rows, each product rounded; NaN where a choice is of none."""
        results = torch.cat([_computed(self.rows(e), e) for e in range(len(self.chosen.starts) - 1)])
        results = torch.cat([results, torch.full((1, _WIDTH), torch.nan).bfloat16()])[self.chosen.place]
        total = torch.zeros(_TOKENS, _WIDTH)
        for choice in range(_TOP_K):
            total += results.view(_TOKENS, _TOP_K, _WIDTH)[:, choice].float() * self.weights[:, choice, None]
        return total.bfloat16()


def _computed(rows: torch.Tensor, expert: int) -> torch.Tensor:
    """What an expert makes of its rows."""
    return (rows.float() * (expert + 1)).to(rows.dtype)


class _Call:
    """Calls of a rank: its memory and words, and those of its peers."""

    def __init__(self, o: Operands, launch: Launch, count: int = 3) -> None:
        self._o, self._launch, self._host = o, launch, None
        self.layout = layout = Layout(_WORLD, count, _TOKENS * _TOP_K, _WIDTH, 2)
        self.memory, self.signals, self.control = (
            [self._of(torch.zeros(size, dtype=torch.int32), f"rank {rank}'s {what}") for rank in range(_WORLD)]
            for what, size in (
                ("memory", layout.size // 4), ("signals", signals(_WORLD, count)), ("words", control_words(_WORLD))
            )
        )  # fmt: skip
        begins = [one.address for one in self.control]
        places = self._of(torch.tensor([*begins, *(at + 4 * BROKEN for at in begins)]), "the places")
        self.words = rank_calls.SlotWords(
            self.signals[_RANK], self.control[_RANK], places, _RANK, _WORLD, "moe", _KEY, _FORM
        )
        slots = torch.tensor([one.address for one in (*self.memory, *self.signals)])

        def zeros(size: int, name: str) -> list[_Given]:
            return [self._of(torch.zeros(size, dtype=torch.int32), f"{name} {source}") for source in range(_WORLD)]

        done = self._of(torch.zeros(_WORLD * count, dtype=torch.int32), "rows that have landed")
        self.local = experts.Local(
            done, zeros(4, "returned"), zeros(4, "taken"), zeros(count, "ends"), self._of(slots, "slots")
        )  # type: ignore[arg-type]
        self.records = self._of(torch.zeros(FIELDS * RECORDS, dtype=torch.int64), "records")
        self.claims = self._of(torch.zeros(2 * LINE, dtype=torch.int64), "claims")

    def _of(self, x: torch.Tensor, name: str) -> _Given:
        return _Given(self._o.memory, bits(x), name_of(x.dtype), name)

    def start(self, seed: int) -> None:
        """The ranks' next tokens; the peers need nothing of the last call any more."""
        count = _WORLD * self.layout.experts
        self.tokens = [_Tokens.random(10 * seed + rank, count) for rank in range(_WORLD)]
        self.own = own = self.tokens[_RANK]
        self.x, self.weights = self._of(own.x, "x"), self._of(own.weights, "the weights")
        self.chosen = Chosen(*(self._of(x, f"the choices' {n}") for n, x in own.chosen._asdict().items()))
        self.set(MARKS + _WORLD, *[seed] * _WORLD)
        self.run(rank_calls.begin_call, self.words, _LONG, 0, 1)
        self.stamp = self.word(STAMP)
        self.set(MARKS, *[self.stamp] * _WORLD)

    def run(self, function: Callable[..., None], *given: Any, host: Any = None) -> None:
        """Launch, beside ``host``."""

        def keyed(kernel: Any, grid: Any, before: Any, numbers: Any, behind: Any, num_warps: int = 4, **options: Any):
            self._launch(kernel, (*before, *numbers, *behind), min(grid[0], _WORKERS), num_warps, host, **options)

        with pytest.MonkeyPatch.context() as patch:
            for module in (experts, rank_calls):
                patch.setattr(module, "launch_keyed", keyed)
                patch.setattr(module, "records_of", lambda device: (self.records, self.claims))
            function(*given)

    # What peers do and see --------------------------------------------------------------------------------------------

    def set(self, at: int, *values: int) -> None:
        """Words of the rank from ``at`` on, as peers write them."""
        self.control[_RANK].write(np.array(values, np.int32), 4 * at)

    def word(self, at: int, rank: int = _RANK) -> int:
        return int(self._look(self.control[rank], 4 * at, np.zeros(1, np.int32))[0])

    @property
    def broken(self) -> list[int]:
        return [self.word(BROKEN, rank) for rank in range(_WORLD)]

    def check_record(self, why: int, chunk: int) -> None:
        """Assert that the first record says so."""
        found = self.records.numpy().tolist()
        assert (found[1], found[5], found[6]) == (why, chunk, _KEY), f"the record: {found[:14]}"
        assert why != EXPIRED or found[12] > found[13] == round(1e9 * _SHORT)

    def signal(self, rank: int, at: int) -> int:
        return int(self._look(self.signals[rank], 4 * at, np.zeros(1, np.int32))[0])

    def _look(self, tensor: _Given, at: int, like: np.ndarray) -> np.ndarray:
        return self._o.memory.read(tensor.address + at, like)

    def _row(self, source: int, row: int = 0) -> int:
        """Bytes in front of a row of a source's in a rank's memory."""
        return 2 * _WIDTH * (source * self.layout.capacity + row)

    def _rows(self, rank: int, at: int, count: int) -> torch.Tensor:
        """Rows from byte ``at`` of a rank's memory on."""
        found = self._look(self.memory[rank], at, np.zeros((count, _WIDTH), np.int16))
        return torch.from_numpy(found).view(torch.bfloat16)

    def watch(self, seen: set[tuple[int, int]]) -> Callable[[Any], None]:
        """Peers that look at what the rank pushes, and read what is signalled: its head first, then by expert."""
        e = self.layout.experts

        def look(machine: Any) -> None:
            for peer in range(_WORLD):
                starts = self.own.chosen.starts[peer * e : peer * e + e + 1]
                if (peer, -1) not in seen and self.signal(peer, _RANK):
                    seen.add((peer, -1))
                    head = self._look(self.memory[peer], self.layout.heads + 4 * _RANK * (1 + e), np.zeros(1 + e, "i4"))
                    assert head.tolist() == [int(starts[0]), *starts.diff().tolist()], f"the head for rank {peer}"
                    assert peer == _RANK or self.word(MARKS + _RANK, peer) == self.stamp, "its mark"
                for expert in range(e) if (peer, -1) in seen else ():
                    if (peer, expert) not in seen and self.signal(peer, _WORLD + _RANK * e + expert):
                        seen.add((peer, expert))
                        rows = self.own.rows(peer * e + expert)
                        at = self._row(_RANK, int(starts[expert] - starts[0]))
                        assert self._rows(peer, at, len(rows)).equal(rows), f"rows of expert {expert} for {peer}"

        return look

    def bring(self, source: int, lost: int | None = None, every: int = _EVERY) -> Callable[[Any], None]:
        """A peer that pushes: head, then rows by expert, the last one first; ``lost`` never comes, -1: the head."""
        e, tokens = self.layout.experts, self.tokens[source]
        starts = tokens.chosen.starts[_RANK * e : _RANK * e + e + 1].tolist()
        left = [-1, *reversed(range(e))]

        def one(machine: Machine) -> None:
            while left and machine.executed >= every * (2 + e - len(left)):
                expert = left.pop(0)
                if expert == lost:
                    continue
                if expert < 0:
                    head = np.array([starts[0], *np.diff(starts)], np.int32)
                    self.memory[_RANK].write(head, self.layout.heads + 4 * source * (1 + e))
                    word = source
                else:
                    rows = bits(tokens.rows(_RANK * e + expert))
                    if rows.size:
                        self.memory[_RANK].write(rows, self._row(source, starts[expert] - starts[0]))
                    word = _WORLD + source * e + expert
                self.signals[_RANK].write(np.ones(1, np.int32), 4 * word)

        return one

    def send_back(self, lost: int | None = None, every: int = _EVERY) -> Callable[[Any], None]:
        """The peers that send the rank's results back."""
        e, left = self.layout.experts, [peer for peer in range(_WORLD) if peer not in (_RANK, lost)]
        results = [_computed(self.own.rows(expert), expert) for expert in range(_WORLD * e)]

        def one(machine: Machine) -> None:
            while left and machine.executed >= every * (_WORLD - len(left)):
                peer = left.pop()
                rows = bits(torch.cat(results[peer * e : peer * e + e]))
                if rows.size:
                    at = self.layout.results + 2 * _WIDTH * int(self.own.chosen.starts[peer * e])
                    self.memory[_RANK].write(rows, at)
                self.signals[_RANK].write(np.ones(1, np.int32), 4 * (_WORLD * (1 + e) + peer))

        return one

    # The rank's kernels -----------------------------------------------------------------------------------------------

    def push(self) -> set[tuple[int, int]]:
        """Returns what peers have seen signalled, and read."""
        seen: set[tuple[int, int]] = set()
        look = self.watch(seen)
        given = self.words, self.layout, self.local, self.x, _TOP_K, self.chosen, 1, _WORKERS - 1
        self.run(experts.push_rows, *given, host=look)
        look(None)
        assert not self.local.done.numpy().any(), "counts are not restored"
        return seen

    def take(self, source: int, seconds: float = _LONG, beside: Any = None) -> bool:
        """Returns whether the source's rows may be computed. ``beside``: what its peer does."""
        e = self.layout.experts
        host = None if source == _RANK else beside or self.bring(source)
        self.run(experts.take_rows, self.words, self.layout, self.local, source, seconds, host=host)
        ends, (taken, place, *_) = self.local.ends[source].numpy(), self.local.taken[source].numpy().tolist()
        if taken:
            starts = self.tokens[source].chosen.starts[_RANK * e : _RANK * e + e + 1]
            assert ends.tolist() == (starts[1:] - starts[0]).tolist()
            assert place == starts[0]
            words = [source, *range(_WORLD + source * e, _WORLD + source * e + e)]
            assert not any(self.signal(_RANK, word) for word in words), "signals are not cleared"
        else:
            assert not ends.any(), "nothing is computed"
        return bool(taken)

    def give_back(self, source: int) -> None:
        """The rank's experts, here, on what is in its memory; then the results go to the source."""
        e = self.layout.experts
        ends, word = self.local.ends[source].numpy().tolist(), _WORLD * (1 + e) + _RANK
        rows = self._rows(_RANK, self._row(source), self.layout.capacity)
        made, begin = torch.zeros_like(rows), 0
        for expert, end in enumerate(ends):
            made[begin:end], begin = _computed(rows[begin:end], _RANK * e + expert), end
        made, seen = made[: ends[-1]], []

        def look(machine: Any) -> None:
            if not seen and self.signal(source, word):
                place = self.local.taken[source].numpy().tolist()[1]
                seen.append(self._rows(source, self.layout.results + 2 * _WIDTH * place, len(made)))

        results = self._of(torch.cat([made, torch.full_like(rows, 7.0)]), "results")
        given = self.words, self.layout, self.local, source, results, _WORKERS
        self.run(experts.push_results, *given, host=look)
        look(None)
        taken = self.local.taken[source].numpy().tolist()[0]
        assert len(seen) == taken, "the results are signalled where there are some"
        assert not taken or seen[0].equal(made)
        assert not self.local.returned[source].numpy().any(), "counts are not restored"

    def end(self, seconds: float = _LONG, beside: Any = None) -> torch.Tensor:
        """The rank's result. ``beside``: what its peers do."""
        self.run(experts.take_results, self.words, self.layout, seconds, host=beside or self.send_back())
        self.run(rank_calls.end_call, self.words)
        like = torch.empty_like(self.own.x)
        out = self._of(torch.full_like(like, 7.0), "the output")
        at, size = self.layout.results, self.layout.capacity * _WIDTH
        results = SimpleNamespace(
            data_ptr=lambda: self.memory[_RANK].address + at, ptr_range=lambda: 0, dtype=out.dtype, shape=(size,)
        )
        self.run(experts.add_results, self.words, results, self.weights, self.chosen, out)
        return answer(out, like).view(like.shape)


def calls_are_right(o: Operands, launch: Launch, count: int = 3) -> None:
    """Two calls: each signal is behind what it says; rows and results come late, then at once; words are restored."""
    call = _Call(o, launch, count)
    for seed, every in ((0, _EVERY), (1, 0)):
        call.start(seed)
        assert len(call.push()) == _WORLD * (1 + count), "all is signalled"
        for source in sources(_RANK, _WORLD):
            assert call.take(source, beside=call.bring(source, every=every))
            call.give_back(source)
        found = call.end(beside=call.send_back(every=every))
        wanted = call.own.expected()
        assert found.isnan().equal(wanted.isnan())
        assert found.nan_to_num().equal(wanted.nan_to_num()), "the output"
        assert not call.signals[_RANK].numpy().any(), "signals are not cleared"
        for peer in {*range(_WORLD)} - {_RANK}:  # peers clear theirs, and say that they have read
            assert call.word(MARKS + _WORLD + _RANK, peer) == seed + 1
            call.signals[peer].write(np.zeros(signals(_WORLD, count), np.int32))
    assert not call.claims.numpy()[0], "a record of calls that lost nothing"
    assert call.broken == [0] * _WORLD


def something_is_lost(what: str) -> Callable[[Operands, Launch], None]:
    """A peer's head, rows of one of its experts, or results: the call is void, the group broken on every rank."""

    def steps(o: Operands, launch: Launch) -> None:
        call = _Call(o, launch)
        call.start(0)
        call.push()
        (own, late, _), e = sources(_RANK, _WORLD), call.layout.experts
        assert call.take(own)
        call.give_back(own)
        if what == "results":
            assert call.take(late)
            chunk = _WORLD * (1 + e) + 2
        else:
            expert = -1 if what == "head" else 1
            assert not call.take(late, _SHORT, call.bring(late, expert))
            chunk = late if what == "head" else _WORLD + late * e + expert
        call.give_back(late)
        found = call.end(_SHORT, call.send_back(2 if what == "results" else None))
        assert found.isnan().all(), "a void call's output is not NaN"
        call.check_record(EXPIRED, chunk)
        assert call.broken == [1] * _WORLD
        for one in call.signals:
            one.write(np.zeros(signals(_WORLD, e), np.int32))
        assert not call.push(), "a broken group pushes nothing"

    return steps


def peer_gives_up(lost: int) -> Callable[[Operands, Launch], None]:
    """It breaks the group while the rank waits, then before: the rank waits no more, and the call is void.

    ``lost``: see `_Call.bring`.
    """

    def steps(o: Operands, launch: Launch) -> None:
        call = _Call(o, launch)
        call.start(0)
        call.push()
        own, *others = sources(_RANK, _WORLD)
        assert call.take(own)

        def give_up(source: int, at: int) -> Callable[[Machine], None]:
            left, bring = [*call.control], call.bring(source, lost)

            def host(machine: Machine) -> None:
                if lost >= 0:
                    bring(machine)
                while left and machine.executed >= at:
                    left.pop().write(np.ones(1, np.int32), 4 * BROKEN)

            return host

        for source, at in zip(others, (4000, 0), strict=True):
            assert not call.take(source, beside=give_up(source, at))
            call.give_back(source)
        call.check_record(QUARANTINED, others[0] if lost < 0 else _WORLD + others[0] * call.layout.experts + lost)
        assert call.end().isnan().all()

    return steps


def rows_multiplied(o: Operands, launch: Launch) -> None:
    """``gate * up`` of the rows that there are; rows behind them are not touched."""
    call = _Call(o, launch)
    made = torch.Generator().manual_seed(8)
    gate, up = (torch.randn(300, _WIDTH, generator=made).bfloat16() for _ in range(2))
    to, ends = call._of(gate, "gate"), call._of(torch.tensor([0, 130, 270], dtype=torch.int32), "ends")
    call.run(experts.multiply_rows, to, call._of(up, "up"), ends)
    wanted = torch.cat([(gate.float() * up.float()).bfloat16()[:270], gate[270:]])
    assert answer(to, gate).view(gate.shape).equal(wanted)


#: As `executed.small.CASES` has them.
CASES: dict[tuple[str, str], Callable[[Operands, Launch], None]] = {
    ("mixture over ranks", "two calls, late peers"): calls_are_right,
    ("mixture over ranks", "more experts than lanes"): lambda o, launch: calls_are_right(o, launch, 72),
    ("mixture over ranks", "a head is lost"): something_is_lost("head"),
    ("mixture over ranks", "rows are lost"): something_is_lost("rows"),
    ("mixture over ranks", "results are lost"): something_is_lost("results"),
    ("mixture over ranks", "a peer gives up"): peer_gives_up(-1),
    ("mixture over ranks", "a peer gives up behind its head"): peer_gives_up(0),
    ("mixture over ranks", "gate times up"): rows_multiplied,
}  # fmt: skip
