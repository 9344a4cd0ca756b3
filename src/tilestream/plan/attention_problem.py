"""Attention's description for the planner: extents, masks, dtypes and arrivals, without data.

The definition of attention, for all backends
---------------------------------------------
Row ``i`` of a sequence's ``sq`` queries sees key ``j`` of its ``sk`` keys where::

    i + shift - left <= j <= i + shift + right        shift = sk - sq (bottom right), or 0 (top left)

A side that is None has no bound; ``causal`` sets ``right`` to 0. The scores are ``s = scale * q k``, capped before they
are masked: ``softcap * tanh(s / softcap)``. A sink is one more score of a query head, without a value. So::

    lse[i] = log(sum over visible keys of exp(s) + exp(sink))        natural, fp32
    out[i] = sum over visible keys of exp(s - lse[i]) * v            added up in fp32, rounded once

The output of a row that sees no key is 0; its lse is -inf, or the sink if there is one. Scores and sums are float32,
or float64 for float64 operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tilestream.core.arguments import is_one_of
from tilestream.plan.problem import ITEMSIZE, Incoming

#: The corner of the mask through which the diagonal passes, if the numbers of queries and keys differ.
Alignment = Literal["bottom_right", "top_left"]
ALIGNMENTS: tuple[Alignment, ...] = get_args(Alignment)
#: The layouts of dense operands: ``[B, S, H, D]``, or ``[B, H, S, D]``.
AttentionLayout = Literal["bshd", "bhsd"]
LAYOUTS: tuple[AttentionLayout, ...] = get_args(AttentionLayout)
#: Dtypes of the operands. float64 is the CPU's alone; of 8 bits, bfloat16 comes out.
ATTENTION_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")
#: Head dimensions are multiples of the first, up to the second: rows of 16 bytes, and a kernel's registers.
HEAD_DIM_STEP, MOST_HEAD_DIM = 8, 256
#: Keys of a page.
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class AttentionProblem:
    """``out = softmax(mask(scale * q @ k^T)) @ v``, for each sequence and query head."""

    batch: int  # sequences
    #: heads_q, heads_kv: query heads, and heads of keys and values. ``heads_q // heads_kv`` neighbouring query heads
    #: share a head of keys.
    heads_q: int
    heads_kv: int
    #: seqlen_q, seqlen_k: query rows and keys of a sequence. If sequences differ, those of the longest, or a bound; the
    #: lengths are on the device.
    seqlen_q: int
    seqlen_k: int
    #: head_dim, head_dim_v: columns of queries and keys, and of values and output; ``head_dim_v=0``: ``head_dim``.
    head_dim: int
    head_dim_v: int = 0
    dtype: str = "bfloat16"  # of queries, keys and values
    #: causal, alignment: whether keys right of the diagonal are masked; the diagonal's place, also for a window.
    causal: bool = False
    alignment: Alignment = "bottom_right"
    window: tuple[int | None, int | None] = (None, None)  # keys seen left and right of the diagonal; None: all
    softcap: float = 0.0  # 0: none
    sinks: bool = False  # whether each query head has one more score
    #: varlen, tokens_q, tokens_k: whether the sequences' queries are packed, with cumulative lengths; the total rows of
    #: queries and of keys. ``tokens_k`` is 0 if keys are dense or in pages.
    varlen: bool = False
    tokens_q: int = 0
    tokens_k: int = 0
    #: page_size, pages: keys of a page, and the number of pages; 0 if keys are not in pages.
    page_size: int = 0
    pages: int = 0
    lengths: bool = False  # whether each sequence has its own number of keys (``seqlens_k``), in pages or dense
    return_lse: bool = False  # whether the log-sum-exp is an output
    scaled: bool = False  # whether q, k and v have a scale for each sequence and head
    layout: AttentionLayout = "bshd"  # the layout of dense operands
    positive: bool = True  # whether the scale is positive: then the largest product is the largest score
    tf32: bool = False  # whether float32 may be rounded to tf32 for the matrix units
    aligned: bool = True  # whether rows begin at multiples of 16 bytes
    no_tma: str = ""  # why TMA cannot address an operand; empty if it can
    #: The arrival of keys and values, as concatenated rows of all sequences; None if they are complete at launch.
    keys: Incoming | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "tokens_q", "tokens_k", "pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; an extent is not negative")
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("head_dim", "head_dim_v"):
            dim = getattr(self, name)
            if dim % HEAD_DIM_STEP or not 0 < dim <= MOST_HEAD_DIM:
                raise ValueError(
                    f"{name}={dim}; it must be a multiple of {HEAD_DIM_STEP}, at most {MOST_HEAD_DIM}: pad "
                    "with zeros (torch.nn.functional.pad), and give scale="
                )
        if self.heads_kv and self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q={self.heads_q}, heads_kv={self.heads_kv}; each head of keys serves the same number of query "
                "heads"
            )
        if self.heads_q and not self.heads_kv:
            raise ValueError(f"heads_kv=0 for heads_q={self.heads_q}; query heads have a head of keys")
        if self.dtype not in ATTENTION_DTYPES:
            raise TypeError(f"dtype: {self.dtype}; attention takes {', '.join(ATTENTION_DTYPES)}: convert first")
        if self.alignment not in ALIGNMENTS:
            raise ValueError(f"alignment={self.alignment!r}; it must be one of {', '.join(ALIGNMENTS)}")
        if not is_one_of(self.layout, LAYOUTS):
            raise ValueError(f"layout={self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        if self.page_size and self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={self.page_size}; it must be a power of two, at most {PAGE_SIZES[-1]}")
        for side, width in zip(("left", "right"), self.window, strict=True):
            if width is not None and width < 0:
                raise ValueError(f"window: {side}={width}; it must be a number of keys, not negative, or None for all")
        if self.softcap < 0:
            raise ValueError(f"softcap={self.softcap}; it must be positive, or 0 for none")
        if self.keys is not None:
            rows = self.tokens_k or self.batch * self.seqlen_k
            if self.page_size:
                raise ValueError("arrival: keys in pages arrive in no order of rows; wait for them before the call")
            if self.keys.chunks.rows != rows:
                raise ValueError(f"arrival: its chunks bring {self.keys.chunks.rows} rows, the keys have {rows}")

    @property
    def left(self) -> int | None:
        """The number of visible keys left of the diagonal; None for all."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """The number of visible keys right of the diagonal, 0 if causal; None for all."""
        return 0 if self.causal else self.window[1]

    @property
    def masked(self) -> bool:
        """Whether the mask has a bound on either side."""
        return self.left is not None or self.right is not None

    @property
    def alike(self) -> bool:
        """Whether a head's tiles all see about the same number of keys: all keys, or a window."""
        return self.right is None or self.left is not None

    @property
    def ratio(self) -> int:
        """The number of query heads that share a head of keys."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def out_dtype(self) -> str:
        """The output's dtype."""
        return "bfloat16" if self.dtype == "float8_e4m3fn" else self.dtype

    @property
    def kind(self) -> str:
        """The matrix units' input: the operands' dtype, ``"fp8"`` or ``"tf32"``."""
        if self.dtype == "float8_e4m3fn":
            return "fp8"
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype

    @property
    def rows(self) -> int:
        """The total query rows of all sequences."""
        return self.tokens_q if self.varlen else self.batch * self.seqlen_q

    def unfit(self, most: int) -> str:
        """Why no GPU's fast kernel supports the problem, with extents below ``most``; empty if one may."""
        if not self.positive:
            return "a scale that is not positive: it takes the largest product for the largest score"
        if not self.rows or not self.heads_q or not self.heads_kv or not self.seqlen_k or not self.batch:
            return "there is nothing to load"
        for name in ("seqlen_q", "seqlen_k", "tokens_q", "tokens_k"):
            if getattr(self, name) >= most:
                return f"{name}={getattr(self, name)}; it counts rows in 31 bits"
        return ""

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """``left`` and ``right``, clipped to all keys, because kernels add positions to them in 32 bits."""
        widest = self.seqlen_q + self.seqlen_k
        left, right = (None if side is None else min(side, widest) for side in (self.left, self.right))
        return left, right

    @property
    def pairs(self) -> int:
        """Pairs of a query row and a visible key of one head, if all sequences are as long as the longest."""
        shift = self.seqlen_k - self.seqlen_q if self.alignment == "bottom_right" else 0
        high = self.seqlen_k * self.seqlen_q if self.right is None else self._before(shift + self.right + 1)
        low = 0 if self.left is None else self._before(shift - self.left)
        if self.varlen:
            return -(-(high - low) * self.tokens_q // max(self.seqlen_q, 1))
        return self.batch * (high - low)

    def _before(self, shift: int) -> int:
        """The number of keys before key ``i + shift``, summed over all rows ``i`` of a sequence."""

        def below(x: int) -> int:  # the sum of min(y, seqlen_k) over 0 <= y < x
            few, rest = min(max(x, 0), self.seqlen_k), max(x - self.seqlen_k, 0)
            return few * (few - 1) // 2 + rest * self.seqlen_k

        return below(shift + self.seqlen_q) - below(shift)

    @property
    def operations(self) -> int:
        """The operations of both products, without masked scores; a multiply-add is two."""
        return 2 * self.heads_q * self.pairs * (self.head_dim + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """The least number of bytes to move: q, k and v are read once, the output is written once."""
        size, out = ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype]
        keys = self.tokens_k or self.batch * self.seqlen_k
        q = self.rows * self.heads_q * (size * self.head_dim + out * self.head_dim_v)
        return q + keys * self.heads_kv * size * (self.head_dim + self.head_dim_v)
