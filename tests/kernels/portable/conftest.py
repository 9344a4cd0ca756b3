"""The tests that run kernels in Triton's interpreter: only in a process that was started for it.

The interpreter is chosen when Triton's functions are made, which is when Triton is imported, and other tests compile.
So `tests/kernels/test_portable_interpreted.py` runs these in a process of their own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

INTERPRETED = [
    "test_attention_merge.py",
    "test_portable_add.py",
    "test_portable_arrival.py",
    "test_portable_attention.py",
    "test_portable_copy_items.py",
    "test_portable_fp8.py",
    "test_portable_gemm.py",
    "test_portable_order.py",
    "test_portable_trace.py",
]

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED
