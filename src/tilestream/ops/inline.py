"""A cache of calls on the CPU: an equal call reuses the checks and the plan of the first one.

For small operands the checks, torch's dispatcher, the plan and a workspace cost a multiple of the arithmetic. `product`
and `attention` find an earlier equal call whose plan is ``inline`` by its key, and run the same kernel
(`kernels.cpu.gemm.multiply`, `kernels.cpu.attention.flash`), so the bits are the same. Equal calls have operands of the
same shapes, strides and dtypes, the same options, threads and limits. Two conditions are checked at each call: whether
the output overlaps an operand, and whether something between the caller and the kernel has to see the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.kernels.cpu import gemm
from tilestream.kernels.cpu.attention import FlashCall, flash
from tilestream.launch.cache import LaunchCache, launch_cache
from tilestream.launch.observe import observe
from tilestream.ops.operands import is_frozen, span, untracked
from tilestream.plan.limit import limit
from tilestream.runtime import shutdown
from tilestream.runtime.workspace import workspace
from tilestream.trace.record import current

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _jit_trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiler, _autocast = torch._C._autograd._profiler_enabled, torch._C._is_any_autocast_enabled
_num_threads, _gradients = torch.get_num_threads, torch.is_grad_enabled
#: Types of tensors that are their address, shape and strides alone.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS, _STRIDED = (float, int), torch.strided

#: Shape and strides.
_Layout = tuple[torch.Size, tuple[int, ...]]
_Tensors = tuple[torch.Tensor | None, ...]
#: An output of attention; with its log-sum-exp where that is asked for.
Answer = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_ALL_TENSORS, _CAUSAL = (torch.Tensor,) * 3, (bool, str)

#: A cache of its own: calls on the CPU must not evict GPU launches, which cost seconds to compile.
inline_cache = LaunchCache()
launch_cache.followers.append(inline_cache.clear)


class _Views(NamedTuple):
    """How the kernel views the caller's tensors, the last of which is the output.

    Attributes
    ----------
    views
        The index and layout of each tensor that the kernel views otherwise than the caller.
    unread
        The indices of tensors that the call does not read: a residual times 0.
    spans
        The extent in bytes of the output, and of each tensor that it must not overlap; 0 for others.
    """

    views: tuple[tuple[int, _Layout], ...]
    unread: tuple[int, ...]
    spans: tuple[int, ...]

    @classmethod
    def of(cls, given: _Tensors, seen: _Tensors) -> _Views | None:
        """The views of a call; None if the kernel read a copy, or a tensor has no address."""
        views: list[tuple[int, _Layout]] = []
        unread = tuple(i for i, x in enumerate(seen) if x is None and given[i] is not None)
        for i, (mine, x) in enumerate(zip(given, seen, strict=True)):
            if mine is None or x is None:
                continue
            # With ``is_grads_batched`` one tensor without a storage stands for all calls.
            if is_legacy_batchedtensor(mine) or x.data_ptr() != mine.data_ptr() or x.dtype != mine.dtype:
                return None
            if x.shape != mine.shape or x.stride() != mine.stride():
                views.append((i, (x.shape, x.stride())))
        *read, out = given
        # A residual that is the output itself has passed the checks of the first call.
        spans = [0 if x is None or x is out or i in unread else span(x) for i, x in enumerate(read)]
        return cls(tuple(views), unread, (0 if out is None else span(out), *spans))

    def seen(self, given: _Tensors) -> _Tensors:
        """The kernel's operands of an equal call."""
        if not self.views and not self.unread:
            return given
        found: list[Any] = list(given)
        for i, (shape, stride) in self.views:
            found[i] = found[i].as_strided(shape, stride)
        for i in self.unread:
            found[i] = None
        return tuple(found)

    def may_meet(self, given: tuple[Any, ...]) -> bool:
        """Whether the output may overlap an operand. The checks of a first call are more exact."""
        begin = given[-1].data_ptr()
        end = begin + self.spans[0]
        for x, length in zip(given, self.spans[1:], strict=False):
            if length and x.data_ptr() < end and begin < x.data_ptr() + length:
                return True
        return False


