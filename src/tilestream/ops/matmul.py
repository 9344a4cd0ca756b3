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

#: The default of an operand that the caller may pass by torch's keyword instead.
_NAMED: Any = None
#: By op: torch's keyword of an operand, and ours.
_TORCHS = {
    "matmul": {"input": "a", "other": "b"},
    "mm": {"input": "a", "mat2": "b"},
    "bmm": {"input": "a", "mat2": "b"},
    "addmm": {"mat1": "a", "mat2": "b"},
    "linear": {"input": "x"},
}


def _torchs(op: str, names: Mapping[str, Any], **given: Any) -> tuple[Any, ...]:
    """The operands ``given``; ``names`` holds those that were passed by torch's keywords."""
    for name, operand in names.items():
        ours = _TORCHS[op].get(name)
        if ours is None:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        if given[ours] is not None:
            raise TypeError(f"{op}: {name}= and {ours} are the same operand; give one of them")
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
        ``[..., M, K]`` and ``[..., K, N]``, or vectors ``[K]``, with any strides. Both have one dtype: float16,
        bfloat16, float32 or float64. Or each is float8_e4m3fn or float8_e5m2; on AMD GPUs and on the CPU also
        float8_e4m3fnuz or float8_e5m2fnuz. Operands of 8 bits get no gradient. On NVIDIA GPUs float32 is computed as
        tf32 where ``torch.backends.cuda.matmul`` allows it; Hopper is fastest where K is contiguous in both operands,
        as in a row-major ``a`` and the transpose of a Linear's weight. torch's keywords are accepted, too
        (``input=``, ``other=``; ``mat1=``, ``mat2=`` of the other ops).
    out
        The output. It has the result's dtype, and its shape with any strides. An output of no elements is resized, as
        torch does. Kernels write in place where the output is a view of one matrix, or of one batch of matrices, of any
        strides. For another output the result is computed into a new tensor and copied; with ``arrival`` or ``publish``
        such an output is refused. No gradient flows through it.
    bias
        ``[N]``, added to each row.
    residual
        Added times ``beta``; broadcasts to the result's shape. With ``beta=0`` it is not read.
    activation
        ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"silu"``. The backward pass of the last three computes
        their input once more instead of keeping it.
    out_dtype
        Dtype of the result. Default: the operands' dtype; bfloat16 for operands of 8 bits. Products of 8-bit operands
        are accumulated in float32 and rounded once. So are those of 16-bit operands that have an epilogue or another
        ``out_dtype``.
    scale_a, scale_b
        float32 factors on the operands' device, for operands of any dtype, as in ``torch._scaled_mm``. Default: 1. Each
        has one element, or ``scale_a`` one a row of ``a`` (``[M]``, ``[M, 1]``, or a shape that broadcasts to
        ``[..., M, 1]``) and ``scale_b`` one a column of ``b`` (``[N]``, ``[1, N]``, or a shape that broadcasts to
        ``[..., 1, N]``). They are complete when the call is made, and get no gradient.
    use_fast_accum
        Whether Hopper's tensor cores may accumulate products of 8-bit operands in less than float32. If False, partial
        sums are added to float32 accumulators at least every 128 of K, which is slower. No effect elsewhere.
    arrival
        How the rows of ``a`` arrive: their chunks and signals. Each tile is computed as soon as the chunks that it
        reads are signalled. A `tilestream.Stream` may be given as ``a`` itself and has its own arrival. The leading
        dimensions of ``a`` count as rows; an ``a`` expanded over the batches of ``b`` has the rows of one batch.
    publish
        Chunks of the result's rows (leading dimensions count as rows). This call signals each chunk when it is
        complete. A call on another stream or in another thread that takes the same `Arrival` as ``arrival=`` begins
        before this call has ended; issue this call first. On a GPU such readers leave this call the SMs that it needs;
        your own kernels must do so, too. Where the signals are your own words, they are zeroed first, and a reader on a
        GPU begins after this call has ended. Excludes ``arrival``; no gradient flows through it.
    schedule
        ``"static"``, ``"dynamic"``, ``"stream_k"`` or ``"auto"``; see `tilestream.plan`. With ``publish``:
        ``"dynamic"`` or ``"auto"``.
    workers
        Number of workers. Default: ``torch.get_num_threads()`` on the CPU, one an SM on a GPU. At most what
        `tilestream.worker_limit` and TILESTREAM_WORKERS allow; on the CPU at most one an item.
    deadline
        Seconds from the start of the call (on a GPU: of the kernel) after which it stops waiting; default 30. It bounds
        all waits together: a stream that takes longer needs a longer deadline.

    Returns
    -------
    torch.Tensor
        ``out``, or a new tensor.

    Raises
    ------
    ValueError, TypeError
        If arguments do not fit together. Raised before anything is computed.
    RuntimeError
        If an operand of 8 bits, or a scale, requires a gradient; or any operand of a call with ``out`` or ``publish``.
        If a launch on this GPU already waits for what this call is to publish: issue that launch after this call.
    NotImplementedError
        If the tensors are on a device without a backend.
    ArrivalTimeout
        If a chunk did not arrive within the deadline. Rows that were not computed are NaN, and no worker waits any
        longer. A launch on a GPU returns before it has run, so the next call on that device, or `tilestream.check`,
        raises its error.
    Exception
        The error of a chunk's producer.

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
    call = (
        "matmul", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
        schedule, workers,
    )  # fmt: skip
    if arrival is None and publish is None and deadline is None:
        made = native.product(*call)
        if made is not None:
            return made
    return multiply(Request(*call, arrival=arrival, publish=publish, deadline=deadline))


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
        If an operand is not a matrix.
    """
    if names:
        a, b = _torchs("mm", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("mm", "a", a, "arrival", arrival)
        streamed.refuse("mm", b=b, bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    call = (
        "mm", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum, schedule,
        workers,
    )  # fmt: skip
    if arrival is None and deadline is None:
        made = native.product(*call)
        if made is not None:
            return made
    _check_dims("mm", 2, a, b)
    return multiply(Request(*call, arrival=arrival, deadline=deadline))


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
        If an operand does not have three dimensions, or they differ in batches.
    """
    if names:
        a, b = _torchs("bmm", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("bmm", "a", a, "arrival", arrival)
        streamed.refuse("bmm", b=b, bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    call = (
        "bmm", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum, schedule,
        workers,
    )  # fmt: skip
    if arrival is None and deadline is None:
        made = native.product(*call)
        if made is not None:
            return made
    _check_dims("bmm", 3, a, b)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a has {a.shape[0]} batches, b has {b.shape[0]}; bmm does not broadcast, matmul does")
    return multiply(Request(*call, arrival=arrival, deadline=deadline))


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
        Broadcasts to ``[M, N]``. With ``beta=0`` it is not read, so NaN there has no effect.
    a, b
        The matrices.
    beta, alpha
        Factors of ``input`` and of the product.
    out, activation, out_dtype, arrival, schedule, workers, deadline
        As for `tilestream.matmul`, whose exceptions are raised.

    Raises
    ------
    ValueError
        If ``a`` or ``b`` is not a matrix.
    """
    if names:
        a, b = _torchs("addmm", names, a=a, b=b)
    if type(a) is Stream or (not is_compiling() and open_streams):
        a, arrival = streamed.operand("addmm", "a", a, "arrival", arrival)
        streamed.refuse("addmm", b=b, input=input, out=out)
    call = (
        "addmm", a, b, out, None, input, alpha, beta, activation, out_dtype, None, None, True, schedule, workers
    )  # fmt: skip
    if arrival is None and deadline is None and input is not None:
        made = native.product(*call)
        if made is not None:
            return made
    check_tensors("addmm", input=input)
    _check_dims("addmm", 2, a, b, "it has 2 dimensions: [M, K] and [K, N]")
    return multiply(Request(*call, arrival=arrival, deadline=deadline))


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
        How the rows of ``weight`` arrive, where it is still being copied from the host or read from a file. A
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
        scale_b = scale_b.t()  # a scale of a row of the weight is one of a column of its transpose
    if type(x) is Stream or type(weight) is Stream or (not is_compiling() and open_streams):
        x, arrival = streamed.operand("linear", "x", x, "arrival", arrival)
        weight, weight_arrival = streamed.operand("linear", "weight", weight, "weight_arrival", weight_arrival)
        streamed.refuse("linear", bias=bias, residual=residual, out=out, scale_a=scale_a, scale_b=scale_b)
    call = (
        "linear", x, weight, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
        schedule, workers,
    )  # fmt: skip
    if arrival is None and weight_arrival is None and publish is None and deadline is None:
        made = native.product(*call)
        if made is not None:
            return made
    if isinstance(weight, torch.Tensor) and weight.is_nested:  # it cannot be transposed
        check_operands("linear", {"x": x, "weight": weight})
    if isinstance(weight, torch.Tensor) and weight.dim() not in (1, 2):
        raise ValueError(f"linear: weight has shape {list(weight.shape)}; it must be [N, K]")
    return multiply(Request(
        *call, arrival=arrival, weight_arrival=weight_arrival, publish=publish, deadline=deadline
    ))  # fmt: skip


def _check_dims(op: str, dims: int, a: torch.Tensor, b: torch.Tensor, rule: str = "") -> None:
    check_tensors(op, a=a, b=b)
    if a.is_nested or b.is_nested:  # a nested tensor has no shape
        check_operands(op, {"a": a, "b": b})
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != dims:
            rule = rule or f"it has {dims} dimensions: use matmul for others"
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; {rule}")
