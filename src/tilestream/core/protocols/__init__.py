"""Protocols between ranks, as generators of operations: the host performs them on streams, the checker explores them.

`gather`, `reduce_scatter` and `one_shot` order accesses to peers' memory; `handshake` compares what ranks call.
"""
