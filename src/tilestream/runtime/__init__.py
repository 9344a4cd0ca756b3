"""What outlives a call: workspaces, streams, the error channel, shutdown."""

from tilestream.core.errors import ArrivalTimeout, ProducerStopped, TilestreamError

__all__ = ["ArrivalTimeout", "ProducerStopped", "TilestreamError"]
