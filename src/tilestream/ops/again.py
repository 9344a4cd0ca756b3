"""A call like an earlier one: what was checked and decided then is looked up, and the launch issued at once.

What a call on GPU operands may do, and which kernel it launches, depends on what its arguments are, not on what is in
them. The first call with such arguments goes the long way: it is checked, dispatched by torch, planned. Once it has
gone through, its like goes straight to the launch, with nothing arriving, and only if nobody watches torch's
dispatcher: a mode, a transform, autograd, a compiler, autocast.

Here are what all ops need for that, and the products of two matrices, without a residual and without an output given
(which must be checked for overlap each time); `tilestream.ops.attention_again` has attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch.autograd import forward_ad

from tilestream.core.operands import Epilogue
from tilestream.ops import gpu
from tilestream.ops.scales import FP8_DTYPES, FP8_RESULT_DTYPE, canonical_scales
from tilestream.plan import limit as limits
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32, context_units
from tilestream.trace.record import current

if TYPE_CHECKING:
    from tilestream.launch.launch import Launch
    from tilestream.ops.operands import Options

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST = 4096

T = TypeVar("T")


class Known(dict[object, T]):
    """What was decided for earlier calls, by all that the checks and the plan depend on. Holds no tensor."""

    def keep(self, key: object, decided: T) -> None:
        """Remember it; when there is too much, all that was before is forgotten."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = decided


def unwatched(device: torch.device) -> bool:
    """Whether a launch on ``device`` may be issued past torch's dispatcher: nobody would see the call there."""
    return not (
        current() is not None  # traced
        or device.index != torch.cuda.current_device()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or forward_ad._current_level >= 0
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its address and strides say all of it."""
    return type(tensor) in _PLAIN and not tensor.is_neg()


_known: Known[Launch] = Known()


def run(a: torch.Tensor, b: torch.Tensor, options: Options) -> torch.Tensor | None:
    """The result, if a call like this went through before; else None, and nothing has happened."""
    key = _key(a, b, options)
    launch = None if key is None else _known.get(key)
    if launch is None:
        return None
    check_device(a.device.index)
    out_dtype = options.out_dtype or (FP8_RESULT_DTYPE if a.dtype in FP8_DTYPES else None)
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    # The launch knows where in a scale each row's and column's lies: [M] is as good as [M, 1] to it.
    launch(a, b, out, _epilogue(options, options.scale_a, options.scale_b), None)
    return out


def remember(a: torch.Tensor, b: torch.Tensor, options: Options, result: torch.Tensor) -> None:
    """Remember that such a call went through."""
    key = _key(a, b, options)
    if key is None or not result.numel():
        return
    scales = canonical_scales(options.op, options.scale_a, options.scale_b, a.shape[:1], (), result.shape)
    launch = gpu.find(
        a, b, result, _epilogue(options, *scales), options.schedule, options.workers or 0,
        fast_accum=options.fast_accum, limit=limits.limit(),
    )  # fmt: skip
    _known.keep(key, launch)


def _epilogue(options: Options, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None) -> Epilogue:
    return Epilogue(options.alpha, options.bias, None, 1.0, options.activation or "none", scale_a, scale_b)


def _key(a: torch.Tensor, b: torch.Tensor, options: Options) -> object | None:
    """What the checks and the plan of this call depend on; None for a call that always goes the long way."""
    bias, scale_a, scale_b = options.bias, options.scale_a, options.scale_b
    if (
        not is_plain(a)
        or not is_plain(b)
        or not a.is_cuda
        or a.dim() != 2
        or b.dim() != 2
        or options.out is not None
        or options.residual is not None
        or options.arriving
        or options.publish is not None
        or options.deadline is not None  # with nothing arriving it is an error, which the long way raises
        or not unwatched(a.device)
        or (bias is not None and not is_plain(bias))
        or (scale_a is not None and not is_plain(scale_a))
        or (scale_b is not None and not is_plain(scale_b))
    ):
        return None
    if torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or _has_gradient(bias) or _has_gradient(scale_a) or _has_gradient(scale_b)
    ):
        return None
    return (
        options.op, a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, a.device, b.device,
        a.data_ptr() % 16, b.data_ptr() % 16,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() % 16 == 0),
        None if scale_a is None else _scale_key(scale_a),
        None if scale_b is None else _scale_key(scale_b),
        options.fast_accum,
        options.alpha, options.beta, options.activation, options.out_dtype, options.schedule, options.workers,
        allows_tf32(), limits.limit(), context_units(a.device.index),
    )  # fmt: skip


def _scale_key(scale: torch.Tensor) -> object:
    return scale.shape, scale.stride(), scale.dtype, scale.device, scale.data_ptr() % 16 == 0


def _has_gradient(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad
