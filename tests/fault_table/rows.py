"""The rows: each function makes one fault."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilestream as ts
from fault_table.engine import LONG, SHORT, Feed, Place, beside, fault, use_folders
from forked import in_a_child
from streaming import new_workers
from tilestream.arrival import files

use_folders("distributed", "gpu")
BOTH = ("cpu", "cuda")

# Chunks ---------------------------------------------------------------------------------------------------------------


@fault("chunks", "late", "one chunk of four comes 50 ms after the others", within=LONG, where=BOTH)
def late(place: Place) -> None:
    feed = place.feed()
    place.call(feed, lambda: (feed(0, 1, 3), time.sleep(0.05), feed(2)))


@fault("chunks", "lost", "one chunk of four never comes", r"ArrivalTimeout: matmul: .*chunk 2 did not arrive",
       within=SHORT, where=BOTH)  # fmt: skip
def lost(place: Place) -> None:
    feed = place.feed()
    place.next = lambda: place.call(feed, lambda: feed(2))  # the same epoch, in which it comes after all
    place.call(feed, lambda: feed(0, 1, 3), deadline=SHORT)


@fault("chunks", "signalled twice", "each chunk is signalled again, after later ones", within=LONG, where=BOTH)
def twice(place: Place) -> None:
    feed = place.feed()
    place.call(feed, lambda: (feed(0, 1), feed.signal(0, 1), feed(2), feed.signal(0), feed(3), feed.signal(3, 2)))


@fault("chunks", "signalled early", "a chunk is signalled for an epoch that has not begun",
       r"ValueError: .*epoch", where=BOTH)  # fmt: skip
def early(place: Place) -> None:
    feed = place.feed()
    place.next = lambda: place.call(feed, lambda: feed(0, 1, 2, 3))
    feed.arrival.signal(0, epoch=feed.arrival.epoch + 1)


@fault("chunks", "of an earlier epoch", "a producer of the epoch before signals every chunk in this one",
       r"ArrivalTimeout: matmul", within=SHORT, where=BOTH)  # fmt: skip
def stale(place: Place) -> None:
    feed = place.feed()(0, 1, 2, 3)
    place.call(feed)
    before = feed.arrival.epoch
    feed.again()
    place.next = lambda: place.call(feed, lambda: feed(0, 1, 2, 3))
    place.call(feed, lambda: [feed.arrival.signal(chunk, epoch=before) for chunk in range(4)], deadline=SHORT)


# Producers ------------------------------------------------------------------------------------------------------------


def _blocks(place: Place, then: Any) -> Iterator[torch.Tensor]:
    """Two chunks, then what ``then`` does."""
    for _ in range(2):
        yield torch.randn(place.chunk, place.k).to(place.dtype)
    then()


def _of_blocks(place: Place, then: Any, **how: Any) -> None:
    shape = 4 * place.chunk, place.k
    place.stream(_blocks(place, then), shape=shape, dtype=place.dtype, rows_per_chunk=place.chunk, **how)


@fault("producers", "raises", "the iterator that is streamed raises after half of its rows", r"OSError: .*on fire",
       where=BOTH)  # fmt: skip
def raises(place: Place) -> None:
    def then() -> None:
        raise OSError("disk on fire")

    _of_blocks(place, then)


@fault("producers", "ends early", "the iterator ends after half of its rows", r"ValueError: .*rows", where=BOTH)
def ends_early(place: Place) -> None:
    _of_blocks(place, lambda: None)


@fault("producers", "exits", "the iterator calls sys.exit", r"SystemExit: 3", where=BOTH)
def exits(place: Place) -> None:
    _of_blocks(place, lambda: sys.exit(3))


@fault("producers", "blocks", "the iterator never gives its third block", r"ArrivalTimeout: matmul", within=SHORT,
       where=BOTH)  # fmt: skip
def blocks(place: Place) -> None:
    go_on = threading.Event()

    def then() -> None:
        go_on.wait(LONG)
        raise OSError("too late")

    place.next = lambda: (go_on.set(), place.again())
    shape = 4 * place.chunk, place.k
    x = ts.stream_in(_blocks(place, then), shape=shape, dtype=place.dtype, rows_per_chunk=place.chunk,
                     device=place.device)  # fmt: skip
    b = place.weight()
    place.begin()
    try:
        ts.matmul(x, b, deadline=SHORT)
        if place.is_gpu:
            torch.cuda.synchronize()
            ts.check()
    finally:
        place.end()
        go_on.set()
        x.close()


@fault("producers", "dies", "a process that writes rows and words in shared memory is killed half way",
       r"ArrivalTimeout: matmul: .*chunk [23]", within=SHORT)  # fmt: skip
def dies(place: Place) -> None:
    words, source = torch.zeros(4, dtype=torch.int32).share_memory_(), place.source()
    x = torch.full_like(source, float("nan")).share_memory_()
    arrival = ts.Arrival.uniform(place.chunk, 4, signals=words)

    def produce() -> None:
        for chunk in range(2):
            rows = slice(chunk * place.chunk, (chunk + 1) * place.chunk)
            x.numpy()[rows] = source.numpy()[rows]
            words.numpy()[chunk] = 1
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(produce) == -signal.SIGKILL
    feed = Feed(arrival, source)
    feed.tensor = x

    def following() -> None:
        arrival.reset()
        place.call(feed, lambda: feed(0, 1, 2, 3))

    place.next = following
    place.call(feed, deadline=SHORT)


# Files ----------------------------------------------------------------------------------------------------------------


def _saved(place: Place, rows: int = 4000) -> tuple[Path, torch.Tensor]:
    source = torch.randn(rows, 64)
    path = place.folder / "fault.npy"
    np.save(path, source.numpy())
    place.next = lambda: (np.save(path, source.numpy()), place.stream(path, want=source))  # the file is whole again
    return path, source


def _at_read(place: Place, number: int, do: Any) -> None:
    """Before the reader's read of this number something happens to the file."""
    reads, real = itertools.count(1), os.preadv

    def preadv(*how: Any) -> int:
        if next(reads) == number:
            do()
        return real(*how)

    place.patch.setattr(files.os, "preadv", preadv)


