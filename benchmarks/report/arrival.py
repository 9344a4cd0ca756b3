"""The sections of docs/performance.md that come from ``gpu_arrival*.json``: memory order, and what polling costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report.gemm import table, where

#: The pause in which nobody looks, as benchmarks/gpu_arrival.py has it, which imports Triton.
ASLEEP = 1_000_000


def sections(folder: Path) -> list[str]:
    """Those of the records in ``folder``, one GPU after the other."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gpu_arrival*.json"))]
    return [text for data in found for text in (order(data), polling(data)) if text]


def order(data: dict[str, Any]) -> str:
    """What a signal announced, as TMA read it, with and without the fences of invariant 7."""
    rows = [row for row in data["rows"] if row["section"] == "order"]
    if not rows:
        return ""
    cells = [
        [row["producer"], row["way"], f"{row['rounds']:,}", f"{row['wrong_rounds']:,}", f"{row['wrong_elements']:,}"]
        for row in rows
    ]
    return "\n\n".join(
        [
            f"## Copy, flag, TMA: what is read, {data['device']}",
            "A box of 16 KB is written, announced by a flag, and copied to shared memory by TMA; an element that is "
            "not this round's is wrong. *acquire*: the flag is looked at with acquire at system scope; *fence*: the "
            "generic to asynchronous proxy fence before the copy. The kernels do both, whatever a GPU gets away with "
            f"without ({where(data)}).",
            table(["Producer", "Consumer", "rounds", "with a wrong element", "wrong elements"], cells),
            *failures(data),
        ]
    )


def polling(data: dict[str, Any]) -> str:
    """A worker an SM that waits, by the pause between two looks."""
    rows = [row for row in data["rows"] if row["section"] == "polling"]
    if not rows:
        return ""
    held = next((row["ms"] for row in rows if row["pause_ns"] == ASLEEP), None)
    names = {None: "nobody waits", ASLEEP: "as good as asleep"}
    cells = [
        [
            names.get(row["pause_ns"], str(row["pause_ns"])),
            "-" if row["looks_per_us_and_poller"] is None else f"{row['looks_per_us_and_poller']:.3f}",
            "not readable" if row["watts"] is None else f"{row['watts']:.0f}",
            f"{row['ms']:.3f}",
            "-" if held is None else f"{held / row['ms']:.3f}",
        ]
        for row in rows
    ]
    beside = max(row["pollers_beside"] for row in rows)
    return "\n\n".join(
        [
            f"## What waiting costs, {data['device']}",
            "A worker on each SM looks at a signal that does not come: its looks a microsecond, and the power that the "
            f"driver says the GPU draws. Then {beside} of them, and our matmul ({rows[0]['matmul']}) on the other SMs: "
            "*of its speed*: beside its time while those that wait all but sleep, and hold their SMs as well "
            f"({where(data)}).",
            table(["Pause, ns", "looks a microsecond", "power, W", "matmul, ms", "of its speed"], cells),
        ]
    )


def failures(data: dict[str, Any]) -> list[str]:
    """What did not come to its end."""
    return [f"Not finished: {'; '.join(data['failures'])}."] if data["failures"] else []
