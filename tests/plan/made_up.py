"""GPUs made up for the plans' tests, of round figures that no driver changes; and what is read off a plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tilestream.core.device import DeviceProperties

HZ = 1.8e9
H100 = DeviceProperties(
    "an H100", "portable", 132, 256 * HZ, 3.3e12, "made up", "sm_90", 232448,
    (("float16", 4096 * HZ), ("bfloat16", 4096 * HZ), ("tf32", 2048 * HZ), ("fp8", 8192 * HZ)),
)  # fmt: skip
A100 = replace(H100, name="an A100", workers=108, bandwidth=2e12, arch="sm_80", shared=166912)
MI300X = DeviceProperties("an MI300X", "portable", 304, 256 * HZ, 5.3e12, "made up", "gfx942", 65536)
MI355X = DeviceProperties("an MI355X", "portable", 256, 256 * HZ, 8e12, "made up", "gfx950", 163840)
#: Operands and output of a problem.
BF16 = {"dtype": "bfloat16", "out_dtype": "bfloat16"}


def refused(error, message):
    """The block raises ``error`` with this very message."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def reason(plan, what: str) -> str | None:
    """Why ``what`` was not taken; None where the plan does not say so."""
    return next((refusal.why for refusal in plan.refused if refusal.what == what), None)


def lines(plan, name: str) -> list[str]:
    """What `explain` says under ``name``."""
    return [line[12:] for line in plan.explain().splitlines()[1:] if line[2:12].strip() == name]
