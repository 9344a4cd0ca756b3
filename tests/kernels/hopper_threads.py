"""A Hopper kernel's own text as plain Python: a thread for each load loop and math loop of each worker.

What the hardware does is done by stand-ins: an mbarrier blocks, and counts arrivals and bytes; a copy clips, fills with
zeros, and arrives at its barrier; a multiplication is torch's; an atomic is one step. Threads that all wait for each
other are an error, and so are bytes that no copy brings, a read outside a tensor, an element stored twice, and a
trace's end that no barrier holds behind the stores of all warps.

Modules' functions call each other as their modules import them, so two of one name are two.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from mutants.engine import Edit, code_of
from tilestream.kernels.device.schedule import LINE as _LINE
from tilestream.kernels.device.trace import END, WORDS

BEYOND, LINE = 2**30, _LINE.value
#: Of a span in the log: when the stores of a tile, or of its halves, are issued.
_ENDS = (END.value, END.value + 1)
#: What a load leaves as it is; it makes float32 of other elements.
_WORDS = (torch.int32, torch.int64)


class Deadlock(Exception):
    """All threads wait for each other."""


class Pointer:
    """An address in a tensor's memory."""

    def __init__(self, tensor: torch.Tensor, offset: Any = None) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.memory = tensor.as_strided((size,), (1,), 0)
        self.offset = torch.as_tensor(tensor.storage_offset() if offset is None else offset)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def __sub__(self, less: Any) -> Pointer:
        return self + -less

    def to(self, kind: tuple[str, torch.dtype]) -> Pointer:
        """The same address, of elements of another dtype."""
        what, dtype = kind
        assert what == "pointer"
        times = self.memory.element_size() // dtype.itemsize
        return Pointer(self.memory.view(dtype), self.offset * times)


def load(pointer: Pointer, mask: Any = True, other: float = 0, **_: Any) -> torch.Tensor:
    mask = torch.as_tensor(mask).expand(pointer.offset.shape)
    assert ((pointer.offset >= 0) & (pointer.offset < len(pointer.memory)) | ~mask).all(), "read out of bounds"
    found = pointer.memory[torch.where(mask, pointer.offset, 0)]
    return torch.where(mask, found if found.dtype in _WORDS else found.float(), other)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    mask = torch.as_tensor(mask).expand(pointer.offset.shape)
    assert ((pointer.offset >= 0) & (pointer.offset < len(pointer.memory)) | ~mask).all(), "stored out of bounds"
    value = torch.as_tensor(value).to(pointer.memory.dtype).expand(pointer.offset.shape)
    pointer.memory[pointer.offset[mask]] = value[mask]


