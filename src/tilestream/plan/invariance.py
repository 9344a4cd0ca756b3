"""Selects the plans that keep the promise of `tilestream.invariant`: a row's bits are independent of other rows.

An output's bits depend on its operands, on the order in which its products are added (`tilestream.plan.additions`) and
on the epilogue, which is the same code in all kernels. Under the promise the planner takes only candidates with the
*promised* order. This is the order of the plan for the same K, columns, dtypes and epilogue with `ROWS` rows and
contiguous operands. It is independent of rows, workers, chunks and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tilestream.plan.attention_plan import AttentionCandidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import Asked, Candidate, Refusal
from tilestream.plan.explain import number
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.tma import ALIGNMENT

#: Rows, and keys, of the problem whose plan has the promised order.
ROWS, KEYS = 128, 4096

Found = TypeVar("Found", Candidate, AttentionCandidate)


def plain(problem: Problem) -> Problem:
    """The problem whose plan has the promised order: `ROWS` rows of contiguous operands that do not arrive.

    It is aligned, and open to TMA, if K allows this: a row of A must be a multiple of 16 bytes. If not, operands may be
    too large to be copied, and their rows be added as they lie. So no copy is promised where the order depends on it.
    """
    by_copy = "" if problem.kind == "tf32" or problem.promoted else "ab"
    even = problem.k * ITEMSIZE[problem.dtype] % ALIGNMENT == 0
    return replace(
        problem, m=ROWS, batch=1, rows=None, columns=None, shared_rows=False, publishes=None,
        row_multiples=(128, 128), aligned=problem.k % 16 == 0, not_by_tma="" if even else by_copy,
        no_tma="" if even else f"a row of K elements is no multiple of {ALIGNMENT} bytes",
    )  # fmt: skip


def plain_attention(problem: AttentionProblem) -> AttentionProblem:
    """`plain` for attention: one dense sequence of `KEYS` queries and keys."""
    return replace(
        problem, batch=1, seqlen_q=KEYS, seqlen_k=KEYS, varlen=False, tokens_q=0, tokens_k=0, page_size=0, pages=0,
        lengths=False, return_lse=False, aligned=True, no_tma="", keys=None,
    )  # fmt: skip


def refuse_splits(how: Asked) -> None:
    """Raise `NotImplementedError` if a caller requests cuts of K, whose places depend on rows and workers."""
    for name, value in (("schedule", how.schedule if how.schedule == "stream_k" else None), ("shares", how.shares)):
        if value is not None:
            raise NotImplementedError(
                f"{name}={value!r} under tilestream.invariant: stream_k cuts K by the numbers of tiles and workers, "
                "so that a row's bits depend on them; take schedule='dynamic', 'static' or 'auto'"
            )


#: The reason for excluding stream_k.
NO_STREAM_K = Refusal("stream_k", "it cuts K by the numbers of tiles and workers, and invariance is promised")


def keeping(found: Sequence[Found], orders: Sequence[object], promised: object, way_out: str) -> list[Found]:
    """The candidates that add in the promised order.

    Raises
    ------
    NotImplementedError
        If there is none. The message ends with ``way_out``.
    """
    kept = [one for one, order in zip(found, orders, strict=True) if order == promised]
    if not kept:
        raise NotImplementedError(
            f"tilestream.invariant: these operands would be added in another order ({orders[0]}) than plain ones "
            f"({promised}); {way_out}"
        )
    return kept


def refused(orders: Sequence[object], promised: object) -> tuple[Refusal, ...]:
    """The refusal of the candidates that the promise excludes, of the ``orders`` of all; empty if it excludes none."""
    others = [order for order in orders if order != promised]
    if not others:
        return ()
    what = f"{len(others)} candidate{'s' if len(others) > 1 else ''}"
    shown = list(dict.fromkeys(map(str, others)))[:3]
    return (Refusal(what, f"they add in another order than is promised: {'; '.join(shown)}"),)


def cost(label: str, seconds: float, free_label: str, free_seconds: float) -> str:
    """The cost of a promise in words: the plan's predicted time relative to the plan without the promise."""
    if (label, seconds) == (free_label, free_seconds):
        return "nothing: the plan is the same without it"
    return (
        f"{max(0.0, seconds / free_seconds - 1):.1%} by the cost model ({number(seconds * 1e3)} ms, and "
        f"{number(free_seconds * 1e3)} ms without it: {free_label})"
    )
