"""The text of CDNA's attention on numpy, by the machine of `emulated`: a whole launch of one worker, for any operands.

Nothing is rounded to 16 bits here, so what it gives is as near to the truth as float64 is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_operands import listed
from emulated import FLOAT32, INT32, Dtype, Int, Machine, Memory, Pointer, Tensor
from texts import bind, constants_of, jitted_of, structs_of

from tilestream.core import attention as rules
from tilestream.core import integers, queues, raster
from tilestream.core.operands import AttentionOperands
from tilestream.core.structs import Item, Passed, Progress, Watch
from tilestream.kernels.cdna import attention, attention_copy
from tilestream.kernels.cdna import attention_softmax as cdna_softmax
from tilestream.kernels.device import attention_tile, schedule, softmax, varlen
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.plan.attention_plan import AttentionPlan

FLOAT16 = Dtype("fp16", 16)
#: Of these all jitted functions are run as they stand; their constants and structs too.
MODULES = (attention_tile, softmax, attention_copy, cdna_softmax, attention)
#: Others' functions that are run as they stand.
ALSO = (varlen.rows_of, varlen.place_of, schedule.first_cursor)


def _compared(name: str) -> Any:
    return lambda self, other: NotImplemented if isinstance(other, Tensor) else Int(getattr(int, name)(self, other))


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Int, f"__{_name}__", _compared(f"__{_name}__"))
Int.__hash__ = int.__hash__  # type: ignore[method-assign]


def data(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


class AttentionMachine(Machine):
    """The kernel's functions, bound to stand-ins: see `emulated.Machine`."""

    def __init__(self, items: list[Any], late: bool) -> None:
        super().__init__(items, late)
        gl, tl = self.names["gl"], self.names["tl"]
        gl.amd = SimpleNamespace(
            AMDMFMALayout=lambda version, shape, *_: SimpleNamespace(version=version, instr_shape=shape)
        )
        gl.static_assert = required
        gl.DistributedLinearLayout = gl.BlockedLayout = lambda *_: SimpleNamespace(size_per_thread=[1, 1])
        gl.max = lambda x, axis: Tensor(x.data.max(axis), x.dtype)
        gl.sum = lambda x, axis: Tensor(x.data.sum(axis), x.dtype)
        gl.log2 = lambda x: Tensor(np.log2(x.data), FLOAT32)
        gl.convert_layout = lambda x, *_, **__: x
        gl.where = lambda mask, x, y: Tensor(np.where(mask.data, data(x), data(y)), FLOAT32)
        gl.maximum, gl.bfloat16 = self.maximum, Dtype("bf16", 16)
        for name in ("load", "minimum", "maximum", "where", "max", "sum", "log2"):
            setattr(tl, name, getattr(gl, name))
        self.names |= structs_of(schedule, *MODULES) | constants_of(schedule, *MODULES)
        for jitted in (*jitted_of(*MODULES), *ALSO):  # instead of those of GEMM
            self.names.pop(jitted.fn.__name__, None)
        bind(self.names, (*jitted_of(*MODULES), *ALSO))
        self.names |= {
            "settled": lambda x: x, "load_scalar": self.load, "opaque_zero": lambda: 0,
            "power_of_2": lambda x: Tensor(np.exp2(x.data), FLOAT32),
            "reciprocal": lambda x: Tensor(1 / x.data, FLOAT32),
            "cdiv": integers.cdiv, "longest_first": raster.longest_first, "key_blocks": rules.key_blocks,
            "diagonal": rules.diagonal, "halved": rules.halved, "neighbour": queues.neighbour,
            "begin_worker": self.begin_worker, "finish_worker": self.ignore, "take": self.take,
        }  # fmt: skip

    @staticmethod
    def load(at: Pointer, mask: Any = None, other: float = 0.0) -> Any:
        found = at.read(mask, other)
        if at.dtype == INT32:
            return Int(found.data) if not found.shape else Tensor(found.data.astype(int))
        return found if found.shape else float(found.data)

    @staticmethod
    def minimum(x: Any, y: Any) -> Any:
        return Int(min(x, y)) if isinstance(x, int) and isinstance(y, int) else Tensor(np.minimum(data(x), data(y)))

    @staticmethod
    def maximum(x: Any, y: Any) -> Any:
        if isinstance(x, int) and isinstance(y, int):
            return Int(max(x, y))
        return Tensor(np.maximum(data(x), data(y)), x.dtype if isinstance(x, Tensor) else INT32)

    def begin_worker(self, worker: int, workers: int, *_: object) -> tuple[Any, Watch]:
        passed = Passed(*[Int(0)] * 5)
        return Progress(self.names["first_cursor"](), None, passed), Watch(worker, workers, Int(0), None, None, None)

    def take(self, cursor: Any, *_: object) -> tuple[Any, ...]:
        """An item; a worker's cursor begins with no ticket, at its own queue: `schedule.take` says what they are."""
        assert (cursor.ticket, cursor.source) == (0, 0)
        item = next(self.items, None)
        if item is None:
            return 0, Item(*[Int(7)] * 9), cursor  # a void ticket's item is of no account
        return 1, Item(*map(Int, (item.batch, item.pm, item.pn)), *[Int(0)] * 6), cursor

    def attend(self, filled: tuple[Any, ...]) -> None:
        """The kernel, one worker."""
        code = attention.attend.fn.__code__
        given = {
            name: Int(value) if type(value) is int and name.islower() else value
            for name, value in zip(code.co_varnames[: code.co_argcount], filled, strict=True)
        }
        with np.errstate(divide="ignore", invalid="ignore"):  # log2 of what saw nothing
            self.names["attend"](**given)
        assert not self.open, "copies that nobody committed"
        assert not any(self.groups), "copies that nobody waited for"


def required(kept: bool, message: str) -> None:
    """What a kernel asserts when it is compiled."""
    assert kept, message


def memory(x: torch.Tensor | None, dtype: Dtype) -> Memory | None:
    return None if x is None else Memory(x.detach().double().numpy(), dtype)


def run(plan: AttentionPlan, arguments: CdnaAttentionArguments, x: AttentionOperands, late: bool) -> None:
    """Fill the output and the log-sum-exp of ``x`` with what the kernel's text makes of it."""
    floats = [memory(y, FLOAT16) for y in (x.q, x.k, x.v, x.out)]
    singles = [memory(y, FLOAT32) for y in (x.lse, x.sinks)]
    starts, order = listed(plan, x)
    ints = [
        memory(y, INT32) for y in (x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, x.block_table, starts, order)
    ]  # fmt: skip
    at = [None if one is None else one.start for one in (*floats, *singles, None, None, None, *ints)]
    items = list(plan.schedule.items())
    given = (*at, None, None, 0, 0, *arguments.scales(x.scale))
    AttentionMachine(items, late).attend(arguments.pack(attention.attend)(given))
    for tensor, made in ((x.out, floats[3]), (x.lse, singles[0])):
        if tensor is not None and made is not None:
            tensor.copy_(torch.from_numpy(made.values[: tensor.numel()].reshape(tensor.shape)))
