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
        made.arrivals[0] = tuple(arrived)
        made.started[0] = begin - 0.002
    if both:
        made.arrivals[1] = tuple(begin + 0.2 * seconds * (c + 1) / 4 for c in range(4))
    now = [begin] * workers
    each = 0.9 * seconds * workers / (chunks * columns)
    for chunk in range(chunks):
        for column in range(columns):
            w = min(range(workers), key=now.__getitem__)
            told = chunk if arrival else -1
            spans = made.by_worker[w]
            if arrival:
                there = max(now[w] + 1e-7, arrived[chunk])
                spans.append(Span(w, "wait", now[w], there, 0, chunk, column, 0, 4, told))
                now[w] = there
            end = now[w] + each * dice.uniform(0.7, 1.0)
            if parts and chunk == chunks - 1:
                spans.append(Span(w, "part", now[w], end, 0, chunk, column, 0, 2, told))
                spans.append(Span(w, "reduce", end, end + each / 9, 0, chunk, column, 0, 4, told))
                end += each / 9
            else:
                spans.append(Span(w, "tile", now[w], end, 0, chunk, column, 0, 4, told))
            now[w] = end
    made.end = max(now)
    return made
