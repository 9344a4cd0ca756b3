"""What `tilestream tune` measured: a file of the user's, which plans consult and can do without.

The cost model chooses by itself; where this file has measured the very problem, on a device of that name with as many
workers and with the same versions of tilestream and Triton, the plan is what was fastest there, and says so. A file
that is not there, or `TILESTREAM_TUNED=0`, changes nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilestream._version import __version__
from tilestream.core.device import DeviceProperties
from tilestream.plan.candidate import Candidate
from tilestream.plan.problem import Problem

if TYPE_CHECKING:
    from tilestream.plan.plan import Plan

logger = logging.getLogger(__name__)

#: ``0``: nothing is consulted; a path: the file; not set: `tuned.json` in the user's cache folder.
ENVIRONMENT = "TILESTREAM_TUNED"

Knobs = dict[str, int | str]
Entry = Mapping[str, Any]


def tuned_path() -> Path | None:
    """The file; None where none is to be consulted."""
    given = os.environ.get(ENVIRONMENT, "")
    if given == "0":
        return None
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tilestream" / "tuned.json"


def knobs(candidate: Candidate | Plan) -> Knobs:
    """What tells a candidate, or a plan, from the others of the same problem, as the file has it."""
    schedule = candidate.schedule
    return {
        "variant": candidate.variant,
        "block": "x".join(map(str, candidate.block)),
        "swapped": int(candidate.swap_ab),
        "warps": candidate.warps,
        "stages": candidate.stages,
        "schedule": schedule.kind,
        "queues": schedule.queues,
        "split": schedule.split,
        "shares": schedule.shares,
        "order": schedule.raster.order,
        "group": schedule.raster.group,
    }


def problem_key(problem: Problem) -> str:
    """All of a problem in a line: extents, and what is not as it is for most."""
    most = {entry.name: entry.default for entry in fields(problem)}
    rest = {name: getattr(problem, name) for name in most if name not in ("m", "n", "k", "dtype")}
    extra = [f"{name}={value}" for name, value in rest.items() if value != most[name]]
    return " ".join([f"{problem.m}x{problem.n}x{problem.k}", problem.dtype, *extra])


def device_key(device: DeviceProperties) -> str:
    """A device and the versions that made its kernels."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{device.name}, {device.arch}, {device.workers} workers, tilestream {__version__}, triton {triton}"


def lookup(problem: Problem, device: DeviceProperties) -> Entry | None:
    """What was measured for a problem, if it was."""
    path = tuned_path()
    if path is None:
        return None
    entry: Entry | None = _read(path).get(device_key(device), {}).get(problem_key(problem))
    return entry


def matching(entry: Entry, found: list[Candidate]) -> Candidate | None:
    """The candidate that an entry names; None where there is none such any more."""
    return next((one for one in found if knobs(one) == entry["knobs"]), None)


def save(problem: Problem, device: DeviceProperties, entry: Entry) -> Path:
    """Write an entry beside those that are there.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If TILESTREAM_TUNED says that no file is to be used.
    """
    path = tuned_path()
    if path is None:
        raise ValueError(f"{ENVIRONMENT}=0: there is no file to write what is measured to; unset it, or give a path")
    forget()
    data = {key: dict(entries) for key, entries in _read(path).items()}
    data.setdefault(device_key(device), {})[problem_key(problem)] = dict(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    new.replace(path)  # whole or not at all
    forget()
    return path


def forget() -> None:
    """Read the file anew when it is asked for next."""
    _read.cache_clear()


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Entry]]:
    """The file, once a process. One that cannot be read is as none, and said to be so."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(entry["knobs"], dict) for entries in data.values() for entry in entries.values()):
            raise ValueError("an entry without knobs")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        logger.warning(
            "%s: what `tilestream tune` measured cannot be read (%s: %s), and is not used: delete it, or tune anew",
            path, type(error).__name__, error,
        )  # fmt: skip
        return {}
    return dict(data)
