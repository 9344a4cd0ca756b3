"""Locks in a forked child: free, unless the thread that forked holds them."""

from __future__ import annotations

import ast
import os
import threading
from pathlib import Path

import pytest
import torch

import tilestream as ts
from forked import forks, in_a_child
from streaming import run_together
from tilestream.core.forks import free_in_child
from tilestream.trace import Recorder

SRC = Path(ts.__file__).parent
#: Locks that a child has no use for, and why.
ONLY_OF_THE_PARENT = {
    "arrival/files.py": "of threads that read a file, which the child does not have",
    "arrival/filling.py": "of threads that fill a tensor, which the child does not have",
    "arrival/kernel_copies.py": "GPU: torch uses no GPU in a forked child",
    "distributed/call_queue.py": "GPU",
    "distributed/exchange.py": "of threads that send and receive, which the child does not have",
    "distributed/group_state.py: self": "of a process group, whose connections are the parent's",
    "distributed/async_tp.py: self": "of a process group",
    "distributed/host_flags.py": "of a process group",
    "launch/cpu/launch.py": "of one launch, whose workers the child does not have",
    "launch/cpu/publish.py": "of one launch",
    "launch/cpu/workers.py": "of one launch, whose workers the child does not have",
    "runtime/device_workspace.py": "GPU",
    "runtime/workspace.py": "of workspaces, which the child makes anew",
}

LOCKS = ("threading.Lock()", "threading.RLock()", "threading.Condition()")

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


class Held:
    """A block in which another thread holds a lock."""

    def __init__(self, lock) -> None:
        self._lock, self._held, self._end = lock, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self._lock:
            self._held.set()
            self._end.wait()

    def __enter__(self) -> None:
        self._thread.start()
        self._held.wait()

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


@needs_fork
@forks
class TestFork:
    @pytest.mark.parametrize("words", [False, True], ids=["epochs", "own words"])
    def test_a_child_signals_while_a_thread_of_the_parent_does(self, words):
        own = torch.zeros(2, dtype=torch.int32) if words else None
        arrival = ts.Arrival.uniform(4, 2, signals=own)

        def task() -> None:
            arrival.signal(1)
            assert arrival._signals.state() == [False, True]
            arrival.fail(OSError("of the child"))
            arrival.advance()
            assert not arrival.arrived(1)

        with Held(arrival._signals._bell):
            assert in_a_child(task) == 0
        arrival.signal(0)
        assert arrival._signals.state() == [True, False], "the parent's lock is as it was"

    def test_a_child_waits_for_chunks_while_a_thread_of_the_parent_signals(self):
        a, b = torch.ones(8, 4), torch.ones(4, 8)
        ts.matmul(a, b)
        arrival = ts.Arrival.uniform(4, 2)

        def task() -> None:
            with pytest.raises(ts.ArrivalTimeout):
                ts.matmul(a, b, arrival=arrival, workers=1, deadline=0.02)

        with Held(arrival._signals._bell):
            assert in_a_child(task) == 0

    def test_churn(self):
        """As it happens: a thread signals without a pause, and the process forks."""
        arrival, end = ts.Arrival.uniform(1, 1), threading.Event()

        def signal() -> None:
            while not end.is_set():
                arrival.signal(0)

        def fork() -> None:
            try:
                for _ in range(12):
                    assert in_a_child(lambda: arrival.signal(0)) == 0
            finally:
                end.set()

        run_together(2, lambda i: (signal, fork)[i]())

    def test_locks_of_modules_and_recorders(self):
        from tilestream.core import error_record
        from tilestream.launch import compiling
        from tilestream.runtime import channel, collector, streams

        recorder = Recorder()
        for lock, use in (
            (error_record._ops_lock, lambda: error_record.op_number("matmul")),
            (channel._lock, channel._lock.acquire),
            (streams._lock, streams._lock.acquire),
            (collector._lock, lambda: collector.paused().__enter__()),
            (compiling._making_key, compiling._making_key.acquire),
            (recorder._lock, lambda: recorder.later(print)),
        ):
            with Held(lock):
                assert in_a_child(use) == 0

    def test_the_thread_that_forks_keeps_what_it_holds(self):
        for lock in (free_in_child(threading.RLock()), free_in_child(threading.Condition())):

            def task(lock=lock) -> None:
                taken = []
                thread = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
                thread.start()
                thread.join()
                assert taken == [False]
                lock.release()

            with lock:
                assert in_a_child(task) == 0


def locks_of(path: Path) -> list[str]:
    """The locks that a module makes and does not free in a child: where they are kept."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    freed = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "free_in_child"
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for part in ast.walk(node.value):
                if ast.unparse(part) in LOCKS and id(part) not in freed:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    found.append("self" if ast.unparse(target).startswith(("self", "(self")) else "module")
    return found


def test_each_lock_is_freed_in_a_child_or_has_a_reason():
    left = set()
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        for place in locks_of(path):
            key = name if name in ONLY_OF_THE_PARENT else f"{name}: {place}"
            assert key in ONLY_OF_THE_PARENT, f"{key}: free_in_child, or a reason here"
            left.add(key)
    assert left == ONLY_OF_THE_PARENT.keys(), "a reason for a lock that is not there"
