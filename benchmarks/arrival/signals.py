"""Whether TMA reads what a signal announces (``order``), and what polling costs (``polling``).

``order`` does ROUNDS rounds of a copy, a flag and a TMA load of what was copied, and counts wrong elements, for either
producer, with and without what invariant 7 asks for (`order_kernels`). No wrong element without a fence proves nothing
for the next GPU: the memory model asks for the fence. The result is published either way.

``polling`` puts a worker on each SM that looks at a signal which never comes, with pauses of one length: the power
drawn, and the looks a second. Then workers take `WAITING` SMs, and our matmul runs on the others: what it loses beside
workers that hold their SMs and all but sleep (`ASLEEP`). A worker of ours or of cuBLAS's takes all registers of an SM,
so it does not share one with a poller. The pauses of the kernels grow from the shortest to the longest that
`tilestream.kernels.device.clock` names.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import tilestream as ts
from benchmarks.arrival.order_kernels import COLUMNS, ROWS, SLOTS, consume, poll
from benchmarks.core.session import Session
from benchmarks.core.timing import line
from tilestream.kernels.device.clock import LONGEST, SHORTEST
from tilestream.runtime.driver import copy_in, stream_write
from tilestream_tools.sweep.check import errors

ROUNDS = 100_000
#: Values that fill the boxes in turn; prime to the number of boxes.
VALUES = 61
#: How a consumer reads the flag, and whether it fences before the TMA copy.
WAYS = {"acquire, fence": ("acquire", True), "acquire, no fence": ("acquire", False), "relaxed": ("relaxed", False)}
#: Nanoseconds that any launch here may take.
ALLOWED = 15_000_000_000
#: Pauses between two polls, in nanoseconds.
PAUSES = (0, SHORTEST.value, 256, LONGEST.value, 4096)
#: SMs whose workers wait while the others multiply, as if a chunk were late; and a pause in which no worker polls.
WAITING, ASLEEP = 16, 1_000_000
SIZE, MULTIPLICATIONS = 8192, 22


def order(session: Session, rounds: int = ROUNDS) -> None:
    record = session.record("arrival", rounds=rounds)
    host = torch.arange(VALUES, dtype=torch.int32).repeat_interleave(ROWS.value * COLUMNS.value).pin_memory()
    size = 4 * ROWS.value * COLUMNS.value
    shape = [ROWS.value, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.int32)
    for producer in ("copy engine", "worker"):
        for way, (sem, fences) in WAYS.items():
            boxes = torch.full((SLOTS.value * shape[0], shape[1]), -1, dtype=torch.int32, device="cuda")
            words = torch.zeros(256, dtype=torch.int64, device="cuda")
            flag, acknowledged, clock, wrong = (words[at:] for at in (0, 32, 64, 96))
            if producer == "copy engine":  # the host looks at it
                acknowledged = torch.zeros(1, dtype=torch.int64).pin_memory()
            flag, acknowledged = flag.view(torch.int32), acknowledged.view(torch.int32)
            described = TensorDescriptor.from_tensor(boxes, shape, layout)
            # Before the launch: while a kernel waits, the driver may be unable to make a stream.
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            consume[(1 if producer == "copy engine" else 2,)](
                described, boxes, flag, acknowledged, wrong, clock, rounds, VALUES, ALLOWED, sem, fences, num_warps=1,
            )  # fmt: skip
            if producer == "copy engine":
                _produce(stream.cuda_stream, boxes, flag, acknowledged, host, size, rounds)
            torch.cuda.synchronize()
            done, bad_rounds, bad = words[96:99].tolist()
            row = {
                "section": "order", "producer": producer, "way": way, "rounds": done, "wrong_rounds": bad_rounds,
                "wrong_elements": bad, "seconds": round(time.perf_counter() - begin, 2),
            }  # fmt: skip
            if done < rounds:
                record.fail(f"{producer}, {way}: {done} of {rounds} rounds before the deadline")
            record.add(row)
            print(line(row), flush=True)


def _produce(
    stream: int, boxes: torch.Tensor, flag: torch.Tensor, acknowledged: torch.Tensor, host: torch.Tensor, size: int,
    rounds: int,
) -> None:  # fmt: skip
    """Issue each round's copy and flag once its box is free; stop when the consumer is silent for too long."""
    seen = ctypes.c_int32.from_address(acknowledged.data_ptr())
    silent = time.perf_counter() + 1e-9 * ALLOWED
    for r in range(rounds):
        while seen.value <= r - SLOTS.value:
            if time.perf_counter() > silent:
                return
        copy_in(stream, boxes.data_ptr() + r % SLOTS.value * size, host.data_ptr() + r % VALUES * size, size)
        stream_write(stream, flag.data_ptr(), r + 1)


