"""What the promise costs: plans with and without it, cuBLAS and the peers that promise it, in one process, in turns.

Peers are on PYTHONPATH, in a folder of their own: ``pip download --no-deps sgemm-bi==0.1.2``, unpacked;
``batch_invariant_ops`` of https://github.com/thinking-machines-lab/batch_invariant_ops; and vLLM 0.33, or of its wheel
``vllm/model_executor/determinism`` alone (``unzip vllm-*.whl 'vllm/model_executor/determinism/*'``). One that is
not there is left out. Attention has no such peer: it is timed beside itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import tilestream as ts
from benchmarks.core.compiling import compile_ahead
from benchmarks.core.session import Session
from tilestream_tools.sweep.clock import GpuClock

RECORD = "invariance_cost"
#: Ways of a call that are ours.
OURS = ("free", "invariant")
#: Peers that no CUDA graph can hold. A capture that fails leaves torch's generator in capture, and later rows fail.
EAGER = frozenset({"sgemm-bi"})
ROWS = (1, 16, 64, 128, 256, 1024, 4096)
#: Columns and K of Llama's layers of 8B and 70B, and a weight of few columns.
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (1024, 8192))
#: Sequences, queries, keys: prefills, and steps of decoding.
ATTENTION = (
    (1, 512, 512), (1, 1024, 1024), (1, 4096, 4096), (1, 8192, 8192), (4, 1024, 1024), (1, 1, 2048), (1, 1, 8192),
    (1, 1, 32768), (4, 1, 8192), (16, 1, 4096), (64, 1, 4096),
)  # fmt: skip
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
#: Samples of a call, and below how many seconds it is replayed from a graph.
SAMPLES = 25


def promised(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call inside `tilestream.invariant`."""

    def run() -> Any:
        with ts.invariant():
            return call()

    return run


def peers() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """What multiplies ``x @ w.t()`` with the same promise, where it is installed."""
    found: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
    modules = {"batch_invariant_ops": _batch_invariant_ops, "vllm": _vllm}
    for name, module in modules.items():
        try:
            multiply = module().matmul_persistent
        except ImportError:
            continue
        found[name] = lambda x, w, multiply=multiply: multiply(x, w.t())
    try:
        engine = importlib.import_module("sgemm_bi").Engine(0)
    except (ImportError, RuntimeError):
        return found
    except BaseException as error:  # of a Rust extension that has no driver
        if type(error).__name__ != "PanicException":
            raise
        return found
    kept: dict[int, torch.Tensor] = {}

    def sgemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # It takes weights [K, N].
        if w.data_ptr() not in kept:
            kept[w.data_ptr()] = w.t().contiguous()
        out = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
        addresses = out.data_ptr(), x.data_ptr(), kept[w.data_ptr()].data_ptr(), None
        extents, stream = (*x.shape, w.shape[0]), torch.cuda.current_stream().cuda_stream
        engine.forward(addresses, extents, "bfloat16", stream, True)
        return out

    found["sgemm-bi"] = sgemm
    return found


def _batch_invariant_ops() -> ModuleType:
    return importlib.import_module("batch_invariant_ops.batch_invariant_ops")


def _vllm() -> ModuleType:
    """The module of such kernels that vLLM has; alone, it has stand-ins for what it imports of the rest of vLLM."""
    name = "vllm.model_executor.determinism.batch_invariant"
    try:
        return importlib.import_module(name)
    except ImportError:
        pass
    import triton
    import triton.language as tl

    own = [Path(at) / "vllm" / "model_executor" for at in sys.path]
    paths = [str(at) for at in own if (at / "determinism" / "batch_invariant.py").exists()]

    def units(device: int | None = 0) -> int:
        return torch.cuda.get_device_properties(device or 0).multi_processor_count

    def capability() -> SimpleNamespace:
        major, minor = torch.cuda.get_device_capability()
        return SimpleNamespace(major=major, minor=minor)

    yes, no = (lambda: True), (lambda: False)
    platform = SimpleNamespace(
        is_cuda=yes, is_cuda_alike=yes, is_rocm=no, is_xpu=no, get_device_capability=capability
    )  # fmt: skip
    has: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.envs": {}, "vllm.model_executor": {"__path__": paths}, "vllm.utils": {},
        "vllm.platforms": {"current_platform": platform}, "vllm.platforms.interface": {"DeviceCapability": object},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.mem_utils": {"get_max_shared_memory_bytes": lambda: 232448},
        "vllm.utils.nccl": {"pin_nccl_env": None}, "vllm.utils.platform_utils": {"num_compute_units": units},
        "vllm.utils.torch_utils": {"is_torch_equal_or_newer": lambda _: True},
    }  # fmt: skip
    stands = {one: ModuleType(one) for one in has}
    for one, module in stands.items():
        vars(module).update(has[one])
        above, _, below = one.rpartition(".")
        if above:
            setattr(stands[above], below, module)
    with mock.patch.dict(sys.modules, stands):
        return importlib.import_module(name)


