"""Which matrix instructions add into an element of a product, in which order, over which of K: read by execution.

A launch is executed on operands that name their own K. In place of sums the accumulators hold *terms*: an instruction,
what each of its places along K multiplies, and the term that was there before. So the compiled code itself says in
which order it adds, whatever moves its operands on the way. What one instruction does inside is not asked: it is a
property of the instruction, of its places along K, and of which operand gives its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions import Decoded, parse
from tilestream_tools.emulator.machine import Act, Step, Wave
from tilestream_tools.emulator.numbers import LANES, U32, Array

_MATRIX = re.compile(r"v_mfma_(?:scale_)?f32_(16|32)x(?:16|32)x(\d+)_?(\w+)")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
#: The exponent of a scale of 1.
_ONE = U32(127)
#: Modifiers that choose the types of operands: they are part of an instruction's name.
_KINDS = ("cbsz", "blgp", "abid")
#: What a place of an instruction multiplies that is past the end of K: zeros.
PADDING = -1
#: Why the order of a kernel cannot be read: its elements have other bits where they are multiplied.
CONVERTED = "operands are converted before they are multiplied"


class Term(NamedTuple):
    """An instruction that was executed.

    Attributes
    ----------
    instruction
        Its name, with what chooses the types of its operands.
    rows
        The operand that gives its rows: ``"A"``, ``"B"``, or nothing if the digit or padding does not say.
    places
        By place along K, lane by lane: the digit of K that it multiplies.
    before
        The number of the term that it adds to; 0: zero.
    """

    instruction: str
    rows: str
    places: tuple[int, ...]
    before: int


class Addition(NamedTuple):
    """A step of a sum: see `Term`. ``places``: of K, or `PADDING`."""

    instruction: str
    rows: str
    places: tuple[int, ...]


def digits(size: int) -> int:
    """The number of launches that name all of K by elements of ``size`` bytes."""
    return 2 if size == 1 else 1


def coded(k: int, of_b: bool, size: int, digit: int) -> Array:
    """What the elements of a row of K are: unsigned numbers of ``size`` bytes, by `digits`; zeros are no K.

    Raises
    ------
    ValueError
        If K is too long.
    """
    flag = 1 << (8 * size - 1)
    names = np.arange(1, k + 1, dtype=np.int64)
    if names[-1] >> (8 if size == 1 else 0) >= flag:
        raise ValueError(f"k={k}; elements of {size} bytes cannot name so many")
    if size == 1:
        names = names & 0xFF if digit == 0 else names >> 8
    if of_b and digit == digits(size) - 1:
        names = names | flag
    return names.astype(_UNSIGNED[size])


class Sums:
    """What the matrix instructions of a launch did. `traced` is to be executed in place of the program's own steps.

    Parameters
    ----------
    size
        Bytes of an element of an operand as it is multiplied.
    digit
        Which of the digits the operands have: see `coded`.
    """

    def __init__(self, size: int, digit: int = 0) -> None:
        self._size, self._has_flag = size, digit == digits(size) - 1
        self._terms: list[Term | None] = [None]
        self._numbers: dict[Term, int] = {}
        self._counts: dict[int, int] = {}

    def traced(self, steps: Iterable[Step]) -> list[Step]:
        """The steps, with matrix instructions that write down what they do."""
        return [one._replace(act=self._act(one)) if one.text.startswith("v_mfma") else one for one in steps]

    def _act(self, step: Step) -> Act:
        mnemonic, _, operands = step.text.partition(" ")
        decoded = parse(mnemonic, operands)
        found = _MATRIX.fullmatch(decoded.name)
        if found is None:
            raise Fault(f"{step.text}: a matrix instruction whose operands are not known")
        rows, name = int(found[1]), instruction_of(decoded)
        if {"f32": 4, "f16": 2, "bf16": 2}.get(found[3], 1) != self._size:
            return _converted
        to, a, b, c, *scales = decoded.operands
        count = rows * rows // LANES

        def act(w: Wave) -> None:
            if w.on is not None:
                raise Fault("a matrix instruction while lanes are off")
            if any(((w.v[o.index] if o.file == "v" else U32(o.bits(32))) & U32(0xFF) != _ONE).any() for o in scales):
                raise Fault("a scale other than 1")
            x = self._places(w.v[a.index : a.index + a.count], rows)
            y = self._places(w.v[b.index : b.index + b.count], rows)
            before = np.unique(w.v[c.index : c.index + count]) if c.file == "v" else np.array([c.bits(32)])
            if len(before) != 1 or int(before[0]) >= len(self._terms):
                raise Fault("elements of one instruction with different sums, or with none")
            term = self._term(name, x, y, int(before[0]))
            number = self._numbers.setdefault(term, len(self._terms))
            if number == len(self._terms):
                self._terms.append(term)
            self._counts[number] = self._counts.get(number, 0) + rows * rows
            w.v[to.index : to.index + count] = U32(number)

        return act

    def _places(self, registers: Array, rows: int) -> Array:
        """What an operand has at each place along K: the same in all of its rows."""
        lanes = np.ascontiguousarray(registers.reshape(-1, LANES // rows, rows).T).reshape(rows, -1)
        found = lanes.view(_UNSIGNED[self._size])
        if (found != found[0]).any():
            raise Fault("rows of one instruction have different places of K")
        return found[0].astype(np.int64)

    def _term(self, name: str, x: Array, y: Array, before: int) -> Term:
        flag = 1 << (8 * self._size - 1) if self._has_flag else 0
        if ((x & ~flag) != (y & ~flag)).any():
            raise Fault("an instruction multiplies different places of K")
        from_b = bool((x & flag).any()), bool((y & flag).any())
        if from_b == (True, True) or (flag and not any(from_b) and x.any()):
            raise Fault("an instruction multiplies an operand with itself")
        rows = "B" if from_b[0] else "A" if from_b[1] else ""
        return Term(name, rows, tuple((x & ~flag).tolist()), before)

    def chain(self, elements: int) -> list[Term]:
        """The terms of the output's elements, first to last: all ``elements`` have the same.

        Waves may compute all of it more than once, where there are more of them than parts of a tile.

        Raises
        ------
        Fault
            If they have not.
        """
        ends = set(range(1, len(self._terms))) - {one.before for one in self._terms if one is not None}
        if len(ends) != 1:
            raise Fault(f"elements are added in {len(ends)} orders")
        (last,) = ends
        found: list[Term] = []
        whole = self._counts[last]
        while last:
            if self._counts[last] != whole or whole % elements:
                raise Fault(f"a step adds to {self._counts[last]} elements, of {elements}")
            term = self._terms[last]
            assert term is not None
            found.append(term)
            last = term.before
        return found[::-1]


def _converted(w: Wave) -> None:
    raise Fault(CONVERTED)


def instruction_of(one: Decoded) -> str:
    """The name of a matrix instruction without its registers: rows, columns and K, and types."""
    kinds = "".join(f" {key}:{value}" for key, value in one.modifiers.items() if key in _KINDS)
    return one.name.removeprefix("v_mfma_") + kinds + (" of scales" if one.operands[4:] else "")


def joined(chains: list[list[Term]], size: int) -> list[Addition]:
    """The additions whose digits are ``chains``.

    Raises
    ------
    Fault
        If launches of one kernel added in different orders.
    """
    if len({len(chain) for chain in chains}) != 1:
        raise Fault("launches of one kernel added in different orders")
    made = []
    for terms in zip(*chains, strict=True):
        if len({one.instruction for one in terms}) != 1:
            raise Fault("launches of one kernel added in different orders")
        names = [
            sum(x << (8 * i) for i, x in enumerate(place)) for place in zip(*(t.places for t in terms), strict=True)
        ]
        made.append(Addition(terms[-1].instruction, terms[-1].rows, tuple(name - 1 for name in names)))
    return made


class Order(NamedTuple):
    """The order of a sum, as a rule for every K.

    Attributes
    ----------
    instruction, rows
        See `Term`; instructions that alternate are separated by semicolons.
    span
        The extent of K after which the order repeats.
    pattern
        The places of the first span, an instruction after the other: ``0-3 8-11; 4-7 12-15``.
    end
        K with its padding.
    """

    instruction: str
    rows: str
    span: int
    pattern: str
    end: int


def order_of(found: list[Addition], k: int) -> Order:
    """The rule behind additions along ``k``.

    Raises
    ------
    Fault
        If they follow none: a span after the other upwards, and zeros past the end alone.
    """
    each = len(found[0].places)
    for period in range(1, len(found) + 1):
        first = found[:period]
        span = each * period
        if sorted(x for one in first for x in one.places) != list(range(span)) or len(found) % period:
            continue
        wanted = [
            one._replace(places=tuple(_of(x + i * span, k) for x in one.places))
            for i in range(len(found) // period)
            for one in first
        ]
        if [one._replace(rows="") for one in found] == [one._replace(rows="") for one in wanted]:
            named = {one.rows for one in found if max(one.places) != PADDING}
            if len(named) != 1:
                raise Fault("the operands of the instructions change places")
            kinds = "; ".join(dict.fromkeys(one.instruction for one in first))
            return Order(kinds, named.pop(), span, "; ".join(runs(one.places) for one in first), each * len(found))
    raise Fault("K is added in no regular order")


def _of(place: int, k: int) -> int:
    return place if place < k else PADDING


def runs(places: tuple[int, ...]) -> str:
    """Places in short: ``0-3 8-11``."""
    made: list[list[int]] = []
    for place in places:
        if made and place == made[-1][1] + 1:
            made[-1][1] = place
        else:
            made.append([place, place])
    return " ".join(f"{a}-{b}" if a != b else str(a) for a, b in made)


def float_modes(text: str) -> str:
    """How a kernel rounds and treats subnormal numbers, as its descriptor says it."""
    found: dict[str, Any] = dict(re.findall(r"\.amdhsa_(float_\w+|dx10_clamp|ieee_mode)\s+(\S+)", text))
    return ", ".join(f"{key} {value}" for key, value in sorted(found.items()))
