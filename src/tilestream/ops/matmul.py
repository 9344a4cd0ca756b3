"""`tilestream.matmul`, with an epilogue, for operands that may still be arriving; `mm`, `bmm`, `addmm`, `linear`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.stream import Stream, open_streams
from tilestream.ops import native, streamed
from tilestream.ops.checks import check_operands, check_tensors
from tilestream.ops.request import Request, multiply

#: The default of an operand that may be given by torch's name instead.
_NAMED: Any = None
#: torch's names of operands, and ours.
_TORCHS = {
    "matmul": {"input": "a", "other": "b"},
    "mm": {"input": "a", "mat2": "b"},
    "bmm": {"input": "a", "mat2": "b"},
    "addmm": {"mat1": "a", "mat2": "b"},
    "linear": {"input": "x"},
}


def _torchs(op: str, names: Mapping[str, Any], **given: Any) -> tuple[Any, ...]:
    """The operands ``given``, with those of ``names``, which have torch's names, in their places."""
    for name, operand in names.items():
        ours = _TORCHS[op].get(name)
        if ours is None:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        if given[ours] is not None:
            raise TypeError(f"{op}: {name}= is {ours}, which is given, too; give one of them")
        given[ours] = operand
    return tuple(given.values())


def matmul(
    a: torch.Tensor | Stream = _NAMED,
    b: torch.Tensor = _NAMED,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True,
    arrival: Arrival | None = None,
    publish: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
    **names: torch.Tensor,
) -> torch.Tensor:
    """``activation(scale_a * scale_b * (a @ b) + bias + beta * residual)``.

    With torch.matmul's rules for dimensions and broadcasting.

    Parameters
    ----------
    a, b
        ``[..., M, K]`` and ``[..., K, N]``, or vectors ``[K]``; one dtype of float16, bfloat16, float32, float64, or
        each of float8_e4m3fn or float8_e5m2, or of float8_e4m3fnuz or float8_e5m2fnuz (AMD GPUs and the CPU); any
        strides. torch's keywords are accepted, too (``input=``, ``other=``; ``mat1=``, ``mat2=`` of the other ops).
        Operands of 8 bits get no gradient. On NVIDIA GPUs float32 counts as tf32 where
        ``torch.backends.cuda.matmul`` allows that; on Hopper it is at its fastest where K is the contiguous dimension
        of both, as of a row-major ``a`` and the transpose of a Linear's weight.
    out
        Where to write the result; of its dtype, and of its shape with any strides, or of no elements: then it is
        resized, as torch does. Kernels write in place what is a view of one matrix or of one batch of matrices, each of
        any strides; another output is computed apart and copied, which ``arrival`` and ``publish`` exclude. No gradient
        flows through it.
    bias
        ``[N]``, added to each row.
    residual
        Added times ``beta``; broadcasts to the result's shape. With ``beta=0`` it is not read.
    activation
        ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"silu"``. The backward pass of the last three computes
        their input once more instead of keeping it.
    out_dtype
        Dtype of the result; default that of the operands, bfloat16 where those are of 8 bits. With an epilogue or
        another dtype, 16-bit operands are added up in float32 and the result is rounded once; 8-bit ones always are.
    scale_a, scale_b
        float32, on the operands' device, complete when the call is made; None: 1. Each has one element, or one a row of
        ``a`` (``[M]``, ``[M, 1]``, or what broadcasts to ``[..., M, 1]``) and one a column of ``b`` (``[N]``,
        ``[1, N]``, or what broadcasts to ``[..., 1, N]``), as ``torch._scaled_mm`` has them. For operands of any dtype.
        They get no gradient.
    use_fast_accum
        Whether Hopper's tensor cores may accumulate products of 8-bit operands in less than float32. False: partial
        sums go to float32 at least every 128 of K, which is slower. No effect elsewhere.
    arrival
        How ``a``'s rows come in, where they are not there yet: chunks and signals. A `tilestream.Stream` may be given
        as ``a`` itself, and brings its own. ``a``'s leading dimensions count as rows (an ``a`` expanded over the
        batches of ``b`` has the rows of one batch). Each tile is computed as soon as the chunks it reads are signalled.
    publish
        Chunks of the result's rows (leading dimensions count), each signalled when it is complete. A call that gets the
        same `Arrival` as ``arrival=``, on another stream or in another thread, begins before this call has ended; issue
        this call first. On a GPU such readers leave this call the SMs that it needs; your own kernels must do so, too.
        Where the signals are words of your own, a reader on a GPU begins behind this call's end, and the words are
        zeroed first. Excludes ``arrival``; no gradient flows through it.
    schedule
        ``"static"``, ``"dynamic"``, ``"stream_k"`` or ``"auto"``; see `tilestream.plan`. With ``publish`` the second or
        the last.
    workers
        Workers to use; None: ``torch.get_num_threads()``, on a GPU one an SM. No more than `tilestream.worker_limit`
        and TILESTREAM_WORKERS allow; on the CPU, no more threads than there are items.
    deadline
        Seconds from the call's start (on a GPU: from the kernel's) after which it stops waiting; default 30. One bound
        for all waits together: a stream that takes longer needs a longer deadline.

    Returns
    -------
    torch.Tensor
        ``out``, or a new tensor.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is computed.
    RuntimeError
        If an operand of 8 bits, or a scale, requires a gradient; or any operand of a call with ``out`` or ``publish``.
        If a launch on this GPU already waits for what is to be published: issue it behind this one.
    NotImplementedError
        For tensors on a device that this version has no backend for.
    ArrivalTimeout
        If a chunk did not arrive within the deadline. What was not computed is NaN; all workers have left. A launch on
        a GPU returns before it has run: it is raised by the next call on that device, or by `tilestream.check`.
    Exception
        What the producer of a chunk raised.

    Examples
    --------
    >>> a, b = torch.ones(4, 3), torch.ones(3, 2)
    >>> matmul(a, b, bias=torch.tensor([1.0, -9.0]), activation="relu")[0]
    tensor([4., 0.])
    """
    if names:
        a, b = _torchs("matmul", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("matmul", "a", a, "arrival", arrival)
        streamed.refuse("matmul", b=b, bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    if arrival is None and publish is None and deadline is None:
        made = native.product(
            "matmul", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
            schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    return multiply(Request(
        "matmul", a, b, out=out, bias=bias, residual=residual, beta=beta, activation=activation, out_dtype=out_dtype,
        scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival, publish=publish,
        schedule=schedule, workers=workers, deadline=deadline,
    ))  # fmt: skip


def mm(
    a: torch.Tensor | Stream = _NAMED, b: torch.Tensor = _NAMED, *,
    out: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, beta: float = 1.0, activation: str | None = None,
    out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True, arrival: Arrival | None = None, schedule: str = "auto", workers: int | None = None,
    deadline: float | None = None,
    **names: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``a @ b`` for matrices ``[M, K]`` and ``[K, N]``; keyword arguments and exceptions as for `tilestream.matmul`.

    Raises
    ------
    ValueError
        If an operand is no matrix.
    """
    if names:
        a, b = _torchs("mm", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("mm", "a", a, "arrival", arrival)
        streamed.refuse("mm", b=b, bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    if arrival is None and deadline is None:
        made = native.product(
            "mm", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
            schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    _check_dims("mm", 2, a, b)
    return multiply(Request(
        "mm", a, b, out=out, bias=bias, residual=residual, beta=beta, activation=activation, out_dtype=out_dtype,
        scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival, schedule=schedule,
        workers=workers, deadline=deadline,
    ))  # fmt: skip


def bmm(
    a: torch.Tensor | Stream = _NAMED, b: torch.Tensor = _NAMED, *,
    out: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, beta: float = 1.0, activation: str | None = None,
    out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True, arrival: Arrival | None = None, schedule: str = "auto", workers: int | None = None,
    deadline: float | None = None,
    **names: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``a[i] @ b[i]`` for ``[B, M, K]`` and ``[B, K, N]``; keyword arguments and exceptions as for `tilestream.matmul`.

    Raises
    ------
    ValueError
        If an operand has not three dimensions, or they differ in batches.
    """
    if names:
        a, b = _torchs("bmm", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("bmm", "a", a, "arrival", arrival)
        streamed.refuse("bmm", b=b, bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    if arrival is None and deadline is None:
        made = native.product(
            "bmm", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
            schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    _check_dims("bmm", 3, a, b)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a has {a.shape[0]} batches, b has {b.shape[0]}; bmm does not broadcast, matmul does")
    return multiply(Request(
        "bmm", a, b, out=out, bias=bias, residual=residual, beta=beta, activation=activation, out_dtype=out_dtype,
        scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival, schedule=schedule,
        workers=workers, deadline=deadline,
    ))  # fmt: skip


def addmm(
    input: torch.Tensor, a: torch.Tensor | Stream = _NAMED, b: torch.Tensor = _NAMED, *, beta: float = 1,
    alpha: float = 1, out: torch.Tensor | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    arrival: Arrival | None = None, schedule: str = "auto", workers: int | None = None, deadline: float | None = None,
    **names: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``beta * input + alpha * (a @ b)`` for matrices ``[M, K]`` and ``[K, N]``.

    Parameters
    ----------
    input
        Broadcasts to ``[M, N]``. With ``beta=0`` it is not read: NaN there does not count.
    a, b
        The matrices.
    beta, alpha
        Factors.
    out, activation, out_dtype, arrival, schedule, workers, deadline
        As for `tilestream.matmul`, whose exceptions are raised.

    Raises
    ------
    ValueError
        If ``a`` or ``b`` is no matrix.
    """
    if names:
        a, b = _torchs("addmm", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("addmm", "a", a, "arrival", arrival)
        streamed.refuse("addmm", b=b, input=input, out=out)
    if arrival is None and deadline is None and input is not None:
        made = native.product(
            "addmm", a, b, out, None, input, alpha, beta, activation, out_dtype, None, None, True, schedule, workers
        )  # fmt: skip
        if made is not None:
            return made
    check_tensors("addmm", input=input, a=a, b=b)
    if a.is_nested or b.is_nested:  # of which no shape can be said
        check_operands("addmm", {"a": a, "b": b})
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            raise ValueError(f"addmm: {name} has shape {list(tensor.shape)}; it has 2 dimensions: [M, K] and [K, N]")
    return multiply(Request(
        "addmm", a, b, residual=input, beta=beta, alpha=alpha, out=out, activation=activation, out_dtype=out_dtype,
        arrival=arrival, schedule=schedule, workers=workers, deadline=deadline,
    ))  # fmt: skip


def linear(
    x: torch.Tensor | Stream = _NAMED, weight: torch.Tensor | Stream = _NAMED, bias: torch.Tensor | None = None, *,
    out: torch.Tensor | None = None, residual: torch.Tensor | None = None, beta: float = 1.0,
    activation: str | None = None, out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True, arrival: Arrival | None = None, weight_arrival: Arrival | None = None,
    publish: Arrival | None = None, schedule: str = "auto", workers: int | None = None, deadline: float | None = None,
    **names: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``activation(scale_a * scale_b * (x @ weight.T) + bias + beta * residual)``.

    Parameters
    ----------
    x
        ``[..., K]``; its leading dimensions count as rows.
    weight
        ``[N, K]`` (or ``[K]``, for a result without the last dimension).
    bias
        ``[N]``.
    weight_arrival
        How ``weight``'s rows come in: a weight that is still being copied from the host or read from a file. A
        `tilestream.Stream` may be given as ``weight`` itself.
    scale_b
        float32: one element, or one a row of ``weight``: ``[N]``, ``[N, 1]`` or ``[1, N]``.
    out, residual, beta, activation, out_dtype, scale_a, use_fast_accum, arrival, publish, schedule, workers, deadline
        As for `tilestream.matmul`, whose exceptions are raised.

    Raises
    ------
    ValueError
        If ``weight`` is neither a matrix nor a vector.
    """
    if names:
        x, weight = _torchs("linear", names, x=x, weight=weight)
    if isinstance(scale_b, torch.Tensor) and scale_b.dim() == 2 and scale_b.shape[1] == 1:
        scale_b = scale_b.t()  # a scale a row of the weight is one a column of its transpose
    if type(x) is Stream or type(weight) is Stream or (not is_compiling() and open_streams):
        x, arrival = streamed.operand("linear", "x", x, "arrival", arrival)
        weight, weight_arrival = streamed.operand("linear", "weight", weight, "weight_arrival", weight_arrival)
        streamed.refuse("linear", bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    if arrival is None and weight_arrival is None and publish is None and deadline is None:
        made = native.product(
            "linear", x, weight, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b,
            use_fast_accum, schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    if isinstance(weight, torch.Tensor) and weight.is_nested:  # which has no transposed one
        check_operands("linear", {"x": x, "weight": weight})
    if isinstance(weight, torch.Tensor) and weight.dim() not in (1, 2):
        raise ValueError(f"linear: weight has shape {list(weight.shape)}; it is [N, K]")
    return multiply(Request(
        "linear", x, weight, out=out, bias=bias, residual=residual, beta=beta, activation=activation,
        out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival,
        weight_arrival=weight_arrival, publish=publish, schedule=schedule, workers=workers, deadline=deadline,
    ))  # fmt: skip


def _check_dims(op: str, dims: int, a: torch.Tensor, b: torch.Tensor) -> None:
    check_tensors(op, a=a, b=b)
    if a.is_nested or b.is_nested:
        check_operands(op, {"a": a, "b": b})
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != dims:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}; it has {dims} dimensions: use matmul for others"
            )
