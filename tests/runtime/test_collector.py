"""Blocks in which no garbage is collected."""

import gc
import threading

import pytest

from tilestream.runtime import collector


@pytest.fixture(autouse=True)
def enabled():
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_collections_go_on_behind_the_last_block():
    with collector.paused():
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_block_that_raises_ends():
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()


def test_what_the_caller_disabled_stays_disabled():
    gc.disable()
    with collector.paused():
        pass
    assert not gc.isenabled()


def test_a_block_of_another_thread_holds_on():
    began, end = threading.Event(), threading.Event()

    def hold():
        with collector.paused():
            began.set()
            end.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(10)
    with collector.paused():
        pass
    assert not gc.isenabled()
    end.set()
    thread.join()
    assert gc.isenabled()
