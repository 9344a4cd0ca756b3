"""Launching the portable GEMM: what a plan and a layout decide is worked out once, a call fills in the addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilestream.kernels.epilogue import Epilogue
from tilestream.kernels.portable.arguments import Arguments, Layout
from tilestream.kernels.portable.gemm import gemm
from tilestream.kernels.portable.jit import INTERPRETED
from tilestream.kernels.portable.schedule import RECORD
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import Words, captured_words, device_workspace

_NO_WORDS = Words(None, None, None, 0, 0)


class Probe:
    """A log of what each worker of one launch took: see `tilestream.kernels.portable.schedule`.

    Parameters
    ----------
    capacity
        Records a worker has room for.
    """

    def __init__(self, workers: int, capacity: int, device: torch.device) -> None:
        self.workers, self.capacity = workers, capacity
        self.words = torch.full((workers, capacity, RECORD.value), -1, dtype=torch.int32, device=device)

    def log(self, worker: int) -> list[list[int]]:
        """The records of a worker, in order."""
        rows: list[list[int]] = self.words[worker].tolist()
        return [row for row in rows if row[0] >= 0]


class GemmLaunch:
    """The portable GEMM for one plan, one layout of the operands and one alignment of their addresses.

    Holds no operand: a call is given all of them. The compiled kernel is looked up by Triton at the first call and then
    launched directly, which takes a third of the time.
    """

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self.plan, self.layout = plan, layout
        self._arguments = Arguments(plan, layout)
        self._grid = (plan.schedule.workers, 1, 1)
        # By (captured or not): under capture arguments that are constants eagerly may be others.
        self._compiled: Callable[..., Any] | None = None
        self._table: torch.Tensor | None = None
        self._static = plan.schedule.kind == "static"

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, probe: Probe | None = None
    ) -> None:
        """Issue the launch on the current stream of the current device, which is the operands'."""
        device = a.device
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        if self._static:
            self._issue(stream, a, b, out, epilogue, _NO_WORDS, probe)
        elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            words = captured_words(device, self.plan.schedule, self.plan.block)
            self._issue(stream, a, b, out, epilogue, words, probe)
        else:
            workspace = device_workspace(device, stream)
            with workspace.lock:
                words = workspace.open(self.plan.schedule, self.plan.block)
                self._issue(stream, a, b, out, epilogue, words, probe)

    def _issue(
        self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, words: Words,
        probe: Probe | None,
    ) -> None:  # fmt: skip
        operands = (
            a, b, out, epilogue.bias, epilogue.residual, words.partials, words.counts, words.counters,
            self._tiles(a.device), None if probe is None else probe.words, words.base, words.reset,
            epilogue.alpha, epilogue.beta,
        )  # fmt: skip
        if probe is not None:
            probing = Arguments(self.plan, self.layout, probe=True)
            gemm[self._grid](*probing.fill(*operands, probe.capacity), **probing.options)
        elif self._compiled is not None:
            self._compiled(*self._arguments.fill(*operands), stream=stream)
        else:
            kernel = gemm[self._grid](*self._arguments.fill(*operands), **self._arguments.options)
            self._compiled = None if INTERPRETED else kernel[self._grid]

    def _tiles(self, device: torch.device) -> torch.Tensor | None:
        """The caller's own order of tiles on the device, made at the first call."""
        table = self.plan.schedule.raster.table
        if table is not None and self._table is None:
            self._table = torch.tensor(table, dtype=torch.int32).to(device)
        return self._table
