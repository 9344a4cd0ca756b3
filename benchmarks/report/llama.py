"""The section of docs/performance.md on a Llama of torch's own parallel styles: ``gpu_llama_x*.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report.gemm import table
from benchmarks.report.reduce import records, shortened, versions

#: The rows of a record.
MODELS = {"blocks": "two blocks", "whole": "two blocks, embedding and head"}


def sections(folder: Path) -> list[str]:
    """Those of the records in ``folder``."""
    return [llama(data) for data in records(folder, "gpu_llama_x*.json") if data["rows"]]


def llama(data: dict[str, Any]) -> str:
    """Its losses as it is and on our ops, and what the handle reports."""
    steps = len(data["rows"][0]["losses"]["plain"])
    cells, sites = [], []
    for row in data["rows"]:
        plain, ours = row["losses"]["plain"], row["losses"]["ours"]
        apart = max(abs(x - y) / abs(x) for x, y in zip(plain, ours, strict=True))
        cells.append([MODELS[row["model"]], f"{plain[0]:.4f}", f"{plain[-1]:.4f}", f"{ours[-1]:.4f}", f"{apart:.1e}"])
        for site in row["sites"]:
            what, how, why = shortened(site).split(": ", 2)
            sites.append([MODELS[row["model"]], f"`{what}`", how, why])
    text = (
        f"Trained for {steps} steps on {data['world']} GPUs, as it is and compiled under `async_tp` ({versions(data)}; "
        "`benchmarks/gpu_llama.py`). It is small, 512 columns and 1024 tokens: the dispatch leaves its sums unfused, "
        "which larger ones have fused. *Apart*: the two losses, at the step where they differ most. Reasons are those "
        "of that commit: what it says no matmul makes is, here, the sum of several products, and is called so since."
    )
    told = (
        "What its handle reported: calls of torch's fused ops, one a site and step, and collectives that the compiler "
        "left as they were."
    )
    head = ["", "first loss", f"after {steps} steps", "on our ops", "apart"]
    return "\n\n".join([
        f"## A Llama of torch's parallel styles, {data['world']} x {data['device'].removeprefix('NVIDIA ')}", text,
        table(head, cells), told, table(["", "op", "how", "why"], sites),
    ])  # fmt: skip