class Barrier:
    """An mbarrier of so many arrivals."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.bytes, self.phase = count, 0, 0, 0


class Barriers(list):
    """Barriers side by side."""

    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


class Box:
    """A stage, a C buffer, or a row of a table."""

    def __init__(self) -> None:
        self.value = torch.full((), float("nan"))

    def store(self, value: torch.Tensor) -> None:
        self.value = value

    def load(self, _: Any) -> torch.Tensor:
        return self.value

    def permute(self, _: Any) -> Box:
        found = Box()
        found.store = lambda value: self.store(value.T)  # type: ignore[method-assign]
        return found


class Boxes:
    """The stages of an operand, as many as were allocated."""

    def __init__(self, bits: int, count: int = 64) -> None:
        self.found: dict[int, Box] = {}
        self.count = count
        self.dtype = SimpleNamespace(primitive_bitwidth=bits)

    def index(self, i: Any) -> Box:
        assert 0 <= i < self.count, "a stage that is not there"
        return self.found.setdefault(int(i), Box())


class TensorMap:
    """An operand, and the box of a copy; or the output.

    Of groups of rows: ``[G, rows, K]`` and ``[rows, columns]``; of groups of K: ``[K, rows]`` and
    ``[G, rows, columns]``.
    """

    def __init__(self, tensor: torch.Tensor, box: Sequence[int] = ()) -> None:
        self.tensor, self.box = tensor, tuple(box)
        self.dtype: Any = SimpleNamespace(primitive_bitwidth=8 * tensor.element_size())
        self.stored = torch.zeros(tensor.shape, dtype=torch.int32)


class Machine:
    """The workers of one launch.

    ``exchanged`` is called before a word is exchanged, as signals are; ``edits`` seed faults; ``log``: the trace's.
    """

    def __init__(
        self, edits: Sequence[Edit] = (), exchanged: Callable[[Pointer], None] = lambda _: None,
        log: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._edits, self._exchanged, self._log = tuple(edits), exchanged, log
        self._modules: dict[str, dict[str, Any]] = {}
        self._of_thread = threading.local()
        self._changed = threading.Condition()
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._alive = 0
        self._errors: list[BaseException] = []
        self._stand_ins = self._made_stand_ins()

    # Text ----------------------------------------------------------------------------------------------------------

    def text(self, jitted: Any) -> Any:
        """A jitted function that calls what its module has."""
        function = jitted.fn
        if function.__module__.startswith("tilestream.core"):
            return FunctionType(
                function.__code__, {**function.__globals__, "min": _least, "max": _most}, function.__name__
            )
        names = self._names(function.__module__)
        if function.__name__ not in names:
            names[function.__name__] = FunctionType(
                code_of(function, self._edits), names, function.__name__,
                None if function.__defaults__ is None else tuple(map(self._value, function.__defaults__)),
            )  # fmt: skip
        return names[function.__name__]

    def _names(self, module: str) -> dict[str, Any]:
        if module not in self._modules:
            names: dict[str, Any] = {
                "range": lambda *ends: map(torch.tensor, range(*map(int, ends))), "__builtins__": __builtins__,
            }  # fmt: skip
            self._modules[module] = names
            for name, value in vars(importlib.import_module(module)).items():
                if name in self._stand_ins:
                    names[name] = self._stand_ins[name]
                elif not name.startswith("__"):
                    names[name] = self._value(value)
        return self._modules[module]

    def _value(self, value: Any) -> Any:
        kind = type(value).__name__
        if kind in ("JITFunction", "GluonJITFunction"):
            return self._stand_ins.get(value.fn.__name__) or self.text(value)
        if kind == "ConstexprFunction":
            return value.fn
        return value.value if kind == "constexpr" else value

    # Threads -------------------------------------------------------------------------------------------------------

    def launch(self, kernel: Any, workers: int, arguments: Sequence[Any]) -> None:
        """Run all workers, and raise what one of them has raised."""
        entry = self.text(kernel)
        whole = [torch.tensor(one) if type(one) is int else one for one in arguments]

        def worker(number: int) -> None:
            self._of_thread.worker, self._of_thread.workers = number, workers
            entry(*whole)

        self._run([lambda number=number: worker(number) for number in range(workers)])
        if self._errors:
            raise self._errors[0]

    def _run(self, loops: Sequence[Callable[[], None]]) -> None:
        def guarded(loop: Callable[[], None]) -> None:
            try:
                loop()
            except BaseException as error:
                with self._changed:
                    self._errors.append(error)
            finally:
                with self._changed:
                    self._alive -= 1
                    self._look()
                    self._changed.notify_all()

        threads = [threading.Thread(target=guarded, args=(loop,), daemon=True) for loop in loops]
        with self._changed:
            self._alive += len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _look(self) -> None:
        """Whether any thread can go on. One that waits for its loops to end counts as one that waits."""
        if self._waiting and len(self._waiting) == self._alive and not any(one() for one in self._waiting.values()):
            self._errors.append(Deadlock(f"{self._alive} loops wait for each other"))

    def warp_specialize(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        of = self._of_thread.worker, self._of_thread.workers

        def loop(text: Any, arguments: tuple[Any, ...]) -> None:
            self._of_thread.worker, self._of_thread.workers = of
            text(*arguments)

        with self._changed:
            self._alive -= 1  # this thread only waits for them
        self._run([lambda one=one: loop(*one) for one in parts])
        with self._changed:
            self._alive += 1

    def wait(self, barrier: Barrier, phase: Any) -> None:
        def passed() -> bool:
            return barrier.phase != phase

        with self._changed:
            if passed():
                return
            self._waiting[threading.get_ident()] = passed
            self._look()
            self._changed.wait_for(lambda: passed() or bool(self._errors))
            del self._waiting[threading.get_ident()]
            if self._errors:
                raise Deadlock("another loop has ended")

    def arrive(self, barrier: Barrier, count: int = 1, more: int = 0) -> None:
        with self._changed:
            barrier.arrived, barrier.bytes = barrier.arrived + count, barrier.bytes + more
            assert barrier.arrived <= barrier.count, "more arrivals than the barrier counts"
            if barrier.arrived == barrier.count and not barrier.bytes:
                barrier.arrived, barrier.phase = 0, barrier.phase ^ 1
                self._changed.notify_all()

    # What the hardware does ----------------------------------------------------------------------------------------

    def tma_load(self, tensor_map: TensorMap, place: Sequence[Any], barrier: Barrier, box: Box) -> None:
        found = tensor_map.tensor[_part(place, tensor_map.box)].float()
        box.value = torch.zeros(tensor_map.box)
        box.value[: found.shape[0], : found.shape[1]] = found
        self.arrive(barrier, 0, -box.value.numel() * tensor_map.tensor.element_size())

    def tma_store(self, tensor_map: TensorMap, place: Sequence[Any], box: Box) -> None:
        self._of_thread.apart = True
        part = _part(place, box.value.shape)
        found = tensor_map.tensor[part]
        with self._changed:
            tensor_map.stored[part] += 1
        found.copy_(box.value[: found.shape[0], : found.shape[1]])

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        """A thread is all warps of its loop: on a GPU those are apart from a store on, until they meet."""
        if self._log is None or pointer.memory.data_ptr() != self._log.data_ptr():
            self._of_thread.apart = True
        elif int(pointer.offset) % WORDS.value in _ENDS:
            assert not getattr(self._of_thread, "apart", False), "a tile's end is before another warp's stores"
        store(pointer, value, mask)

    def meet(self, *_: Any) -> None:
        self._of_thread.apart = False

    def atomic(self, change: Callable[[torch.Tensor, Any], Any]) -> Callable[..., torch.Tensor]:
        def one(pointer: Pointer, *values: Any, **_: Any) -> torch.Tensor:
            assert 0 <= pointer.offset < len(pointer.memory), "an atomic out of bounds"
            with self._changed:
                found = pointer.memory[pointer.offset].clone()
                pointer.memory[pointer.offset] = change(found, *values)
            return found

        return one

    def exchange(self, pointer: Pointer, new: Any, **_: Any) -> torch.Tensor:
        self._exchanged(pointer)
        return self.atomic(lambda old, new: new)(pointer, new)

    def prefetch(self, words: Any, queue: Any, go: Any) -> torch.Tensor | None:
        return self.atomic(lambda old, new: old + new)(words.counters + queue * LINE, 1) if go else None

    def _made_stand_ins(self) -> dict[str, Any]:
        both: dict[str, Any] = {
            "static_range": range, "constexpr": None, "load": load, "store": self.store, "where": _where,
            "minimum": _least, "maximum": _most, "abs": torch.abs, "float32": torch.float32, "int32": torch.int32,
            "int64": torch.int64, "cast": lambda x, dtype: torch.as_tensor(x).to(dtype), "expand_dims": torch.unsqueeze,
            "sum": lambda x, _: x.sum(), "min": lambda x, _: x.min(), "max": lambda x, _: x.max(),
            "cumsum": lambda x, _: x.cumsum(0), "program_id": lambda _: torch.tensor(self._of_thread.worker),
            "num_programs": lambda _: torch.tensor(self._of_thread.workers), "debug_barrier": lambda: None,
            "atomic_add": self.atomic(lambda old, new: old + new), "atomic_xchg": self.exchange,
            "atomic_max": self.atomic(lambda old, new: max(old, new)),
            "atomic_cas": self.atomic(lambda old, if_so, new: torch.where(old == if_so, new, old)),
        }  # fmt: skip
        gl = {
            "arange": lambda first, end, _=None: torch.arange(first, end), "num_warps": lambda: 4,
            "pointer_type": lambda dtype: ("pointer", dtype), "zeros_like": torch.zeros_like,
            "SliceLayout": lambda *_: None, "BlockedLayout": lambda *_: None, "SwizzledSharedLayout": lambda *_: None,
            "convert_layout": lambda x, _: x, "warp_specialize": self.warp_specialize,
            "allocate_shared_memory": lambda _, shape, __: Boxes(0, shape[0]),
            "inline_asm_elementwise": lambda _, __, values, **___: values[0],
        }  # fmt: skip
        slots: Callable[[], dict[Any, Any]] = dict
        nothing = {name: lambda *_: None for name in ("gdc_wait", "gdc_launch_dependents", "drain")}
        tick = itertools.count(1)
        return nothing | {
            "barrier": self.meet,
            "tl": SimpleNamespace(**both), "gl": SimpleNamespace(**both | gl),
            "mbarrier": SimpleNamespace(
                wait=self.wait, arrive=self.arrive, expect=lambda barrier, more: self.arrive(barrier, 1, int(more))
            ),
            "tma": SimpleNamespace(store_wait=lambda _: None), "fence_async_shared": lambda: None,
            "tma_load": self.tma_load, "tma_store": self.tma_store, "viewed": lambda box, _: box,
            "make_stages": lambda made, count: Boxes(8 * made.tensor.element_size(), count),
            "make_barriers": lambda count, arrivals: Barriers(Barrier(arrivals) for _ in range(count)),
            "make_slots": slots, "put": lambda made, slot, field, value, _: made.update({(int(slot), field): value}),
            "get": lambda made, slot, field, _: made[int(slot), field], "mma_layout": lambda *_: None,
            "zero": lambda rows, width, _: torch.zeros(rows, width), "fenced": lambda x: x, "landed": lambda x: x,
            "mma_operand": operand, "warpgroup_mma": lambda x, y, acc, is_async, use_acc: x @ y + (acc * use_acc),
            "warpgroup_mma_wait": lambda _, values: values if len(values) > 1 else values[0],
            "columns_of": lambda acc, first, _, strip, __: acc[:, int(first) : int(first) + strip],
            "reciprocal": lambda y: 1 / y, "power_of_2": torch.exp2, "lane_layout": lambda *_: None,
            "prefetch_leaving": lambda *_: None,
            "prefetch_ticket": self.prefetch, "await_ticket": lambda words, queue, asked: asked - words.base,
            "nap": lambda _: time.sleep(0), "present": lambda _: torch.tensor(next(tick)),
            "latest": lambda _: torch.tensor(next(tick)), "now": lambda: torch.tensor(next(tick)),
            "unit_of": lambda: torch.tensor(-1),
        }  # fmt: skip


def operand(stages: Boxes, at: Any, k_major: bool, transposed: bool) -> torch.Tensor:
    found = stages.index(at).value
    return found.T if k_major == transposed else found


def _part(place: Sequence[Any], extent: Sequence[int]) -> tuple[Any, ...]:
    """The part of a tensor that a box at a place covers; a map that clips has the end of its rows there, too."""
    *front, row, column = (int(x) for x in place)
    rows = slice(row, row + extent[0])
    if len(front) == 2:
        first, end = front
        assert first == BEYOND, "the map clips"
        front, row = [], row - BEYOND + end
        rows = slice(row, min(row + extent[0], end))
    return *front, rows, slice(column, column + extent[1])


def _where(found: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(torch.as_tensor(found), torch.as_tensor(a), torch.as_tensor(b))


def _least(a: Any, b: Any) -> torch.Tensor:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _most(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
