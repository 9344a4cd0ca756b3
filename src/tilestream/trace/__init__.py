"""Which worker did which tile when: recorded, drawn, and exported for Perfetto."""

from tilestream.trace.coverage import faults
from tilestream.trace.draw import draw
from tilestream.trace.perfetto import export, load
from tilestream.trace.record import LaunchTrace, Recorder, Span, record

__all__ = ["LaunchTrace", "Recorder", "Span", "draw", "export", "faults", "load", "record"]
