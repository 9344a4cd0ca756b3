"""The text of CDNA's attention on numpy, by the machine of `emulated`: a whole launch of one worker, for any operands.

Nothing is rounded to 16 bits here, so what it gives is as near to the truth as float64 is.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from emulated import FLOAT32, INT32, Dtype, Int, Machine, Memory, Pointer, Tensor

from tilestream.core import attention as rules
from tilestream.core import integers, raster
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.cdna import attention, attention_copy
from tilestream.kernels.cdna import attention_softmax as cdna_softmax
from tilestream.kernels.device import varlen as attention_list
from tilestream.kernels.hopper import attention_load, attention_softmax
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.plan.attention_plan import AttentionPlan

FLOAT16 = Dtype("fp16", 16)
#: What of other kernels is run as it stands.
SHARED = (
    attention_load.item_of, cdna_softmax.sees, attention_softmax.peaks, attention_softmax.weighed,
    attention_softmax.finished, attention_list.rows_of, attention_list.place_of,
)  # fmt: skip


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
        for name in ("load", "minimum", "maximum", "where"):
            setattr(tl, name, getattr(gl, name))
        self.names |= {
            "VECTOR": attention_copy.VECTOR.value, "KEYS": cdna_softmax.KEYS.value,
            "LOG2_E": attention_softmax.LOG2_E.value, "LN_2": attention_softmax.LN_2.value, "settled": lambda x: x,
            "load_scalar": self.load,
            "power_of_2": lambda x: Tensor(np.exp2(x.data), FLOAT32),
            "reciprocal": lambda x: Tensor(1 / x.data, FLOAT32),
            "cdiv": integers.cdiv, "longest_first": raster.longest_first, "key_blocks": rules.key_blocks,
            "diagonal": rules.diagonal, "halved": rules.halved,
        }  # fmt: skip
        own = [
            value for module in (attention_copy, cdna_softmax, attention) for value in vars(module).values()
            if getattr(getattr(value, "fn", None), "__module__", "") == module.__name__
        ]  # fmt: skip
        for jitted in (*own, *SHARED):
            text = jitted.fn
            self.names[text.__name__] = FunctionType(text.__code__, self.names, text.__name__, text.__defaults__)

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

    def take(self, *given: Any) -> tuple[Any, ...]:
        """An item; a worker's cursor begins with no ticket, at its own queue: `schedule.take` says what they are."""
        assert self.taken or given[2:4] == (0, 0)
        self.taken = True
        return super().take(*given)

    taken = False

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


def listed(plan: AttentionPlan, x: AttentionOperands) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What `tilestream.kernels.device.varlen.list_sequences` makes."""
    p = plan.problem
    if not p.varlen:
        return None, None
    assert x.cu_seqlens_q is not None
    queries = [*(x.cu_seqlens_q.diff().tolist()), p.tokens_q - int(x.cu_seqlens_q[-1])]
    keys = [p.seqlen_k] * p.batch if x.cu_seqlens_k is None else x.cu_seqlens_k.diff().tolist()
    if x.seqlens_k is not None:
        keys = [min(a, b) for a, b in zip(keys, x.seqlens_k.tolist(), strict=True)]
    keys = [*keys, 0]
    order = sorted(range(p.batch + 1), key=lambda i: (-keys[i], i))
    starts = [0]
    for i in order:
        starts.append(starts[-1] + integers.cdiv(queries[i], plan.positions) * (p.heads_q // plan.pack))
    return torch.tensor(starts), torch.tensor(order)


def run(plan: AttentionPlan, arguments: CdnaAttentionArguments, x: AttentionOperands, late: bool) -> None:
    """Fill the output and the log-sum-exp of ``x`` with what the kernel's text makes of it."""
    floats = [memory(y, FLOAT16) for y in (x.q, x.k, x.v, x.out)]
    singles = [memory(y, FLOAT32) for y in (x.lse, x.sinks)]
    starts, order = listed(plan, x)
    ints = [
        memory(y, INT32) for y in (x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, x.block_table, starts, order)
    ]  # fmt: skip
    at = [None if one is None else one.start for one in (*floats, *singles, *ints)]
    items = list(plan.schedule.items())
    AttentionMachine(items, late).attend(arguments.fill(*at, None, 0, 0, *arguments.scales(x.scale)))
    for tensor, made in ((x.out, floats[3]), (x.lse, singles[0])):
        if tensor is not None and made is not None:
            tensor.copy_(torch.from_numpy(made.values[: tensor.numel()].reshape(tensor.shape)))
