"""The texts of attention whose values are taken in strips, run as plain Python: a program at a time, on flat memory.

It has the numbers of `attention_machine`, so that a row's bits can be compared with those of the Hopper kernel's text.
Products of matrices are exact and rounded once for each product of that kernel: of 64 columns, of a block of keys.
"""

from __future__ import annotations

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


def names() -> dict[str, Any]:
    """What the texts call."""
    found = Machine.names(Machine.__new__(Machine))
    more = {
        "load": lambda pointer, mask=None, other=0: pointer.load(mask, other),
        "arange": lambda low, high, layout=None: of(np.arange(low, high)),
        "dot": dot, "trans": np.transpose, "int64": np.int64, "multiple_of": lambda x, _: x,
    }  # fmt: skip
    language = SimpleNamespace(**vars(found["gl"]) | more)
    return found | structs_of(*MODULES) | constants_of(*MODULES) | {"gl": language, "tl": language}


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
    bound = names()
    bind(bound, jitted_of(*MODULES), edits)
    for kernel, grid, _ in arguments.kernels():
        filled = arguments.pack(kernel)(tuple(given.values()), scratch)
        for at in product(*map(range, grid)):
            bound["tl"].program_id = bound["gl"].program_id = lambda axis, at=at: Integer(at[axis])
            with np.errstate(all="ignore"):
                bound[kernel.fn.__name__](*[Integer(one) if type(one) is int else one for one in filled])
    lse = memory["lse"].reshape(p.batch, p.heads_q, -1).transpose(0, 2, 1)
    return memory["out"].reshape(rows, p.heads_q, -1), lse.reshape(rows, p.heads_q)
