"""The texts of attention whose values are taken in strips, run as plain Python: a program at a time, on flat memory.

It has the numbers of `attention_machine`, so that a row's bits can be compared with those of the Hopper kernel's text.
Products of matrices are exact and rounded once for each product of that kernel: of 64 columns, of a block of keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_machine import Machine
from attention_memory import Array, Dtype, Integer, Pointer, of
from attention_operands import Prepared
from test_hopper_attention_text import H100, flat
from texts import bind, constants_of, jitted_of, structs_of

from mutants.engine import Edit
from tilestream.kernels.device import attention_tile, softmax
from tilestream.kernels.hopper import attention_strips as weigh_text
from tilestream.kernels.portable import attention as portable_text
from tilestream.kernels.portable import attention_strips as text
from tilestream.launch.attention_arguments import GIVEN
from tilestream.launch.hopper.strip_arguments import Scratch, StripArguments
from tilestream.ops.attention_gpu import layout_of
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention, hopper_strips

MODULES = (attention_tile, softmax, portable_text, weigh_text, text)
#: Columns of queries and keys that the Hopper kernel multiplies at a time.
PART = 64


class Flat(Pointer):
    """An address in a flat array, that masks guard."""

    dtype = SimpleNamespace(element_ty=Dtype)

    def __add__(self, offset: Any) -> Flat:
        return Flat(self.memory, self.at + offset)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        if mask is None:
            return super().load()
        at, mask = np.broadcast_arrays(self.at, np.asarray(mask, bool))
        assert (at[mask] >= 0).all(), "in range"
        assert (at[mask] < self.memory.size).all(), "in range"
        return of(np.where(mask, self.memory[np.where(mask, at, 0)], other).astype(self.memory.dtype))

    def store(self, value: np.ndarray, mask: np.ndarray) -> None:
        _, mask, value = np.broadcast_arrays(self.at, np.asarray(mask, bool), value)
        super().store(value, mask) if mask.any() else None


class Shared:
    """A buffer of shared memory, or several. A copy's bytes are there when somebody has waited for them."""

    def __init__(self, dtype: Any, memory: np.ndarray) -> None:
        self.dtype, self.memory, self.shape = dtype, memory, memory.shape

    def index(self, at: int) -> Shared:
        assert 0 <= at < len(self.memory)
        return Shared(self.dtype, self.memory[at])

    def slice(self, start: int, length: int) -> Shared:
        assert length % 8 == 0, "whole rows of swizzled cells"
        return Shared(self.dtype, self.memory[start : start + length])

    def load(self, _: object) -> Array:
        return of(self.memory.copy())


class Warps:
    """The loops of one program: two at most, of which one runs until it waits. And what they wait for."""

    def __init__(self) -> None:
        self.turn, self.changed, self.failed = 0, threading.Condition(), False
        self.going = {0}
        self.copies: dict[int, list[Callable[[], None]]] = {0: [], 1: []}
        self.groups: dict[int, list[list[Callable[[], None]]]] = {0: [], 1: []}
        self.products: list[list[Any]] = []

    def who(self) -> int:
        return getattr(threading.current_thread(), "who", 0)

    def until(self, ready: Callable[[], bool]) -> None:
        """Let the other loop run until it waits, and again until this one is ``ready``."""
        for _ in range(10000):
            if len(self.going) > 1:
                with self.changed:
                    self.turn = 1 - self.who()
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: self.turn == self.who() or len(self.going) == 1 or self.failed)
            if ready():
                return
            assert not self.failed
            assert len(self.going) > 1, "what is waited for never comes"
        raise AssertionError("the loops wait for each other")

    def specialize(self, loops: Any, warps: list[int], registers: list[int]) -> None:
        assert warps == [4]
        assert len(loops) == 2

        def beside() -> None:
            with self.changed:
                self.changed.wait_for(lambda: self.turn == 1)
            try:
                with np.errstate(all="ignore"):
                    loops[1][0](*loops[1][1])
            except BaseException:
                self.failed = True
                raise
            finally:
                with self.changed:
                    self.going.discard(1)
                    self.turn = 0
                    self.changed.notify_all()

        thread = threading.Thread(target=beside, daemon=True)
        thread.who = 1  # type: ignore[attr-defined]
        self.going.add(1)
        thread.start()
        try:
            loops[0][0](*loops[0][1])
        finally:
            with self.changed:
                self.going.discard(0)
                self.turn = 1
                self.changed.notify_all()
            thread.join(30)
            self.going = {0}
        assert not self.failed

    def copy(self, buffer: Shared, pointer: Flat, mask: Any) -> None:
        assert np.broadcast_shapes(np.shape(pointer.at), np.shape(mask)) == buffer.shape
        value = pointer.load(mask, 0)
        buffer.memory[...] = np.nan

        def land() -> None:
            buffer.memory[...] = value

        self.copies[self.who()].append(land)

    def commit(self) -> None:
        self.groups[self.who()].append(self.copies[self.who()])
        self.copies[self.who()] = []

    def wait_group(self, left: int) -> None:
        groups = self.groups[self.who()]
        while len(groups) > left:
            for land in groups.pop(0):
                land()

    def arrive_when_copied(self, bar: Any, increment_count: bool) -> None:
        assert not increment_count
        assert bar.count == 128
        assert not bar.arrived, "each phase is waited for"
        bar.copies, self.copies[self.who()] = self.copies[self.who()], []
        bar.arrived += 128

    def make_barriers(self, count: int, arrivals: int) -> Any:
        made = [SimpleNamespace(count=arrivals, arrived=0, phase=0, copies=[]) for _ in range(count)]
        return SimpleNamespace(index=lambda at: made[at])

    def arrive(self, bar: Any) -> None:
        bar.arrived += 1
        self.settle(bar)

    def settle(self, bar: Any) -> None:
        """Copies land, and the barrier's phase ends, if all have arrived."""
        if bar.arrived == bar.count:
            for land in bar.copies:
                land()
            bar.arrived, bar.phase, bar.copies = 0, bar.phase + 1, []

    def wait(self, bar: Any, parity: int) -> None:
        def passed() -> bool:
            self.settle(bar)
            return bool(bar.phase & 1 != parity)

        self.until(passed)

    def multiply(self, p: Shared, y: Shared, acc: Any, is_async: bool) -> list[Any]:
        assert is_async
        assert p.shape[0] == 64, "rows of an instruction"
        self.products.append([p, y, np.array(acc), None])
        return self.products[-1]

    def multiplied(self, left: int, tensors: tuple[Any, ...]) -> Any:
        """The sum, of what its buffers hold after all that others do meanwhile."""
        assert left == 0
        self.until(lambda: True)
        (made,) = tensors
        assert made is self.products.pop()
        p, y, acc, _ = made
        return dot(of(p.memory), of(y.memory), acc, "ieee")

    def names(self) -> dict[str, Any]:
        return {
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.copy, commit_group=self.commit, wait_group=self.wait_group,
                mbarrier_arrive=self.arrive_when_copied,
            ),
            "mbarrier": SimpleNamespace(wait=self.wait, arrive=self.arrive), "make_barriers": self.make_barriers,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied, "copy_layout": lambda _: None,
            "fence_async_shared": lambda: None, "barrier": lambda: None,
        }  # fmt: skip


