"""The texts of attention whose values are taken in strips, run as plain Python: a program at a time, on flat memory.

It has the numbers of `attention_machine`, so that a row's bits can be compared with those of the Hopper kernel's text.
Products of matrices are exact and rounded once for each product of that kernel: of 64 columns, of a block of keys.
"""

from __future__ import annotations

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
    """What one program waits for: copies, which land when it has waited for their group, and products."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[list[Any]] = []
        #: What landed behind the last fence, and what products read that other warps may not have waited for.
        self.landed: list[np.ndarray] = []
        self.read: list[np.ndarray] = []
        self.synchronized = True

    def copy(self, buffer: Shared, pointer: Flat, mask: Any) -> None:
        assert np.broadcast_shapes(np.shape(pointer.at), np.shape(mask)) == buffer.shape
        value = pointer.load(mask, 0)
        assert not any(np.shares_memory(buffer.memory, one) for one in self.read), "a barrier stands between"
        buffer.memory[...] = np.nan

        def land() -> None:
            buffer.memory[...] = value
            self.landed.append(buffer.memory)

        self.copies.append(land)

    def commit(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, left: int) -> None:
        """Each thread's own copies land; the other threads' are there behind a barrier."""
        self.synchronized = False
        while len(self.groups) > left:
            for land in self.groups.pop(0):
                land()

    def barrier(self) -> None:
        self.synchronized, self.read = True, []

    def fence(self) -> None:
        assert self.synchronized, "a fence stands behind the barrier"
        self.landed = []

    def multiply(self, p: Shared, y: Shared, acc: Any, is_async: bool) -> list[Any]:
        assert is_async
        assert p.shape[0] == 64, "rows of an instruction"
        for operand in (p, y):
            assert not np.isnan(operand.memory[: 1 if operand is p else None]).any(), "what is read has landed"
            assert not any(np.shares_memory(operand.memory, one) for one in self.landed), "a fence stands between"
        self.products.append([p, y, np.array(acc)])
        return self.products[-1]

    def multiplied(self, left: int, tensors: tuple[Any, ...]) -> Any:
        """The sum, of what its buffers hold after all that was copied meanwhile."""
        assert left == 0
        (made,) = tensors
        assert made is self.products.pop()
        p, y, acc = made
        self.read += [p.memory, y.memory]
        return dot(of(p.memory), of(y.memory), acc, "ieee")

    def names(self) -> dict[str, Any]:
        return {
            "copy_to_shared": self.copy, "commit": self.commit, "wait_for_groups": self.wait_group,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied, "copy_layout": lambda _: None,
            "fence_async_shared": self.fence, "barrier": self.barrier,
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
        "SwizzledSharedLayout": lambda *_: None,
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
