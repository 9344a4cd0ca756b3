"""The small portable kernels, executed on the emulator: shares and attentions joined, sums, calls between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_operands import joined

from error_rule import nans, passes
from executed.problems import LINE, OP, Built, Operands, answer
from tilestream.core.error_record import EXPIRED, FIELDS, RECORDS
from tilestream.core.protocols.replay import BROKEN, COUNT, MARKS, VOID, control_words, form_number, stamp
from tilestream.kernels.portable import add, rank_calls
from tilestream.kernels.portable.attention_merge import merge_pair, merge_shares
from tilestream.kernels.portable.rows import sum_rows
from tilestream.launch.portable.attention_arguments import PAIR_WARPS, merge_shape, padded, pair_arguments
from tilestream_tools.emulator import Machine

#: ``launch(kernel, arguments, workgroups, warps=4, host=None, **options)``.
Launch = Callable[..., Machine]
_RANKS, _KEY = 3, 40


class Small:
    """Launches that belong together. ``steps(operands, launch)`` makes them, and checks what comes out.

    Attributes
    ----------
    seeded
        The kernel whose text may be another; empty: none.
    built
        That kernel, once it is compiled.
    """

    def __init__(self, steps: Callable[[Operands, Launch], None], arch: str) -> None:
        self._steps, self._arch, self.seeded = steps, arch, ""
        self._built: dict[Any, Built] = {}
        self.built: Built | None = None

    def run(self, text: str | None = None, **how: Any) -> Any:
        """Execute them: the instructions and seconds of all; of the seeded kernel, see `Machine`.

        Raises
        ------
        AssertionError, Fault
        """
        machines, of_seeded = [], []

        def launch(
            kernel: Any, filled: tuple[Any, ...], groups: int, warps: int = 4, host: Any = None, **options: Any
        ) -> Machine:
            constants = tuple(repr(value) for value in filled if isinstance(value, bool | None))
            key = kernel, len(filled), constants
            built = self._built.setdefault(key, Built(kernel, {"num_warps": warps, **options}, self._arch))
            is_seeded = kernel.fn.__name__ == self.seeded
            given = how | ({"text": text} if is_seeded else {})
            machines.append(built.launch(filled, o.memory, groups, host=host, **given))
            if is_seeded:
                self.built = built
                of_seeded.append(machines[-1])
            return machines[-1]

        o = Operands()
        self._steps(o, launch)
        return SimpleNamespace(
            executed=sum(one.executed for one in machines), seconds=sum(one.seconds for one in machines),
            visited=set().union(*(one.visited for one in of_seeded)),
            waited=set().union(*(one.waited for one in of_seeded)),
        )  # fmt: skip


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Attention, joined ----------------------------------------------------------------------------------------------------


def shares_joined(o: Operands, launch: Launch) -> None:
    """19 shares of keys, more than are read at a time; rows without keys, with sinks and without."""
    shares, sequences, positions, heads, columns = 19, 2, 3, 4, 40
    rows = sequences * positions * heads
    parts, logs = _random(shares, rows, columns), 5 * _random(shares, rows, seed=4)
    logs[_random(shares, rows, seed=5) < -0.5] = -math.inf
    logs[:, ::7] = -math.inf
    parts[logs == -math.inf] = 0
    out, lse = nans(sequences, positions, heads, columns, dtype=torch.bfloat16), nans(sequences, heads, positions)
    for sinks in (None, _random(heads, seed=6)):
        to, sums = o.of(out, "the output"), o.of(lse, "the log-sum-exp", 4)
        given = (o.of(parts, "the shares"), o.of(logs, "their log-sum-exp"), to, sums, o.of(sinks, "sinks", 4))
        strides = (positions * heads * columns, heads * columns, columns, heads * positions, 1, positions)
        together, warps = merge_shape(shares, padded(columns))
        numbers = (shares, rows, positions, heads, *strides, columns, padded(columns), together)
        launch(merge_shares, (*given, *numbers), rows, warps)
        flat = sinks if sinks is None else sinks.repeat(sequences * positions)
        wanted, whole = joined(parts, logs, flat)
        found = answer(to, out)
        assert passes(found, wanted.view(out.shape), wanted.to(out.dtype).view(out.shape)), "the output"
        whole = whole.view(sequences, positions, heads).transpose(1, 2)
        torch.testing.assert_close(answer(sums, lse).double(), whole, rtol=1e-5, atol=1e-5)


def pair_joined(o: Operands, launch: Launch) -> None:
    """Two attentions: of rows of one no keys, of some of both none; the weight of a part may be 0, that part NaN."""
    extents, columns = (2, 5, 6), 72
    parts = [_random(*extents, columns, dtype=torch.bfloat16, seed=seed) for seed in (7, 8)]
    logs = [4 * _random(*extents, seed=seed) for seed in (9, 10)]
    logs[0][0, :2] = logs[1][0, 1:3] = -math.inf
    parts[0][0, :2] = math.nan
    out, lse = nans(*extents, columns, dtype=torch.bfloat16), nans(*extents)
    to, sums = o.of(out, "the output"), o.of(lse, "the log-sum-exp", 4)
    given = []
    for part, log in zip(parts, logs, strict=True):
        given += [o.of(part, "an attention"), o.of(log, "its log-sum-exp", 4)]
    rows, of_sums = (30 * columns, 6 * columns, columns), (30, 6, 1)
    grid, numbers = pair_arguments(extents, columns, (rows,) * 3, (of_sums,) * 3)
    launch(merge_pair, (*given, to, sums, *numbers), grid[0], PAIR_WARPS)
    whole = torch.stack(logs).double().logsumexp(0)
    weights = [torch.where(whole == -math.inf, 0.0, (log - whole).exp()) for log in logs]
    terms = [torch.where(w[..., None] == 0, 0.0, w[..., None] * x) for w, x in zip(weights, parts, strict=True)]
    wanted = terms[0] + terms[1]
    assert passes(answer(to, out), wanted, wanted.to(out.dtype)), "the output"
    torch.testing.assert_close(answer(sums, lse).double(), whole, rtol=1e-5, atol=1e-5)


# Sums -----------------------------------------------------------------------------------------------------------------


def parts_added(o: Operands, launch: Launch) -> None:
    """The ranks' parts, in float32 and in the order of the ranks: the same bits; a call that is void is NaN."""
    width, plane, rank = 40, 1240, 1
    own = torch.full((_RANKS, plane), math.nan, dtype=torch.bfloat16)
    parts = _random(_RANKS, plane, dtype=torch.bfloat16)
    own[rank], parts[rank] = _random(plane, dtype=torch.bfloat16, seed=4), math.nan
    bias = _random(width, seed=5)
    wide = torch.zeros(plane)
    for r in range(_RANKS):
        wide += (own if r == rank else parts)[r].float()
    wanted = (wide / _RANKS + bias.repeat(plane // width)).bfloat16()
    like = nans(plane, dtype=torch.bfloat16)
    for over in (0, 6):
        out = o.of(like, "the output")
        given = (o.of(own, "own"), o.of(parts, "parts"), out, o.of(bias, "the bias"))
        void = o.of(torch.tensor([over], dtype=torch.int32), "the void call")
        numbers = (rank, 7, 1, plane, width, float(_RANKS), _RANKS, True, add.BLOCK)
        launch(add.add_parts, (*given, void, *numbers), -(-plane // add.BLOCK))
        found = answer(out, like)
        assert found.isnan().all() if over else found.equal(wanted), f"void from call {over} on"


def slots_added(o: Operands, launch: Launch) -> None:
    """The ranks' slots, by a table of their addresses."""
    count, width = 1240, 40
    slots = [_random(count, dtype=torch.float16, seed=seed) for seed in range(_RANKS)]
    at = [o.of(slot, "a slot", 4096) for slot in slots]
    table = o.of(torch.tensor([one.address for one in at]), "the addresses")
    out, void = o.of(nans(count, dtype=torch.float16), "the output"), o.zeros(torch.int32, 1, "the void call")
    numbers = (7, count, width, 1.0, _RANKS, False, add.BLOCK)
    launch(add.add_slots, (table, out, None, void, *numbers), -(-count // add.BLOCK))
    wide = torch.zeros(count)
    for slot in slots:
        wide += slot.float()
    assert answer(out, slots[0]).equal(wide.half())


def rows_added(o: Operands, launch: Launch) -> None:
    """Each row's sum has the bits that it has alone."""
    x = _random(5, 300)
    out, one = o.zeros(torch.float32, 5, "the sums"), o.zeros(torch.float32, 1, "a sum")
    launch(sum_rows, (o.of(x, "x"), out, 300, 300, 128), 5)
    launch(sum_rows, (o.of(x[3].contiguous(), "a row"), one, 300, 300, 128), 1)
    found = answer(out, x)
    assert passes(found, x.double().sum(1), x.sum(1))
    assert found[3] == answer(one, x)[0]


# Calls between ranks --------------------------------------------------------------------------------------------------


class Words:
    """The words of all ranks in one memory, as rank 0 sees them."""

    def __init__(self, o: Operands) -> None:
        self.control = [o.zeros(torch.int32, control_words(_RANKS), f"rank {r}'s words") for r in range(_RANKS)]
        self.signals = o.zeros(torch.int32, 2 * _RANKS, "signals")
        begins = [one.address for one in self.control]
        self.places = o.of(torch.tensor([*begins, *(at + 4 * BROKEN for at in begins)]), "the places")
        self.records = o.zeros(torch.int64, FIELDS * RECORDS, "records")
        self.claims = o.zeros(torch.int64, 2 * LINE, "claims")

    def set(self, at: int, *values: int, rank: int = 0) -> None:
        """Words of a rank from ``at`` on, as a peer or the host writes them."""
        self.control[rank].write(np.array(values, np.int32), 4 * at)

    def begin(self, launch: Launch, allowed: int = 10**9, form: int = 0, host: Any = None) -> None:
        numbers = (allowed, OP, _KEY, 0, 1, 2, form, _RANKS)
        launch(rank_calls.begin_call, (*self._pointers, *numbers), 1, 1, host)

    def wait(self, launch: Launch, allowed: int = 10**9, host: Any = None) -> None:
        launch(rank_calls.await_parts, (*self._pointers, allowed, OP, _KEY, 0, 2, _RANKS), 1, 1, host)

    def end(self, launch: Launch) -> None:
        launch(rank_calls.end_call, (*self._pointers[1:], OP, _KEY, 0, _RANKS), 1, 1)

    @property
    def _pointers(self) -> tuple[Any, ...]:
        return self.signals, self.control[0], self.places, self.records, self.claims

    def word(self, at: int, rank: int = 0) -> int:
        return int(self.control[rank].numpy()[at])

    @property
    def broken(self) -> list[int]:
        return [self.word(BROKEN, rank) for rank in range(_RANKS)]


def call_is_right(o: Operands, launch: Launch) -> None:
    """Peers that read late and parts that come late are waited for; nothing is void."""
    words, form = Words(o), form_number(b"a call")
    words.set(COUNT, 4)

    def read(machine: Machine) -> None:
        if machine.executed > 2000:
            words.set(MARKS + _RANKS, 4, 4, 4)

    words.begin(launch, form=form, host=read)
    assert words.word(COUNT) == 5
    assert words.signals.numpy().tolist() == [1, 1, 0, 0, 0, 0], "the own chunks are signalled"
    sent = [2, 5, 4, 3]

    def send(machine: Machine) -> None:
        while sent and machine.executed > 500 * (5 - len(sent)):
            words.signals.write(np.array([1], np.int32), 4 * sent.pop())

    words.wait(launch, host=send)
    assert not words.signals.numpy().any()
    words.set(MARKS, *[stamp(5, form)] * _RANKS)
    words.end(launch)
    assert [words.word(MARKS + _RANKS, rank) for rank in (1, 2)] == [5, 5], "rank 0 has read"
    assert (words.word(VOID), words.broken) == (0, [0] * _RANKS)
    assert not words.claims.numpy()[0]
    assert not _voided(o, launch, words).isnan().any()
    assert not _ended_or_void(o, launch, words).isnan().any()
    assert words.word(VOID) == 0


def call_is_void(o: Operands, launch: Launch) -> None:
    """A peer that does not read breaks the group on every rank, with a record; the result is NaN."""
    words = Words(o)
    words.set(COUNT, 4)
    words.set(MARKS + _RANKS, 4, 4, 3)
    words.begin(launch, allowed=20_000)
    record = words.records.numpy().tolist()
    assert (record[1], record[5] // 2, record[6]) == (EXPIRED, 2, _KEY)
    assert record[12] > record[13] == 20_000
    assert words.broken == [1] * _RANKS
    words.wait(launch)
    words.end(launch)
    assert words.word(VOID) == 1
    assert _voided(o, launch, words).isnan().all()
    assert _ended_or_void(o, launch, words).isnan().all()


def _voided(o: Operands, launch: Launch, words: Words) -> torch.Tensor:
    like = torch.ones(4500, dtype=torch.bfloat16)
    out = o.of(like, "the result")
    numbers = (like.numel(), torch.iinfo(torch.int16).max, rank_calls.BLOCK)
    launch(rank_calls.void_out, (_as_integers(out), words.control[0], *numbers), 2)
    return answer(out, like)


def _ended_or_void(o: Operands, launch: Launch, words: Words) -> torch.Tensor:
    like = torch.ones(1030, dtype=torch.bfloat16)
    out = o.of(like, "a result that the last kernel makes NaN")
    behind = (OP, _KEY, 0, like.numel(), _RANKS, torch.iinfo(torch.int16).max, rank_calls.BLOCK_OF_ONE)
    launch(rank_calls.end_or_void, (*words._pointers[1:], _as_integers(out), *behind), 1, 1)
    return answer(out, like)


def _as_integers(x: Any) -> Any:
    x.dtype = type(x.dtype)("int16")
    return x


#: By row of the table and name.
CASES: dict[tuple[str, str], Callable[[Operands, Launch], None]] = {
    ("portable attention, joined", "shares of keys"): shares_joined,
    ("portable attention, joined", "two attentions"): pair_joined,
    ("portable sums", "ranks' parts"): parts_added,
    ("portable sums", "ranks' slots"): slots_added,
    ("portable sums", "rows"): rows_added,
    ("calls between ranks", "late peers and parts"): call_is_right,
    ("calls between ranks", "a peer does not read"): call_is_void,
}  # fmt: skip
