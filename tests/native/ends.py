"""The extension where processes end, fork, or have no driver: ``ends.py LIBRARY FAKE_DRIVER SCENARIO`` prints "well".

Each scenario needs a process of its own.
"""

# ruff: noqa: E402  # one handler is registered before the package's own

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest

#: Handlers that run behind this package's own, because they were registered first.
late: list[Any] = []
atexit.register(lambda: [handler() for handler in late])

import torch
from stand_ins import TICKETS, Launch, call, remember

import tilestream as ts
from conftest import use
from tilestream.launch import native as launch_native
from tilestream.launch.native import Extension
from tilestream.ops import native, request
from tilestream.runtime import shutdown

#: `mm` is the public op of this number.
MM = 1
COUNTS = (TICKETS, 8, 4, 16, 0)


def python_way(r: request.Request) -> torch.Tensor:
    """A call that the extension declines."""
    with shutdown.call():
        return torch.zeros(16, 32, dtype=torch.bfloat16)


def refused(x: Any) -> None:
    """Behind this package's own handler a call is refused, as Python's way refuses it."""
    before = driver.library.fake_launches()
    with pytest.raises(ts.TilestreamError, match="the interpreter exits; nothing is launched any more"):
        ts.mm(x.a, x.b)
    assert driver.library.fake_launches() == before
    print("refused", flush=True)


class Caller:
    """An object whose last act is a call."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __del__(self) -> None:
        refused(self.x)


def native_mm(x: Any) -> None:
    before = driver.library.fake_launches()
    out = ts.mm(x.a, x.b)
    assert out.shape == (16, 32)
    assert driver.library.fake_launches() > before, "not native"


def at_exit(x: Any) -> None:
    """Calls of handlers that run before this package's own and behind it, and of an object that goes at the end."""
    atexit.register(native_mm, x)
    last = [Caller(x)]
    late.extend([lambda: refused(x), last.clear])


def threads_at_exit(x: Any) -> None:
    """Daemon threads that call natively all the time."""

    def work() -> None:
        driver.thread()
        while True:
            ts.mm(x.a, x.b)

    driver.state(records=False)
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)


def blocked_at_exit(x: Any) -> None:
    """A daemon thread whose launch the driver holds back for a while: the exit waits for it."""
    returned = threading.Event()

    def work() -> None:
        driver.thread()
        while True:
            ts.mm(x.a, x.b)
            returned.set()

    def release() -> None:
        time.sleep(0.5)
        driver.library.fake_block(0)

    driver.library.fake_block(1)
    for target in (work, release):
        threading.Thread(target=target, daemon=True).start()
    wait_until_blocked()
    late.append(lambda: print("returned" if returned.wait(0.1) else "left behind", flush=True))


def wait_until_blocked() -> None:
    deadline = time.monotonic() + 300
    while not driver.library.fake_blocked():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def forked(x: Any) -> None:
    """A child of a process whose other threads hold every lock: its calls are Python's, and nothing waits."""
    stop = threading.Event()

    def hold() -> None:
        driver.thread()
        extension.try_matmul(*x)

    def write() -> None:
        driver.thread()
        while not stop.is_set():
            remember(extension, launch, x)
            extension.clear()

    driver.library.fake_block(1)
    threads = [threading.Thread(target=hold), threading.Thread(target=write)]
    threads[0].start()
    wait_until_blocked()
    threads[1].start()
    for held in (*[contextlib.nullcontext()] * 40, extension._lock):
        with held:
            child = os.fork()
            if not child:
                signal.alarm(10)  # ends a child that waits for ever
                assert extension.try_matmul(*x) is None
                assert extension.try_matmul_out(torch.zeros(16, 32, dtype=torch.bfloat16), *x) is False
                extension.clear()
                extension.set_capacity(8)
                assert len(extension) == 0
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    driver.library.fake_block(0)
    for thread in threads:
        thread.join()
    assert remember(extension, launch, x)
    native_mm(x)


def without_driver(x: Any) -> None:
    """The ops where no driver was found: they make nothing, and say so."""
    ops = torch.ops.tilestream
    assert ops.try_matmul(*x) is None
    assert ops.try_matmul_out(torch.zeros(16, 32, dtype=torch.bfloat16), *x) is False
    assert ops.try_plain.mm(x.a, x.b) is None
    assert ops.remember_matmul([0], torch.zeros(16, 32), False, *x) is False
    assert ops.try_plain_attention(x.a, x.a, x.a) is None
    for _ in range(2):
        assert ts.mm(x.a.float(), x.b.float()).shape == (16, 32)


if __name__ == "__main__":
    library, fake, scenario = sys.argv[1:]
    x = call(op=MM)
    if scenario == "without_driver":
        with pytest.raises(OSError, match=r"no driver: libnone\.so\.9"):
            Extension(Path(library), "libnone.so.9", fake)
    else:
        driver = use(Path(fake))
        extension = Extension(Path(library), fake, fake)
        driver.thread()
        launch = Launch(driver, x, COUNTS)
        assert remember(extension, launch, x)
        launch_native.extension = lambda: extension
        assert native._load() is extension
        request._multiply = python_way
        torch.Tensor.is_cuda = True
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.cuda.current_stream = lambda device=None: SimpleNamespace(stream_id=0, cuda_stream=0, device=device)
        native_mm(x)
    globals()[scenario](x)
    print("well", flush=True)
