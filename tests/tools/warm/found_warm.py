"""Does a launch find in Triton's cache what `tilestream warm` put there? A process of its own: see `test_warm`.

For each call, as a line of JSON: the kernels that its launch compiled, and whether each was found. The launch is the
one of an H100 that is not here: operands lie on the CPU, Triton's driver knows the target only, and nothing is issued.
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import GateWords, SignalsAhead
from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands, Epilogue, GemmOperands, GroupedOperands
from tilestream.launch.hopper import attention_launch as hopper_attention
from tilestream.launch.hopper import grouped as hopper_grouped
from tilestream.launch.hopper import launch as hopper_gemm
from tilestream.launch.launch import Kernel
from tilestream.ops import attention_gpu, gpu, grouped_library, grouped_sources
from tilestream.ops.attention_operands import Settings
from tilestream_tools.isa.build import TARGETS, NoGpu

BF16, FP32 = torch.bfloat16, torch.float32


def linear(rows: int, columns: int, k: int, dtype: torch.dtype = BF16, bias: bool = False) -> None:
    x, weight = torch.zeros(rows, k, dtype=dtype), torch.zeros(columns, k, dtype=dtype)
    epilogue = Epilogue(1.0, torch.zeros(columns, dtype=dtype) if bias else None, None, 1.0)
    operands = GemmOperands(x, weight.t(), torch.zeros(rows, columns, dtype=dtype), epilogue)
    gpu.find(operands, gpu.How())(operands)


def attention(rows: int, keys: int, causal: bool) -> None:
    q, k = torch.zeros(1, rows, 8, 64, dtype=BF16), torch.zeros(1, keys, 8, 64, dtype=BF16)
    operands = AttentionOperands(q, k, k, torch.zeros_like(q), 0.125)
    settings = Settings(causal, "bottom_right", -1, -1, 0.0, 0.125)
    attention_gpu.find(operands, settings)(operands)


def gradients() -> None:
    """A backward pass on the GPU makes each product as a call of its own."""
    x, weight, grad = (torch.zeros(*shape, dtype=BF16) for shape in ((256, 128), (512, 128), (256, 512)))
    for a, b in ((x, weight.t()), (grad, weight), (grad.t(), x)):
        operands = GemmOperands(a, b, torch.zeros(a.shape[0], b.shape[1], dtype=BF16), Epilogue())
        gpu.find(operands, gpu.How())(operands)


class Signals(SignalsAhead):
    """Words on the CPU, as operands are here."""

    @staticmethod
    def use(local_rows: bool = False) -> GateWords:
        words = torch.zeros(8, dtype=torch.int32)
        return GateWords(words, words[1:], 1, 0)


def arriving(rows: int, chunk: int) -> FlatArrival:
    return FlatArrival.of(Arrival.uniform(chunk, rows // chunk))


def late_rows() -> None:
    a, b = torch.zeros(256, 128, dtype=BF16), torch.zeros(512, 128, dtype=BF16).t()
    operands = GemmOperands(a, b, torch.zeros(256, 512, dtype=BF16), Epilogue())
    gpu.find(operands, gpu.How(), rows=arriving(256, 64))(operands, Awaited(Signals()))


def late_keys() -> None:
    q = torch.zeros(1, 256, 8, 64, dtype=BF16)
    operands = AttentionOperands(q, q, q, torch.zeros_like(q), 0.125)
    settings = Settings(True, "bottom_right", -1, -1, 0.0, 0.125)
    attention_gpu.find(operands, settings, arriving(256, 64))(operands, Awaited(Signals()))


def groups(arrives: bool | None = None) -> None:
    """``arrives``: of rows by two sources, whether they do; None: rows are packed."""
    a, b = torch.zeros(512, 128, dtype=BF16), torch.zeros(4, 256, 128, dtype=BF16).mT
    counts = torch.zeros(4 if arrives is None else (2, 4), dtype=torch.int32)
    x = GroupedOperands(a, b, torch.zeros(512, 256, dtype=BF16), Epilogue(), counts)
    if arrives is None:
        grouped_library.find(x, gpu.How())(x)
    else:
        grouped_sources.find(x, gpu.How(), arrives=arrives)(x, Awaited(Signals()) if arrives else None)


CALLS = {
    "gemm 256,512,128,bias": lambda: linear(256, 512, 128, bias=True),
    "gemm 64,48,40,float32": lambda: linear(64, 48, 40, FP32),
    "attention 1,256,8,8,64,causal": lambda: attention(256, 256, causal=True),
    "attention 1,1,8,8,64,keys=8192": lambda: attention(1, 8192, causal=False),
    "gemm 256,512,128,backward": gradients,
    "gemm 256,512,128,chunk=64": late_rows,
    "attention 1,256,8,8,64,causal,chunk=64": late_keys,
    "grouped 512,256,128,4": groups,
    "grouped 512,256,128,4,sources=2": lambda: groups(False),
    "grouped 512,256,128,4,sources=2,arrives": lambda: groups(True),
}


class Issued:
    """Stands in for a launcher."""

    def __init__(self, *_) -> None:
        pass

    def __call__(self, stream: int, *varying) -> None:
        pass


def main() -> None:
    found = []
    triton.runtime.driver.set_active(NoGpu(TARGETS["sm_90a"]))
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append([src.name, cache_hit])
    for module in (gpu, attention_gpu, grouped_library):
        module.cuda_properties = lambda index: named("h100")
    for module in (hopper_gemm, hopper_attention, hopper_grouped):
        module.Launcher = Issued
    Kernel.__call__ = lambda self, stream, filled: self.compile(filled)
    Kernel.load = Kernel.compile
    for name in sys.argv[1:]:
        found.clear()
        CALLS[name]()
        print(json.dumps({"name": name, "kernels": sorted(found)}))


if __name__ == "__main__":
    main()