@fault("files", "shrinks", "a file is truncated while it is read",
       r"EOFError: .*fault\.npy: ends at byte \d+, \d+ bytes early", where=BOTH)  # fmt: skip
def shrinks(place: Place) -> None:
    path, source = _saved(place)
    _at_read(place, 2, lambda: os.truncate(path, 100_000))
    place.stream(path, want=source, rows_per_chunk=100, direct=False)


@fault("files", "is deleted", "a file is unlinked while it is read", where=BOTH)
def unlinked(place: Place) -> None:
    path, source = _saved(place)
    _at_read(place, 2, path.unlink)
    place.stream(path, want=source, rows_per_chunk=100, direct=False)


@fault("files", "disappears", "a file is gone before the call", r"FileNotFoundError: .*fault\.npy")
def gone(place: Place) -> None:
    path, _ = _saved(place)
    path.unlink()
    place.stream(path)


@fault("files", "cannot be read", "a read fails with EIO", r"OSError: \[Errno 5\]", where=BOTH)
def unreadable(place: Place) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path, source = _saved(place)
    _at_read(place, 2, fails)
    place.stream(path, want=source, rows_per_chunk=100, direct=False)


@fault("files", "is a FIFO", "a FIFO without a writer is streamed", r"ValueError: .*no regular file")
def fifo(place: Place) -> None:
    os.mkfifo(place.folder / "fault.fifo")
    place.stream(place.folder / "fault.fifo")


@fault("files", "is a directory", "a directory is streamed", r"IsADirectoryError: ")
def directory(place: Place) -> None:
    (place.folder / "fault").mkdir()
    place.stream(place.folder / "fault")


@fault("files", "is a symlink", "a symlink to a file is streamed")
def symlink(place: Place) -> None:
    path, source = _saved(place)
    link = place.folder / "fault_link.npy"
    link.symlink_to(path)
    place.stream(link, want=source)