def dot(x: Array, y: Array, acc: Any = None, input_precision: str = "") -> Array:
    """A product as the Hopper kernel's exact stand-in has it."""
    assert input_precision == "ieee"
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if acc is not None:
        return of((np.asarray(acc) + x @ y).astype(np.float32))
    sums = np.zeros((x.shape[0], y.shape[1]), np.float32)
    for first in range(0, x.shape[1], PART):
        sums = (sums + x[:, first : first + PART] @ y[first : first + PART]).astype(np.float32)
    return of(sums)


def names(warps: Warps) -> dict[str, Any]:
    """What the texts call."""
    found = Machine.names(Machine.__new__(Machine))
    more = {
        "arange": lambda low, high, layout=None: of(np.arange(low, high)),
        "load": lambda pointer, mask=None, other=0: pointer.load(mask, other),
        "SwizzledSharedLayout": lambda *_: None, "warp_specialize": warps.specialize,
        "allocate_shared_memory": lambda dtype, shape, _: Shared(dtype, np.full(tuple(shape), np.nan, np.float32)),
        "dot": dot, "trans": np.transpose, "int64": np.int64, "multiple_of": lambda x, _: x,
    }  # fmt: skip
    language = SimpleNamespace(**vars(found["gl"]) | more)
    return found | structs_of(*MODULES) | constants_of(*MODULES) | {"gl": language, "tl": language} | warps.names()


def plan_of(problem: AttentionProblem) -> AttentionPlan:
    """A plan in strips, of the block that unsplit tiles have."""
    unsplit = next(iter(hopper_attention.candidates(problem, H100, 132, kind="dynamic", splits=1, promises=True)))
    (found,) = hopper_strips.candidates(problem, H100, 132, [unsplit.block[1]], kind="dynamic")
    return of_candidate(problem, H100, "hopper", found, "a test's", ())


def run(case: Prepared, plan: AttentionPlan | None = None, edits: tuple[Edit, ...] = ()) -> tuple[np.ndarray, ...]:
    """``(out, lse)``: ``[rows, heads, columns]`` and ``[rows, heads]``, from the kernels' texts."""
    p, x = case.problem, case.operands
    plan = plan or plan_of(p)
    memory = {name: flat(y) for name, y in x._asdict().items() if isinstance(y, torch.Tensor)}
    rows = p.batch * p.seqlen_q
    memory |= {"out": np.full(rows * p.heads_q * p.head_dim_v, np.nan), "lse": np.full(rows * p.heads_q, np.nan)}
    arguments = StripArguments(plan, layout_of(x))
    sizes = hopper_strips.scratch_of(plan)
    sizes[2] *= 2  # weights have 16 bits
    scratch = Scratch(*(Flat(np.full(size, np.nan, np.float32)) for size in sizes))
    given = dict.fromkeys(GIVEN) | {name: Flat(one) for name, one in memory.items() if name in GIVEN}
    given |= dict(zip(("scale", "softcap_scale"), arguments.scales(x.scale), strict=True))
    warps = Warps()
    bound = names(warps)
    bind(bound, jitted_of(*MODULES), edits)
    for kernel, grid, _ in arguments.kernels():
        filled = arguments.pack(kernel)(tuple(given.values()), scratch)
        for at in product(*map(range, grid)):
            bound["tl"].program_id = bound["gl"].program_id = lambda axis, at=at: Integer(at[axis])
            with np.errstate(all="ignore"):
                bound[kernel.fn.__name__](*[Integer(one) if type(one) is int else one for one in filled])
    lse = memory["lse"].reshape(p.batch, p.heads_q, -1).transpose(0, 2, 1)
    return memory["out"].reshape(rows, p.heads_q, -1), lse.reshape(rows, p.heads_q)
