"""How many workers a plan has: what the caller asks for, within the limit, and without what producers need."""

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
        What stood in the way of more.
    """

    number: int
    forced: bool
    refused: tuple[Refusal, ...]


def workers_of(device: DeviceProperties, asked: int | None, default: int | None, limit: int, arrives: str) -> Workers:
    """The workers of a plan for ``device``.

    Parameters
    ----------
    asked
        What the caller asks for; None where he does not.
    default
        What the device has by itself, where that is not its properties' number.
    limit
        See `tilestream.plan.limit`.
    arrives
        What is still on its way, and whose producers need room; empty where nothing is.
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
