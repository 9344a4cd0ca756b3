"""Scenarios between real ranks, over gloo, that hold on every rank; each job's docstring says what holds."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import faults
import jobs
import known_jobs
import node_jobs
import pytest

from tilestream.distributed.exchange import Exchange

#: Ranks, job, arguments; ``FOLDER``: a new one.
FOLDER = object()
SCENARIOS = [
    (2, jobs.parts), (3, jobs.overlaps, FOLDER), (3, jobs.iterates, 50), (2, faults.two_groups), (2, faults.refuses),
    (2, jobs.autocasts), (2, jobs.forgets), (2, jobs.empties), (2, jobs.gradients, 0), (2, jobs.gradients, 1),
    (2, jobs.reduce_gradients), (2, jobs.fakes), (2, jobs.limits), (2, jobs.layers), (2, jobs.torch_ops),
    (4, node_jobs.overlaps, 2, FOLDER), (4, node_jobs.layers, 2), (2, node_jobs.meshes_of_one),
    (3, node_jobs.exchanges), (2, known_jobs.repeats, "fused"), (2, known_jobs.repeats, "unfused"),
    (2, known_jobs.is_seen), (2, known_jobs.refuses),
]  # fmt: skip
SLOW = [(2, jobs.compiles), (4, node_jobs.iterates, 2, 50)]


def name_of(scenario) -> str:
    world, job, *given = scenario
    shown = [str(x) for x in given if x is not FOLDER]
    return "-".join([job.__module__, job.__name__, str(world), *shown])


@pytest.mark.parametrize(
    "scenario", [*SCENARIOS, *(pytest.param(x, marks=pytest.mark.slow, id=name_of(x)) for x in SLOW)], ids=name_of
)
def test_it_holds_on_every_rank(ranks, tmp_path, scenario):
    world, job, *given = scenario
    given = [str(tmp_path) if x is FOLDER else x for x in given]
    assert ranks.run(world, job, *given) == [True] * world


def test_a_thread_of_an_exchange_does_not_keep_the_process_alive():
    """At exit it is waited for within a bound; a peer may hang for longer."""
    group = SimpleNamespace(recv=lambda *_: None, send=lambda *_: None)
    exchange = Exchange(
        SimpleNamespace(group=group, rank=0, world=2), SimpleNamespace(op="", handshake=b"x"), None, 1.0
    )
    go_on = threading.Event()
    exchange._run = lambda peer: go_on.wait()
    try:
        exchange._start()
        assert [thread.daemon for thread in exchange._threads] == [True]
    finally:
        go_on.set()
        exchange._join()
