"""Memory that outlives the call that makes it, where the call's own memory comes from a pool.

A CUDA graph of torch's compiler, already while its function is warmed up, and `torch.cuda.use_mem_pool` have all that a
thread allocates come from a pool of theirs. What is kept from call to call must not: the compiler takes it for a leak,
and raises, and a replay would overwrite it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from tilestream.runtime.driver import bind_context, context_id

T = TypeVar("T")


def outliving(device: torch.device, make: Callable[[], T]) -> T:
    """``make()``, on the current stream, with memory on ``device`` that comes from no pool of this thread's.

    Another thread makes it, since the pools are each thread's own. Modes of this thread do not hold there. This thread
    makes it itself at the interpreter's end, which runs no new thread (Python 3.11 would wait for it for ever), and in
    a green context, whose default stream other threads do not have.

    Raises
    ------
    RuntimeError
        If no thread can be started.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    if device.type == "cuda" and not sys.is_finalizing():
        stream, own = torch.cuda.current_stream(device), context_id()

        def run() -> None:
            try:
                with torch.cuda.stream(stream):
                    bind_context()
                    if context_id() == own:
                        made.append(make())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="tilestream-memory", daemon=True)
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
    if made:
        return made[0]
    with torch.inference_mode(False):
        return make()
