"""How many workers a plan has: the caller's or the device's number, within the limit, less what producers need."""

from __future__ import annotations

from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.plan.candidate import Refusal
from tilestream.plan.limit import ENVIRONMENT, within
from tilestream.plan.policy.cdna import workers_beside_producers


class Workers(NamedTuple):
    """The workers of a plan.

    Attributes
    ----------
    number
        How many.
    forced
        Whether the caller, or a limit, wants another number than the device's own.
    refused
        Why there are not more.
    """

    number: int
    forced: bool
    refused: tuple[Refusal, ...]


def workers_of(device: DeviceProperties, asked: int | None, default: int | None, limit: int, arrives: str) -> Workers:
    """The workers of a plan for ``device``.

    Parameters
    ----------
    asked
        What the caller forces; None: the device's own number.
    default
        The device's own number, where it differs from its properties'.
    limit
        See `tilestream.plan.limit`.
    arrives
        Which operand arrives, so that its producers need room; empty where none does.
    """
    own = default or device.workers
    given = within(limit, asked, own)
    count = given or own
    refused: tuple[Refusal, ...] = ()
    if count < (asked or own):
        refused += (Refusal(f"{asked or own} workers", f"the limit is {limit}: worker_limit, or {ENVIRONMENT}"),)
    beside = workers_beside_producers(bool(arrives), device, count)
    if beside < count:
        refused += (Refusal(f"{count} workers", arrives),)
    return Workers(beside, bool(given), refused)
