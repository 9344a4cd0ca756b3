"""A machine of NumPy that runs the text of the Hopper attention kernel: its numbers, its barriers, its copies.

The kernel's own functions are run as plain Python, each loop in a thread; all else that they call is stood in for.
Nothing lands early and nothing is read early, as far as the kernel's waits allow:

* a TMA load makes its stage NaN when it is started, and lands when somebody waits for its barrier (``eager``: at once);
* a multiplication reads its shared memory when it is waited for;
* a TMA store reads its buffer when it is waited for;
* what a loop writes to shared memory is NaN there until the loop fences: copies and multiplications are of the
  asynchronous proxy.

One thread runs at a time. At each wait the baton goes to one that a seeded generator picks; where all wait, that is a
deadlock. Memory is flat, with bounds that are checked; a tensor map's coordinates go through 64 bits, as in hardware.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from attention_memory import (
    Array,
    Barrier,
    Buffer,
    Dtype,
    Integer,
    Memory,
    Narrow,
    Pointer,
    Product,
    Real,
    TensorMap,
    of,
)
from texts import bind, constants_of, jitted_of, structs_of

from mutants.engine import Edit
from tilestream.core import attention as rules
from tilestream.core import integers, raster, ring
from tilestream.core.structs import Item, Passed, Progress, Watch
from tilestream.kernels.device import attention_gate as gate_text
from tilestream.kernels.device import attention_tile as tile_text
from tilestream.kernels.device import epilogue as portable_text
from tilestream.kernels.device import items as items_text
from tilestream.kernels.device import schedule as schedule_text
from tilestream.kernels.device import softmax as device_softmax_text
from tilestream.kernels.device import varlen as list_text
from tilestream.kernels.hopper import attention as text
from tilestream.kernels.hopper import attention_convert as convert_text
from tilestream.kernels.hopper import attention_load as load_text
from tilestream.kernels.hopper import attention_math as math_text
from tilestream.kernels.hopper import attention_softmax as softmax_text
from tilestream.kernels.hopper import epilogue as epilogue_text
from tilestream.kernels.hopper import queues as queues_text
from tilestream.launch.attention_arguments import NO_KEY_GATE, KeyGate

#: Of these all jitted functions that have no stand-in are run as they stand; their constants and structs too.
MODULES = (tile_text, device_softmax_text, convert_text, load_text, softmax_text, math_text, text)
#: Others' functions that are run as they stand.
ALSO = (
    list_text.rows_of, list_text.place_of, portable_text.sigmoid, gate_text.poll_over, items_text.with_over,
    schedule_text.first_cursor, schedule_text.with_asked,
)  # fmt: skip
_SECONDS = 60


def fma(x: Any, y: Any, z: Any) -> Array:
    """``x * y + z``, rounded once (but where the double's rounding is a tie of the float's)."""
    exact = np.multiply(np.asarray(x, np.float64), np.asarray(y, np.float64))
    return of((exact + np.asarray(z, np.float64)).astype(np.float32))


def blocked(elements: list[int], lanes: list[int], warps: list[int], _: list[int]) -> None:
    """A layout of a warp group, as the compiler takes it: powers of two, of 32 lanes and four warps."""
    assert math.prod(lanes) == 32, "a warp's lanes"
    assert math.prod(warps) == 4, "a group's warps"
    assert all(n & (n - 1) == 0 for n in (*elements, *lanes, *warps)), "powers of two"


class Deadlock(AssertionError):
    """All loops wait."""


class Machine:
    """One worker of one launch, on the positions of the schedule that it takes."""

    def __init__(
        self, arguments: Any, operands: dict[str, Any], positions: list[int], scale: float, seed: int = 0,
        eager: bool = False, edits: tuple[Edit, ...] = (), over_at: int | None = None,
    ) -> None:  # fmt: skip
        self.positions, self.random, self.eager = positions, random.Random(seed), eager
        self.turn = threading.Condition()
        self.running: set[int] = set()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.baton: int | None = None
        self.error: BaseException | None = None
        self.local = threading.local()
        #: What a trace of it would be told, where its arguments are those of one: what, of which tile, by whom.
        self.spans: list[tuple[Any, ...]] = []
        #: How often the gate is asked until it says that the launch is over; None: never. The rows waited for.
        self.over_at, self.passed = over_at, []  # type: tuple[int | None, list[tuple[int, int]]]
        self.barriers: list[Barrier] = []
        self.loops: list[Any] = []
        names = self.names()
        bind(names, (*jitted_of(*MODULES), *ALSO), edits)
        self.config = arguments.config()
        narrow = arguments.plan.problem.dtype == "float8_e4m3fn"
        maps = [
            TensorMap(getattr(arguments, name), operands[name], Narrow if narrow and name != "out" else Dtype)
            for name in ("q", "k", "v", "out")
        ]  # fmt: skip
        self.names_of_barriers = [name for name in BARRIERS if narrow or not name.startswith("raw")]
        given = [None if operands.get(name) is None else Pointer(operands[name]) for name in GIVEN]
        gate, counters = NO_KEY_GATE, None
        if arguments.plan.problem.keys is not None:
            gate, counters = KeyGate(*[0] * len(KeyGate._fields)), 0
        filled = arguments.pack(text.attend)((*maps, *given, counters, None, 0, 0, *arguments.scales(scale)), gate)
        self.first_cursor = names["first_cursor"]
        #: The answer to a ticket that has been asked for and not told.
        self.asked: Integer | None = None
        #: What items were told by first: their key blocks and one more, 0 for STOP.
        self.told: list[int] = []
        #: All that they were told, by field.
        self.items: list[dict[int, int]] = []
        names["attend"](*[Integer(x) if type(x) is int else x for x in filled])
        self.logs: list[list[tuple[Any, ...]]] = [[] for _ in self.loops]
        self.run()
        assert self.asked is None
        assert not any(bar.copies for bar in self.barriers), "each copy is waited for"

    # Threads ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.loop, args=(i, *loop), daemon=True) for i, loop in enumerate(self.loops)
        ]
        self.running = set(range(len(threads)))
        self.baton = 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
        if self.error is not None:
            raise self.error
        assert not any(thread.is_alive() for thread in threads)

    def loop(self, who: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.local.who, self.local.products, self.local.stores = who, [], []
        self.local.written, self.local.seen = [], False
        self.local.log = self.logs[who]
        try:
            self.until(lambda: True)
            with np.errstate(all="ignore"):  # of what the kernel means: 2**-inf, log2 0
                function(*arguments)
            assert not self.local.stores, "a loop leaves when its stores have read"
            assert not self.local.products
            assert not self.local.written, "what is written to shared memory is fenced"
        except BaseException as error:
            with self.turn:
                self.error = self.error or error
        finally:
            with self.turn:
                self.running.discard(who)
                self.waiting.pop(who, None)
                self.hand_on()

    def hand_on(self) -> None:
        """Give the baton to a loop that can go on. Called with the lock."""
        ready = [who for who in sorted(self.running) if who not in self.waiting or self.waiting[who]()]
        if not ready and self.running and self.error is None:
            self.error = Deadlock(f"all loops wait: {sorted(self.waiting)}")
        self.baton = self.random.choice(ready) if ready else None
        self.turn.notify_all()

    def until(self, ready: Callable[[], bool]) -> None:
        """Give the baton away, and go on when it comes back, which is when it can."""
        who = self.local.who
        with self.turn:
            self.waiting[who] = ready
            if self.baton == who:
                self.hand_on()
            while self.baton != who:
                if self.error is not None:
                    raise Deadlock("another loop failed")
                assert self.turn.wait(_SECONDS), "no baton"
            del self.waiting[who]

    # What the kernel asks for -----------------------------------------------------------------------------------------

    def names(self) -> dict[str, Any]:
        triton = SimpleNamespace(
            program_id=lambda _: Integer(0), num_programs=lambda _: Integer(1), static_range=range,
            arange=lambda low, high, _: of(np.arange(low, high)),
            full=lambda shape, value, *_: of(np.full(shape, value, np.float32)),
            zeros=lambda shape, *_: of(np.zeros(shape, np.float32)), where=where,
            maximum=both(np.maximum), minimum=both(np.minimum),
            max=lambda x, axis: of(np.asarray(x).max(axis)), sum=lambda x, axis: of(np.asarray(x).sum(axis)),
            log2=lambda x: of(np.log2(np.asarray(x))), fma=fma, convert_layout=lambda x, *_, **__: x,
            load=lambda pointer: pointer.load(), store=lambda pointer, value, mask: pointer.store(value, mask),
            cast=lambda value, _: Integer(value) if isinstance(value, int) else Real(value),
            allocate_shared_memory=lambda dtype, shape, _: Memory(dtype, *shape, self.unseen),
            warp_specialize=self.warp_specialize,
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None), SliceLayout=lambda *_: None,
            DotOperandLayout=lambda *_: None, BlockedLayout=blocked, float16=Dtype,
            float32=None, int32=None, int64=None,
        )  # fmt: skip
        modules = (schedule_text, items_text, gate_text, queues_text, *MODULES)
        return structs_of(*modules) | constants_of(*modules) | {
            "range": range, "len": len,
            "gl": triton, "tl": triton,
            "mbarrier": SimpleNamespace(wait=self.wait, arrive=self.arrive, expect=self.expect),
            "tma": SimpleNamespace(store_wait=self.store_wait), "fence_async_shared": self.fence,
            "tma_load": self.tma_load, "tma_store": self.tma_store, "viewed": lambda buffer, _: buffer,
            "boxes": lambda stages, tensor_map: stages.boxes(tensor_map),
            "in_blocks": lambda stages, rows, columns: stages.blocks(rows, columns),
            "mma_layout": lambda *_: None,
            "rescale_o": lambda o, rescale, *_: of(np.asarray(o) * np.asarray(rescale)[:, None]),
            "pack_p": lambda weights, _, dtype, __: weights.to(dtype), "as_operand": lambda p, *_: p,
            "warpgroup_mma": self.mma, "warpgroup_mma_wait": self.mma_wait,
            "take": self.take, "prefetch_ticket": self.prefetch_ticket, "await_ticket": "await_ticket", "add": "add",
            "begin_worker": self.begin_worker, "finish_worker": lambda *_: None, "put": self.put, "get": self.get,
            "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
            "make_barriers": self.make_barriers, "make_slots": dict, "step": ring.step,
            "pending": epilogue_text.pending.fn,
            "strip_of": lambda accs, start, _, strip, __: of(accs[0][:, start : start + strip]),
            "power_of_2": lambda x: of(np.exp2(np.asarray(x, np.float32))),
            "reciprocal": lambda x: of(np.float32(1) / np.asarray(x)),
            "cdiv": integers.cdiv, "longest_first": raster.longest_first, "key_blocks": rules.key_blocks,
            "diagonal": rules.diagonal, "halved": rules.halved, "share_of_keys": rules.share_of_keys,
            "late_bound": rules.late_bound,
            "blocks_of_part": rules.blocks_of_part,
            "fenced": self.fenced, "is_over": self.is_over, "pass_keys": self.pass_keys,
            "begin_span": lambda _, tile, worker: self.spans.append(("begin", tile, worker)),
            "ready_span": lambda _, tile: self.spans.append(("ready", tile)),
            "chunk_span": lambda _, tile, chunk: self.spans.append(("chunk", tile, chunk)),
            "end_span": lambda _, tile, who, whole: self.spans.append(("end", tile, who, bool(whole))),
            "barrier": self.meet, "chunk_at": lambda row, *_: row,
        }  # fmt: skip

    def warp_specialize(self, loops: Any, warps: list[int], registers: list[int]) -> None:
        assert len(loops) == len(warps) + 1 == len(registers) + 1
        self.loops = loops

    def make_barriers(self, count: int, arrivals: int) -> SimpleNamespace:
        name = self.names_of_barriers[len({bar.name.split("[")[0] for bar in self.barriers})]
        made = [Barrier(f"{name}[{i}]", arrivals) for i in range(count)]
        self.barriers += made

        def index(at: int) -> Barrier:
            assert 0 <= at < count
            return made[at]

        return SimpleNamespace(index=index)

    def wait(self, bar: Barrier, parity: int) -> None:
        assert parity in (0, 1)
        self.local.log.append(("WaitBarrier", bar.name, int(parity)))

        def passed() -> bool:
            if bar.phase & 1 == parity and bar.copies and bar.arrived == bar.count:
                bar.land()
            return bar.phase & 1 != parity

        self.until(passed)

    def arrive(self, bar: Barrier) -> None:
        self.local.log.append(("Arrive", bar.name))
        bar.arrived += 1
        bar.settle()

    def expect(self, bar: Barrier, nbytes: int) -> None:
        self.local.log.append(("Expect", bar.name))
        bar.arrived += 1
        bar.bytes += nbytes

    def unseen(self, buffer: Buffer, x: np.ndarray) -> None:
        """A write to shared memory: nothing that copies and multiplications read, until the loop's next fence."""
        self.local.written.append((Buffer(buffer.slabs), x))
        buffer.slabs[:] = np.nan

    def fence(self) -> None:
        """What this loop has written to shared memory, copies and multiplications see from here on."""
        self.local.log.append(("Fence",))
        for buffer, x in self.local.written:
            buffer.store(x)
        self.local.written.clear()

    def fenced(self, value: Integer) -> Integer:
        self.local.log.append(("Fence",))
        self.local.seen = False
        return value

    def meet(self) -> None:
        self.local.log.append(("Meet",))

    def tma_load(self, tensor_map: TensorMap, at: Any, bar: Barrier, box: np.ndarray) -> None:
        assert not self.local.seen, "what the gate has seen is fenced before it is copied"
        assert bar.arrived == bar.count, "bytes are expected before they come"
        self.local.log.append(("Copy", bar.name))
        box[:] = np.nan

        def copy() -> int:
            box[:] = tensor_map.load(at)
            return tensor_map.block_type.nbytes

        bar.copies.append(copy)
        if self.eager:
            bar.bytes -= bar.copies.pop()()
            bar.settle()

    def tma_store(self, tensor_map: TensorMap, at: Any, buffer: Buffer) -> None:
        self.local.stores.append(lambda: tensor_map.store(at, buffer.read()))

    def store_wait(self, left: int) -> None:
        while len(self.local.stores) > left:
            self.local.stores.pop(0)()

    def mma(self, x: Any, y: Buffer, acc: Any, is_async: bool, use_acc: bool = True) -> Product:
        assert is_async
        self.local.log.append(("Start", "k" if isinstance(x, Buffer) else "v"))
        self.local.products.append(Product(x, y, acc, use_acc))
        return self.local.products[-1]

    def mma_wait(self, left: int, tensors: tuple[Any, ...]) -> Any:
        self.local.log.append(("Retire", left))
        self.until(lambda: True)  # others go on meanwhile, and give what is read too early another content
        while len(self.local.products) > left:
            self.local.products.pop(0).finish()
        for x in tensors:
            assert not isinstance(x, Product) or x.value is not None, "what is read has been waited for"
        found = tuple(x.value if isinstance(x, Product) else x for x in tensors)
        return found if len(found) > 1 else found[0]

    def begin_worker(self, worker: int, workers: int, *_: object) -> tuple[Any, Watch]:
        passed = Passed(*[Integer(0)] * 5)
        return Progress(self.first_cursor(), None, passed), Watch(worker, workers, Integer(0), None, None, None)

    def prefetch_ticket(self, *_: object) -> Integer:
        assert self.asked is None, "each ticket that is prefetched is awaited"
        self.asked = Integer(0)
        return self.asked

    def take(self, cursor: Any, work: Any, words: Any, watch: Any, config: Any, add: str) -> tuple[Any, ...]:
        assert (self.asked is not None) == (add == "await_ticket"), "a ticket is prefetched before it is awaited"
        assert self.asked is None or cursor.asked is self.asked, "and that one is awaited"
        self.asked = None
        if not self.positions:
            return Integer(0), Item(*[Integer(7)] * 9), cursor  # a void ticket's item is of no account
        t = Integer(self.positions.pop(0))
        pm, pn = t, Integer(0)
        if config.ORDER == "longest_first":
            pm, pn = raster.longest_first(t, work.num_m, work.num_n, work.group)
        return Integer(1), Item(Integer(0), Integer(pm), Integer(pn), *[Integer(0)] * 6), cursor

    def is_over(self, *_: object) -> Integer:
        self.local.log.append(("Ask",))
        return Integer(self.over_at is not None and len(self.passed) >= self.over_at)

    def pass_keys(self, row: int, end: int, *_: object) -> tuple[Passed, int]:
        assert row < end, "nobody waits for nothing"
        self.local.log.append(("Pass",))
        over = Integer(len(self.passed) == self.over_at)
        self.passed.append((int(row), int(end)))
        self.local.seen = True
        return Passed(over, *[Integer(0)] * 4), Integer(end)

    def put(self, slots: dict[tuple[int, int], int], slot: int, field: int, value: int, warps: int) -> None:
        assert warps == 1
        self.local.log.append(("Put", int(slot)))
        if slots is self.loops[-1][1][2].slots:  # the load loop's
            if field == 0:
                self.told.append(int(value))
                self.items.append({})
            self.items[-1][field] = int(value)
        assert -(2**31) <= value < 2**31
        slots[int(slot), field] = int(value)

    def get(self, slots: dict[tuple[int, int], int], slot: int, field: int, warps: int) -> Integer:
        assert warps == 4
        self.local.log.append(("Get", int(slot)))
        return Integer(slots[int(slot), field])


#: In the order in which the kernel makes them.
BARRIERS = (
    "q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "raw_full", "raw_empty", "item_full", "item_empty",
    "order",
)  # fmt: skip
#: Operands behind the maps, in the order of `tilestream.launch.attention_arguments.GIVEN`; counters there are none.
GIVEN = (
    "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table",
    "starts", "order",
)  # fmt: skip


def where(condition: Any, x: Any, y: Any) -> Any:
    """Of scalars a scalar, of tensors a tensor."""
    if any(isinstance(one, np.ndarray) for one in (condition, x, y)):
        return of(np.where(condition, np.float32(x), np.float32(y)))
    return (Real if isinstance(x, float) or isinstance(y, float) else Integer)(x if condition else y)


def both(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of scalars a scalar, of tensors a tensor."""

    def done(x: Any, y: Any) -> Any:
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            return of(function(np.asarray(x), np.asarray(y)))
        return Integer(function(int(x), int(y)))

    return done