def polling(session: Session) -> None:
    """One row without a poller, one for each pause, and one of workers that hold their SMs and all but sleep."""
    record = session.record("arrival", rounds=ROUNDS)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    a, b, out = (torch.randn(SIZE, SIZE, device="cuda").to(torch.bfloat16) for _ in range(3))
    ts.matmul(a, b, out=out, workers=sms - WAITING)  # while pollers run the driver loads no kernel
    exact, peer = a[:64].double() @ b.double(), a[:64] @ b
    for pause in (None, *PAUSES, ASLEEP):
        often, watts = None, _power()
        if pause is not None:
            often, watts = _polled(sms, pause, _power)
        out.fill_(float("nan"))
        multiply = functools.partial(_timed, a, b, out, sms - WAITING)
        ms = multiply() if pause is None else _polled(WAITING, pause, multiply)[1]
        errors(out[:64], peer, exact)
        if max(ms) > 1e-6 * ALLOWED / 2:
            record.fail(f"pauses of {pause} ns: a matmul took {max(ms):.0f} ms, until pollers ended")
        record.add({
            "section": "polling", "pause_ns": pause, "pollers": 0 if pause is None else sms,
            "watts": round(statistics.median(watts), 1) if watts else None,
            "looks_per_us_and_poller": often, "pollers_beside": 0 if pause is None else WAITING,
            "matmul": f"{SIZE}x{SIZE}x{SIZE}, {sms - WAITING} workers", "ms": round(statistics.median(ms[2:]), 4),
            "samples": [round(one, 4) for one in ms],
        })  # fmt: skip
        print(line({name: value for name, value in record.rows[-1].items() if name != "samples"}), flush=True)


def _polled(workers: int, pause: int, meanwhile: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    """Polls a microsecond and worker while so many workers wait, and what ``meanwhile`` returns meanwhile."""
    words = torch.zeros(256, dtype=torch.int64, device="cuda")
    word, clock, looks = words[:1].view(torch.int32), words[32:], words[64:]
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.cuda.stream(beside):
        poll[(workers,)](word, clock, looks, ALLOWED, pause, pause > 0, num_warps=1)
    time.sleep(0.3)
    found = meanwhile()
    seconds = time.perf_counter() - begin
    stream_write(torch.cuda.current_stream().cuda_stream, word.data_ptr(), 1)  # behind what was done meanwhile
    torch.cuda.synchronize()
    return round(int(looks[0]) / workers / seconds / 1e6, 4), found


def _timed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, workers: int) -> list[float]:
    ms = []
    for _ in range(MULTIPLICATIONS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        ts.matmul(a, b, out=out, workers=workers)
        events[1].record()
        events[1].synchronize()
        ms.append(events[0].elapsed_time(events[1]))
    return ms


def _power() -> list[float]:
    return [watts for _ in range(3) if (watts := _watts()) is not None]


def _watts() -> float | None:
    """Power of the first GPU, as the driver has it; None if it has none."""
    asked = ["nvidia-smi", "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return float(subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
