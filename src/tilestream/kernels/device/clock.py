"""Time on the device: a clock that all its units share, and a pause between two polls of a word.

Triton's interpreter has no assembly, so there both are the host's.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.language.target_info import is_cuda

from tilestream.kernels.device.jit import INTERPRETED

#: Nanoseconds between two polls, at first and at most. A waiting worker makes one memory request a pause.
SHORTEST: tl.constexpr = tl.constexpr(64)
LONGEST: tl.constexpr = tl.constexpr(1024)


@triton.jit
def _now_on_device():
    """Nanoseconds since an arbitrary moment."""
    if is_cuda():
        ns = globaltimer()
    else:
        # CDNA's constant clock, 100 MHz. Triton's `memrealtime` waits for the counter of vector memory, but a scalar
        # load has the other counter.
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\n\ts_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        ns = ticks * 10
    return ns


@triton.jit
def _nap_on_device(ns):
    """Do nothing for about ``ns`` nanoseconds."""
    if is_cuda():
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [ns], dtype=tl.int32, is_pure=False, pack=1
        )
    else:  # 32 x 64 cycles, about a microsecond
        tl.inline_asm_elementwise("s_sleep 32\n\tv_mov_b32 $0, $1", "=v,v", [ns], dtype=tl.int32, is_pure=False, pack=1)


def _now_on_host():
    return tl.full((), time.perf_counter_ns(), tl.int64)


def _nap_on_host(ns):
    time.sleep(1e-9 * LONGEST.value)


now = _now_on_host if INTERPRETED else _now_on_device
nap = _nap_on_host if INTERPRETED else _nap_on_device


@triton.jit
def latest(clock):
    """The time stored in the clock's word, which is then set to the present time.

    Each thread would read the timer at another moment, but a worker must make one decision by it: threads that decided
    differently would wait for each other without end. So time goes through a word of memory, which one lane reads for
    all. It is as old as the previous poll of this worker or of another.
    """
    return tl.atomic_max(clock, now(), sem="relaxed")


@triton.jit
def present(clock):
    """The present time, by the same clock."""
    latest(clock)
    return tl.atomic_add(clock, 0, sem="relaxed")
