"""Workspaces, errors, and what must happen at exit."""

from tilestream.core.errors import ArrivalTimeout, ProducerStopped, TilestreamError

__all__ = ["ArrivalTimeout", "ProducerStopped", "TilestreamError"]
