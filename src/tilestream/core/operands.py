"""The operands of a call as every backend is given them. Tensors are named here, and torch is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tilestream.core.dtypes import GroupedScales, Scales
from tilestream.core.integers import cdiv

if TYPE_CHECKING:
    import torch

#: Names of the activations.
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
#: Those of grouped products that make one column of two: column j of the first half of B's columns is the gate of
#: column j of the second half.
HALVES = ("swiglu",)
#: K, and columns of B, that share a scale where scales are of blocks.
SCALE_BLOCK = 128


class Epilogue(NamedTuple):
    """``activation(alpha * (scale_a * scale_b) * acc + bias + beta * residual)``, in the accumulator's dtype."""

    alpha: float = 1.0
    bias: torch.Tensor | None = None  # ``[N]`` or None
    residual: torch.Tensor | None = None  # ``[B, M, N]`` (any strides) or None
    beta: float = 1.0
    activation: str = "none"  # one of `ACTIVATIONS`; of a grouped product of `HALVES`, too
    #: scale_a, scale_b: float32: one element, of any shape, or one a row of A (``[M, 1]``, ``[B, M, 1]``) and one a
    #: column of B (``[1, N]``, ``[B, 1, N]``), any strides; None: 1.
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    #: `tilestream.launch.gate.PublishArguments`, for a plan that publishes the output's chunks; else None.
    publish: Any = None

    @property
    def trivial(self) -> bool:
        """Whether the accumulator is the answer."""
        return (
            self.alpha == 1.0
            and self.bias is None
            and self.residual is None
            and self.activation == "none"
            and self.scales == "none"
        )

    @property
    def scales(self) -> Scales:
        """How many factors there are: see `tilestream.core.dtypes.Scales`."""
        given = [scale for scale in (self.scale_a, self.scale_b) if scale is not None]
        if not given:
            return "none"
        return "tensor" if all(scale.numel() == 1 for scale in given) else "row"


class GemmOperands(NamedTuple):
    """``out = epilogue(a @ b)`` in canonical form."""

    #: a, b, out: ``[M, K]``, ``[K, N]``, ``[M, N]``, or all three with a batch in front.
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue = Epilogue()


class AttentionOperands(NamedTuple):
    """Attention's tensors in canonical form: heads behind rows in any layout of the caller's; the last stride is 1."""

    #: q, out: ``[B, Sq, Hq, D]`` and ``[B, Sq, Hq, Dv]``; where queries are packed ``[T, Hq, D]`` and ``[T, Hq, Dv]``.
    #: There is no output yet while only shapes are checked.
    q: torch.Tensor
    #: k, v: ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``; packed ``[T, Hkv, D]``; in pages ``[P, page, Hkv, D]``.
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor = None  # type: ignore[assignment]
    scale: float = 1.0  # of the products of queries and keys
    #: float32 (float64 for float64): ``[B, Hq, Sq]``, packed ``[T, Hq]``; None where it is no output.
    lse: torch.Tensor | None = None
    sinks: torch.Tensor | None = (
        None  # ``[Hq]``, of the log-sum-exp's dtype; without gradients on a GPU also of 16 bits
    )
    #: scale_q, scale_k, scale_v: float32 ``[B, Hq]``, ``[B, Hkv]``, ``[B, Hkv]``, any strides; None: 1.
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    #: cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``: first rows of the sequences, and behind the last.
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None  # int32 ``[B, n]``: the pages of a sequence, in order
    seqlens_k: torch.Tensor | None = None  # int32 ``[B]``: keys of a sequence, where they are not all of its rows

    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """What is read: q, k, v, and the tensors from the sinks on, as the registered ops take them.

        No property: torch 2.10's compiler follows none of a named tuple.
        """
        return (*self[:3], *self[6:])

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def keys_of_sequence(self) -> int:
        """Keys that a sequence can have at most: a bound, where only the device knows."""
        if self.block_table is not None:
            return self.block_table.shape[1] * self.k.shape[1]
        return self.k.shape[0] if self.cu_seqlens_k is not None else self.k.shape[1]


class MergeOperands(NamedTuple):
    """Two attentions of the same queries to different keys, and what they are joined into.

    Rows are those of one attention; each tensor has strides of its own, and columns lie side by side.
    """

    o_a: torch.Tensor  # ``[B, S, H, D]``, ``[B, H, S, D]`` or ``[T, H, D]``, as are `o_b` and `out`
    lse_a: torch.Tensor  # that shape without D, as are `lse_b` and `lse`
    o_b: torch.Tensor
    lse_b: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class GroupedOperands(NamedTuple):
    """A product a group, of which the device knows the lengths: see `tilestream.plan.problem.GroupedProblem`.

    Of the epilogue there are a bias, an activation and scales. What goes along B's columns is a vector a group,
    ``[G, 1, N]``; what goes along its rows is ``[M, 1]`` where groups divide the rows, else ``[G, M, 1]``. Scales of
    blocks are ``[M, blocks of K]`` and ``[G, blocks of K, blocks of N]``.
    """

    #: a, b, out: ``[M, K]``, ``[G, K, N]``, ``[M, N]`` where groups divide the rows (``[M, N / 2]`` of an activation of
    #: two halves); else ``[M, K]``, ``[K, N]``, ``[G, M, N]``.
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue
    offsets: torch.Tensor  # int32 ``[G]``: where each group ends

    @property
    def scales(self) -> GroupedScales:
        """As `Epilogue.scales`, or ``"block"``."""
        scale = self.epilogue.scale_b
        if scale is None or self.b.dim() == 2 or scale.numel() == 1:
            return self.epilogue.scales
        is_block = tuple(scale.shape[1:]) == blocks_of(*self.b.shape[1:]) and scale.shape[1:] != (1, self.b.shape[2])
        return "block" if is_block else self.epilogue.scales


def blocks_of(*extents: int) -> tuple[int, ...]:
    """Blocks of `SCALE_BLOCK` that extents come to."""
    return tuple(cdiv(extent, SCALE_BLOCK) for extent in extents)
