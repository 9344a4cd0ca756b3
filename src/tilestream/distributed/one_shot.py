"""Matmul + all-reduce of a few rows on GPUs: each rank reads all partial sums over NVLink, and adds them itself.

::

    calling stream:  matmul -> slot; set my flag at each peer; wait for the peers' flags; read all slots, add
    watchdog:        if a peer is late: release the stream, and make the sum NaN

`tilestream.core.protocols.one_shot`, which the checker explores, has the operations. This module maps each to a GPU's
operation, and records them (`tilestream.distributed.program`). Streams synchronise by memory operations, so waiting for
a peer holds no SM (invariant 10).

Measurements of a hand-written prototype (2 x H200, benchmarks/results/h200/reduce_by_hand_x2.json): from 64 rows on it
is 1.04 to 1.31 times as fast as torch.mm followed by NCCL. For fewer rows NCCL's kernel, without stream handshakes, is
as fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import torch

from tilestream.core.protocols import gather, one_shot
from tilestream.distributed.gpu_reduce_scatter import Issuing, ReducePartials, ReduceScatterQueue, SumRepeat
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.program import CALLING, Handlers, Program, Recorder, issue
from tilestream.distributed.repeats import PlainCall
from tilestream.distributed.request import Request
from tilestream.ops.publish import Publication
from tilestream.runtime.sequence import Record, Wait, Write

#: ``product(out)`` issues the matmul into ``out``.
Product = Callable[[torch.Tensor], object]


class AllReduceQueue(ReduceScatterQueue):
    """A group's all-reduces on one GPU; they expire like reduce-scatters. Hold the group's call."""

    op = "matmul_all_reduce"
    _addresses: torch.Tensor | None = None
    _first_slot = 0

    def make_publication(self, chunks: int) -> Publication:
        """Return None, since a slot is signalled when its matmul has ended."""
        return cast("Publication", None)

    def reduce(
        self, shape: tuple[int, int], dtype: torch.dtype, product: Product, reduce_partials: ReducePartials,
        seconds: float, repeat: SumRepeat | None = None,
    ) -> None:  # fmt: skip
        """Issue a call. Non-blocking.

        Parameters
        ----------
        shape, dtype
            The shape and the dtype of a partial sum.
        reduce_partials
            Adds the slots at addresses ``int64[world]``.
        seconds
            Seconds that peers have from the matmul's end.
        repeat
            Learns to repeat the call.
        """
        addresses = self._slots()  # before the call is counted, because it may raise
        epoch = self.begin()
        calling = torch.cuda.current_stream(self.device)
        slot, call = epoch % gather.SLOTS, Issuing(self, epoch, epoch, seconds, calling, calling)

        def multiply() -> None:
            size = shape[0] * shape[1] * dtype.itemsize
            product(self.memory.slot(self._rank, slot)[:size].view(dtype).view(shape))

        values = calling.cuda_stream, epoch, 0, 0
        add = functools.partial(reduce_partials, addresses[slot], self._void, epoch)
        try:
            program = self.prepared(None, epoch, self._prepare_call)
            if repeat is None:
                issue(program, values, call.host(multiply, add))
            else:
                repeat.learn(slot, program, values, lambda add: call.host(multiply, add), add)
        except BaseException as error:
            self.recover_half_issued(error, call)
            raise

    def _prepare_call(self, form: None, slot: int) -> Program:
        """Record a call of any shape, since only the host's part depends on the shape."""
        recorder, flag = Recorder(slot), self.flags.flag
        add, epoch_of, side = recorder.add, recorder.epoch_of, self._events[slot].side.cuda_event

        def all_flagged(op: one_shot.AllFlagged) -> None:
            add(Record(CALLING, side))
            recorder.host("track")

        handlers: Handlers = {
            **self.ends(recorder),
            one_shot.Multiply: lambda op: recorder.host("multiply"),
            one_shot.Multiplied: lambda op: recorder.host("kernel"),
            one_shot.FlagPeer: lambda op: add(Write(CALLING, flag(op.peer, self._rank), epoch_of(op))),
            one_shot.AwaitPeer: lambda op: add(Wait(CALLING, flag(self._rank, op.peer), epoch_of(op))),
            one_shot.AllFlagged: all_flagged,
        }
        recorder.run(one_shot.reduce(self._rank, self._world, recorder.epoch), handlers)
        return recorder.program()

    def _slots(self) -> torch.Tensor:
        """The addresses of every rank's slots, ``int64[SLOTS, world]``; made again when the slots have grown."""
        first = self.memory.address(self._rank, 0)
        if self._addresses is None or self._first_slot != first:
            at = [[self.memory.address(rank, slot) for rank in range(self._world)] for slot in range(gather.SLOTS)]
            with torch.inference_mode(False):
                self._addresses = torch.tensor(at, dtype=torch.int64).to(self.device)
            self._first_slot = first
        return self._addresses


def matmul_reduce(
    state: GroupState, plan: DistributedPlan, request: Request, dtype: torch.dtype, plain: PlainCall | None = None
) -> torch.Tensor:
    """The sum (or average) over all ranks of their products, on each rank, plus the bias: ``[..., M, N]`` of ``dtype``.

    Non-blocking. The next call on this device, or with this group, raises later errors. ``plain``: the call, if equal
    ones can be repeated.
    """
    a, seconds = request.a, request.seconds(state)
    whole = *a.shape[:-1], request.b.shape[-1]
    shape = math.prod(whole[:-1]), whole[-1]
    with torch.cuda.device(a.device):
        queue = AllReduceQueue.of(state, plan, "a", a.device, shape[0] * shape[1] * dtype.itemsize)
        out = torch.empty(shape, dtype=dtype, device=a.device)
        bias = None if request.bias is None else request.bias.contiguous()  # the kernel takes no strides

        def product(into: torch.Tensor) -> None:
            request.product(a, bias=None, out_dtype=dtype, out=into.view(whole))

        def reduce_partials(addresses: torch.Tensor, void: torch.Tensor, epoch: int) -> None:
            from tilestream.launch.portable.add import add_slots  # imports Triton

            add_slots(addresses, out, bias, void, epoch, request.divisor(state.world))

        repeat = None if plain is None else SumRepeat.of(plain, queue, 0, None, whole, dtype, plain.extras)
        queue.reduce(shape, dtype, product, reduce_partials, seconds, repeat)
    return out.view(whole)
