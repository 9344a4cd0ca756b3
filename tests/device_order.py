"""What a device's probe wrote down, compared with the host: `tilestream.schedule.take` led through the same answers."""

from __future__ import annotations

from collections import Counter

from tilestream.arrival import Gate
from tilestream.core.schedule import Peek, Ready, Take
from tilestream.schedule import Cursor, Schedule, WorkItem, take

TOOK, PEEKED, ITEM, STOPPED, WAITED, GATE, READY = range(7)


def follow(schedule: Schedule, worker: int, log: list[list[int]]) -> list[WorkItem]:
    """Run the host's protocol for ``worker``, answering as the device was answered; the items it took, in order.

    Asserts that the device asked the same questions of the same queues in the same order, got the same items from the
    answers, and stopped where the host stops.
    """
    records = iter([row for row in log if row[0] not in (WAITED, GATE)])
    items: list[WorkItem] = []
    cursor = Cursor()
    while True:
        turn = take(schedule, worker, cursor)
        answer = None
        try:
            while True:
                asked = turn.send(answer)
                if isinstance(asked, Ready):
                    kind, answer = next(records)[:2]
                    assert kind == READY, (asked, kind)
                    assert answer < 0 or asked.queues >> answer & 1, "a queue that this worker has found empty"
                    continue
                kind, queue, answer = next(records)[:3]
                assert (kind, queue) == ({Take: TOOK, Peek: PEEKED}[type(asked)], asked.queue), (asked, kind, queue)
                assert answer >= 0, "a ticket, or a count of them, before the launch's first"
        except StopIteration as end:
            item, cursor = end.value
        kind, *values = next(records)
        if item is None:
            assert kind == STOPPED
            assert next(records, None) is None, "the device went on where the host stops"
            return items
        mine = [kind, *values[:6]]
        host = [ITEM, item.tile, item.k_begin, item.k_end, item.part, item.parts, item.slot]
        assert mine == host, f"device {mine}, host {host}"
        items.append(item)


def check_order(schedule: Schedule, logs: list[list[list[int]]]) -> None:
    """Every worker's log follows the host's protocol, no ticket was given twice, and together they did all."""
    items = [item for worker, log in enumerate(logs) for item in follow(schedule, worker, log)]
    tickets = Counter((row[1], row[2]) for log in logs for row in log if row[0] == TOOK)
    assert all(times == 1 for times in tickets.values()), "a ticket was given twice"
    assert Counter(items) == Counter(schedule.items())


def check_gates(gate: Gate, schedule: Schedule, logs: list[list[list[int]]]) -> None:
    """Every item waited for just the chunks that `Gate.needs` names, but for those between the item before's.

    Asserts also that none was waited for after the launch was over.
    """
    by_key = {(item.tile, item.k_begin): item for item in schedule.items()}
    for log in logs:
        seen = {0: (0, -1), 1: (0, -1)}
        rest = iter(log)
        for kind, tile, k_begin, *_ in rest:
            if kind != ITEM:
                continue
            waited: list[tuple[int, int]] = []
            for kind, *values in rest:
                if kind == GATE:
                    break
                assert kind == WAITED
                assert values[2] == 1, "not arrived"
                waited.append((values[0], values[1]))
            assert values[0] == 0, "over"
            needs = [(need.operand, need.chunk) for need in gate.needs(by_key[tile, k_begin])]
            expected = [(which, chunk) for which, chunk in needs if not seen[which][0] <= chunk <= seen[which][1]]
            assert waited == expected, f"tile {tile} reads {needs}, waited for {waited}"
            for which in (0, 1):
                mine = [chunk for operand, chunk in needs if operand == which]
                if mine:
                    seen[which] = mine[0], mine[-1]
