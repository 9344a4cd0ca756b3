"""Flags of the ranks of one host, in host memory that all their GPUs map.

Streams wait for some of these flags without a bound, so the watchdog must be able to write them at any time. It cannot
write them through the CUDA driver. At a kernel's first launch the driver loads the kernel, and waits for all work on
the GPU, waiting streams included. Meanwhile other threads' copies and stream creations block, and a stream's write is
accepted but not performed (H100, CUDA 13.0). A flag in host memory is written by a store. NCCL's abort flag is in host
memory, too.

A stream that waits for a flag reads it over PCIe instead of from the GPU's memory. A flag that every program of a
kernel reads is first copied to the GPU: an all-reduce of 128 programs that each read a flag in host memory was 15 us
slower (two H200s).
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

#: Bytes between two flags: each has its own cache line.
LINE = 128
#: The ops that have call queues, and so flags.
_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "moe")
#: The folder of shared memory that other processes of this host can open.
_FOLDER = "/dev/shm"
_TOKEN_BYTES = 16

#: Mapped memory is never unmapped: a late peer may write after the group is destroyed.
_kept: list[mmap.mmap] = []


def size_of(world: int) -> int:
    """Bytes of a group's flags: one line for a token, then the flags of `RankFlags` for each op and rank."""
    lines = 1 + len(_OPS) * world * (world + 2)
    return -(-lines * LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def offer(world: int) -> str:
    """Create the memory; returns a path and a token for the other ranks. `withdraw` the path afterwards.

    Raises
    ------
    OSError
        If this host has no shared memory, or too little.
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
    """Remove the path of an offer; processes that have mapped the memory keep it."""
    with contextlib.suppress(OSError):
        Path(offered.split(" ")[0]).unlink()


class GroupFlags:
    """A group's flags, mapped by this process and its GPU.

    Parameters
    ----------
    offered
        The result of `offer` on any rank.
    rank, world
        This process's rank, and the number of ranks.

    Raises
    ------
    OSError
        If this process cannot open the memory (for example, ranks in separate containers).
    RuntimeError
        If the driver does not map the memory.
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

    def of(self, op: str) -> RankFlags:
        """The flags of one op."""
        at = LINE * (1 + _OPS.index(op) * self._world * (self._world + 2))
        return RankFlags(self._host + at, self._gpu + at, self._rank, self._world)


class RankFlags:
    """The flags of one op. Each rank owns an abort flag, a void flag, and for each peer a flag that the peer writes.

    Parameters
    ----------
    host, gpu
        Addresses of the first flag, for this process and for its GPU.
    """

    def __init__(self, host: int, gpu: int, rank: int, world: int) -> None:
        self._host, self._gpu, self._rank, self._world = host, gpu, rank, world
        # Stores on either side of a lock become visible in program order, on any CPU.
        self._lock = threading.Lock()
        words = (ctypes.c_int32 * 1).from_address(host + self._at(rank, world + 1))
        #: ``int32[1]``: the first call of this rank whose result is void, or 0.
        self.void = torch.frombuffer(words, dtype=torch.int32)

    def _at(self, of: int, line: int) -> int:
        return (of * (self._world + 2) + line) * LINE

    def _word(self, of: int, line: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self._host + self._at(of, line))

    def flag(self, of: int, writer: int) -> int:
        """GPU address of the flag of rank ``of`` that ``writer`` writes."""
        return self._gpu + self._at(of, writer)

    def peer_flags(self) -> list[int]:
        """The values of this rank's flags, one for each writer."""
        return [self._word(self._rank, writer).value for writer in range(self._world)]

    def release(self, peer: int, value: int) -> None:
        """Write this rank's flag in place of its writer ``peer``, so that a waiting stream continues."""
        with self._lock:
            self._word(self._rank, peer).value = value

    def abort(self, peer: int) -> None:
        """Set a peer's abort flag, because this rank has given up."""
        with self._lock:
            self._word(peer, self._world).value = 1

    def aborted(self) -> bool:
        """Whether a peer has set this rank's abort flag."""
        return bool(self._word(self._rank, self._world).value)

    def make_void(self, epoch: int) -> None:
        """Make the results of call ``epoch`` and of all later calls void; an earlier first void call is kept."""
        with self._lock:
            word = self._word(self._rank, self._world + 1)
            word.value = word.value or epoch
