"""Who did which tile when; drawn, and exported for Perfetto."""

from tilestream.trace.record import LaunchTrace, Recorder, Span, record

__all__ = ["LaunchTrace", "Recorder", "Span", "record"]
