"""Calls of the public API on emulated AMD GPUs, from the op to the result; see `emulated_hip`.

``python tests/tools/emulator/end_to_end.py ARCH LANDING SEED [NAME...]`` prints a JSON object a case that is right: the
functions of HIP that were called, and the instructions that each kernel executed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))
sys.path.insert(0, str(Path(__file__).parents[2]))

sys.path.insert(0, str(Path(__file__).parents[2] / "native"))

import pytest
import torch
from stand_ins import Matmul
from torch.utils._python_dispatch import _disable_current_modes

import emulated_hip
import tilestream as ts
from attention_maths import attention_by_torch
from emulated_hip import Hip
from error_rule import Maths, check
from grouped_cases import expected
from tilestream.core.errors import ArrivalTimeout, TilestreamError
from tilestream.core.operands import Epilogue, GroupedOperands
from tilestream.distributed import async_input
from tilestream.launch import native as native_launch
from tilestream.launch.native import Extension, recipe_of
from tilestream.launch.observe import Call, observe
from tilestream.runtime import outliving

BF16 = torch.bfloat16
GPU = "cuda:0"


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B = rand(192, 128), rand(128, 128, seed=1)


def matmul(schedule: str, k: int = 128) -> Callable[[Hip], None]:
    def case(hip: Hip) -> None:
        a, b, bias = rand(192, k), rand(k, 128, seed=1), rand(128, seed=2)
        out = ts.matmul(a.to(GPU), b.to(GPU), bias=bias.to(GPU), activation="relu", schedule=schedule, workers=4)
        check(out.cpu(), Maths(a, b, bias, activation="relu"))

    return case


def cdna(hip: Hip) -> None:
    """The CDNA kernel, which is taken on request."""
    a, b = rand(256, 256), rand(256, 256, seed=1)
    plan = ts.plan(256, 256, 256, dtype="bfloat16", layout="nt", device="cuda", backend="cdna", workers=2)
    assert plan.backend == "cdna"
    check(plan.run(a.to(GPU), b.t().contiguous().to(GPU).t()).cpu(), Maths(a, b))


def grouped(along: str) -> Callable[[Hip], None]:
    """Groups of rows, with an epilogue, or of K; one of them is empty, and rows behind the last are 0."""

    def case(hip: Hip) -> None:
        offsets, epilogue, how = torch.tensor([70, 70, 150], dtype=torch.int32), Epilogue(), {}
        if along == "rows":
            a, b, bias = rand(160, 128), rand(3, 128, 96, seed=1), rand(3, 96, seed=2)
            epilogue = Epilogue(bias=bias[:, None], activation="gelu")
            how = {"bias": bias.to(GPU), "activation": "gelu"}
        else:
            a, b = rand(96, 160), rand(160, 128, seed=1)
        out = ts.grouped_mm(a.to(GPU), b.to(GPU), offsets.to(GPU), workers=4, **how).cpu()
        for part, maths in expected(GroupedOperands(a, b, out, epilogue, offsets)):
            if part.numel():
                check(part, maths)
        assert along != "rows" or not out[150:].any()

    return case


def attention(hip: Hip) -> None:
    q, k, v = rand(1, 100, 4, 64), rand(1, 130, 2, 64, seed=1), rand(1, 130, 2, 64, seed=2)
    with ts.worker_limit(3):
        found = ts.attention(q.to(GPU), k.to(GPU), v.to(GPU), causal=True).cpu().float()
    heads = [x.float().transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    mask = torch.ones(100, 130, dtype=torch.bool).tril(30)
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    assert (found - exact).abs().max() < 2e-2


def sinks_of_16_bits(hip: Hip) -> None:
    """They are read as they are, so that an equal call is launched natively."""
    given = rand(1, 40, 4, 64), rand(1, 70, 2, 64, seed=1), rand(1, 70, 2, 64, seed=2), rand(4, seed=3)
    q, k, v, sinks = on_gpu = [x.to(GPU) for x in given]
    with ts.worker_limit(3), observe() as seen:
        out = ts.attention(q, k, v, sinks=sinks, causal=True)
    exact, _ = attention_by_torch(*(x[0].float() for x in given[:3]), causal=True, sinks=given[3])
    assert (out.cpu()[0].float() - exact).abs().max() < 2e-2
    with _disable_current_modes():
        recipe_of(seen, Call(dict(zip(("q", "k", "v", "sinks", "out"), (x.held for x in (*on_gpu, out)), strict=True))))


def streamed(hip: Hip) -> None:
    """Chunks that copy engines bring while the kernel runs, each followed by its signal."""
    stream = ts.stream_in(hip.pin(hip.place(A, "pinned memory")), rows_per_chunk=64, device=GPU)
    out = ts.matmul(stream, B.to(GPU), workers=3)
    check(out.cpu(), Maths(A, B))
    ts.check()


def lost(hip: Hip) -> None:
    """A chunk whose signal never comes: NaN where it is needed, and the error names it."""
    arrival = ts.Arrival.uniform(64, 3, signals=torch.zeros(3, dtype=torch.int32).to(GPU))
    a, words = A.to(GPU), arrival.signals
    words.copy_(torch.tensor([1, 0, 1], dtype=torch.int32))
    out = ts.matmul(a, B.to(GPU), arrival=arrival, workers=3, deadline=2e-3).cpu()
    assert out[64:128].isnan().all()
    with pytest.raises(ArrivalTimeout, match="chunk 1"):
        ts.check()


def captured(schedule: str, k: int = 128) -> Callable[[Hip], None]:
    """A graph, replayed on other numbers: what a launch counts with it restores, for the next replay."""

    def case(hip: Hip) -> None:
        a, b = (x.to(GPU) for x in (rand(192, k), rand(k, 128, seed=1)))
        how: dict[str, Any] = {"schedule": schedule, "workers": 4}
        check(ts.matmul(a, b, **how).cpu(), Maths(a.cpu(), b.cpu()))
        with hip.capture() as graph:
            out = ts.matmul(a, b, **how)
        for seed in (3, 4, 5):
            a.copy_(rand(192, k, seed=seed))
            out.fill_(float("nan"))
            hip.replay(graph)
            check(out.cpu(), Maths(a.cpu(), b.cpu()))

    return case


def captured_gate(hip: Hip) -> None:
    """A captured launch that waits: it zeroes the signals at each replay. One is lost; `reset` ends that."""
    words, b = torch.zeros(3, dtype=torch.int32).to(GPU), B.to(GPU)
    arrival = ts.Arrival.uniform(64, 3, signals=words)
    a = torch.full((192, 128), float("nan"), dtype=BF16).to(GPU)
    with hip.capture() as graph:
        out = ts.matmul(a, b, arrival=arrival, workers=3, deadline=2e-3)
    beside = hip.stream().cuda_stream

    def bring(rows: torch.Tensor, *chunks: int) -> torch.Tensor:
        source = hip.pin(hip.place(rows, "pinned memory"))
        a.fill_(float("nan"))
        hip.replay(graph)
        for chunk in chunks:
            at = 64 * 128 * 2 * chunk
            ts.runtime.driver.copy_in(beside, a.data_ptr() + at, source.data_ptr() + at, 64 * 128 * 2)
            ts.runtime.driver.stream_write(beside, words.data_ptr() + 4 * chunk, 1)
        return out.cpu()

    for seed in (3, 4):
        check(bring(rand(192, 128, seed=seed), 2, 0, 1), Maths(rand(192, 128, seed=seed), B))
        assert not words.cpu().any(), "the signals are not zeroed"
    ts.check()
    assert bring(A, 2, 0)[64:128].isnan().all()
    with pytest.raises(ArrivalTimeout, match="chunk 1"):
        ts.check()
    assert bring(A, 0, 1, 2).isnan().all(), "signals of the replay that lost a chunk are taken for news"
    with pytest.raises(TilestreamError, match=r"call arrival.reset\(\)"):
        ts.check()
    torch.cuda.synchronize()  # the producers have stopped
    arrival.reset()
    check(bring(A, 1, 0, 2), Maths(A, B))
    ts.check()


def async_tp(hip: Hip) -> None:
    """torch's ``_async_input_mm`` on two GPUs at once: each has its own rows; copy engines bring the other's late."""
    library = torch.library.Library("symm_mem", "IMPL")
    async_input.register(library)
    shards = [rand(64, 128, seed=rank) for rank in (0, 1)]
    b, gathered, words, outs = [], [], [], []
    for rank in (0, 1):
        with torch.cuda.device(rank):
            b.append(rand(128, 128, seed=5 + rank).to(f"cuda:{rank}"))
            whole = torch.full((128, 128), float("nan"), dtype=BF16, device=f"cuda:{rank}")
            whole[64 * rank : 64 * rank + 64].copy_(shards[rank])
            word = torch.zeros(2, dtype=torch.uint32, device=f"cuda:{rank}")
            word.view(torch.int32)[rank].fill_(1)
            gathered.append(whole)
            words.append(word)
    for rank in (0, 1):
        with torch.cuda.device(rank):
            beside, at = hip.stream().cuda_stream, 128 * 2 * 64 * (1 - rank)
            ts.runtime.driver.copy_across(
                beside, gathered[rank].data_ptr() + at, gathered[1 - rank].data_ptr() + at, 64 * 128 * 2
            )
            ts.runtime.driver.stream_write(beside, words[rank].data_ptr() + 4 * (1 - rank), 1)
            with ts.worker_limit(4):
                outs.append(torch.ops.symm_mem._async_input_mm(gathered[rank], b[rank], words[rank], rank))
    assert not hip.machines, "nothing has been executed yet, no copy either"
    for rank in (0, 1):
        check(outs[rank].cpu(), Maths(torch.cat(shards), b[rank].cpu()))
        assert not words[rank].view(torch.int32).cpu().any(), "the words are not zeroed"
    ts.check()


def native(schedule: str, k: int = 128) -> Callable[[Hip], None]:
    """An equal call, launched by `csrc/` on HIP: with the recipe of the call before it, on other operands.

    The extension is one of tensors of the CPU: it gets those of the emulated memory as what they are.
    """

    def case(hip: Hip) -> None:
        extension = Native(hip)
        bias = rand(128, seed=2)
        on_gpu = [x.to(GPU) for x in (rand(192, k), rand(k, 128, seed=1), bias, torch.zeros(192, 128, dtype=BF16))]
        with observe() as seen:
            ts.matmul(*on_gpu[:2], out=on_gpu[3], bias=on_gpu[2], schedule=schedule, workers=4)
        hip.run()
        with _disable_current_modes():
            a, b, there, out = (x.held for x in on_gpu)
            made = Matmul(0, a, b, there)
            call = Call({**made.tensors, "out": out}, (made.alpha, made.beta))
            assert extension.remember(seen, call, 0, True, made), recipe_of(seen, call)
            for seed in (3, 4):
                a, b, bias, out = (
                    hip.place(x, "an operand") for x in (
                        rand(192, k, seed=seed), rand(k, 128, seed=seed + 9), bias, torch.zeros(192, 128, dtype=BF16)
                    )
                )  # fmt: skip
                before = len(hip.machines)
                assert extension.try_matmul_out(out, *made._replace(a=a, b=b, bias=bias))
                hip.run()
                assert len(hip.machines) == before + len(seen.issued)
                check(out, Maths(a, b, bias))

    return case


class Native(Extension):
    """The extension over the emulated HIP; its words are in the emulated memory."""

    def __init__(self, hip: Hip) -> None:
        driver = os.environ["TRITON_LIBHIP_PATH"]
        super().__init__(Path(os.environ["TILESTREAM_TEST_NATIVE"]), driver, driver)
        self._hip = hip

    def _give_words(self, device: torch.device, stream: int, sizes: Sequence[int]) -> None:
        hip, names = self._hip, ("inference_mode", "int32", "int64", "float32")
        allocator = SimpleNamespace(
            **{name: getattr(torch, name) for name in names},
            zeros=lambda n, dtype, device: hip.place(torch.zeros(n, dtype=dtype), "words"),
            empty=lambda n, dtype, device: hip.empty((n,), dtype, "words"),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_launch, "torch", allocator)
            super()._give_words(device, stream, sizes)


class Here:
    """A thread's work, done by the caller: the emulated tensors are those of one thread."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target

    def join(self) -> None:
        """It has ended."""


