"""`attention_plan` checks the caller's arguments; `plan_attention` compares the backend's candidates."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import get_args

from tilestream.core.arguments import is_one_of, is_whole
from tilestream.core.chunks import Arriving
from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.core.schedule import Kind
from tilestream.plan import experimental, invariance
from tilestream.plan.additions import key_order
from tilestream.plan.api import checked_extents, default_workers, device_properties
from tilestream.plan.attention_plan import AttentionCandidate, AttentionPlan, of_candidate
from tilestream.plan.attention_problem import Alignment, AttentionLayout, AttentionProblem
from tilestream.plan.candidate import Refusal
from tilestream.plan.explain import log, number
from tilestream.plan.limit import is_invariant, promising, workers_in, workers_of
from tilestream.plan.planner import NAMES, fast_or_portable
from tilestream.plan.policy import cdna_attention, cpu_attention, hopper_attention, hopper_strips, portable_attention

#: The values of ``schedule=``. Attention has no ``stream_k``.
ATTENTION_SCHEDULES = ("auto", "static", "dynamic")
#: The values of ``backend=`` on GPUs.
BACKENDS = ("hopper", "cdna", "portable")
#: The reason for a dynamic schedule by default.
_NO_STATIC = "tiles differ in length, and those of a worker that a neighbour keeps from running wait"
_ALL_KEYS = Refusal(
    "keys as they arrive",
    f"a tile waits for all its keys and takes them from the last on, which invariance promises: {experimental.NOT_RUN}",
)


def check_splits(op: str, splits: object) -> None:
    """Raise `ValueError` unless ``splits`` is a valid number of shares, or None."""
    if splits is None:
        return
    if not isinstance(splits, int) or isinstance(splits, bool) or not 1 <= splits <= hopper_attention.MOST_SHARES:
        raise ValueError(
            f"{op}splits={splits!r}; it must be the number of shares of a tile's keys, 1 to "
            f"{hopper_attention.MOST_SHARES}, or None for the plan's choice"
        )


@functools.lru_cache(maxsize=1024)
def plan_attention(
    problem: AttentionProblem,
    workers: int | None = None,
    schedule: str = "auto",
    default_workers: int | None = None,
    device: DeviceProperties | None = None,
    backend: str | None = None,
    limit: int = 0,
    splits: int | None = None,
) -> AttentionPlan:
    """`attention_plan` for an `AttentionProblem`; equal arguments give the same object.

    ``limit``: see `tilestream.plan.limit`.
    """
    device = device or cpu_properties()
    if backend is not None and device.backend == "cpu":
        raise NotImplementedError(
            f"backend={backend!r}; it is a GPU's, and this plan is for the CPU, which has one of its own: leave "
            "backend= away, or give the GPU's device="
        )
    kind: Kind = "static" if schedule == "static" else "dynamic"
    refused: tuple[Refusal, ...] = (Refusal("static", _NO_STATIC),) if schedule == "auto" else ()
    arrives = "" if problem.keys is None else "keys arrive: a CU of each shader engine is their producers'"
    count, forced, fewer = workers_of(device, workers, default_workers, limit, arrives)
    found: list[AttentionCandidate]
    promises = is_invariant(limit)
    if promises:
        refuse_splits(splits)
    if device.backend == "cpu":
        forced = forced or schedule != "auto" or promises
        block = cpu_attention.PROMISED_BLOCK if promises else cpu_attention.BLOCK
        found = list(cpu_attention.candidates(problem, device, count, kind=kind, forced=forced, block=block))
        name, why = "cpu", "least of the candidates in the cost model"
        elsewhere = Refusal("GPU backends", "the operands are on the CPU")
    else:
        name, found, elsewhere = _on_gpu(problem, device, count, kind, backend, 1 if promises else splits, promises)
        if promises:
            found, excluded = _keeping(problem, device, name, found, backend)
            refused += excluded
            if problem.keys is not None and found[0].downwards:
                refused += (_ALL_KEYS,)
        why = f"least of {len(found)} candidates in the cost model"
        if name in experimental.KERNELS:
            why += f"; {experimental.NOT_RUN}"
    refused += (*fewer, elsewhere)
    best, *others = sorted(found, key=lambda candidate: candidate.predicted)
    if others:
        other = others[0]
        tile = f"{other.block[0]} query rows x {other.block[1]} keys"
        costs = f"the cost model expects {number(other.predicted * 1e3)} ms, not {number(best.predicted * 1e3)} ms"
        refused += (Refusal(other.variant if other.variant != best.variant else tile, costs),)
    if splits is not None and best.shares != splits:
        unsplit = f"the {'CPU' if name == 'cpu' else name} kernel takes a tile's keys one after the other"
        if name == "hopper":
            unsplit = hopper_attention.unsplit(problem, splits)
        refused += (Refusal(f"splits={splits}", unsplit),)
    made = of_candidate(problem, device, name, best, why, refused)
    if promises:
        free = plan_attention(
            problem, workers, schedule, default_workers, device, backend, workers_in(limit), splits
        )  # fmt: skip
        made = replace(made, promise=invariance.cost(made.label, made.predicted, free.label, free.predicted))
    log(made)
    return made


def refuse_splits(splits: int | None) -> None:
    """Raise `NotImplementedError` for split keys, whose sums have another order than those of unsplit keys."""
    if splits not in (None, 1):
        raise NotImplementedError(
            f"splits={splits} under tilestream.invariant: a prefill's keys are not split, and a row of it has the bits "
            "of a decoding step; leave splits= away"
        )


def _keeping(
    problem: AttentionProblem, device: DeviceProperties, name: str, found: list[AttentionCandidate], asked: str | None
) -> tuple[list[AttentionCandidate], tuple[Refusal, ...]]:
    """The candidates that take keys in the promised order, and the refusals of the others."""
    if not (problem.rows and problem.heads_q and problem.seqlen_k):
        return found, ()
    promised = plan_attention(invariance.plain_attention(problem), schedule="dynamic", device=device, splits=1)
    orders = [key_order(device, name, problem, one) for one in found]
    way_out = f"{problem.no_tma or 'pages of too few keys, or rows that are not aligned'}: copy them (contiguous())"
    if asked is not None:
        way_out = "leave backend= away"
    elif problem.keys is not None:
        way_out = "leave arrival= away, and call when the keys have arrived"
    kept = invariance.keeping(found, orders, promised.key_order, way_out)
    return kept, invariance.refused(orders, promised.key_order)


def _on_gpu(
    problem: AttentionProblem, device: DeviceProperties, workers: int, kind: Kind, backend: str | None,
    splits: int | None, promises: bool,
) -> tuple[str, list[AttentionCandidate], Refusal]:  # fmt: skip
    """The backend, its candidates, and the refusal of the other backend."""
    fast = "cdna" if device.arch.startswith("gfx") else "hopper"
    if backend in NAMES:
        fast = backend
    policy = cdna_attention if fast == "cdna" else hopper_attention
    more = {"splits": splits, "promises": promises} if fast == "hopper" else {}

    def of_fast() -> list[AttentionCandidate]:
        found: list[AttentionCandidate] = list(policy.candidates(problem, device, workers, kind=kind, **more))
        if fast == "hopper" and promises:  # without the promise shares of keys are faster
            blocks = {one.block[1] for one in found}
            found += hopper_strips.candidates(problem, device, workers, blocks, kind=kind)
        return found

    return fast_or_portable(
        fast, backend, policy.refusal(problem, device),
        (of_fast, lambda: portable_attention.candidates(problem, device, workers, kind=kind)),
        lambda: "no tile of it fits", "leave backend= away",
    )  # fmt: skip


def attention_plan(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    batch: int = 1,
    heads_q: int = 1,
    heads_kv: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: object = "bfloat16",
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    layout: AttentionLayout = "bshd",
    page_size: int = 0,
    return_lse: bool = False,
    arrival: Arriving | None = None,
    device: object = "cpu",
    workers: int | None = None,
    schedule: str = "auto",
    backend: str | None = None,
    splits: int | None = None,
    invariant: bool | None = None,
) -> AttentionPlan:
    """The plan of `tilestream.attention` for dense or paged keys.

    Parameters
    ----------
    seqlen_q, seqlen_k
        Query rows and keys of a sequence; ``seqlen_k`` defaults to ``seqlen_q``.
    batch, heads_q, heads_kv, head_dim, head_dim_v
        Sequences; heads of queries and of keys (default: ``heads_q``); columns of keys and of values (default: equal).
    dtype, causal, window, softcap, layout, return_lse, arrival, workers, schedule, splits
        See `tilestream.attention`.
    sinks
        Whether each query head has a sink.
    page_size
        Keys of a page; 0 for dense keys.
    device
        See `tilestream.plan`.
    backend
        Force a GPU's backend: ``"hopper"``, ``"cdna"`` or ``"portable"``.
    invariant
        See `tilestream.plan`.

    Raises
    ------
    ValueError, TypeError
        If an argument is out of range.
    NotImplementedError
        If no backend supports the device, or the forced backend does not support the problem.

    Examples
    --------
    >>> attention_plan(1024, heads_q=8, heads_kv=2, head_dim=64, causal=True, workers=2).schedule.grid.tiles
    64
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    extents = checked_extents({
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch, "heads_q": heads_q,
        "heads_kv": heads_q if heads_kv is None else heads_kv, "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v, "page_size": page_size,
    })  # fmt: skip
    if not is_one_of(schedule, ATTENTION_SCHEDULES):
        raise ValueError(f"schedule={schedule!r}; attention has {', '.join(ATTENTION_SCHEDULES)}")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise ValueError(f"workers={workers!r}; it must be a positive whole number, or None for the device's own")
    if not is_one_of(backend, (None, *BACKENDS)):
        raise ValueError(
            f"backend={backend!r}; attention has {', '.join(map(repr, BACKENDS))} on GPUs: leave backend= away for "
            "the plan's choice"
        )
    check_splits("", splits)
    if not is_one_of(causal, (False, True, *get_args(Alignment))):
        raise ValueError(f"causal={causal!r}; it must be False, True, {' or '.join(map(repr, get_args(Alignment)))}")
    if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
        raise ValueError(f"window={window!r}; it must be (left, right): keys on either side of the diagonal, or None")
    left, right = window or (None, None)
    for side in (left, right):
        if side is not None and (not is_whole(side) or side < -1):
            raise ValueError(
                f"window={window!r}; a side is a whole number of keys, not negative, or None (or -1) for all"
            )
    if softcap is not None:
        number: object = softcap
        if not isinstance(number, int | float | Real) or isinstance(number, bool):
            raise TypeError(f"softcap={softcap!r}; it must be a number, or None for none")
        if not math.isfinite(softcap) or softcap < 0:
            raise ValueError(f"softcap={softcap!r}; it must be finite and positive, or None for none")
    for name, given in (("sinks", sinks), ("return_lse", return_lse)):
        if not isinstance(given, bool):
            raise TypeError(f"{name}={given!r}; it must be True or False: a plan has no data")
    if arrival is not None and not isinstance(arrival, Arriving):
        raise TypeError(
            f"arrival={arrival!r}; it must be a tilestream.Arrival (a Stream's is stream.arrival), or None where the "
            "keys are there"
        )
    properties = device_properties(device)
    keys = None if arrival is None else arrival.incoming(extents["batch"] * extents["seqlen_k"])
    problem = AttentionProblem(
        **extents,  # type: ignore[arg-type]
        dtype=str(dtype).removeprefix("torch."), causal=bool(causal),
        alignment="top_left" if causal == "top_left" else "bottom_right",
        window=(None if left == -1 else left, None if right == -1 else right),
        softcap=softcap or 0.0, sinks=sinks, layout=layout, return_lse=return_lse, lengths=page_size > 0,
        pages=page_size and batch * -(-seqlen_k // page_size), keys=keys,
    )  # fmt: skip
    default = None if isinstance(device, DeviceProperties) else default_workers(properties)
    return plan_attention(problem, workers, schedule, default, properties, backend, promising(invariant), splits)
