"""Whether a recorded launch did each work item of its schedule once: invariant 1, from a trace."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilestream.core.schedule import Schedule
    from tilestream.trace.record import LaunchTrace

#: Faults that are listed.
_LISTED = 8


def faults(launch: LaunchTrace, schedule: Schedule) -> list[str]:
    """What is wrong with a recorded launch of ``schedule``; empty if each work item was done once.

    A dynamic schedule does not say which worker does what when, but which items there are.

    Parameters
    ----------
    launch
        Recorded on any backend, all of it.
    schedule
        Of the plan that was run.

    Returns
    -------
    list of str
        A line a fault; where there are many, the last says how many more.
    """
    wanted = Counter((item.batch, item.pm, item.pn, item.k_begin, item.k_end) for item in schedule.items())
    did = Counter(
        (span.batch, span.pm, span.pn, span.k_begin, span.k_end)
        for span in launch.spans
        if span.kind in ("tile", "part")
    )
    found = []
    for item in sorted(wanted | did):
        if did[item] != wanted[item]:
            batch, pm, pn, k_begin, k_end = item
            often = {0: "never", 1: "once"}.get(did[item], f"{did[item]} times")
            not_of_it = "" if wanted[item] else ", and is none of the schedule's"
            found.append(f"tile ({pm}, {pn}) of batch {batch}, K steps {k_begin} to {k_end}: done {often}{not_of_it}")
    unfinished = sum(item.part == 0 for item in schedule.items()) - launch.tiles_done
    if not found and unfinished:
        found.append(f"all items were done, and {unfinished} tiles were not completed")
    if len(found) > _LISTED:
        found[_LISTED:] = [f"and {len(found) - _LISTED} more"]
    return found
