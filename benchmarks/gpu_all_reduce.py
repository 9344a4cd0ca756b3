"""Matmul + all-reduce of a few rows across GPUs (decode): NCCL, torch's one-shot and two-shot, and what we could do.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_all_reduce.py [--rounds 25] [--into FOLDER]

One process a GPU. bf16, B as a Linear has it. Timed as `gpu_all_gather` does it: events on the stream, L2 flushed, the
ranks met there before, functions in turn, medians, the largest over ranks. Answers are checked against float64 first.

``nccl + mm`` and ``torch one shot + mm``, ``torch two shot + mm`` are what there is; torch's two read the peers'
partial sums by a kernel between two barriers that spin in it, without a bound. ``ours + mm`` is what our rules allow,
written out here: the matmul writes its partial sum into one of two slots by turns, streams tell each other by memory
operations (which hold no SM, and which a watchdog could end), and a kernel reads all ranks' slots over NVLink and adds
them in float32 in the order of the ranks; no barrier behind it. It is a measurement and no op: nothing looks after a
peer that does not come. ``told`` is that handshake by itself.

The record, ``gpu_all_reduce_x<world>``, decides whether `tilestream.distributed` gets such a form.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from gpu_all_gather import Forms, bench, wrong
from harness import RESULTS, GpuRecord
from ranks import on_each_gpu
from tilestream.runtime.driver import stream_wait, stream_write

BF16 = torch.bfloat16
ROWS = (1, 16, 64, 128, 256)
_LINE, _BLOCK, _SLOTS = 128, 1024, 2


def shapes(world: int) -> list[tuple[int, int]]:
    """N and K of one rank: Llama-3-70B's w2 and wo."""
    return [(8192, 28672 // world), (8192, 8192 // world)]


@triton.jit
def add_slots(addresses, out, count, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """``out = sum of the ranks' slots``, whose addresses stand in a row, in their order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        # Slots begin at multiples of 16 bytes: what is loaded of a peer is loaded in vectors.
        slot = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.bfloat16)), 16)
        acc += tl.load(slot + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out + i, acc.to(tl.bfloat16), mask=i < count)


class Slots:
    """Two slots and a flag a peer, in memory that all ranks map."""

    def __init__(self, rank: int, world: int, elements: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._world, size = rank, world, 2 * elements
        whole = _SLOTS * size + world * _LINE
        self._memory = symmetric.empty(whole, dtype=torch.uint8, device=f"cuda:{rank}")
        self._memory.zero_()
        torch.cuda.synchronize()
        self._handle = symmetric.rendezvous(self._memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        buffers = [self._handle.get_buffer(peer, (whole,), torch.uint8) for peer in range(world)]
        at = [[buffer.data_ptr() + slot * size for buffer in buffers] for slot in range(_SLOTS)]
        self._addresses = torch.tensor(at, dtype=torch.int64, device="cuda")
        self._flags = [buffer.data_ptr() + _SLOTS * size for buffer in buffers]
        self._size, self._epochs = size, itertools.count(1)
        self._epoch = 0

    def next(self, rows: int, columns: int) -> torch.Tensor:
        """The slot of the next call: its readers of the call before the last have told that they are done."""
        self._epoch = next(self._epochs)
        begin = self._epoch % _SLOTS * self._size
        return self._memory[begin : begin + 2 * rows * columns].view(BF16).view(rows, columns)

    def meet(self) -> None:
        """Tell all peers that the slot is filled, and wait until theirs are."""
        stream, others = torch.cuda.current_stream().cuda_stream, [x for x in range(self._world) if x != self._rank]
        for peer in others:
            stream_write(stream, self._flags[peer] + self._rank * _LINE, self._epoch)
        for peer in others:
            stream_wait(stream, self._flags[self._rank] + peer * _LINE, self._epoch)

    def add(self, out: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' slots."""
        blocks = triton.cdiv(out.numel(), _BLOCK)
        add_slots[(blocks,)](self._addresses[self._epoch % _SLOTS], out, out.numel(), self._world, _BLOCK)
        return out


def forms(rows: int, n: int, k: int, slots: Slots, ours: torch.Tensor) -> tuple[Forms, torch.Tensor]:
    """Each way as a call, and the exact answer."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a = torch.randn(rows, k, device="cuda").to(BF16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(BF16).t()
    exact = a.double() @ w.double()
    dist.all_reduce(exact)
    partial = ours[: rows * n].view(rows, n)  # in symmetric memory, as torch's ops want it

    def nccl() -> torch.Tensor:
        product = a @ w
        dist.all_reduce(product)
        return product

    def one_shot() -> torch.Tensor:
        torch.mm(a, w, out=partial)
        result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", name)
        return result

    def two_shot() -> torch.Tensor:
        torch.mm(a, w, out=partial)
        result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", name)
        return result

    def by_slots() -> torch.Tensor:
        torch.mm(a, w, out=slots.next(rows, n))
        slots.meet()
        return slots.add(torch.empty(rows, n, device="cuda", dtype=BF16))

    def told() -> None:
        slots.next(rows, n)
        slots.meet()

    alone = torch.empty(rows, n, device="cuda", dtype=BF16)
    return {
        "nccl + mm": nccl, "torch one shot + mm": one_shot, "torch two shot + mm": two_shot, "ours + mm": by_slots,
        "mm": lambda: torch.mm(a, w), "nccl": lambda: dist.all_reduce(alone), "told": told,
    }, exact  # fmt: skip


def rank_main(rank: int, world: int, arguments: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed._symmetric_memory as symmetric

    torch.manual_seed(rank)
    record = GpuRecord(f"gpu_all_reduce_x{world}", Path(arguments.into), world=world) if rank == 0 else None
    most = max(ROWS) * max(n for n, _ in shapes(world))
    slots = Slots(rank, world, most)
    theirs = symmetric.empty(most, dtype=BF16, device=f"cuda:{rank}")
    symmetric.rendezvous(theirs, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    for n, k in shapes(world):
        for rows in ROWS:
            functions, exact = forms(rows, n, k, slots, theirs)
            failures: dict[str, str] = {}
            errors: dict[str, float] = {}
            for name in [name for name in functions if name.endswith("+ mm")]:
                if failed := wrong(functions[name], exact, errors, name):
                    failures[name] = failed
                    del functions[name]
            ms, host = bench(functions, arguments.rounds, failures)
            if record is not None:
                row: dict[str, Any] = {"m": rows, "n": n, "k": k, "ms": ms, "host ms": host, "errors": errors}
                record.rows.append(row)
                record.data["failures"] += [f"{rows}x{n}x{k} {name}: {text}" for name, text in failures.items()]
                record.write()
                print(rows, n, k, ms, failures, flush=True)


def main() -> None:
    """All ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--into", default=str(RESULTS), help="the folder of the record")
    on_each_gpu(rank_main, parser.parse_args())


if __name__ == "__main__":
    main()
