"""Memory that outlives the call that makes it, where the call's own memory comes from a pool.

A CUDA graph of torch's compiler, already while its function is warmed up, and `torch.cuda.use_mem_pool` have all that a
thread allocates come from a pool of theirs. What is kept from call to call must not: the compiler takes it for a leak,
and raises, and a replay would overwrite it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def outliving(device: torch.device, make: Callable[[], T]) -> T:
    """``make()``, on the current stream, with memory on ``device`` that comes from no pool of this thread's.

    Another thread makes it, since the pools are each thread's own. Modes of this thread do not hold there.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):
            return make()
    stream = torch.cuda.current_stream(device)
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="tilestream-memory", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and begins no thread any more
        return make()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
