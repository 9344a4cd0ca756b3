"""Chunks, signals, gates, deadlines, and the producers that fill tensors.

Importing this package imports no torch; `tilestream.arrival.stream`, which has the producers, imports torch.
"""

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.signals import Outcome, Signals
from tilestream.core.chunks import Chunks
from tilestream.core.gate import Gate, See, Seen, Wait, pass_gate

__all__ = ["Arrival", "Chunks", "Gate", "Outcome", "See", "Seen", "Signals", "Wait", "pass_gate"]
