"""Ranks for tests: processes that live as long as the session, and form a process group for each job.

A job is a function of a module of this folder, named with its arguments. Every rank runs it and answers with what it
returned, or with the text of what it raised. Everything is bounded: a rank that does not answer in time is killed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: The answer of a rank that was lost.
LOST = "lost"


def _rank_main(pipe: Any, path: list[str], backend: str, environment: dict[str, str]) -> None:
    sys.path[:] = path
    # No rank leaves the construction of the group before all have finished it: otherwise a rank with a short job was
    # gone while another still connected to it ("connection closed by peer").
    os.environ.update(TORCH_DIST_INIT_BARRIER="1", **environment)
    import torch
    import torch.distributed as dist

    import tilestream.distributed.library  # noqa: F401  # so that no test's time includes it

    torch.set_num_threads(1)
    while True:
        try:
            module, name, rank, world, where, seconds, bound, args = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(
            float(os.environ.get("TILESTREAM_DUMP", 0.8 * bound))
        )  # where it hangs, before it is killed
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(
                backend, init_method=f"file://{where}", rank=rank, world_size=world,
                timeout=datetime.timedelta(seconds=seconds),
            )  # fmt: skip
            answer = getattr(importlib.import_module(module), name)(rank, world, *args)
        except BaseException:
            answer = AssertionError(traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


class Pool:
    """Processes that run jobs, started when they are first needed. On a machine with GPUs each uses its own."""

    def __init__(self, backend: str = "gloo", **environment: str) -> None:
        self._how = backend, environment
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[Any] = []
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0

    def _start(self) -> Any:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_rank_main, args=(theirs, [str(HERE), *sys.path], *self._how), daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    def run(self, world: int, job: Any, *args: Any, seconds: float = 300.0, bound: float = 800.0) -> list[Any]:
        """Each rank's answer. The group's timeout is ``seconds``; a job may take ``bound`` seconds.

        Raises
        ------
        AssertionError
            If a rank raised what the job did not catch, or did not answer.
        """
        self._ranks = [rank if rank[0].is_alive() else self._start() for rank in self._ranks]
        while len(self._ranks) < world:
            self._ranks.append(self._start())
        self._jobs += 1
        where = Path(self._folder.name) / str(self._jobs)
        for rank, (_, pipe) in enumerate(self._ranks[:world]):
            pipe.send((job.__module__, job.__name__, rank, world, str(where), seconds, bound, args))
        answers = [self._answer(rank, bound) for rank in self._ranks[:world]]
        failed = [f"rank {i}: {x}" for i, x in enumerate(answers) if isinstance(x, AssertionError)]
        assert not failed, "\n".join(failed)
        return answers

    def _answer(self, rank: Any, bound: float) -> Any:
        process, pipe = rank
        try:
            if pipe.poll(bound):
                return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join(bound)
            return LOST
        process.kill()
        process.join()
        return AssertionError(f"no answer in {bound} s: killed")

    def close(self) -> None:
        """Kill all processes: none runs a job, and a clean exit takes seconds."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._folder.cleanup()
