"""Work items, raster, queues, stream-K: plain integer functions, run by host and devices alike."""

from tilestream.core.grid import INT31, Grid, WorkItem
from tilestream.core.order import Order, Raster, TileOrder, by_arrival, by_cost, table_raster
from tilestream.core.schedule import Cursor, Kind, Peek, Ready, Schedule, Split, Take, take

__all__ = [
    "INT31", "Cursor", "Grid", "Kind", "Order", "Peek", "Raster", "Ready", "Schedule", "Split", "Take", "TileOrder",
    "WorkItem", "by_arrival", "by_cost", "table_raster", "take",
]  # fmt: skip