@fault("files", "is a symlink to itself", "a symlink that leads to itself is streamed", r"OSError: .*fault_circle")
def circle(place: Place) -> None:
    link = place.folder / "fault_circle.npy"
    link.symlink_to(link)
    place.stream(link)


def _safetensors(place: Place, shape: list[int], size: int, header_bytes: int | None = None) -> Path:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}}).encode()
    path = place.folder / "fault.safetensors"
    path.write_bytes(struct.pack("<Q", header_bytes or len(header)) + header + bytes(size))
    return path


@fault("files", "is cut off", "a safetensors file ends before its tensor does", r"ValueError: .*it is cut off")
def cut_off(place: Place) -> None:
    place.stream(_safetensors(place, [64, 64], 4 * 64 * 64 - 1))


@fault("files", "lies about its header", "a safetensors file says that its header has 2^60 bytes",
       r"ValueError: .*fault\.safetensors")  # fmt: skip
def lying_size(place: Place) -> None:
    place.stream(_safetensors(place, [64, 64], 4 * 64 * 64, 2**60))


@fault("files", "lies about a shape", "a safetensors header has an empty shape beyond 2^63",
       r"ValueError: .*fault\.safetensors")  # fmt: skip
def lying_shape(place: Place) -> None:
    place.stream(_safetensors(place, [2**63, 0], 0))


