"""`tilestream.matmul`: torch.matmul, with an epilogue, for operands that may still be arriving."""

from __future__ import annotations

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.ops.operands import Options, multiply


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    arrival: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``activation(a @ b + bias + beta * residual)``, with torch.matmul's rules for dimensions and broadcasting.

    Parameters
    ----------
    a, b
        ``[..., M, K]`` and ``[..., K, N]``, or vectors ``[K]``; one dtype of float16, bfloat16, float32, float64; any
        strides.
    out
        Where to write the result; of its shape and dtype, any strides whose leading dimensions can be seen as one. No
        gradient flows through it.
    bias
        ``[N]``, added to each row.
    residual
        Added times ``beta``; broadcasts to the result's shape. With ``beta=0`` it is not read.
    activation
        ``"relu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"silu"``. The backward pass of the last three computes
        their input once more instead of keeping it.
    out_dtype
        Dtype of the result; default that of the operands. With an epilogue or another dtype, 16-bit operands are
        added up in float32 and the result is rounded once.
    arrival
        How ``a``'s rows come in, where they are not there yet: chunks and signals. ``a``'s leading dimensions count as
        rows (an ``a`` expanded over the batches of ``b`` has the rows of one batch). Each tile is computed as soon as
        the chunks it reads are signalled.
    schedule
        ``"static"``, ``"dynamic"``, ``"stream_k"`` or ``"auto"``; see `tilestream.plan`.
    workers
        Workers to use; None: ``torch.get_num_threads()``, on a GPU one an SM.
    deadline
        Seconds from the call's start (on a GPU: from the kernel's) after which it waits for no chunk any more; default
        30. One bound for all waits, not for each: a stream that takes longer than that needs a longer deadline.

    Returns
    -------
    torch.Tensor
        ``out``, or a new tensor.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is computed.
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
    return multiply(
        a,
        b,
        Options(
            "matmul",
            out=out,
            bias=bias,
            residual=residual,
            beta=beta,
            activation=activation,
            out_dtype=out_dtype,
            arrival=arrival,
            schedule=schedule,
            workers=workers,
            deadline=deadline,
        ),
    )