class _Product(NamedTuple):
    """A cached call of a matmul op."""

    views: _Views
    #: plain: without an epilogue; scratch: the kernel needs a workspace.
    plain: bool
    scratch: bool
    alpha: float
    beta: float
    activation: str
    dtype: torch.dtype
    shape: torch.Size | None  # of a new result; None: the kernel's own

    @classmethod
    def of(cls, given: _Tensors, x: GemmOperands, result: torch.Tensor) -> _Product | None:
        """The call to cache; None if the kernel read a copy."""
        e, out = x.epilogue, None if given[-1] is None else x.out
        views = _Views.of(given, (x.a, x.b, e.bias, e.residual, e.scale_a, e.scale_b, out))
        if views is None:
            return None
        return cls(
            views, e.trivial and x.out.dtype == x.a.dtype, gemm.needs_scratch(x), e.alpha, e.beta, e.activation,
            x.out.dtype, None if result.shape == x.out.shape else result.shape,
        )  # fmt: skip

    def __call__(self, given: _Tensors) -> torch.Tensor:
        seen: tuple[Any, ...] = self.views.seen(given)
        with shutdown.call():
            try:
                made = gemm.product(seen[0], seen[1], seen[-1]) if self.plain else self._with_epilogue(*seen)
            except BaseException:
                if seen[-1] is not None:
                    seen[-1].fill_(float("nan"))
                raise
        if given[-1] is not None:
            return given[-1]
        if self.shape is None:
            return made
        with untracked():
            return made.view(self.shape)

    def _with_epilogue(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
        scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, out: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        e = Epilogue(self.alpha, bias, residual, self.beta, self.activation, scale_a, scale_b)
        if not self.scratch:
            return gemm.multiply(a, b, out, e, self.dtype, None)
        with workspace() as scratch:
            return gemm.multiply(a, b, out, e, self.dtype, scratch)


def product(
    op: str, a: Any, b: Any, out: Any, bias: Any, residual: Any, alpha: Any, beta: Any, activation: Any, out_dtype: Any,
    scale_a: Any, scale_b: Any, fast_accum: Any, schedule: Any, workers: Any,
) -> torch.Tensor | None:  # fmt: skip
    """The result of a call equal to an earlier one; None for another. Parameters as of `tilestream.ops.native.product`.

    The arguments need no checks: a call with the same key has passed them.
    """
    given = (a, b, bias, residual, scale_a, scale_b, out)
    key = _key(op, given, (alpha, beta, activation, out_dtype, fast_accum), schedule, workers)
    try:
        found: _Product | None = inline_cache.get(key)  # type: ignore[assignment]
    except TypeError:  # an option that cannot be hashed
        return None
    if found is None or (out is not None and found.views.may_meet(given)):
        return None
    return found(given)


def first_product(call: tuple[Any, ...], run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a call that is not in the cache, and cache it if its plan is inline.

    Parameters
    ----------
    call
        The arguments of `product`.
    run
        Runs the call with all checks.
    """
    op, a, b, out, bias, residual, alpha, beta, activation, out_dtype, *scales, fast_accum, schedule, workers = call
    given = (a, b, bias, residual, *scales, out)
    key = _key(op, given, (alpha, beta, activation, out_dtype, fast_accum), schedule, workers)
    if key is None:
        return run()
    generation = inline_cache.generation
    with observe() as observed:
        result = run()
    after = _key(op, given, (alpha, beta, activation, out_dtype, fast_accum), schedule, workers)
    if len(observed.launches) == 1 and after == key:  # else out was resized
        found = _Product.of(given, observed.launches[0], result)
        if found is not None:
            inline_cache.insert(key, found, generation)
    return result


def _key(
    op: str, given: tuple[Any, ...], options: tuple[Any, ...], schedule: Any, workers: Any
) -> tuple[object, ...] | None:
    """The key of a call: all that its checks and its plan depend on.

    None for a call that something else has to see, whose plan is never inline, or whose options have another type than
    the valid ones that they equal, as 1 and True.
    """
    a, b, bias, residual, scale_a, scale_b, out = given
    alpha, beta, _, _, fast_accum = options
    if workers is not None or type(a) not in PLAIN or type(b) not in PLAIN or not a.is_cpu or not unseen():
        return None
    if type(schedule) is not str or schedule != "auto" or type(fast_accum) is not bool:
        return None
    if type(alpha) not in _NUMBERS or type(beta) not in _NUMBERS:
        return None
    gradients = _gradients()
    try:
        if not _is_dense(a, gradients) or not _is_dense(b, gradients):
            return None
        key = (
            op, options, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, _num_threads(), limit(),
        )  # fmt: skip
        if bias is residual is scale_a is scale_b is out is None:
            return key
        more: list[object] = []
        for x in (bias, residual, scale_a, scale_b, out):
            if x is None:
                more.append(None)
            elif type(x) in PLAIN and _is_dense(x, gradients):
                more += x.shape, x.stride(), x.dtype
            else:
                return None
    except RuntimeError:  # a nested tensor has no shape
        return None
    if out is not None:
        if not out.numel() or is_frozen(out):  # it may be resized, or is refused
            return None
        more.append(out is residual)  # a residual may be the output
    return *key, *more


class _Attention(NamedTuple):
    """A cached call of attention by torch's kernel."""

    views: _Views
    causal: bool
    scale: float
    return_lse: bool
    #: made: shape, and the kernel's view, of a new output; None if the kernel's own output, transposed, is the result.
    made: tuple[torch.Size, _Layout] | None
    lse: torch.Size

    @classmethod
    def of(cls, given: _Tensors, call: FlashCall, answer: Answer) -> _Attention | None:
        """The call to cache; None if the kernel read a copy."""
        result, lse = answer if isinstance(answer, tuple) else (answer, None)
        out = call.out
        views = _Views.of(given, (call.q, call.k, call.v, None if given[-1] is None else out))
        if views is None:
            return None
        turned = result.shape == out.transpose(1, 2).shape and result.stride() == out.transpose(1, 2).stride()
        own = turned and out.dim() == 4 and out.transpose(1, 2).is_contiguous()
        made = None if own else (result.shape, (out.shape, out.stride()))
        return cls(views, call.causal, call.scale, lse is not None, made, torch.Size() if lse is None else lse.shape)

    def __call__(self, given: _Tensors) -> Answer:
        q, k, v, into = cast("tuple[Any, ...]", self.views.seen(given))
        result = given[-1]
        with shutdown.call():
            try:
                out, lse = flash(q, k, v, self.causal, self.scale)
                if into is not None:
                    into.copy_(out)
                elif self.made is None:
                    with untracked():
                        result = out.transpose(1, 2)
                else:
                    shape, (seen, stride) = self.made
                    result = q.new_empty(shape)
                    result.as_strided(seen, stride).copy_(out)
            except BaseException:
                if into is not None:
                    into.fill_(float("nan"))
                raise
        assert result is not None
        return (result, lse.new_empty(self.lse).copy_(lse.reshape(self.lse))) if self.return_lse else result


def attention(
    q: Any, k: Any, v: Any, out: Any, layout: Any, causal: Any, scale: Any, return_lse: Any, schedule: Any
) -> Answer | None:
    """The result of a call equal to an earlier one; None for another. All other arguments have their defaults."""
    given = (q, k, v, out)
    try:
        found: _Attention | None = inline_cache.get(  # type: ignore[assignment]
            _key_of_attention(given, layout, causal, scale, return_lse, schedule)
        )
    except TypeError:  # an option that cannot be hashed
        return None
    if found is None or (out is not None and found.views.may_meet(given)):
        return None
    return found(given)


def first_attention(given: _Tensors, options: tuple[Any, ...], call: Callable[[], Answer]) -> Answer:
    """Run a call on the CPU that is not in the cache, and cache it if it is one call of torch's kernel.

    Parameters
    ----------
    given
        The caller's q, k, v and out. All other tensors are None.
    options
        layout, causal, scale, return_lse and schedule.
    """
    key = _key_of_attention(given, *options)
    if key is None:
        return call()
    generation = inline_cache.generation
    with observe() as observed:
        answer = call()
    if len(observed.launches) == 1 and _key_of_attention(given, *options) == key:  # else out was resized
        found = _Attention.of(given, observed.launches[0], answer)
        if found is not None:
            inline_cache.insert(key, found, generation)
    return answer


def _key_of_attention(
    given: tuple[Any, ...], layout: Any, causal: Any, scale: Any, return_lse: Any, schedule: Any
) -> tuple[object, ...] | None:
    """`_key` for attention."""
    q, k, v, out = given
    kinds = type(q), type(k), type(v)
    if not (kinds == _ALL_TENSORS or all(kind in PLAIN for kind in kinds)) or not unseen():
        return None
    if type(return_lse) is not bool or (scale is not None and type(scale) not in _NUMBERS):
        return None
    if type(causal) not in _CAUSAL or type(schedule) is not str or schedule != "auto":
        return None
    gradients = _gradients()
    try:
        if not (_is_dense(q, gradients) and _is_dense(k, gradients) and _is_dense(v, gradients)):
            return None
        key = (
            "attention inline", layout, causal, scale, return_lse, q.shape, q.stride(), q.dtype, k.shape, k.stride(),
            k.dtype, v.shape, v.stride(), v.dtype, _num_threads(), limit(),
        )  # fmt: skip
        if out is None:
            return key
        if type(out) not in PLAIN or not _is_dense(out, gradients) or is_frozen(out):
            return None
        return *key, out.shape, out.stride(), out.dtype
    except RuntimeError:  # a nested tensor has no shape
        return None


def _is_dense(x: torch.Tensor, gradients: bool) -> bool:
    """Whether a tensor is dense, on the CPU, and requires no gradient.

    A negated view is not: torch's dispatcher resolves it, but a copy to another dtype below the dispatcher does not.
    """
    return x.is_cpu and x.layout is _STRIDED and not (gradients and x.requires_grad) and not x.is_neg()


def unseen() -> bool:
    """Whether nothing but the kernel has to see the calls of this thread."""
    below = _dispatch_modes() or _autocast() or _transform() is not None or _jit_trace() is not None
    return not (below or seen_above())


def seen_above() -> bool:
    """Whether something above torch's dispatcher has to see the calls of this thread.

    For what the dispatcher knows of (modes, transforms, autocast, traces) the extension's ops decline.
    """
    return bool(_function_modes() or _profiler() or forward_ad._current_level >= 0 or current() is not None)
