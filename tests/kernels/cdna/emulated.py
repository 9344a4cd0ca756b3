"""The CDNA kernel's own text, run as plain Python on numpy: its numbers, without a GPU and without Triton's compiler.

What runs is each function of the kernel as it stands, on stand-ins for what Gluon gives it. Shared memory is a flat
array that begins as NaN, and is seen through the layouts' own linear maps (`layouts.elements`); global memory ends in
NaN, and whoever reads past what may be read is told. A copy past the registers lands either at once (``late`` off: it
overwrites what is still to be read) or when a wait says so and not before (``late`` on: who reads without waiting reads
NaN). What is left out: which lane does what (the layouts' tests look at that), and the instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from texts import structs_of
from triton.experimental.gluon import language as real

from layouts import elements
from tilestream.core import queues as queues_
from tilestream.core import ring as ring_
from tilestream.core import structs, swizzle
from tilestream.core.structs import Item, Passed
from tilestream.kernels.cdna import epilogue, gemm, ring
from tilestream.kernels.device import epilogue as formula
from tilestream.kernels.device import items as shared
from tilestream.kernels.device import schedule
from tilestream.schedule import WorkItem

#: Elements past its end that a tensor's last vector may reach into.
BEHIND = 16


class Dtype(NamedTuple):
    name: str
    primitive_bitwidth: int

    @property
    def element_ty(self) -> Dtype:
        return self


BFLOAT16, FLOAT32, INT32 = Dtype("bf16", 16), Dtype("fp32", 32), Dtype("int32", 32)
INT8, INT16, INT64 = Dtype("int8", 8), Dtype("int16", 16), Dtype("int64", 64)
FP8 = Dtype("fp8", 8)


class Int(int):
    """A scalar of the device."""

    def to(self, _: object) -> Int:
        return self


def _scalar(name: str) -> Callable[..., Any]:
    def operate(self: Int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        made = getattr(int, name)(self, other)
        return made if isinstance(made, bool) else Int(made)

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "or", "xor"):
    setattr(Int, f"__{_name}__", _scalar(f"__{_name}__"))


class Tensor:
    """A tensor in registers."""

    def __init__(self, data: Any, dtype: Dtype = INT32) -> None:
        self.data, self.dtype = np.asarray(data), dtype
        self.type = SimpleNamespace(layout="its own")
        self.vector = 1  # offsets that are marked as those of so many neighbours

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.data[key], self.dtype)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype)

    def to(self, dtype: Dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.data, dtype)

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape(shape), self.dtype)

    def permute(self, *order: int) -> Tensor:
        return Tensor(self.data.transpose(order), self.dtype)

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.data[..., 0], self.dtype), Tensor(self.data[..., 1], self.dtype)


def _elementwise(name: str) -> Callable[..., Any]:
    def operate(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        wide = self.dtype if not isinstance(other, Tensor) or self.dtype in (FLOAT32, INT64) else other.dtype
        return Tensor(getattr(self.data, name)(other.data if isinstance(other, Tensor) else other), wide)

    return operate


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
    "rtruediv", "floordiv", "mod", "xor", "and", "lt", "le", "ge",
    "eq",
):  # fmt: skip
    setattr(Tensor, f"__{_name}__", _elementwise(f"__{_name}__"))


class Memory:
    """Global memory of one tensor: its elements, and what lies behind them."""

    def __init__(self, values: np.ndarray, dtype: Dtype) -> None:
        self.values = np.concatenate([values.ravel(), np.full(BEHIND, np.nan)])
        self.dtype = dtype
        self.vectors: set[int] = set()  # neighbours that one store writes

    @property
    def start(self) -> Pointer:
        return Pointer(self, 0)


class Pointer:
    """An address, or a tensor of them."""

    def __init__(self, memory: Memory, at: Any, offsets: Tensor | None = None) -> None:
        self.memory, self.at, self.dtype, self.offsets = memory, at, memory.dtype, offsets

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, Tensor):
            return Pointer(self.memory, self.at + other.data, other)
        return Pointer(self.memory, self.at + other)

    def __sub__(self, other: int) -> Pointer:
        return Pointer(self.memory, self.at - other)

    def read(self, mask: Any = None, other: float = 0.0) -> Tensor:
        at = np.asarray(self.at)
        inside = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask.data, at.shape)
        assert (at[inside] >= 0).all(), "below the tensor"
        assert (at[inside] < len(self.memory.values)).all(), "more than a vector past the end"
        found = self.memory.values[np.where(inside, at, 0)]
        return Tensor(np.where(inside, found, other), self.dtype)

    def write(self, tensor: Tensor, mask: Any = None) -> None:
        at = np.asarray(self.at)
        inside = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask.data, at.shape)
        assert (at[inside] >= 0).all(), "below the tensor"
        assert (at[inside] < len(self.memory.values) - BEHIND).all(), "past the end"
        assert np.isnan(self.memory.values[at[inside]]).all() or self.memory.dtype == INT32, "written twice"
        self.memory.values[at[inside]] = np.broadcast_to(tensor.data, at.shape)[inside]
        self.memory.vectors.add(1 if self.offsets is None else self.offsets.vector)


class Stages:
    """Shared memory of an operand's stages, and a stage of it."""

    def __init__(self, dtype: Dtype, shape: list[int]) -> None:
        self.dtype, self.shape = dtype, shape[1:]
        self.stages = [np.full(shape[1] * shape[2], np.nan) for _ in range(shape[0])]

    def index(self, at: int) -> Stage:
        assert 0 <= at < len(self.stages), "a stage that is not there"
        return Stage(self.stages[at], self.dtype, self.shape)


