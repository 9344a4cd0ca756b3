"""A wave's registers, as its instructions read and write them."""

from __future__ import annotations

import numpy as np

from tilestream_tools.emulator.numbers import F32, LANES, MASK32, MASK64, U32, Array, to_lanes

#: Numbers of the scalar registers that have names.
VCC, M0, EXEC = 106, 124, 126
#: AGPR n is vector register n + 256.
ACCUMULATORS = 256
#: A register's number in the set of those that an instruction touches: vector ones first, then scalar ones.
SCALARS = 512
#: What a vector register holds that nothing has written: a NaN.
UNWRITTEN = 0x7FC0DEAD
_ALL = np.ones(LANES, np.bool_)


class Registers:
    """The registers of 64 lanes.

    Attributes
    ----------
    s, v
        Scalar registers, and vector registers ``[512, 64]``; accumulators are those from 256 on. ``f`` is ``v`` as
        float32; ``rows`` and ``floats`` are their rows.
    scc
        The scalar condition code.
    exec, on
        The lanes that are on, as a mask of 64 bits and as booleans; None: all of them.
    """

    def __init__(self) -> None:
        self.s = [0] * 128
        self.v = np.full((512, LANES), UNWRITTEN, U32)
        self.f: Array = self.v.view(F32)
        self.rows, self.floats = list[Array](self.v), list[Array](self.f)
        self.scc = 0
        self.on: Array | None = None
        self.s[EXEC] = self.s[EXEC + 1] = MASK32
        self.exec = MASK64

    def exec_changed(self) -> None:
        """EXEC was written."""
        self.exec = self.s[EXEC] | self.s[EXEC + 1] << 32
        self.on = None if self.exec == MASK64 else to_lanes(self.exec)

    @property
    def lanes(self) -> Array:
        """The lanes that are on."""
        return _ALL if self.on is None else self.on

    def put(self, register: int, value: Array) -> None:
        """Write a vector register in the lanes that are on."""
        if self.on is None:
            self.rows[register][...] = value
        else:
            np.copyto(self.rows[register], value, where=self.on)
