"""How many workers a launch may have: one rule for plans and ops.

The least of these that are given counts: ``workers=`` (else the device's own number), each `tilestream.worker_limit`
block around the call, and TILESTREAM_WORKERS, a limit on all that a process does.
"""

from __future__ import annotations

import functools
import operator
import os
from contextvars import ContextVar

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
    return tighter(_blocks.get(), _of_environment())


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
    if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
        raise ValueError(f"worker_limit({count!r}): the number of workers is a positive whole number")
    return operator.index(count)


def within(bound: int, workers: int | None, own: int) -> int | None:
    """Workers to take under a limit of ``bound`` (0: none); None: all ``own`` of the device.

    Parameters
    ----------
    workers
        What the call asks for; None where it does not.
    own
        What the device would get without either.
    """
    if not bound:
        return workers
    if workers is not None:
        return min(workers, bound)
    return bound if bound < own else None


@functools.cache
def _of_environment() -> int:
    """TILESTREAM_WORKERS at its first use; 0 where it is not set."""
    text = os.environ.get(ENVIRONMENT, "")
    if not text:
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{ENVIRONMENT}={text!r}: it is a positive whole number of workers; or unset it")
    return int(text)
