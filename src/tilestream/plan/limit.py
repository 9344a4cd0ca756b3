"""The limits that a call's context sets on its launches: a number of workers, and invariance.

*Workers.* The smallest of the given limits holds: ``workers=``, each `tilestream.worker_limit` block around the call,
and TILESTREAM_WORKERS, the limit of the process.

*Invariance.* It is requested by a `tilestream.invariant` block around the call, by ``tilestream.invariant(True)``
before it, or by TILESTREAM_INVARIANT=1: see `tilestream.plan.invariance`.

Both are in one integer, the *limit*: the number of workers (0: no limit), and the bit `INVARIANT` above it. So every
cache with a limit in its key (launches, native recipes, compiled graphs, gradients) distinguishes invariance, too.
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
#: The bit of a limit that requests invariance. Numbers of workers are below it.
INVARIANT = 1 << 40

#: The limits of the enclosing ``with`` blocks, the innermost last, in this thread and what it awaits. They are
#: not in the blocks' objects, because several threads and tasks may enter one object at once.
_blocks: ContextVar[tuple[int, ...]] = ContextVar("tilestream_worker_limits", default=())


def limit() -> int:
    """The limit of this context; 0 for none.

    Raises
    ------
    ValueError
        If TILESTREAM_WORKERS is not a positive whole number, or TILESTREAM_INVARIANT is neither 0 nor 1.
    """
    blocks = _blocks.get()
    of_process = _process.limit if _process.limit is not None else _of_environment()
    return tighter(blocks[-1], of_process) if blocks else of_process


def tighter(one: int, other: int) -> int:
    """The tighter of two limits: the fewer workers (0: no limit), and invariance if either requests it."""
    if not one or not other:
        return one or other
    few, fewer = workers_in(one), workers_in(other)
    return (min(few, fewer) if few and fewer else few or fewer) | ((one | other) & INVARIANT)


def workers_in(limit: int) -> int:
    """The number of workers that a limit allows; 0 for all."""
    return limit & (INVARIANT - 1)


def is_invariant(limit: int) -> bool:
    """Whether a limit requests invariance."""
    return bool(limit & INVARIANT)


def promising(invariant: bool | None) -> int:
    """The limit of this context, with a caller's ``invariant=`` in place of the context's; None keeps the context's.

    Raises
    ------
    TypeError
        If it is neither True, False nor None.
    """
    if invariant is not None and not isinstance(invariant, bool):
        raise TypeError(f"invariant={invariant!r}; it must be True, False, or None for what tilestream.invariant says")
    found = limit()
    if invariant is None:
        return found
    return found | INVARIANT if invariant else workers_in(found)


class _Process:
    """The limit of the process that `tilestream.invariant` has set; None: the environment's limit holds."""

    limit: int | None = None


_process = _Process()


def set_of_process(invariant: bool) -> bool:
    """Promise invariance in all threads, or only inside blocks that request it. Returns the previous setting."""
    before = _process.limit if _process.limit is not None else _of_environment()
    _process.limit = before | INVARIANT if invariant else workers_in(before)
    return is_invariant(before)


def checked(count: object) -> int:
    """``count`` as a limit.

    Raises
    ------
    ValueError
        If it is not a positive whole number.
    """
    if not is_whole(count) or operator.index(count) < 1:
        raise ValueError(f"worker_limit({count!r}): the number of workers is a positive whole number")
    return min(operator.index(count), INVARIANT - 1)


def within(bound: int, workers: int | None, own: int) -> int | None:
    """The number of workers under a limit of ``bound`` (0: none) for a call that requests ``workers``.

    None means all of the device's ``own`` workers.
    """
    if not bound:
        return workers
    if workers is not None:
        return min(workers, bound)
    return bound if bound < own else None


class Workers(NamedTuple):
    """The number of a plan's workers, whether the caller or a limit forces it, and why larger numbers are refused."""

    number: int
    forced: bool
    refused: tuple[Refusal, ...]


def workers_of(device: DeviceProperties, asked: int | None, default: int | None, bound: int, arrives: str) -> Workers:
    """The workers of a plan for ``device``.

    Parameters
    ----------
    asked
        The caller's number; None: the device's own number.
    default
        The device's own number, if it differs from its properties'.
    bound
        See `limit`.
    arrives
        The refusal's text, which names the operand that arrives: its producers need room. Empty if none arrives.
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
    """The limit that TILESTREAM_WORKERS and TILESTREAM_INVARIANT set, read at its first use; 0 if neither is set."""
    text = os.environ.get(ENVIRONMENT, "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{ENVIRONMENT}={text!r}: it must be a positive whole number of workers; or unset it")
    promise = os.environ.get(INVARIANT_ENVIRONMENT, "")
    if promise not in ("", "0", "1"):
        raise ValueError(f"{INVARIANT_ENVIRONMENT}={promise!r}: it is 1, or 0; or unset it")
    return (checked(int(text)) if text else 0) | (INVARIANT if promise == "1" else 0)
