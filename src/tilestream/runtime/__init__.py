"""Workspaces, device properties, the error channel."""

from tilestream.runtime.errors import ArrivalTimeout, ProducerStopped, TilestreamError

__all__ = ["ArrivalTimeout", "ProducerStopped", "TilestreamError"]
