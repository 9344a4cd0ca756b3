"""What `attention_machine` computes on: registers, memory, tensor maps, shared memory, barriers, products."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class Array(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype: Any) -> Array:
        return of(np.asarray(self).astype(np.float16 if dtype is Dtype else dtype))

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


def of(x: Any) -> Array:
    return np.asarray(x).view(Array)


class Integer(int):
    """A scalar of the device: 32 bits, and 64 where it is so converted."""

    def to(self, _: object, bitcast: bool = False) -> Any:
        return Real(struct.unpack("<f", struct.pack("<i", self))[0]) if bitcast else self


class Real(float):
    """A scalar of the device: a floating-point number, which may be taken for its bits."""

    def to(self, _: object, bitcast: bool) -> Integer:
        assert bitcast
        return Integer(struct.unpack("<i", struct.pack("<f", self))[0])

    def __mul__(self, other: Any) -> Any:
        return of(float(self) * other) if isinstance(other, np.ndarray) else Real(float(self) * float(other))

    __rmul__ = __mul__


def _operation(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def done(self: int, other: object) -> Any:
        if isinstance(other, np.ndarray) and other.ndim:
            return NotImplemented
        if not isinstance(other, int | np.integer):
            return NotImplemented
        found = plain(int(self), int(other))
        if name in ("__floordiv__", "__mod__", "__rfloordiv__", "__rmod__"):
            assert int(self) >= 0 <= int(other), "the device's division is Python's from 0 on"
        return Integer(found)

    return done


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "or", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Integer, f"__{_name}__", _operation(f"__{_name}__"))
for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "or"):
    setattr(Integer, f"__r{_name}__", _operation(f"__r{_name}__"))
Integer.__hash__ = int.__hash__  # type: ignore[method-assign]


class Dtype:
    """A floating-point type of 16 bits."""

    primitive_bitwidth = 16


class Narrow:
    """A floating-point type of 8 bits, whose numbers are in an array as they are."""

    primitive_bitwidth = 8


class Pointer:
    """An address in a flat array."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        assert mask is None
        at = np.asarray(self.at)
        assert (at >= 0).all(), "in range"
        assert (at < self.memory.size).all(), "in range"
        found = self.memory[at]
        return of(found) if at.ndim else Integer(found) if self.memory.dtype.kind == "i" else Real(found)

    def store(self, value: np.ndarray, mask: np.ndarray) -> None:
        at = np.broadcast_to(self.at, mask.shape)[mask]
        assert (at >= 0).all(), "in range"
        assert (at < self.memory.size).all(), "in range"
        assert np.isnan(self.memory[at]).all(), "written once"
        self.memory[at] = np.asarray(value)[mask]


