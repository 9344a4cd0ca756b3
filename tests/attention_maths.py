"""Small calls of attention and their references, for the CPU, the interpreter and GPUs.

The rule is `error_rule`'s: output and log-sum-exp are each within twice the error of torch's own operations in the same
dtype. NaN fills the outputs before the call, and all that no query may see: keys behind a sequence's last, free pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from error_rule import FP8, errors, passes

#: What a call has that is not in its shapes.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (7, 3)},
    "causal window": {"causal": True, "window": (20, None)},
    "softcap": {"softcap": 3.0, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "scale": {"scale": -0.3},
    "all": {"causal": True, "window": (33, None), "softcap": 5.0, "sinks": True, "scale": 0.5},
}


@dataclass(frozen=True)
class Case:
    """A call. ``keys`` has a number for each sequence, ``queries`` likewise where they are packed, else one.

    Attributes
    ----------
    how
        ``dense``, ``lengths`` (dense with ``seqlens_k``), ``packed``, ``paged`` (dense queries, keys in pages), or
        ``packed paged``.
    page
        Keys of a page.
    extra
        Rows of packed queries behind the last sequence.
    features
        Of `FEATURES`.
    signed
        Whether scales of 8 bits may be negative and 0, else they are positive.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (16, 16)
    features: str = "full"
    how: str = "dense"
    page: int = 16
    extra: int = 0
    dtype: torch.dtype = torch.float32
    signed: bool = False

    @property
    def packed(self) -> bool:
        return self.how.startswith("packed")


@dataclass
class Call:
    """A case with numbers: tensors for the op, and each sequence by itself for the reference."""

    case: Case
    tensors: dict[str, torch.Tensor]
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    options: dict[str, Any]
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Assert the rule for the answer of an op, in the layout ``bshd``, packed where queries are."""
        case, counts = self.case, [q.shape[0] for q, _, _ in self.sequences]
        begin = sum(counts)
        outs, logs = list(out), [] if lse is None else list(lse)
        if case.packed:
            outs = list(out[:begin].split(counts))
            logs = [] if lse is None else [x.t() for x in lse[:begin].split(counts)]
        dtype = torch.bfloat16 if case.dtype in FP8 else case.dtype
        fine, plain, other = (self.references(*how) for how in ((torch.float64,), (dtype,), (dtype, True)))
        kept(case, "out", outs, *([one for one, _ in which] for which in (fine, plain, other)))
        if lse is not None:
            # What it is the logarithm of was computed at the scale of 1, however near to 0 the logarithm is.
            one = [torch.ones(1, device=out.device)]
            kept(case, "lse", logs + one, *([x for _, x in which] + one for which in (fine, plain, other)))
        if case.packed:
            assert out.shape[0] == begin + case.extra
            assert not out[begin:].any(), "rows of no sequence are 0"
            if lse is not None:
                floor = self.options.get("sinks")
                expected = torch.full_like(lse[begin:], -math.inf) if floor is None else floor.expand(case.extra, -1)
                assert torch.equal(lse[begin:], expected.to(lse))

    def references(self, dtype: torch.dtype, other: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Output ``[S, H, Dv]`` and log-sum-exp ``[H, S]`` of each sequence, in torch's own operations in ``dtype``."""
        made = []
        for i, sequence in enumerate(self.sequences):
            scales = None if self.scales is None else tuple(x[i] for x in self.scales)
            qkv = (x.to(dtype) for x in sequence)
            made.append(attention_by_torch(*qkv, scales=scales, other=other, **self.options))
        return made


def kept(case: Case, what: str, mine: list[torch.Tensor], *references: list[torch.Tensor]) -> None:
    """Assert the rule. Errors of a few numbers scatter, so torch's error is the larger one of two ways in torch."""
    answer, fine, *by_torch = (torch.cat([x.flatten() for x in parts]) for parts in (mine, *references))
    nothing = fine == -math.inf
    assert torch.equal(answer == -math.inf, nothing), (case, what, "rows that see nothing")
    answer, fine, *by_torch = (x.masked_fill(nothing, 0.0) for x in (answer, fine, *by_torch))
    assert any(passes(answer, fine, plain) for plain in by_torch), (
        case, what, errors(answer, fine), [errors(plain, fine) for plain in by_torch],
    )  # fmt: skip


