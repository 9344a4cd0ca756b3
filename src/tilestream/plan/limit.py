"""What the context of a call asks of its launches: few workers, and bits that depend on nothing but the row.

*Workers.* The least of the limits that are given counts: ``workers=``, each `tilestream.worker_limit` block around the
call, and TILESTREAM_WORKERS, a limit on all that a process does.

*Invariance.* A `tilestream.invariant` block around the call, ``tilestream.invariant(True)`` before it, or
TILESTREAM_INVARIANT=1: see `tilestream.plan.invariance`.

Both travel as one integer, the *limit*: the number of workers, 0 for no limit, and `INVARIANT` above it. So all that is
kept by a limit (launches, native recipes, compiled graphs, gradients) is kept by the promise, too.
"""

from __future__ import annotations

import functools
import operator
import os
from contextvars import ContextVar
from typing import NamedTuple

from tilestream.core.arguments import is_whole
from tilestream.core.device import DeviceProperties
from tilestream.plan.candidate import Refusal
from tilestream.plan.policy.cdna import workers_beside_producers

ENVIRONMENT, INVARIANT_ENVIRONMENT = "TILESTREAM_WORKERS", "TILESTREAM_INVARIANT"
#: The bit of a limit that asks for invariance. Numbers of workers are below it.
INVARIANT = 1 << 40

#: The limits within the enclosing ``with`` blocks, the innermost last, in this thread and what it awaits. Not in the
#: blocks' own objects: one of them may stand in blocks of several threads and tasks at once.
_blocks: ContextVar[tuple[int, ...]] = ContextVar("tilestream_worker_limits", default=())


def limit() -> int:
    """The limit of this context; 0: none.

    Raises
    ------
    ValueError
        If TILESTREAM_WORKERS is no positive whole number, or TILESTREAM_INVARIANT neither 0 nor 1.
    """
    blocks = _blocks.get()
    of_process = _process.limit if _process.limit is not None else _of_environment()
    return tighter(blocks[-1], of_process) if blocks else of_process


def tighter(one: int, other: int) -> int:
    """The tighter of two limits, of which 0 is none: the fewer workers, and invariance if either asks for it."""
    if not one or not other:
        return one or other
    few, fewer = workers_in(one), workers_in(other)
    return (min(few, fewer) if few and fewer else few or fewer) | ((one | other) & INVARIANT)


def workers_in(limit: int) -> int:
    """The number of workers that a limit allows; 0: all."""
    return limit & (INVARIANT - 1)


def is_invariant(limit: int) -> bool:
    """Whether a limit asks for invariance."""
    return bool(limit & INVARIANT)


def promising(invariant: bool | None) -> int:
    """The limit of this context, with invariance as a caller's ``invariant=`` has it; None: as the context.

    Raises
    ------
    TypeError
        If it is neither True, False nor None.
    """
    if invariant is not None and not isinstance(invariant, bool):
        raise TypeError(f"invariant={invariant!r}; it is True, False, or None for what tilestream.invariant says")
    found = limit()
    if invariant is None:
        return found
    return found | INVARIANT if invariant else workers_in(found)


class _Process:
    """The limit of the process, as `tilestream.invariant` has set it; None: that of its environment."""

    limit: int | None = None


_process = _Process()


def set_of_process(invariant: bool) -> bool:
    """Have all threads promise invariance, or only those whose blocks ask for it; what was so before."""
    before = _process.limit if _process.limit is not None else _of_environment()
    _process.limit = before | INVARIANT if invariant else workers_in(before)
    return is_invariant(before)


def checked(count: object) -> int:
    """``count`` as a limit.

    Raises
    ------
    ValueError
        If it is no positive whole number.
    """
    if not is_whole(count) or operator.index(count) < 1:
        raise ValueError(f"worker_limit({count!r}): the number of workers is a positive whole number")
    return min(operator.index(count), INVARIANT - 1)


def within(bound: int, workers: int | None, own: int) -> int | None:
    """Workers to take under a limit of ``bound`` (0: none), of which the call asks for ``workers``.

    None: all of the device's ``own`` workers.
    """
    if not bound:
        return workers
    if workers is not None:
        return min(workers, bound)
    return bound if bound < own else None


class Workers(NamedTuple):
    """The number of a plan's workers; whether the caller or a limit forces it; and why there are not more."""

    number: int
    forced: bool
    refused: tuple[Refusal, ...]


def workers_of(device: DeviceProperties, asked: int | None, default: int | None, bound: int, arrives: str) -> Workers:
    """The workers of a plan for ``device``.

    Parameters
    ----------
    asked
        What the caller forces; None: the device's own number.
    default
        The device's own number, where it differs from its properties'.
    bound
        See `limit`.
    arrives
        Which operand arrives, so that its producers need room; empty where none does.
    """
    own = default or device.workers
    bound = workers_in(bound)
    given = within(bound, asked, own)
    count = given or own
    beside = workers_beside_producers(bool(arrives), device, count)
    refused = []
    if count < (asked or own):
        refused.append(Refusal(f"{asked or own} workers", f"the limit is {bound}: worker_limit, or {ENVIRONMENT}"))
    if beside < count:
        refused.append(Refusal(f"{count} workers", arrives))
    return Workers(beside, bool(given), tuple(refused))


@functools.cache
def _of_environment() -> int:
    """The limit that TILESTREAM_WORKERS and TILESTREAM_INVARIANT make, at its first use; 0 where neither is set."""
    text = os.environ.get(ENVIRONMENT, "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{ENVIRONMENT}={text!r}: it is a positive whole number of workers; or unset it")
    promise = os.environ.get(INVARIANT_ENVIRONMENT, "")
    if promise not in ("", "0", "1"):
        raise ValueError(f"{INVARIANT_ENVIRONMENT}={promise!r}: it is 1, or 0; or unset it")
    return (checked(int(text)) if text else 0) | (INVARIANT if promise == "1" else 0)
