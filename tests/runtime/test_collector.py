"""Blocks in which no garbage is collected."""

import gc
import os
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
            end.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(300)
    with collector.paused():
        pass
    assert not gc.isenabled()
    end.set()
    thread.join()
    assert gc.isenabled()


def in_child(step):
    """What ``step`` returns in a forked process, as a status of at most 127."""
    if not (child := os.fork()):
        os._exit(step())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def collects():
    before = gc.isenabled()
    with collector.paused():
        inside = gc.isenabled()
    return 4 * before + 2 * inside + gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_a_block_of_another_thread_is_not_in_a_forked_child():
    began, end = threading.Event(), threading.Event()

    def hold():
        with collector.paused():
            began.set()
            end.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(300)
    statuses = [in_child(collects)]
    with collector.paused():
        statuses.append(in_child(collects))  # the block of the thread that forks is
    end.set()
    thread.join()
    assert statuses == [0b101, 0]
