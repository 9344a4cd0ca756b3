"""Pinned memory, copied to the GPU that multiplies it: chunks and signals on a stream of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import tilestream as ts
from tilestream.cli import ui
from tilestream.cli.demo import machine
from tilestream.cli.demo.bench import Bench
from tilestream.cli.demo.file_bench import refuse_too_large

if TYPE_CHECKING:
    from tilestream.cli.demo.bench import Tell, Watcher
    from tilestream.cli.demo.settings import Settings
    from tilestream.cli.demo.source import Source

#: Rows and columns of the input that is made here, 256 MiB of bfloat16, and columns of the weight.
ROWS, K, N = 16384, 8192, 8192
DTYPE = torch.bfloat16
DEVICE = "cuda"
_SEED = 20250


class GpuBench(Bench):
    """``copy`` is from pinned memory, and ``sequential`` is one plain copy and the matmul behind it in its stream.

    Launches on a GPU are not traced.

    Parameters
    ----------
    host
        ``[M, K]`` in pinned memory.
    origin
        What that is, for people.
    source
        The file it was read from, if it was.
    """

    bring = "copy"

    def __init__(self, host: torch.Tensor, settings: Settings, origin: str, source: Source | None = None) -> None:
        self.origin, self.source = origin, source
        stream = ts.stream_in(host, rows_per_chunk=settings.rows_per_chunk, device=DEVICE)
        super().__init__(stream, host, settings, deadline=60.0)

    def about(self) -> list[tuple[str, str]]:
        """See `Bench`."""
        gpu = self.plan().device.name
        return [("gpu", gpu), ("input", self.origin), ("copy", self.stream.explain())]

    def facts(self) -> dict[str, Any]:
        """See `Bench`."""
        host = self.truth
        return {
            "input": {
                "origin": self.origin,
                "shape": list(host.shape),
                "dtype": str(host.dtype).removeprefix("torch."),
                "bytes": host.nbytes,
                "how": self.stream.explain(),
            },
            **({} if self.source is None else {"file": self.source.facts()}),
        }

    def prepare(self, tell: Tell, watcher: Watcher) -> None:
        """See `Bench`."""
        self.n_is = "default" if self.settings.n is None else "given"
        self.stream.wait()
        self.set_n(self.settings.n or N)
        self.plan()  # what it refuses is refused before anything is compiled
        # Compared with what a plain copy gives, so that a stream that brings the wrong rows is found.
        self._bring_in_turn()
        torch.mm(self.x, self.w, out=self.by_torch)
        for what in ("compiling, and each way once", "each way once more"):
            tell(what)
            for way in self.ways().values():
                way()

    def _settle(self) -> None:
        settle()

    def _bring(self) -> None:
        self.stream.restart()
        self.stream.wait()  # with a timeout it would look now and then, and see the end too late

    def _bring_in_turn(self) -> None:
        self.x.copy_(self.truth, non_blocking=True)


def settle() -> None:
    """Wait for all that the GPU was given."""
    torch.cuda.synchronize()


def pinned(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that a copy engine reads without the host's help."""
    return torch.empty(rows, k, dtype=dtype, pin_memory=True)


def made(rows: int | None, k: int | None, settings: Settings, tell: Tell) -> GpuBench:
    """The bench of an input that is made here.

    Parameters
    ----------
    rows, k
        Its shape; None: `ROWS`, `K`.

    Raises
    ------
    ValueError
        If the host's memory or the GPU's is too small.
    """
    rows, k = rows or ROWS, k or K
    size = rows * k * DTYPE.itemsize
    here = machine.available_memory()
    if here is not None and size > 0.8 * here:
        raise ValueError(
            f"--rows {rows} --k {k}: the input takes {ui.size(size)} of pinned memory, {ui.size(here)} are available; "
            "give smaller ones"
        )
    refuse_too_small(rows, settings.n or N, k, DTYPE.itemsize, "--rows, --k or --n")
    tell(f"filling {ui.size(size)} of pinned memory")
    host = pinned(rows, k, DTYPE)
    # Random numbers come from the GPU: the host would take seconds for them.
    generator = torch.Generator(DEVICE).manual_seed(_SEED)
    host.copy_(torch.randn(rows, k, dtype=DTYPE, device=DEVICE, generator=generator))
    return GpuBench(host, settings, f"{ui.size(size)} of random bfloat16 in pinned memory, the same each time")


def from_file(source: Source, settings: Settings, tell: Tell) -> GpuBench:
    """The bench of a file's matrix, read into pinned memory first.

    Raises
    ------
    ValueError
        If the host's memory or the GPU's is too small.
    """
    matrix = source.matrix
    refuse_too_large(source, copies=2)  # as read, and pinned
    refuse_too_small(source.rows, settings.n or N, source.columns, matrix.itemsize, "--n, or another file")
    tell(f"reading {ui.size(matrix.nbytes)} into pinned memory")
    with ts.stream_in(source.path, tensor=source.tensor, device="cpu") as stream:
        read = stream.wait().view(source.rows, source.columns)
        host = pinned(source.rows, source.columns, read.dtype).copy_(read)
    origin = f"{source.path} ({ui.size(matrix.nbytes)}, yours), read into pinned memory first"
    return GpuBench(host, settings, origin, source)


def refuse_too_small(rows: int, n: int, k: int, itemsize: int, smaller: str) -> None:
    """Raise `ValueError` where the GPU's memory is too small; ``smaller`` names what can be chosen smaller."""
    # The input, the weight (made in float32), two outputs, and as much again and three masks to check them.
    need = itemsize * rows * k + (itemsize + 4) * k * n + rows * n * (4 * itemsize + 3)
    free = machine.free_device_memory()
    if need > 0.9 * free:
        raise ValueError(
            f"[{rows}, {k}] @ [{k}, {n}] takes {ui.size(need)} of the GPU's memory with its check, {ui.size(free)} are "
            f"free; give a smaller {smaller}, or --device cpu"
        )
