"""The file of measurements of `tilestream tune`, in the user's cache folder. It is optional.

If the file has exactly this problem, for a device of the same name and number of workers, and for the same versions of
tilestream and Triton, the plan is the fastest measured one, and says so. Otherwise the cost model chooses.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilestream._version import __version__
from tilestream.core.device import DeviceProperties
from tilestream.core.whole_file import write_whole
from tilestream.plan.candidate import Candidate
from tilestream.plan.problem import Problem

if TYPE_CHECKING:
    from tilestream.plan.plan import Plan

logger = logging.getLogger(__name__)

#: ``0``: no file; a path: that file; unset: `tuned.json` in the user's cache folder.
ENVIRONMENT = "TILESTREAM_TUNED"

Knobs = dict[str, int | str]
Entry = Mapping[str, Any]


_path = functools.lru_cache(maxsize=8)(Path)  # 10 us, which each new plan would take


def tuned_path() -> Path | None:
    """The file's path; None if `ENVIRONMENT` is 0."""
    given = os.environ.get(ENVIRONMENT, "")
    if given == "0":
        return None
    if given:
        return _path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return _path(f"{cache}/tilestream/tuned.json")


def knobs(candidate: Candidate | Plan) -> Knobs:
    """The fields, in the file's form, that identify a candidate or a plan among those of its problem."""
    schedule = candidate.schedule
    return {
        "variant": candidate.variant,
        "block": "x".join(map(str, candidate.block)),
        "swap_ab": int(candidate.swap_ab),
        **({"realigned": candidate.realigned} if candidate.realigned else {}),
        "schedule": schedule.kind,
        **{name: getattr(candidate, name) for name in ("warps", "stages")},
        **{name: getattr(schedule, name) for name in ("queues", "split", "shares")},
        **{name: getattr(schedule.raster, name) for name in ("order", "group")},
    }


def problem_key(problem: Problem) -> str:
    """The key of a problem: extents, and all fields that differ from their defaults."""
    defaults = {entry.name: entry.default for entry in fields(problem)}
    rest = {name: getattr(problem, name) for name in defaults if name not in ("m", "n", "k", "dtype")}
    extra = [f"{name}={value}" for name, value in rest.items() if value != defaults[name]]
    return " ".join([f"{problem.m}x{problem.n}x{problem.k}", problem.dtype, *extra])


@functools.cache  # 1 ms
def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, which `import tilestream` avoids

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def device_key(device: DeviceProperties) -> str:
    """The key of a device and of the versions that compile its kernels."""
    return f"{device.name}, {device.arch}, {device.workers} workers, tilestream {__version__}, triton {_triton()}"


def lookup(problem: Problem, device: DeviceProperties) -> Entry | None:
    """The measurement of a problem; None if there is none."""
    path = tuned_path()
    if path is None:
        return None
    of_device = _read(path).get(device_key(device))
    return of_device.get(problem_key(problem)) if of_device else None


def matching(entry: Entry, found: list[Candidate]) -> Candidate | None:
    """The candidate that an entry names; None if it no longer exists."""
    # Files from before 2026-11-23 call `swap_ab` "swapped".
    wanted = {"swap_ab" if name == "swapped" else name: value for name, value in entry["knobs"].items()}
    return next((one for one in found if knobs(one) == wanted), None)


def save(problem: Problem, device: DeviceProperties, entry: Entry) -> Path:
    """Add an entry to the file and return its path. Raises `ValueError` if TILESTREAM_TUNED is 0."""
    path = tuned_path()
    if path is None:
        raise ValueError(f"{ENVIRONMENT}=0: there is no file to write what is measured to; unset it, or give a path")
    forget()
    data = {key: dict(entries) for key, entries in _read(path).items()}
    data.setdefault(device_key(device), {})[problem_key(problem)] = dict(entry)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode())
    forget()
    return path


def forget() -> None:
    """Drop the cached file, so that its next use reads it again."""
    _read.cache_clear()


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Entry]]:
    """The file's entries, read once for a process. An unreadable file gives a warning and no entries."""
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
