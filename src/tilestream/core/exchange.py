"""How the CTAs of a cluster lay their sums into each other's shared memory: `tilestream.kernels.portable.cluster`."""

from __future__ import annotations

from tilestream.core.integers import cdiv

#: Parts of a tile's K that a cluster's CTAs may have: powers of two, up to what each device with clusters supports.
CLUSTERS = (2, 4, 8)
#: Floats behind each row of a sum: so the rows that a warp stores at once lie in different banks.
PAD = 8
#: Bytes of which the room's address is a multiple.
ALIGNMENT = 16


def room(block_m: int, block_n: int) -> int:
    """Bytes of shared memory for the exchange of a tile's sums, with those before the first aligned address."""
    return cdiv(4 * block_m * (block_n + PAD), ALIGNMENT) * ALIGNMENT + ALIGNMENT
