"""The watchdog's thread: it polls while calls are under way, after a delay, and ends with its queue."""

from __future__ import annotations

import threading
import time
import types

from tilestream.core.protocols import gather
from tilestream.distributed import call_queue


class Calls:
    """A queue that has a call under way for so many polls."""

    def __init__(self, polls: int) -> None:
        self.left, self.polls, self.idle = polls, 0, threading.Event()

    def poll(self) -> bool:
        self.polls += 1
        self.left -= 1
        if self.left <= 0:
            self.idle.set()
        return self.left > 0


def test_it_polls_until_nothing_is_under_way_and_again_when_woken(monkeypatch):
    monkeypatch.setattr(call_queue, "POLL_SECONDS", 0.01)
    calls = Calls(3)
    watchdog = call_queue.Watchdog(calls)
    for polls in (3, 4):
        watchdog.wake()
        assert calls.idle.wait(300)
        time.sleep(0.05)
        assert calls.polls == polls
        calls.idle.clear()
    assert watchdog._thread.is_alive()
    del calls
    watchdog._thread.join(300)
    assert not watchdog._thread.is_alive()


def test_it_does_not_compete_with_the_thread_that_issues_the_call(monkeypatch):
    monkeypatch.setattr(call_queue, "POLL_SECONDS", 0.5)
    calls = Calls(1)
    watchdog = call_queue.Watchdog(calls)
    begin = time.monotonic()
    watchdog.wake()
    assert calls.idle.wait(300)
    assert time.monotonic() - begin >= 0.5
    watchdog.stop_at_exit(10)
    assert not watchdog._thread.is_alive()


def test_it_asks_about_events_while_another_thread_captures_a_graph(monkeypatch):
    """What it is asked of the driver ends no capture of the caller's."""
    threads = []
    monkeypatch.setattr(call_queue, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(call_queue.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(call_queue, "relax_captures", lambda: threads.append(threading.current_thread()))
    calls = Calls(1)
    watchdog = call_queue.Watchdog(calls)
    watchdog.wake()
    assert calls.idle.wait(300)
    assert threads == [watchdog._thread]
    watchdog.stop_at_exit(10)


def test_what_is_prepared_is_of_a_form_and_a_slot():
    queue = types.SimpleNamespace(_prepared={})
    epochs = (1, 2, 1 + gather.SLOTS)
    first, other, again = (call_queue.CallQueue.prepared(queue, "form", epoch, lambda *key: key) for epoch in epochs)
    assert (first, other) == (("form", 1 % gather.SLOTS), ("form", 2 % gather.SLOTS))
    assert again is first
    assert call_queue.CallQueue.prepared(queue, "another", 1, lambda *key: key) == ("another", 1 % gather.SLOTS)
