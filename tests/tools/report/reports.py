"""Reports that no machine measured: plans as they are made for a device, and made-up times."""

from __future__ import annotations

from benchmarks.report.schedule_pictures import schedule_of, simulate

from tilestream.trace.record import LaunchTrace, Span
from tilestream_tools.report.measure import KIND, SCHEMA, planned
from tilestream_tools.trace.page import timeline
from tilestream_tools.warm.calls import parse

TEXTS = {
    "cpu": ("gemm 512,512,512,float32", "attention 2,256,4,2,64,float32,causal", "attention 1,64,8,8,512,float32"),
    "h100": (
        "gemm 4096,4096,4096,bfloat16", "gemm 16,8192,8192,bfloat16,bias,gelu_tanh",
        "attention 2,8192,16,16,128,bfloat16,causal,bhsd", "gemm 1024,1024,1024,float8_e4m3fnuz",
    ),
}  # fmt: skip


def arriving(workers: int = 132, chunks: int = 16, each: int = 4) -> LaunchTrace:
    """A launch whose chunks arrive: tiles, waits, and a part that is added up."""
    launch = LaunchTrace("matmul", f"hopper dynamic, {workers} workers, 128x256 tiles", workers, workers * each, 10.0)
    launch.arrivals = {0: (*(10.0 + 1e-4 * chunk for chunk in range(chunks - 1)), None)}
    launch.started = {0: 9.9999}
    for worker, spans in enumerate(launch.by_worker):
        now = 10.0
        for item in range(each):
            chunk = (worker + item * chunks // each) % (chunks - 1)
            ready = max(now, 10.0 + 1e-4 * chunk)
            spans.append(Span(worker, "wait", now, ready, 0, worker, item, 0, 64, chunk))
            kind = "part" if item == each - 1 and worker % 2 else "tile"
            spans.append(Span(worker, kind, ready, ready + 3e-4, 0, worker, item, 0, 64, chunk))
            now = ready + 3e-4
        if worker % 2:
            spans.append(Span(worker, "reduce", now, now + 2e-5, 0, worker, each - 1, 0, 64, -1))
    launch.end = max(spans[-1].end for spans in launch.by_worker)
    return launch


def made_up(device: str = "cpu", **changes: object) -> dict:
    """A report on a device that need not be here."""
    gpu = device != "cpu"
    calls = [planned(parse(*text.split(" ", 1)), device) for text in TEXTS[device]]
    for place, call in enumerate(calls):
        if "why" in call:
            continue
        ours = 1.3 * call["floor"]
        spread = [0.98 * ours, ours, 1.05 * ours]
        ratio = 0.9 + 0.2 * place
        clocks = {"device": {
            "tilestream": spread, "torch": [ratio * x for x in spread], "ratio": ratio,
            "band": [ratio - 0.02, ratio + 0.02],
        }}  # fmt: skip
        if gpu:
            clocks["host"] = {"torch": 5e-6, "tilestream": 4e-6, "ratio": 1.25}
        call |= {"first": 1.5, "errors": {"max": 1e-3}, "clocks": clocks, "mode": "eager", "rounds": 20}
    bring = "copy" if gpu else "read"
    data = {
        "kind": KIND, "schema": SCHEMA, "quick": False, "device": "cuda" if gpu else "cpu", "seconds": 42.0,
        "about": {"device": device, "python": "3.12", "torch": "2", "tilestream": "0", "commit": "a", "date": "now"},
        "machine": {
            "name": "NVIDIA <H100>" if gpu else "a CPU", "source": "nominal & assumed",
            "bandwidth": 3.35e12 if gpu else 24e9, "read": 3.0e12 if gpu else 20e9,
        },
        "doctor": [["versions", [["torch", "2 & more"]]], ["backends", [["hopper", "no: torch sees no GPU"]]]],
        "calls": calls,
        "warm": {"cache": "~/.triton", "kernels": [[TEXTS["h100"][0], True], [TEXTS["h100"][1], False]], "seconds": 3.2}
        if gpu else {"why": "a CPU runs what is installed: nothing is compiled"},
        "stream": {
            "median_ms": {bring: 3.0, "multiply": 2.0, "torch.mm": 2.1, "in turn": 5.1, "streamed": 3.3},
            "problem": {"m": 64, "n": 32, "k": 16, "dtype": "float32"}, "gb_per_s": {bring: 50.0}, "bring": bring,
            "overlap_won_ms": 1.8, "overlap_won_share": 0.9, "streamed_over_larger": 1.1, "origin": "256 MiB <pinned>",
        },
        "timelines": [timeline(arriving(), title="streamed"), timeline(simulate(schedule_of("stream_k"), held=2))],
    }  # fmt: skip
    return data | changes
