"""Matmul + all-reduce of a few rows on GPUs: each rank reads all partial sums over NVLink, and adds them itself.

::

    calling stream:  matmul -> slot; tell the peers; wait until they have told; read all slots, add
    watchdog:        lets the stream go when a peer has not come in time, and makes the sum NaN

What is issued is `tilestream.distributed.one_shot_protocol`, operation by operation, which the checker explores.
Streams tell each other by memory operations: no SM is held by who waits for a peer (invariant 10).

Measured, written out by hand (2 x H200, benchmarks/results/h200/reduce_by_hand_x2.json): from 64 rows on ahead of
NCCL behind torch.mm, by 1.04 to 1.31; of fewer rows NCCL's kernel, which needs no handshake of streams, is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from tilestream.distributed import one_shot_protocol as text
from tilestream.distributed import protocol as p
from tilestream.distributed.collective import agree
from tilestream.distributed.members import Member
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.sums import Marks, Scatterer
from tilestream.distributed.turns import answer
from tilestream.ops.publish import Publication
from tilestream.runtime.driver import stream_wait, stream_write

#: ``product(out)`` issues the matmul into ``out``.
Product = Callable[[torch.Tensor], object]
#: ``add_up(addresses, over, epoch)`` issues the sum of the slots at these addresses, ``int64[world]``.
AddUp = Callable[[torch.Tensor, torch.Tensor, int], None]


class Reducer(Scatterer):
    """A member's all-reduces on one GPU. It gives up as a sum does. Hold the member's call."""

    op = "matmul_all_reduce"
    _addresses: torch.Tensor | None = None
    _of = 0

    def make_publication(self, chunks: int) -> Publication:
        """None: a slot is told of when its matmul has ended."""
        return cast("Publication", None)

    def reduce(
        self, shape: tuple[int, int], dtype: torch.dtype, product: Product, add_up: AddUp, seconds: float
    ) -> None:
        """Issue a call. None of it has run yet.

        Parameters
        ----------
        shape, dtype
            Of a partial sum.
        seconds
            That are waited for peers when the matmul has ended.
        """
        addresses = self._slots()  # it may raise, so before the call is counted, of which no peer has heard
        epoch = self.begin()
        calling = torch.cuda.current_stream(self.device)
        handle, flag = calling.cuda_stream, self.words.flag
        call = self.call(epoch, epoch, seconds)
        marks = Marks(call, calling, calling)

        def multiply(op: text.Multiply) -> None:
            size = shape[0] * shape[1] * dtype.itemsize
            product(self.memory.slot(self._rank, op.slot)[:size].view(dtype).view(shape))

        def all_told(op: text.Heard) -> None:
            marks.mark(call.side)
            self.issued(call)  # before the sum: a launch that blocks (CUDA_LAUNCH_BLOCKING) waits there for the peers

        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitCall: lambda op: self.await_call(calling),
            text.Multiply: multiply,
            text.Multiplied: lambda op: marks.mark(call.kernel),
            text.TellPeer: lambda op: stream_write(handle, flag(op.peer, self._rank), op.epoch),
            text.HearPeer: lambda op: stream_wait(handle, flag(self._rank, op.peer), op.epoch),
            text.Heard: all_told,
            text.AddSlots: lambda op: add_up(addresses[op.slot], self.over(calling), op.epoch),
            text.Added: lambda op: marks.mark(call.end),
        }
        try:
            answer(text.reduce(self._rank, self._world, epoch), perform)
        except BaseException as error:
            self.halved(error, marks)
            raise

    def _slots(self) -> torch.Tensor:
        """Where every rank's slots are: ``int64[SLOTS, world]``."""
        if self._addresses is None or self._of != self.memory.address(self._rank, 0):
            at = [[self.memory.address(rank, slot) for rank in range(self._world)] for slot in range(p.SLOTS)]
            with torch.inference_mode(False):
                self._addresses = torch.tensor(at, dtype=torch.int64).to(self.device)
            self._of = self.memory.address(self._rank, 0)
        return self._addresses


def matmul_reduce(
    member: Member, plan: DistributedPlan, shape: tuple[int, int], dtype: torch.dtype, product: Product,
    average: bool, bias: torch.Tensor | None, seconds: float, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """The sum (or average) over all ranks of their products ``[rows, columns]``, on each rank, and ``bias``.

    Issues everything and returns; what goes wrong later is raised by the next call on this device, and with this group.
    """
    with torch.cuda.device(device):
        agree(member, plan, device)
        reducer = member.reducer = member.reducer or Reducer(member, device)
        reducer.check_gpu("a", device)
        reducer.reserve(shape[0] * shape[1] * dtype.itemsize)
        out = torch.empty(shape, dtype=dtype, device=device)
        bias = None if bias is None else bias.contiguous()  # what the kernel reads has no strides

        def add_up(addresses: torch.Tensor, over: torch.Tensor, epoch: int) -> None:
            from tilestream.kernels.portable.add import BLOCK, add_slots

            add_slots[-(-out.numel() // BLOCK),](
                addresses, out, bias, over, epoch, out.numel(), shape[1], float(member.world if average else 1),
                WORLD=member.world, BIAS=bias is not None, BLOCK=BLOCK,
            )  # fmt: skip

        reducer.reduce(shape, dtype, product, add_up, seconds)
    return out