def product_calls(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    calls: dict[str, Callable[[], Any]] = {
        "cublas": lambda: torch.mm(x, w.t()),
        "free": lambda: ts.mm(x, w.t()),
        "invariant": promised(lambda: ts.mm(x, w.t())),
    }
    for name, peer in peers().items():
        calls[name] = lambda peer=peer: peer(x, w)
    return calls


def attention_calls(batch: int, queries: int, keys: int) -> dict[str, Callable[[], Any]]:
    q = torch.randn(batch, queries, HEADS, HEAD_DIM, device="cuda").bfloat16()
    k, v = (torch.randn(batch, keys, HEADS_KV, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    return {
        "free": lambda: ts.attention(q, k, v, causal=True),
        "invariant": promised(lambda: ts.attention(q, k, v, causal=True)),
    }


def cases() -> list[tuple[str, tuple[int, int, int]]]:
    """Each kind of call with its extents."""
    products = [("product", (m, n, k)) for n, k in WEIGHTS for m in ROWS]
    return [*(("attention", shape) for shape in ATTENTION), *products]


def calls_of(kind: str, shape: tuple[int, int, int]) -> dict[str, Callable[[], Any]]:
    return product_calls(*shape) if kind == "product" else attention_calls(*shape)


def promised_plan(kind: str, shape: tuple[int, int, int]) -> Any:
    """The plan of such a call with the promise."""
    if kind == "product":
        return ts.plan(*shape, dtype="bfloat16", device="cuda", layout="nt", invariant=True)
    batch, queries, keys = shape
    return ts.attention_plan(
        queries, keys, batch=batch, heads_q=HEADS, heads_kv=HEADS_KV, head_dim=HEAD_DIM, causal=True, device="cuda",
        invariant=True,
    )  # fmt: skip


def without_refusals(calls: dict[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The calls that run; and by peer why its call did not, which is no fault of the row."""
    refused: dict[str, str] = {}
    for name in [one for one in calls if one not in OURS]:
        try:
            calls[name]()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return {name: call for name, call in calls.items() if name not in refused}, refused


def without(calls: dict[str, Callable[[], Any]], names: Collection[str]) -> dict[str, Callable[[], Any]]:
    """The calls but those of these names."""
    return {name: call for name, call in calls.items() if name not in names}


def share(arguments: list[str]) -> int:
    """A process of a core: makes its calls once, so that their kernels are compiled."""
    index, count = map(int, arguments)
    for kind, shape in cases()[index::count]:
        for name, call in calls_of(kind, shape).items():
            if name in OURS:
                call()
    torch.cuda.synchronize()
    return 0


def cost(session: Session) -> None:
    """A row for each shape: microseconds, and ratios above 1 where ours with the promise is the faster."""
    compile_ahead("invariance", limit=max(0.6 * session.left, 1), section="_cost")
    clock = GpuClock()
    record = session.record(RECORD, dtype="bfloat16", peers=sorted(peers()))

    def measure(item: tuple[str, tuple[int, int, int]]) -> dict[str, Any]:
        kind, shape = item
        calls, refused = without_refusals(calls_of(kind, shape))
        timing = clock.interleave(without(calls, EAGER), rounds=SAMPLES, warmup=2, graphs=True)
        us = {name: round(1e6 * timing.median(name), 2) for name in without(calls, EAGER)}
        if eager := without(calls, set(calls) - EAGER):
            alone = clock.interleave(eager, rounds=SAMPLES, warmup=2)
            us |= {name: round(1e6 * alone.median(name), 2) for name in eager}
        ratios = {name: round(its / us["invariant"], 4) for name, its in us.items()}
        row: dict[str, Any] = {"what": kind, "shape": "x".join(map(str, shape)), "timed": timing.mode, "us": us}
        plan = promised_plan(kind, shape)
        row |= {"plan": plan.label, "expected": plan.promise, "refused": refused}
        return row | {"ratios": ratios}

    session.rows(record, cases(), measure)