CASES: dict[str, Callable[[Hip], None]] = {
    "matmul, static": matmul("static"),
    "matmul, dynamic": matmul("dynamic"),
    "matmul, stream-K": matmul("stream_k", 512),
    "matmul, cdna": cdna,
    "grouped, rows": grouped("rows"),
    "grouped, K": grouped("k"),
    "attention": attention,
    "attention, sinks of 16 bits": sinks_of_16_bits,
    "matmul, streamed": streamed,
    "matmul, a chunk is lost": lost,
    "captured, dynamic": captured("dynamic"),
    "captured, stream-K": captured("stream_k", 512),
    "captured, a gate": captured_gate,
    "async TP, two GPUs": async_tp,
}
#: With TILESTREAM_TEST_NATIVE, the extension built for tensors of the CPU: tests/native.
NATIVE_CASES = {
    "native, static": native("static"), "native, dynamic": native("dynamic"),
    "native, stream-K": native("stream_k", 512),
}  # fmt: skip


def main(arch: str, landing: str, seed: str, *names: str) -> None:
    outliving.threading = SimpleNamespace(Thread=Here)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        library = emulated_hip.build(Path(folder))
        os.environ["TRITON_LIBHIP_PATH"] = str(library)
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        how: dict[str, Any] = {"landing": landing, "seed": int(seed)}
        with emulated_hip.emulated_hip(library, cache, arch, devices=2, **how) as hip:
            for name in names or CASES:
                hip.asked.clear()
                hip.machines.clear()
                (CASES | NATIVE_CASES)[name](hip)
                executed = [machine.executed for machine in hip.machines]
                print(json.dumps({"name": name, "executed": executed, "asked": sorted(set(hip.asked))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
