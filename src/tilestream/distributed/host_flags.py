"""Words by which ranks of one host tell each other where they are: in the host's memory, which all their GPUs map.

Streams wait for some of them without a bound, and whoever lets such a stream go must be able to do it at any time. By
the driver he is not. It loads a kernel, ours or torch's or the caller's, at its first launch, and waits with that until
what the GPU is at has ended, a waiting stream included; meanwhile copies and new streams of other threads wait, too,
and a stream's write is accepted and does not come (H100, CUDA 13.0). A word in the host's memory is written by a store.
So is NCCL's own abort flag kept. It costs a stream that waits a read through PCIe in place of one of the GPU's memory.
What every program of a kernel reads is copied to the GPU first, by the stream: an all-reduce of 128 programs that each
read one such word took 15 us longer than before (two H200s).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import tempfile
import threading
from pathlib import Path

import torch

from tilestream.runtime.driver import map_host_memory

#: Bytes between two words: a cache line each.
LINE = 128
#: Ops whose calls take turns of their own.
_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
#: Where memory has a name that other processes of this host find.
_FOLDER = "/dev/shm"
_TOKEN_BYTES = 16

#: Memory that GPUs have mapped stays so: a peer that is late writes when its group is long gone.
_kept: list[mmap.mmap] = []


def size_of(world: int) -> int:
    """Bytes of a group's words: first a line with a token, then for each op and rank those of `RankWords`."""
    lines = 1 + len(_OPS) * world * (world + 2)
    return -(-lines * LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def offer(world: int) -> str:
    """Make the memory; returns how the other ranks find it: a path and a token. Remove the path when all have.

    Raises
    ------
    OSError
        If this host has no room, or no such memory.
    """
    handle, path = tempfile.mkstemp(prefix="tilestream-", dir=_FOLDER)
    try:
        os.ftruncate(handle, size_of(world))
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        os.pwrite(handle, token.encode(), 0)
    except BaseException:
        Path(path).unlink()
        raise
    finally:
        os.close(handle)
    return f"{path} {token}"


def withdraw(offered: str) -> None:
    """Remove the name of what was offered; who has mapped it keeps it."""
    with contextlib.suppress(OSError):
        Path(offered.split(" ")[0]).unlink()


class GroupWords:
    """A group's words, mapped by this process and its GPU.

    Parameters
    ----------
    offered
        What `offer` returned, on whatever rank.
    rank, world
        Of this process.

    Raises
    ------
    OSError
        If this process does not find the memory (ranks in containers of their own).
    RuntimeError
        If the driver does not map it.
    """

    def __init__(self, offered: str, rank: int, world: int) -> None:
        path, token = offered.split(" ")
        handle = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(handle, size_of(world))
        finally:
            os.close(handle)
        if self._map[: len(token)] != token.encode():
            raise OSError(f"{path} is not what was offered")
        _kept.append(self._map)
        self._rank, self._world = rank, world
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._gpu = map_host_memory(self._host, len(self._map))

    def of(self, op: str) -> RankWords:
        """Those of an op's calls."""
        at = LINE * (1 + _OPS.index(op) * self._world * (self._world + 2))
        return RankWords(self._host + at, self._gpu + at, self._rank, self._world)


class RankWords:
    """The words of an op's calls: of each rank a flag a peer, which that peer writes, an abort word and a void word.

    Parameters
    ----------
    host, gpu
        Where they are, for this process and for its GPU.
    """

    def __init__(self, host: int, gpu: int, rank: int, world: int) -> None:
        self._host, self._gpu, self._rank, self._world = host, gpu, rank, world
        # Stores on either side of a lock are seen in their order, on whatever CPU.
        self._lock = threading.Lock()
        words = (ctypes.c_int32 * 1).from_address(host + self._at(rank, world + 1))
        #: ``int32[1]``: the first call of this rank that is void, or 0.
        self.void = torch.frombuffer(words, dtype=torch.int32)

    def _at(self, of: int, line: int) -> int:
        return (of * (self._world + 2) + line) * LINE

    def _word(self, of: int, line: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self._host + self._at(of, line))

    def flag(self, of: int, writer: int) -> int:
        """Address, for a stream, of the flag of rank ``of`` that ``writer`` writes."""
        return self._gpu + self._at(of, writer)

    def told(self) -> list[int]:
        """What each rank has told this one."""
        return [self._word(self._rank, writer).value for writer in range(self._world)]

    def let_go(self, peer: int, value: int) -> None:
        """Write a flag of this rank's in its peer's place: a stream that waits for it goes on."""
        with self._lock:
            self._word(self._rank, peer).value = value

    def abort(self, peer: int) -> None:
        """Tell a peer that this rank has given up."""
        with self._lock:
            self._word(peer, self._world).value = 1

    def aborted(self) -> bool:
        """Whether a peer has told this rank that it has given up."""
        return bool(self._word(self._rank, self._world).value)

    def make_void(self, epoch: int) -> None:
        """Calls from ``epoch`` on are void, unless earlier ones are."""
        with self._lock:
            word = self._word(self._rank, self._world + 1)
            word.value = word.value or epoch
