"""The maths of a mixture's experts on rows sorted by expert: the forward pass and its gradients.

::

    forward:   h = act(x @ w1.T) * (x @ w3.T);  y = h @ w2.T      each a grouped product; h is one, if w1 and w3 are
                                                                  the halves of one tensor, and act is silu
    backward:  t = grad @ w2;  of_factor = sum(t * h);  t *= factor                      y is not needed
               da = t * (x @ w3.T) * act'(x @ w1.T);  db = t * act(x @ w1.T)
               dx = da @ w1 + db @ w3;  dw1 = da.T @ x;  dw3 = db.T @ x;  dw2 = (factor * grad).T @ h

``grad`` is the gradient with respect to ``factor * y``: the token's own rank applies the factor of a token and an
expert. The backward pass recomputes the hidden rows, so that nothing is kept between the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilestream.core.operands import Epilogue
from tilestream.kernels.cpu.epilogue import apply, wide_dtype
from tilestream.ops.gradients import through_activation
from tilestream.ops.grouped import grouped_mm

#: ``multiply(x, y)``: ``x *= y``.
Multiply = Callable[[torch.Tensor, torch.Tensor], object]


class Experts(NamedTuple):
    """A rank's experts: ``w1``, ``w3`` ``[E, I, H]``, ``w2`` ``[E, H, I]``."""

    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor
    activation: str


class Part(NamedTuple):
    """The data of some rows, sorted by expert, for the gradients of the weights."""

    counts: torch.Tensor  # int64 ``[E]``: each expert's rows
    #: x, weighted: ``[rows, H]``: the inputs, and the gradients of y. of_gate, of_up, hidden: ``[rows, I]``.
    x: torch.Tensor
    weighted: torch.Tensor
    of_gate: torch.Tensor
    of_up: torch.Tensor
    hidden: torch.Tensor


def ends_of(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The ends of groups with these numbers of rows: int32."""
    return counts.cumsum(0).to(device, torch.int32)


def forward(e: Experts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The results of the rows, each by its expert."""
    return through(e, x, ends_of(counts, x.device))


def through(e: Experts, x: torch.Tensor, ends: torch.Tensor, multiply: Multiply = torch.Tensor.mul_) -> torch.Tensor:
    """The results of the rows, each by its expert; ``ends`` (int32 ``[E]``): where each expert's rows end.

    ``multiply``: multiplies one tensor by another, in place, up to the last row of an expert.
    """
    both = stacked(e.w1, e.w3) if e.activation == "silu" else None
    if both is not None:
        hidden = grouped_mm(x, both.mT, ends, activation="swiglu")
    else:
        hidden = grouped_mm(x, e.w1.mT, ends, activation=_name(e.activation))
        multiply(hidden, grouped_mm(x, e.w3.mT, ends))
    return grouped_mm(hidden, e.w2.mT, ends)


def stacked(w1: torch.Tensor, w3: torch.Tensor) -> torch.Tensor | None:
    """``[E, 2 I, H]``, of which ``w1`` and ``w3`` are the halves, as ``chunk(2, 1)`` makes them; None if they are not.

    Weights that lie apart are not stacked: that would copy all of them in each call.
    """
    experts, hidden, width = w1.shape
    same = w1.stride() == w3.stride() and w1.untyped_storage().data_ptr() == w3.untyped_storage().data_ptr()
    if not same or w3.storage_offset() - w1.storage_offset() != hidden * w1.stride(1):
        return None
    return w1.detach().as_strided((experts, 2 * hidden, width), w1.stride(), w1.storage_offset())


def backward(
    e: Experts, x: torch.Tensor, grad: torch.Tensor, factors: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Part]:
    """The gradients of the rows and of their factors (``[rows]``, wide), and the `Part` for the weights' gradients."""
    ends, wide = ends_of(counts, x.device), wide_dtype(x.dtype)
    gate = grouped_mm(x, e.w1.mT, ends, out_dtype=wide)
    up = grouped_mm(x, e.w3.mT, ends, out_dtype=wide)
    back = grouped_mm(grad, e.w2, ends, out_dtype=wide)
    activated = gate.clone()
    apply(Epilogue(activation=e.activation), activated)
    hidden = activated * up
    of_factors = (back * hidden).sum(1)
    factors = factors.unsqueeze(1)
    back *= factors
    of_gate = _through(e.activation, back * up, gate).to(x.dtype)
    of_up = (back * activated).to(x.dtype)
    of_x = grouped_mm(of_gate, e.w1, ends, out_dtype=wide)
    of_x += grouped_mm(of_up, e.w3, ends, out_dtype=wide)
    weighted = (grad.to(wide) * factors).to(x.dtype)
    return of_x.to(x.dtype), of_factors, Part(counts, x, weighted, of_gate, of_up, hidden.to(x.dtype))


def weight_gradients(parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of w1, w2 and w3 over all rows; an expert's rows are in the order of the parts."""
    counts = torch.stack([part.counts for part in parts])
    x, weighted, of_gate, of_up, hidden = (torch.cat(same) for same in zip(*(p[1:] for p in parts), strict=True))
    if len(parts) > 1:
        order = by_expert(counts, len(x)).to(x.device)
        x, weighted, of_gate, of_up, hidden = (y[order] for y in (x, weighted, of_gate, of_up, hidden))
    ends = ends_of(counts.sum(0), x.device)
    of_w1, of_w2, of_w3 = (
        grouped_mm(left.mT, right, ends) for left, right in ((of_gate, x), (weighted, hidden), (of_up, x))
    )
    return of_w1, of_w2, of_w3


def by_expert(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """The order that sorts rows of several sources, each sorted by expert, by expert and then by source.

    ``counts``: int64 ``[sources, E]``; ``rows``: their sum. The host waits for nothing. Torch's ``repeat_interleave``
    would, and takes 10 ms on the CPU where its cores are busy.
    """
    runs = counts.flatten()
    begins = counts.new_zeros(rows + 1).index_add_(0, runs.cumsum(0) - runs, torch.ones_like(runs))
    run = begins[:rows].cumsum(0) - 1  # of each row; a run without rows begins where the next one does
    return (run % counts.shape[1]).argsort(stable=True)


def _name(activation: str) -> str | None:
    return None if activation == "none" else activation


def _through(activation: str, change: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The gradient at the activation's input."""
    if activation == "none":
        return change
    if activation == "relu":
        return torch.ops.aten.threshold_backward(change, before, 0)  # type: ignore[no-any-return]
    return through_activation(activation, change, before)