class TensorMap:
    """A map of a flat array: coordinates to addresses, in 64 bits; what is outside of its extents is not there."""

    def __init__(self, made: Any, memory: np.ndarray, dtype: Any = Dtype) -> None:
        self.shape, self.strides, self.box, self.memory = made.shape, made.strides, made.box, memory
        self.dtype, self.layout, self.size = dtype, None, dtype.primitive_bitwidth // 8
        self.block_type = SimpleNamespace(shape=list(made.box), nbytes=self.size * math.prod(made.box))

    def elements(self, at: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which of a box's elements there are, and where these lie."""
        assert len(at) == len(self.box)
        there, byte = np.ones((), bool), np.zeros((), np.uint64)
        for axis, (first, extent, stride, size) in enumerate(
            zip(at, self.shape, self.strides, self.box, strict=True)
        ):  # fmt: skip
            assert -(2**31) <= int(first) < 2**31
            place = int(first) + np.arange(size, dtype=np.int64)
            shape = [size if i == axis else 1 for i in range(len(self.box))]
            there = there & ((place >= 0) & (place < extent)).reshape(shape)
            byte = byte + (place.astype(np.uint64) * np.uint64(self.size * stride)).reshape(shape)
        rows = math.prod(self.box[:-1]), self.box[-1]
        there = np.broadcast_to(there, self.box).reshape(rows)
        element = np.broadcast_to(byte // np.uint64(self.size), self.box).reshape(rows)
        assert (element[there] < self.memory.size).all(), "a copy stays inside its tensor"
        return there, element.astype(np.int64)

    def load(self, at: Any) -> np.ndarray:
        there, element = self.elements(at)
        return np.where(there, self.memory[np.where(there, element, 0)], 0.0)

    def store(self, at: Any, box: np.ndarray) -> None:
        there, element = self.elements(at)
        assert np.isnan(self.memory[element[there]]).all(), "written once"
        self.memory[element[there]] = box[there]


class Memory:
    """Shared memory: stages of rows, in slabs of 128 bytes of columns."""

    def __init__(self, dtype: Any, stages: int, rows: int, columns: int, write: Callable[..., None]) -> None:
        self.width = min(1024 // dtype.primitive_bitwidth, columns)
        self.physical = np.full((stages, columns // self.width, rows, self.width), np.nan)
        self.dtype, self.shape, self.write = dtype, [stages, rows, columns], write

    def index(self, at: int) -> Buffer:
        assert 0 <= at < len(self.physical)
        return Buffer(self.physical[at], write=self.write)

    def boxes(self, tensor_map: TensorMap) -> SimpleNamespace:
        found = self.blocks(math.prod(tensor_map.box[:-1]), tensor_map.box[-1])
        return SimpleNamespace(index=lambda at: found.index(at).slabs[0])

    def blocks(self, rows: int, width: int) -> SimpleNamespace:
        """Of 16-bit numbers the slabs are as wide; those of 8 may be taken for others, by whoever reads them too."""
        assert width == self.width or self.dtype is Narrow
        found = self.physical.reshape(-1, 1, rows, width)

        def index(at: int) -> Buffer:
            assert 0 <= at < len(found)
            return Buffer(found[at], write=self.write)

        return SimpleNamespace(index=index)


class Buffer:
    """A stage: as rows and columns, or the other way round.

    ``write``: what a store from registers does; None: it is there at once.
    """

    def __init__(
        self, slabs: np.ndarray, turned: bool = False, write: Callable[[Buffer, np.ndarray], None] | None = None
    ) -> None:
        self.slabs, self.turned, self.write = slabs, turned, write

    def permute(self, _: object) -> Buffer:
        return Buffer(self.slabs, not self.turned)

    def store(self, x: np.ndarray) -> None:
        if self.write is not None:
            self.write(self, x)
        else:
            self.slabs[:] = np.asarray(x).reshape(x.shape[0], len(self.slabs), -1).transpose(1, 0, 2)

    def load(self, _: object) -> Array:
        return of(self.read().copy())

    def read(self) -> np.ndarray:
        found = self.slabs.transpose(1, 0, 2).reshape(self.slabs.shape[1], -1)
        return found.T if self.turned else found


class Barrier:
    """An mbarrier: ``count`` arrivals and all bytes complete a phase."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.phase, self.arrived, self.bytes = 0, 0, 0
        self.copies: list[Callable[[], int]] = []

    def settle(self) -> None:
        assert self.arrived <= self.count, f"{self.name}: an arrival too many"
        if self.arrived == self.count and self.bytes == 0 and not self.copies:
            self.phase, self.arrived = self.phase + 1, 0

    def land(self) -> None:
        copies, self.copies = self.copies, []
        for copy in copies:
            self.bytes -= copy()
        self.settle()


class Product:
    """A multiplication under way."""

    def __init__(self, x: Any, y: Buffer, acc: Any, more: bool) -> None:
        self.x, self.y, self.acc, self.more, self.value = x, y, acc, more, None

    def finish(self) -> None:
        x = self.x.read() if isinstance(self.x, Buffer) else np.asarray(self.x)
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        made = np.asarray(x, np.float32) @ np.asarray(self.y.read(), np.float32)
        self.value = of(made + np.asarray(acc) if self.more else made)