@functools.cache
def _places(layout: Any, shape: tuple[int, int]) -> np.ndarray:
    """By row and column, where an element lies."""
    places = np.empty(shape, int)
    for offset, (row, column) in enumerate(elements(layout, list(shape))):
        places[row, column] = offset
    return places


class Stage:
    def __init__(self, flat: np.ndarray, dtype: Dtype, shape: list[int]) -> None:
        self.flat, self.dtype, self.shape = flat, dtype, shape

    def seen(self, shape: list[int], layout: Any) -> View:
        assert list(shape) == list(self.shape), "another tile"
        return View(self.flat, _places(layout, tuple(shape)), self.dtype)


class View(NamedTuple):
    flat: np.ndarray
    places: np.ndarray
    dtype: Dtype

    def permute(self, order: list[int]) -> View:
        return self._replace(places=self.places.transpose(order))

    def load(self, _: Any) -> Tensor:
        return Tensor(self.flat[self.places], self.dtype)

    def store(self, tensor: Tensor) -> None:
        self.flat[self.places] = tensor.data


class Machine:
    """The kernel's functions, bound to stand-ins.

    Parameters
    ----------
    items
        What the schedule hands out.
    late
        Whether copies land as late as they may.
    over
        Whether the gate says that the launch is over.
    """

    def __init__(self, items: list[WorkItem], late: bool, over: bool = False) -> None:
        self.items, self.late, self.over = iter(items), late, over
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.open: list[tuple[np.ndarray, np.ndarray]] = []
        gl = SimpleNamespace(
            constexpr=real.constexpr, SwizzledSharedLayout=real.SwizzledSharedLayout,
            BlockedLayout=real.BlockedLayout, SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            amd=SimpleNamespace(AMDMFMALayout=lambda *_: None), static_range=range, program_id=lambda _: Int(0),
            num_programs=lambda _: Int(1), arange=lambda low, high, _: Tensor(np.arange(low, high)),
            full=lambda shape, value, dtype, _: Tensor(np.full(shape, float(value)), dtype),
            zeros=lambda shape, dtype, _: Tensor(np.zeros(shape), dtype),
            minimum=self.minimum, maximum=lambda x, y: Int(max(x, y)), where=self.where,
            convert_layout=lambda x, _, assert_trivial: x, cast=lambda x, _: Int(x), load=self.load, store=self.store,
            max_contiguous=self.contiguous, multiple_of=self.multiple,
            allocate_shared_memory=lambda dtype, shape, _: Stages(dtype, shape),
            int8=INT8, int16=INT16, int32=INT32, int64=INT64, float32=FLOAT32,
        )  # fmt: skip
        self.names: dict[str, Any] = {
            "gl": gl, "range": range, **structs_of(structs),
            "tl": SimpleNamespace(
                cast=lambda x, _: Int(x), where=self.where, load=self.load, store=self.store,
                atomic_add=self.atomic_add, debug_barrier=self.ignore, fma=self.fma, int32=INT32, int64=INT64,
            ),
            "float": float, "len": len, "min": min, "LINE": 16, "swizzled": self.swizzled,
            "after": self.after, "before": self.before, "neighbour": queues_.neighbour, "enter": self.ignore,
            "leave": self.ignore, "leave_gate": self.ignore, "present": self.ignore, "quarantined": lambda *_: Int(0),
            "pass_gate": self.pass_gate, "take": self.take, "uniform": lambda x: Int(x), "opaque_zero": lambda: 0,
            "in_order": self.ignore, "as_loaded": lambda tile: tile, "load_words": self.load_words,
            "elements": lambda words, *_: words,
            "drain": self.ignore, "barrier": self.ignore, "activate": lambda x, how: relu(x) if how == "relu" else x,
            "viewed": lambda stage, shape, layout: stage.seen(shape, layout),
            "load_landed": lambda view, layout: view.load(layout), "copy_to_shared": self.copy, "commit": self.commit,
            "wait_for_groups": self.wait, "buffer_load": self.buffer_load, "buffer_store": self.buffer_store,
            "multiply_add": self.multiply_add,
        }  # fmt: skip
        for module in (ring, epilogue, gemm, formula, shared, schedule):
            for name, value in vars(module).items():
                if name in self.names or name.startswith("__"):
                    continue
                text = getattr(value, "fn", value if isinstance(value, FunctionType) else None)
                if isinstance(text, FunctionType) and text.__module__ == module.__name__:
                    defaults = tuple(map(self.bound, text.__defaults__ or ()))
                    self.names[name] = FunctionType(text.__code__, self.names, name, defaults)

    def bound(self, default: Any) -> Any:
        """A parameter's default: of a function of the kernel, what stands for it here."""
        text = getattr(default, "fn", None)
        if text is None:
            return default
        return lambda *given: self.names[text.__name__](*given)

    def run(self, filled: tuple[Any, ...]) -> None:
        """The kernel, one worker. Numbers become scalars of the device."""
        code = gemm.gemm.fn.__code__
        names = code.co_varnames[: code.co_argcount]
        given = {
            name: Int(value) if isinstance(value, int) and not isinstance(value, bool) and name.islower() else value
            for name, value in zip(names, filled, strict=True)
        }
        self.names["gemm"](**given)
        assert not self.open, "copies that nobody committed"
        assert not self.groups, "copies that nobody waited for"

    # What the kernel asks for -----------------------------------------------------------------------------------------

    def ignore(self, *_: Any) -> int:
        return Int(0)

    def take(self, cursor: Any, *_: Any) -> tuple[Any, ...]:
        item = next(self.items, None)
        if item is None:
            return 0, Item(*[Int(7)] * 9), cursor  # what a void ticket says is of no account
        fields = (item.batch, item.pm, item.pn, item.k_begin, item.k_end, item.part, item.parts, item.slot, 0)
        return 1, Item(*map(Int, fields)), cursor

    def pass_gate(self, *_: Any) -> tuple[Passed, int]:
        return Passed(Int(self.over), *[Int(0)] * 4), Int(0)

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Tensor:
        """``x * y + z``."""
        x, y, z = (one.data if isinstance(one, Tensor) else one for one in (x, y, z))
        return Tensor(x * y + z, FLOAT32)

    @staticmethod
    def after(stage: int, depth: int) -> Int:
        return Int(ring_.after(stage, depth))

    @staticmethod
    def before(stage: int, depth: int) -> Int:
        return Int(ring_.before(stage, depth))

    @staticmethod
    def swizzled(row: Tensor, cell: Tensor, every: int, period: int) -> Tensor:
        return Tensor(swizzle.swizzled(row.data, cell.data, every, period))

    @staticmethod
    def minimum(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return Tensor(np.minimum(*(z.data if isinstance(z, Tensor) else z for z in (x, y))))
        return Int(min(x, y))

    @staticmethod
    def where(kept: Any, x: Any, y: Any) -> Any:
        if not isinstance(kept, Tensor):
            return Int(x if kept else y)
        return Tensor(np.where(kept.data, x.data, y.data if isinstance(y, Tensor) else y), x.dtype)

    @staticmethod
    def multiple(x: Any, of: Any) -> Any:
        if isinstance(x, Pointer):
            assert x.at * x.dtype.primitive_bitwidth // 8 % of == 0, f"an address that is no multiple of {of}"
            return x
        assert (x.data[:, :: of[1]] % of[1] == 0).all(), "a vector that begins anywhere"
        return x

    @staticmethod
    def contiguous(x: Tensor, of: list[int]) -> Tensor:
        rows, columns = x.data.shape
        vectors = x.data.reshape(rows, columns // of[1], of[1])
        assert (vectors - vectors[:, :, :1] == np.arange(of[1])).all(), "a vector whose elements are no neighbours"
        x.vector = of[1]
        return x

    def load(self, at: Pointer, mask: Any = None, other: float = 0.0) -> Any:
        self.far(at)
        found = at.read(mask, other)
        return found if found.shape else float(found.data)

    def store(self, at: Pointer, value: Any, mask: Any = None) -> None:
        self.far(at)
        at.write(value if isinstance(value, Tensor) else Tensor(value), mask)

    def buffer_load(
        self, at: Pointer, offsets: Tensor, mask: Any = None, other: float = 0.0, cache: str = ""
    ) -> Tensor:
        self.reach(at, offsets, mask)
        return (at + offsets).read(mask, other)

    def load_words(self, at: Pointer, offsets: Tensor, far: bool) -> Tensor:
        """The elements of words of four: what they are packed into is the compiler's."""
        assert at.dtype == FP8, "four of 8 bits are a word"
        each = Tensor((4 * offsets.data[:, :, None] + np.arange(4)).reshape(offsets.data.shape[0], -1))
        if far:
            self.far(at + offsets)
        else:
            self.reach(at, offsets, None)
            self.reach(at, each, None)
        return (at + each).read()

    def buffer_store(self, tensor: Tensor, at: Pointer, offsets: Tensor, mask: Any = None) -> None:
        self.reach(at, offsets, mask)
        (at + offsets).write(tensor, mask)

    @staticmethod
    def far(at: Pointer) -> None:
        is_tile = at.offsets is not None and at.offsets.data.ndim == 2
        assert not is_tile or at.offsets.dtype == INT64, "a tile that no buffer reaches has offsets of 64 bits"

    @staticmethod
    def reach(at: Pointer, offsets: Tensor, mask: Any) -> None:
        assert offsets.dtype != INT64, "a buffer's offsets have 32 bits"
        size = at.dtype.primitive_bitwidth // 8
        inside = np.ones(offsets.data.shape, bool) if mask is None else np.broadcast_to(mask.data, offsets.data.shape)
        assert (offsets.data[inside] >= 0).all(), "an offset is unsigned"
        assert (offsets.data[inside] * size < 2**31 - 2).all(), "a buffer ends there"

    @staticmethod
    def atomic_add(at: Pointer, value: int, sem: str, scope: str) -> int:
        assert (sem, scope) == ("acq_rel", "gpu")
        place = int(at.at)
        at.memory.values[place] += value
        return Int(at.memory.values[place] - value)

    def copy(self, stage: Stage, at: Pointer, offsets: Tensor) -> None:
        self.reach(at, offsets, None)
        found = (at + offsets).read().data.ravel()
        assert found.shape == stage.flat.shape
        if self.late:
            stage.flat[:] = np.nan  # a copy may land at any time: from now on nobody knows what is there
            self.open.append((stage.flat, found))
        else:
            stage.flat[:] = found

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, left: int) -> None:
        while len(self.groups) > left:
            for flat, found in self.groups.pop(0):
                flat[:] = found

    @staticmethod
    def multiply_add(a: Tensor, b: Tensor, acc: Tensor, _: Any) -> Tensor:
        return Tensor(acc.data + a.data @ b.data, FLOAT32)


def relu(x: Tensor) -> Tensor:
    return Tensor(np.where(x.data < 0, 0.0, x.data), x.dtype)
