"""Launches that never ran: what workers would have recorded, given rates."""

import random

import pytest

from tilestream.trace.record import LaunchTrace, Span


@pytest.fixture
def make_launch():
    return launch


def launch(workers=2, chunks=8, columns=3, *, arrival=True, both=False, parts=False, begin=100.0, seconds=0.1):
    dice = random.Random(workers * 1000 + chunks)
    made = LaunchTrace("matmul", f"cpu dynamic, {workers} workers", workers, chunks * columns, begin)
    arrived = [begin + 0.9 * seconds * (c + 1) / chunks for c in range(chunks)]
    if arrival:
        made.arrivals[0], made.started[0] = tuple(arrived), begin - 0.002
    if both:
        made.arrivals[1] = tuple(begin + 0.2 * seconds * (c + 1) / 4 for c in range(4))
    now = [begin] * workers
    each = 0.9 * seconds * workers / (chunks * columns)

    def add(w, kind, end, chunk, column, k_end=4):
        told = chunk if arrival else -1
        made.by_worker[w].append(Span(w, kind, now[w], end, 0, chunk, column, 0, k_end, told))
        now[w] = end

    for chunk in range(chunks):
        for column in range(columns):
            w = min(range(workers), key=now.__getitem__)
            if arrival:
                add(w, "wait", max(now[w] + 1e-7, arrived[chunk]), chunk, column)
            end = now[w] + each * dice.uniform(0.7, 1.0)
            if parts and chunk == chunks - 1:
                add(w, "part", end, chunk, column, 2)
                add(w, "reduce", end + each / 9, chunk, column)
            else:
                add(w, "tile", end, chunk, column)
    made.end = max(now)
    return made
