"""How many workers a launch has: the caller's number or the device's, within the limits, less what producers need.

The least of the limits that are given counts: ``workers=``, each `tilestream.worker_limit` block around the call, and
TILESTREAM_WORKERS, a limit on all that a process does.
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

ENVIRONMENT = "TILESTREAM_WORKERS"

#: The limit of the enclosing ``with`` blocks, in this thread and what it awaits; 0: none.
_blocks: ContextVar[int] = ContextVar("tilestream_worker_limit", default=0)


def limit() -> int:
    """The limit on the workers of a launch in this context; 0: none.

    Raises
    ------
    ValueError
        If TILESTREAM_WORKERS is no positive whole number.
    """
    of_blocks, of_process = _blocks.get(), _of_environment()
    return tighter(of_blocks, of_process) if of_blocks else of_process


def tighter(one: int, other: int) -> int:
    """The tighter of two limits, of which 0 is none."""
    return min(one, other) if one and other else one or other


def checked(count: object) -> int:
    """``count`` as a limit.

    Raises
    ------
    ValueError
        If it is no positive whole number.
    """
    if not is_whole(count) or operator.index(count) < 1:
        raise ValueError(f"worker_limit({count!r}): the number of workers is a positive whole number")
    return operator.index(count)


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
    """TILESTREAM_WORKERS at its first use; 0 where it is not set."""
    text = os.environ.get(ENVIRONMENT, "")
    if not text:
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{ENVIRONMENT}={text!r}: it is a positive whole number of workers; or unset it")
    return int(text)