@fault("files", "the disk is full", "tuned plans are saved where no byte can be written (RLIMIT_FSIZE)", r"OSError: ")
def disk_full(place: Place) -> None:
    from tilestream.plan import cpu_properties, tuned
    from tilestream.plan.problem import Problem

    path = place.folder / "fault_tuned.json"
    path.write_text("{}\n", encoding="utf-8")
    place.patch.setenv("TILESTREAM_TUNED", str(path))
    tuned.forget()

    def following() -> None:
        tuned.forget()
        assert path.read_text(encoding="utf-8") == "{}\n", "the old file is whole"
        assert [one.name for one in place.folder.iterdir()] == [path.name], "and nothing else is left"
        place.again()

    place.next = following
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        tuned.save(Problem(64, 64, 64), cpu_properties(), {"knobs": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


# Ranks ----------------------------------------------------------------------------------------------------------------


def _warm(place: Place) -> Any:
    """Ranks that have multiplied once: three, on GPUs two."""
    place.next = lambda: _multiply(place)  # in a new group; dead ranks are started anew
    _multiply(place)
    return place.ranks


def _multiply(place: Place) -> None:
    import faults

    answers = place.ranks.run(faults.multiplies, place.device)
    assert answers == [True] * place.ranks.world, answers


def _first(others: Any) -> str:
    """How it ended for a rank that was not told of it by another."""
    return next((first for first, *_ in others if first.startswith("ArrivalTimeout")), others[0][0])


@fault("ranks", "late", "the last rank calls 0.3 s after the others", within=LONG, where=BOTH)
def late_rank(place: Place) -> None:
    import faults

    answers = _warm(place).run(faults.comes_late, 0.3, place.device)
    assert all(right for right, _ in answers)
    place.took(max(seconds for _, seconds in answers))


@fault("ranks", "lost", "the last rank does not call", r"ArrivalTimeout: .*rank [12]'s part", within=0.5, where=BOTH)
def lost_rank(place: Place) -> str:
    import faults

    *others, _ = _warm(place).run(faults.expires, "gather", place.device)
    assert all(second.startswith("GroupBroken") for _, second, _ in others), "from then on"
    place.took(max(seconds for *_, seconds in others))
    return _first(others)


@fault("ranks", "killed", "the last rank dies in the middle of the others' call", r"GroupBroken: .*lost rank",
       where=BOTH, on_gpus=(r"ArrivalTimeout: .*rank 1's part|GroupBroken: .*lost rank", 0.5))  # fmt: skip
def killed_rank(place: Place) -> str:
    import faults

    folder = place.folder / "ranks"
    folder.mkdir()
    # Over gloo a lost connection tells of it; a kernel that waits for memory has its deadline alone.
    deadline = 0.5 if place.is_gpu else 600.0
    ranks = _warm(place)
    try:
        *others, last = ranks.run(faults.loses, "during", str(folder), place.device, deadline)
    finally:
        ranks.renew()
    assert last == "lost"
    assert all(second.startswith("GroupBroken") for _, second, _ in others), "from then on"
    place.took(max(seconds for *_, seconds in others))
    return _first(others)


@fault("ranks", "restarted", "a rank dies, another process takes its place, and they make a new group", within=LONG,
       where=BOTH)  # fmt: skip
def restarted_rank(place: Place) -> None:
    killed_rank(place)
    place.begin()
    _multiply(place)
    place.end()


@fault("ranks", "stopped", "the last rank is stopped by SIGSTOP, and goes on after the others' deadline",
       r"ArrivalTimeout: .*rank [12]'s part", within=1.0, where=BOTH)  # fmt: skip
def stopped_rank(place: Place) -> str:
    import faults

    folder = place.folder / "ranks"
    folder.mkdir()
    *others, last = _warm(place).run(faults.stops, str(folder), 1.0, "gather", place.device)
    assert last[0].startswith(("GroupBroken", "ArrivalTimeout")), last
    assert all(second.startswith("GroupBroken") for _, second, _ in (*others, last)), "from then on"
    place.took(max(seconds for *_, seconds in others))
    return _first(others)


@fault("ranks", "with other shapes", "one rank gives a shard of other rows",
       r"ValueError: .*ranks 0 and 1 differ in a_shard", where=BOTH)  # fmt: skip
def other_shapes(place: Place) -> str:
    import faults

    ranks = _warm(place)
    place.begin()
    return str(ranks.run(faults.differs, "rows", place.device)[0])  # the group stays usable: the job multiplies again


# Memory and drivers ---------------------------------------------------------------------------------------------------


@fault("memory", "none on the host", "the output has 2^50 bytes", r"(RuntimeError|MemoryError): .*alloc")
def no_host_memory(place: Place) -> None:
    ts.matmul(torch.ones(2**24, 1), torch.ones(1, 2**24))


@fault("memory", "none on the GPU", "the output has 2^42 bytes", r"OutOfMemoryError: ", where=("cuda",))
def no_gpu_memory(place: Place) -> None:
    ts.matmul(torch.ones(2**20, 16, device="cuda", dtype=torch.bfloat16),
              torch.ones(16, 2**21, device="cuda", dtype=torch.bfloat16))  # fmt: skip


@fault(
    "memory", "no more threads", "the second worker's thread cannot be started", r"RuntimeError: can't start new thread"
)
def no_threads(place: Place) -> None:
    real, starts = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if self.name.startswith("tilestream-worker"):
            starts.append(self)
            if len(starts) == 2:
                raise RuntimeError("can't start new thread")
        real(self)

    place.patch.setattr(threading.Thread, "start", start)
    with new_workers(place.patch):  # nothing arrives: the first worker is at work until the launch ends
        place.call(place.feed())


@fault("drivers", "a call is refused", "a GPU's driver (made of the CPU) refuses the second copy of a stream",
       r"SequenceError: .*out of memory; this is operation \d+ of \d+")  # fmt: skip
def refused_by_the_driver(place: Place) -> None:
    use_folders("arrival")
    from device_builders import on_gpu, pinned

    from fake_cuda import fake_cuda
    from tilestream.core.chunks import Chunks

    with fake_cuda() as cuda:
        source = torch.randn(6, 4)
        x = on_gpu(pinned(cuda, source), Chunks.uniform(6, 2))
        assert torch.equal(x.wait(), source)
        real, copies = cuda.driver.copy_in, []

        def copy_in(*how: int) -> None:
            copies.append(how)
            if len(copies) == 2:
                raise RuntimeError("CUDA error: out of memory")
            real(*how)

        cuda.driver.copy_in = copy_in
        place.begin()
        try:
            x.restart()
            x.wait()
        finally:
            place.end()
            cuda.driver.copy_in = real
            x.restart()
            assert torch.equal(x.wait(), source), "the next filling"


@fault(
    "GPU", "all SMs held", "another stream's kernel runs for 0.2 s when the call is made", within=LONG, where=("cuda",)
)
def held(place: Place) -> None:
    feed, other = place.feed(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(400_000_000)
    place.call(feed, lambda: feed(0, 1, 2, 3))


@fault("GPU", "two processes", "another process multiplies on the same GPU meanwhile", within=LONG, where=("cuda",),
       is_slow=True)  # fmt: skip
def two_processes(place: Place) -> None:
    program = """
import torch, tilestream as ts
a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
ts.matmul(a, a); torch.cuda.synchronize(); print("ready", flush=True)
for _ in range(2000):
    ts.matmul(a, a)
torch.cuda.synchronize(); ts.check()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "ready\n"
        for _ in range(20):
            feed = place.feed()
            place.call(feed, lambda feed=feed: feed(0, 1, 2, 3))
    finally:
        status = other.wait(LONG)
    assert status == 0


# Processes and clocks -------------------------------------------------------------------------------------------------


@fault(
    "processes",
    "the clock jumps",
    "time.time() is a day later at each look, forwards and back",
    within=LONG,
    where=BOTH,
)
def clock_jumps(place: Place) -> None:
    real, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return real() + 86400.0 * looks[0] * (-1) ** looks[0]

    place.patch.setattr(time, "time", jumping)
    late(place)


@fault(
    "processes", "Ctrl-C", "SIGINT at ten moments of a row of calls, drawn at random", r"KeyboardInterrupt", within=LONG
)
def interrupted(place: Place) -> None:
    assert threading.current_thread() is threading.main_thread(), "signals are the main thread's"
    rng, met, before = random.Random(30), 0, signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(10):
            timer = threading.Timer(
                rng.uniform(0, 0.03), signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
            )
            try:
                timer.start()
                while timer.is_alive():
                    feed = place.feed()(0, 1, 3)
                    place.call(feed, lambda feed=feed: feed(2))
                time.sleep(LONG)  # the signal is on its way
            except KeyboardInterrupt:
                met += 1
            timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert met == 10
    raise KeyboardInterrupt


@fault(
    "processes", "fork", "a process forks while its threads signal and multiply; the child multiplies, too", within=LONG
)
def forks(place: Place) -> None:
    a, b, end, begun = torch.randn(64, 24), torch.randn(24, 40), threading.Event(), threading.Event()
    arrival, threads = ts.Arrival.uniform(1, 1), torch.get_num_threads()

    def busy() -> None:
        # The workers stay between launches. A child that is forked while a thread begins or ends can hang in MKL's
        # allocator, see docs/troubleshooting.md; so the first launch, which starts the workers, comes before the forks.
        torch.set_num_threads(1)
        while not end.is_set():
            arrival.signal(0)
            ts.matmul(a, b, workers=2)
            begun.set()
        torch.set_num_threads(threads)  # a thread's number is the next thread's default

    def child() -> None:
        arrival.signal(0)
        assert torch.equal(ts.matmul(a, b, workers=2), ts.matmul(a, b, workers=1))

    try:
        with beside(busy):
            try:
                assert begun.wait(LONG)
                for _ in range(3):
                    status = in_a_child(child, LONG)
                    assert status == 0, f"a child ended with {status}"
            finally:
                end.set()
    finally:
        end.set()


@fault(
    "processes", "the interpreter exits", "a process ends while a daemon thread's workers wait for a chunk", within=LONG
)
def exits_interpreter(place: Place) -> None:
    program = """
import threading, time, torch, tilestream as ts
arrival, a = ts.Arrival.uniform(10, 2), torch.randn(20, 20)
thread = threading.Thread(target=lambda: ts.matmul(a, a, arrival=arrival), daemon=True)
thread.start()
while not [one for one in threading.enumerate() if one.name.startswith("tilestream-worker")] and thread.is_alive():
    time.sleep(0.01)
"""
    path = os.pathsep.join([str(Path(ts.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG + 60,
                         env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
