"""Records the workers' tiles and times. `tilestream_tools.trace` draws, checks and exports the records."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tilestream.trace.record import LaunchTrace, Recorder, Span, record

if TYPE_CHECKING:
    from tilestream_tools.trace.coverage import faults
    from tilestream_tools.trace.draw import draw
    from tilestream_tools.trace.perfetto import export, load

__all__ = ["LaunchTrace", "Recorder", "Span", "draw", "export", "faults", "load", "record"]

_TOOLS = {"draw": "draw", "export": "perfetto", "faults": "coverage", "load": "perfetto"}


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module 'tilestream.trace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tilestream_tools.trace.{_TOOLS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
