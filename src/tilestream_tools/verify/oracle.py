"""Model 1's oracle: the chunks that a tile reads, and the tiles that must be finished.

It is computed from bounds and sizes, row by row and column by column, without the arithmetic under test
(`Chunks.of_rows`, `Gate.needs`, `Schedule.ticket`).
"""

from __future__ import annotations

from tilestream.core.gate import Gate
from tilestream.schedule import Schedule, WorkItem


class Oracle:
    """The truth about a schedule's tiles and a gate's chunks. Chunks are bits: the rows' first, then the columns'."""

    def __init__(self, schedule: Schedule, gate: Gate | None) -> None:
        grid = schedule.grid
        self.gate = gate
        self.rows, self.columns = _arrivals(gate)
        self.counts = [0 if c is None else c.count for c in (gate.rows, gate.columns)] if gate else [0, 0]
        self.tiles = {
            (b * grid.num_m + pm) * grid.num_n + pn: (b, pm, pn)
            for b in range(grid.batch)
            for pm in range(grid.num_m)
            for pn in range(grid.num_n)
        }
        self._reads: dict[tuple[int, int, int], int] = {}

    @property
    def chunks(self) -> int:
        """The number of chunks of both operands."""
        return sum(self.counts)

    def bit(self, operand: int, chunk: int) -> int:
        """The bit of a chunk; 0 if there is no such chunk."""
        if not 0 <= chunk < self.counts[operand]:
            return 0
        return 1 << (operand * self.counts[0] + chunk)

    def names(self, bits: int) -> str:
        """The names, in a trace, of the chunks in ``bits``."""
        names = [f"chunk {c}" for c in range(self.counts[0]) if bits >> c & 1]
        names += [f"column chunk {c}" for c in range(self.counts[1]) if bits >> self.counts[0] + c & 1]
        return ", ".join(names)

    def needs(self, item: WorkItem) -> int:
        """The chunks that a tile reads, as bits."""
        key = (item.batch, item.pm, item.pn)
        if key not in self._reads:
            gate, bits = self.gate, 0
            if gate is not None:
                base = gate.row_of_batch[item.batch] if gate.row_of_batch else 0
                for row in range(gate.m):
                    if row // gate.block_m == item.pm and self.rows:
                        bits |= self.bit(0, self.rows[base + row])
                for column in range(gate.n):
                    if column // gate.block_n == item.pn and self.columns:
                        bits |= self.bit(1, self.columns[column])
            self._reads[key] = bits
        return self._reads[key]


def expected_tiles(schedule: Schedule, running: tuple[int, ...]) -> list[int]:
    """The tiles that must be finished without an expiry. ``running``: the workers that run; empty for all."""
    grid = schedule.grid
    if schedule.kind != "static" or not running:
        return list(range(grid.tiles))
    own = []
    for position in range(grid.tiles):
        batch, t = divmod(position, grid.plane)
        pm, pn = schedule.raster.tile(t, grid.num_m, grid.num_n)
        if position % schedule.workers in running:
            own.append((batch * grid.num_m + pm) * grid.num_n + pn)
    return own


def _arrivals(gate: Gate | None) -> tuple[list[int], list[int]]:
    """The chunk of each row, and of each column."""
    out = []
    for chunks in (None, None) if gate is None else (gate.rows, gate.columns):
        where: list[int] = []
        for c in range(0 if chunks is None else len(chunks.bounds) - 1):
            assert chunks is not None
            where += [c] * (chunks.bounds[c + 1] - chunks.bounds[c])
        out.append(where)
    return out[0], out[1]
