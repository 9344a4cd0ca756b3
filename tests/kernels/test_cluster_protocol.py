"""A program of a cluster does, operation by operation, what the checker explores, and its instructions do it.

The text of `one_tile` and of `kernels.portable.cluster` is run here as plain Python, on arrays. Its assembly is
executed on a model of the cluster's shared memories. What comes of it is compared with the operations of
`tilestream_tools.verify.cluster` for each CTA, and the stored sums, bit by bit, with the sum of all shares in K order.

CTAs run one after the other. So all run once to write to each other, and then once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("triton")

from texts import bind, constants_of, jitted_of, structs_of
from turns import operations

from mutants import kernel_text
from tilestream.core import raster, structs
from tilestream.core.exchange import CLUSTERS, PAD, room
from tilestream.kernels.portable import cluster as cluster_text
from tilestream.kernels.portable import one_tile as one_tile_text
from tilestream_tools.verify.cluster import Arrive, Await, Cluster, Fetch, Product, Store, Write, add_shares

#: Where Triton's shared memory begins, and its bytes: the room behind it begins at no multiple of 16.
BEGINS, OWN = 1024, 1052
#: An address of the cluster's window is the CTA's number, from 1 on, and the address in its own.
WINDOW = 1 << 24

_INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<guard>\w+) )?(?P<name>[\w.:]+) ?(?P<operands>.*)")


class Shape(NamedTuple):
    """A cluster, its tile, and how an element's neighbours lie in a thread.

    ``order``, ``shift``: elements follow each other along rows (C), columns (F), or every other of a row (E); the first
    ones are the last so many.
    """

    size: int
    rows: int = 16
    columns: int = 8
    fetched: int = 4
    order: str = "C"
    shift: int = 0
    steps: int = 2

    @property
    def room(self) -> int:
        """Where the room begins."""
        return (BEGINS + OWN + room(self.rows, self.columns) - 4 * self.rows * (self.columns + PAD)) & -16


class Memories:
    """The shared memories of a cluster's CTAs, and the instructions on them; what they do goes to ``log``.

    ``text``: a part of the assembly, and what stands in its place.
    """

    def __init__(self, shape: Shape, text: tuple[str, str] = ("", "")) -> None:
        self.shape, self.text, self.of, self.log = shape, text, {}, []
        self.cta, self.found = 0, text == ("", "")

    def run(self, text: str, constraints: str, arguments: list[Any], dtype: Any, pure: bool, pack: int) -> Any:
        """``tl.inline_asm_elementwise``."""
        if self.text[0] and self.text[0] in text:
            self.found, text = True, text.replace(*self.text)
        instructions = [one.strip() for one in text.strip(" {}").replace("{ .reg", ".reg").split(";") if one.strip()]
        arrays = np.broadcast_arrays(*arguments)
        flat = [self._in_threads(array) for array in arrays]
        assert len(constraints.split(",")) == pack * (1 + len(flat))
        assert len(flat[0]) % pack == 0 or len(flat[0]) == 1
        self.written, self.read = [], []
        out = []
        for first in range(0, len(flat[0]), pack):
            registers = {f"${pack + i * pack + j}": x[first + j] for i, x in enumerate(flat) for j in range(pack)}
            for one in instructions:
                self._execute(one, registers)
            out += [registers[f"${j}"] for j in range(pack)]
        self._note()
        if arrays[0].ndim == 0:
            return out[0]
        made = np.empty(arrays[0].size, np.float32 if dtype == "float32" else np.int64)
        made[self._places(arrays[0])] = out
        return made.reshape(arrays[0].shape)

    def _places(self, array: Any) -> Any:
        """Where threads have an array's elements, in the order in which they have them."""
        places = np.arange(array.size).reshape(array.shape)
        if self.shape.order == "E":
            places = np.concatenate([places[:, ::2], places[:, 1::2]], axis=1)
        return np.roll(places.ravel("F" if self.shape.order == "F" else "C"), self.shape.shift)

    def _in_threads(self, array: Any) -> list[Any]:
        return [array.item()] if array.ndim == 0 else list(array.ravel()[self._places(array)])

    def _execute(self, text: str, x: dict[str, Any]) -> None:
        match = _INSTRUCTION.fullmatch(text)
        assert match is not None, text
        if match["guard"] and bool(x[match["guard"]]) == bool(match["negated"]):
            return
        name, operands = match["name"], re.findall(r"[\w$%.-]+", match["operands"])
        first, *others = operands or [""]
        value = lambda operand: x[operand] if operand in x else self._constant(operand)  # noqa: E731
        if name == ".reg":
            return
        if name in ("mov.u32", "mov.b32"):
            x[first] = value(others[0])
        elif name == "add.u32":
            x[first] = value(others[0]) + value(others[1])
        elif name == "sub.u32":
            x[first] = value(others[0]) - value(others[1])
        elif name == "and.b32":
            x[first] = int(value(others[0])) & value(others[1])
        elif name in ("setp.eq.u32", "setp.eq.and.u32"):
            x[first] = value(others[0]) == value(others[1]) and (len(others) == 2 or x[others[2]])
        elif name == "mapa.shared::cluster.u32":
            assert value(others[1]) < self.shape.size, "no CTA of the cluster"
            x[first] = value(others[0]) + (1 + value(others[1])) * WINDOW
        elif name.startswith("st.shared::cluster."):
            self._store(int(value(first)), [value(one) for one in others], "v2" in name)
        elif name.startswith("ld.shared."):
            x.update(zip(operands[:-1], self._load(int(value(operands[-1])), len(operands) - 1), strict=True))
            assert ("v4" in name) == (len(operands) == 5)
        elif name.startswith("barrier.cluster.arrive"):
            assert name.removeprefix("barrier.cluster.arrive") in ("", ".release", ".relaxed")
            self.log.append(Arrive(not name.endswith(".relaxed")))
        else:
            assert name in ("barrier.cluster.wait", "barrier.cluster.wait.acquire"), name
            self.log.append(Await(True))

    def _constant(self, operand: str) -> int:
        names = {"%dynamic_smem_size": OWN + room(self.shape.rows, self.shape.columns), "global_smem": BEGINS}
        return names[operand] if operand in names else int(operand)

    def _store(self, at: int, values: list[Any], is_vector: bool) -> None:
        assert len(values) == 1 + is_vector
        assert not is_vector or at % 8 == 0, "a vector's address is a multiple of its size"
        cta, address = divmod(at, WINDOW)
        for i, value in enumerate(values):
            self._check(address + 4 * i)
            self.of[cta - 1, address + 4 * i] = value
            self.written.append((cta - 1, address + 4 * i, value))

    def _load(self, at: int, count: int) -> list[Any]:
        assert at % (4 * count) == 0, "a vector's address is a multiple of its size"
        for i in range(count):
            self._check(at + 4 * i)
            self.read.append(at + 4 * i)
        return [self.of.get((self.cta, at + 4 * i), np.nan) for i in range(count)]

    def _check(self, address: int) -> None:
        ends = BEGINS + OWN + room(self.shape.rows, self.shape.columns)
        assert BEGINS + OWN <= address <= ends - 4, "behind Triton's own, and inside of what a launch adds"

    def _where(self, address: int) -> tuple[int, int, int]:
        """The place of the room, and row and column in it."""
        pitch, each = self.shape.columns + PAD, self.shape.rows // self.shape.size
        row, column = divmod((address - self.shape.room) // 4, pitch)
        return row // each, row % each, column

    def _note(self) -> None:
        """Log what an instruction of all threads has written, or read: whole pieces."""
        each = self.shape.rows // self.shape.size
        pieces: dict[Any, set[tuple[int, int]]] = {}
        for owner, address, value in self.written:
            place, row, column = self._where(address)
            source, at = self.source(value)
            assert (source % each, at) == (row, column), "an element lies at its own row and column"
            seen = pieces.setdefault(Write(owner, place, source // each), set())
            assert (row, column) not in seen, "stored once"
            seen.add((row, column))
        for address in self.read:
            place, row, column = self._where(address)
            pieces.setdefault(Fetch(self.cta, place), set()).add((row, column))
        assert all(len(seen) == each * self.shape.columns for seen in pieces.values()), "whole pieces"
        self.log += sorted(pieces)

    def source(self, value: Any) -> tuple[int, int]:
        """Row and column of an element of the product that is being sent."""
        (row,), (column,) = np.nonzero(self.acc == value)
        return int(row), int(column)


class Kernel:
    """`one_tile` for a cluster's shape, on a grid of tiles of which the last ones are cut by the output's end."""

    BATCH, NUM_M, NUM_N = 2, 2, 3

    def __init__(self, shape: Shape, edits: Any = (), text: tuple[str, str] = ("", "")) -> None:
        self.shape, self.tile, self.memories = shape, 0, Memories(shape, text)
        tl = SimpleNamespace(
            program_id=self._program, arange=np.arange, static_range=range, cast=lambda value, _: np.asarray(value),
            inline_asm_elementwise=self._assembly, int32="int32", float32="float32", constexpr=None,
        )  # fmt: skip
        self.names: dict[str, Any] = {
            "tl": tl, "row_major": raster.row_major, "tile_product": self._product, "store_tile": self._store,
            "range": range, **structs_of(structs), **constants_of(cluster_text),
        }  # fmt: skip
        bind(self.names, jitted_of(cluster_text, one_tile_text), edits)
        self.names["cluster"] = SimpleNamespace(**self.names)
        rows, columns = shape.rows, shape.columns
        self.config = SimpleNamespace(
            BLOCK_M=rows, BLOCK_N=columns, CLUSTER=shape.size, FETCHED=shape.fetched, KIND="stream_k"
        )
        entry = self.names["one_tile"]
        code = entry.__code__
        given = dict.fromkeys(code.co_varnames[: code.co_argcount], 0)
        self.given = given | {
            "m": self.NUM_M * rows - rows // 2 - 1, "n": self.NUM_N * columns - 3, "num_m": self.NUM_M,
            "num_n": self.NUM_N, "k_steps": shape.size * shape.steps, "C": self.config,
        }  # fmt: skip

    def _program(self, axis: int) -> int:
        assert axis == 0
        return self.tile * self.shape.size + self.memories.cta

    def _assembly(self, text: str, constraints: str, arguments: Any, dtype: Any, pure: bool, pack: int) -> Any:
        arguments = [np.asarray(x) for x in arguments]
        assert pure == ("%dynamic_smem_size" in text), "what touches memory, or waits, is not to be moved or left out"
        return self.memories.run(text, constraints, arguments, dtype, pure, pack)

    def _product(self, a: Any, b: Any, item: Any, m: Any, n: Any, k: Any, C: Any) -> Any:
        tile = (item.batch * self.NUM_M + item.pm) * self.NUM_N + item.pn
        self.memories.log.append(Product(tile, item.k_begin, item.k_end))
        self.memories.acc = self.products[item.k_begin // self.shape.steps]
        return self.memories.acc

    def _store(self, acc: Any, e: Any, batch: int, row: int, column: int, width: int, C: Any) -> None:
        each = self.shape.rows // self.shape.size
        assert (e.rows, e.columns) == (self.given["m"], self.given["n"]), "what is outside is masked"
        assert (width, column % self.shape.columns, row % each) == (self.shape.columns, 0, 0)
        assert acc.shape == (each, self.shape.columns)
        pm, piece = divmod(row // each, self.shape.size)
        tile = (batch * self.NUM_M + pm) * self.NUM_N + column // self.shape.columns
        self.memories.log.append(Store(tile, piece))
        self.stored = acc

    def run(self, tile: int) -> Iterator[tuple[list[Any], Any]]:
        """What each CTA does for a tile when all have written, and what it stores."""
        shape, random = self.shape, np.random.default_rng(tile)
        self.products = random.standard_normal((shape.size, shape.rows, shape.columns)).astype(np.float32)
        self.tile, self.memories.of = tile, {}
        for number in range(2 * shape.size):
            self.memories.log, self.memories.cta = [], number % shape.size
            self.names["one_tile"](**self.given)
            if number >= shape.size:
                yield self.memories.log, self.stored


def compared(shape: Shape, tiles: Any = (0, 5, 11), **how: Any) -> None:
    """The kernel was seen to do what is explored."""
    kernel, each = Kernel(shape, **how), shape.rows // shape.size
    for tile in tiles:
        for cta, (log, stored) in enumerate(kernel.run(tile)):
            explored, _ = operations(add_shares(Cluster(shape.size, shape.steps), cta, tile))
            assert [(type(op), *op) for op in log] == [(type(op), *op) for op in explored]
            piece = kernel.products[:, cta * each : (cta + 1) * each]
            want = piece[0].copy()
            for other in piece[1:]:
                want += other
            assert np.array_equal(stored, want), "the bits are those of the sum in K order"
    assert kernel.memories.found, "the part of the assembly that is to be replaced is there"


#: Elements of a thread that are side by side; none that are; pairs that are, of fours at no multiple of their size. No
#: layout of Triton's has pairs that begin at an odd column: a register's number, in bits, is a sum of places.
ORDERS = (("C", 0), ("F", 0), ("E", 0), ("C", 2))
SHAPES = [
    *(Shape(size, order=order, shift=shift) for size in CLUSTERS for order, shift in ORDERS),
    *(Shape(size, fetched=1) for size in CLUSTERS),
    *(Shape(size, rows=size, order="F") for size in CLUSTERS),  # a pair has two owners
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_program_does_what_is_explored(shape):
    compared(shape)


@pytest.mark.parametrize("size", CLUSTERS)
def test_all_tiles_of_a_grid_are_stored_once(size):
    compared(Shape(size, 8, 4, steps=1), tiles=range(Kernel.BATCH * Kernel.NUM_M * Kernel.NUM_N))


def differs(**how: Any) -> bool:
    """Whether an edited text is seen to differ: in what is done, or by an instruction that is asked for nonsense."""
    try:
        for shape in SHAPES:
            if shape.size == 4:
                compared(shape, tiles=(5,), **how)
    except AssertionError:
        return True
    return False


def test_a_text_that_says_the_same_is_not_seen():
    assert not differs()
    assert not differs(text=("barrier.cluster.wait.acquire", "barrier.cluster.wait"))


@pytest.mark.parametrize("edits", kernel_text.CLUSTER.values(), ids=kernel_text.CLUSTER)
def test_an_edited_text_is_seen(edits):
    assert differs(edits=edits)


#: Parts of the assembly, and mistakes in their place.
OTHERS = (
    ("arrive.release", "arrive.relaxed"), ("arrive.relaxed", "arrive.release"), ("barrier.cluster.wait;", ""),
    ("barrier.cluster.wait.acquire;", ""), ("second, $3, $5", "second, $3, $4"), ("first, $2, $4", "first, $3, $4"),
    ("behind, first, 4", "behind, first, 8"), ("@near st", "st"), ("@!near st.shared", "@near st.shared"),
    ("{$6, $7}", "{$7, $6}"), ("[second], $7", "[second], $6"), ("behind, $4, 4", "behind, $4, 8"),
    ("behind, $6, near", "behind, $5, near"), ("behind, $7, near", "behind, $6, near"), ("odd, $4, 15", "odd, $4, 7"),
    ("f32 $3, [$7]", "f32 $3, [$6]"), ("{$0, $1, $2, $3}", "{$0, $2, $1, $3}"), ("add.u32 $0, $0, size;", ""),
    ("$0, $0, -16", "$0, $0, -1"),
)  # fmt: skip


@pytest.mark.parametrize("text", OTHERS, ids=" -> ".join)
def test_another_instruction_is_seen(text):
    assert differs(text=text)