def attention_by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, ...] | None = None,
    other: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, ``[S, H, D]`` each, as one would write it with torch; the ``other`` way, by the log-sum-exp."""
    ratio = q.shape[1] // max(k.shape[1], 1)
    q, k, v = q.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(ratio, 0) for x in (k, v))
    if scales is not None:
        of_q, of_k, of_v = (x.to(q.dtype)[:, None, None] for x in scales)
        q, k, v = q * of_q, k * of_k.repeat_interleave(ratio, 0), v * of_v.repeat_interleave(ratio, 0)
    # A head at a time, as the ops do it: torch adds up a batch of products otherwise than one.
    scores = (
        torch.stack([x.contiguous() @ y.contiguous().t() for x, y in zip(q, k, strict=True)]) if len(q) else q @ k.mT
    )
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    position = torch.arange(rows, device=q.device)[:, None] + (0 if causal == "top_left" else keys - rows)
    key = torch.arange(keys, device=q.device)
    left, right = window
    if causal:
        right = 0
    if left is not None:
        scores = scores.masked_fill(key < position - left, -math.inf)
    if right is not None:
        scores = scores.masked_fill(key > position + right, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, rows, 1)], -1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.logsumexp(scores.to(wide), -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    nothing = (lse == -math.inf)[..., None]
    p = torch.exp(scores - lse[..., None]).to(q.dtype) if other else torch.softmax(scores.masked_fill(nothing, 0.0), -1)
    p = p[..., :keys].masked_fill(nothing, 0.0)
    return (p @ v).transpose(0, 1), lse


def call_of(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Call:
    """The numbers of a case: fresh, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    features = dict(FEATURES[case.features])
    heads_q, heads_kv = case.heads
    dim, dim_v = case.dims

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    if features.pop("sinks", False):
        features["sinks"] = torch.randn(heads_q, generator=generator).to(device)
    count = len(case.keys)
    queries = case.queries if case.packed else case.queries * count
    sequences = [
        (rand(n, heads_q, dim), rand(m, heads_kv, dim), rand(m, heads_kv, dim_v))
        for n, m in zip(queries, case.keys, strict=True)
    ]
    q, k, v = (list(x) for x in zip(*sequences, strict=True))
    tensors: dict[str, torch.Tensor] = {}
    if case.packed:
        tensors["cu_seqlens_q"] = _cumulative(queries, device)
        tensors["q"] = torch.cat([*q, rand(case.extra, heads_q, dim)])
    else:
        tensors["q"] = torch.stack(q)
    if case.how == "packed":
        tensors |= {"cu_seqlens_k": _cumulative(case.keys, device), "k": torch.cat(k), "v": torch.cat(v)}
    elif case.how.endswith("paged"):
        tensors |= _in_pages(case, k, v, generator)
    else:
        assert case.how == "lengths" or len(set(case.keys)) == 1, "dense sequences are of one length"
        longest = max(case.keys) + (5 if case.how == "lengths" else 0)
        for name, parts in (("k", k), ("v", v)):
            padded = [torch.cat([x, _nan(longest - x.shape[0], *x.shape[1:], like=x)]) for x in parts]
            tensors[name] = torch.stack(padded)
    if case.how not in ("packed", "dense"):
        tensors["seqlens_k"] = torch.tensor(case.keys, dtype=torch.int32, device=device)
    scales = None
    if case.dtype in FP8:
        scales = tuple(
            _scales(case.signed, torch.rand(count, heads, generator=generator)).to(device)
            for heads in (heads_q, heads_kv, heads_kv)
        )
        tensors |= dict(zip(("scale_q", "scale_k", "scale_v"), scales, strict=True))
    return Call(case, tensors, sequences, features, scales)  # type: ignore[arg-type]


def _scales(signed: bool, x: torch.Tensor) -> torch.Tensor:
    """From numbers below 1: neither large nor near 0; or of either sign, and 0 for every third head."""
    if signed:
        x = x.sub(0.5) * (torch.arange(x.shape[-1]) % 3 != 2)
        return x + 0.25 * x.sign()
    return x + 0.25


def _cumulative(lengths: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)


def _nan(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, math.nan).to(like)


def _in_pages(
    case: Case, k: list[torch.Tensor], v: list[torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Keys and values in shuffled pages, between pages of NaN; unused entries of the table name no page."""
    used = [-(-n // case.page) for n in case.keys]
    order = torch.randperm(sum(used) + 3, generator=generator).tolist()
    table = torch.full((len(used), max(used) + 1), 2**30, dtype=torch.int32)
    pages = [_nan(len(order), case.page, *x[0].shape[1:], like=x[0]) for x in (k, v)]
    for i, count in enumerate(used):
        for j in range(count):
            table[i, j] = page = order.pop()
            for into, rows in zip(pages, (k[i], v[i]), strict=True):
                part = rows[j * case.page : (j + 1) * case.page]
                into[page, : part.shape[0]] = part
    return {"k": pages[0], "v": pages[1], "block_table": table.to(k[0].device)}


#: Lengths at and around the edges of tiles and blocks, equal and not.
LENGTHS = (
    ((1,), (1,)), ((3,), (37,)), ((37,), (3,)), ((64,), (64,)), ((113,), (203,)), ((128,), (127,)), ((128,), (512,)),
    ((239,), (1,)), ((256,), (256,)), ((1,), (799,)), ((130,), (577,)),
)  # fmt: skip
#: Several sequences.
MIXES = (
    ((5, 0, 37, 1), (20, 7, 0, 33)), ((64, 130, 1, 17), (64, 200, 90, 17)), ((0, 3), (4, 600)), ((20, 7), (9, 30)),
)  # fmt: skip
__all__ = ["FEATURES", "LENGTHS", "MIXES", "Call", "Case", "attention_by_torch", "call_of", "replace"]
