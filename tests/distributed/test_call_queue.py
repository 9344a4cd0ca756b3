"""The watchdog's thread: it looks while calls are under way, not beside whoever issues them, and leaves with them."""

from __future__ import annotations

import threading
import time

from tilestream.distributed import call_queue


class Calls:
    """Something to look after: for so many looks there is a call under way."""

    def __init__(self, looks: int) -> None:
        self.left, self.looks, self.quiet = looks, 0, threading.Event()

    def poll(self) -> bool:
        self.looks += 1
        self.left -= 1
        if self.left <= 0:
            self.quiet.set()
        return self.left > 0


def test_looks_until_nothing_is_under_way_and_again_when_it_is_woken(monkeypatch):
    monkeypatch.setattr(call_queue, "POLL_SECONDS", 0.01)
    calls = Calls(3)
    watchdog = call_queue.Watchdog(calls)
    for looks in (3, 4):
        watchdog.wake()
        assert calls.quiet.wait(10)
        time.sleep(0.05)
        assert calls.looks == looks
        calls.quiet.clear()
    assert watchdog._thread.is_alive()
    del calls
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()


def test_who_issues_a_call_has_the_interpreter_for_himself_at_first(monkeypatch):
    monkeypatch.setattr(call_queue, "POLL_SECONDS", 0.5)
    calls = Calls(1)
    watchdog = call_queue.Watchdog(calls)
    begin = time.monotonic()
    watchdog.wake()
    assert calls.quiet.wait(10)
    assert time.monotonic() - begin >= 0.5
    watchdog.stop_at_exit(10)
    assert not watchdog._thread.is_alive()
