"""A task in a forked child of the test's process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

#: Of tests that fork: Python warns where the process has several threads, which is what they are about.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_a_child(task: Callable[[], object], seconds: float = 120.0) -> int:
    """``task`` in a forked child; its exit status: 0 if it returned, 1 if it raised, -1 if it hung and was killed.

    The child keeps to one intra-op thread: libgomp's own threads do not survive a fork, torch's matmul hangs there.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            task()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
