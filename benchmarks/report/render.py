"""Make ``docs/performance.md`` and its plots from the records in ``benchmarks/results/``. Figures are never typed.

python benchmarks/render.py            # writes
python benchmarks/render.py --check    # exit code 1 if the page is not what the records say
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.core.paths import DOCS, IMAGES, RESULTS, ROOT
from benchmarks.report import arrival as render_arrival
from benchmarks.report import attention as render_attention
from benchmarks.report import contention as render_neighbours
from benchmarks.report import distributed as render_ranks
from benchmarks.report import gemm as render_gemm
from benchmarks.report.gemm import table

PAGE = DOCS / "performance.md"

HEAD = """# Performance

Made by `benchmarks/render.py` from the records in `benchmarks/results/`: tables, plots and means are never typed. Why a
comparison was lost, and what comes next, is written by hand in `benchmarks/render_*.py`; the figures in such words are
fields of the records. Ratios are of medians of interleaved runs in one process; a ratio above 1 means that tilestream
is faster. Absolute times belong to the device named beside them. Lost comparisons stand here like won ones.
"""


def where(data: dict[str, Any]) -> str:
    """On what the record was made."""
    device = f"{data['device']}, {data['cores']} cores, torch {data['torch']}"
    return f"{device}, {data['dtype']}, commit `{data['commit']}`, {data['date']}"


def matmul(data: dict[str, Any]) -> str:
    """The section for ``cpu_matmul.json``."""
    kinds = list(data["rows"][0]["ratio"])
    rows = [
        [
            "x".join(map(str, row["shape"])),
            f"{row['ms']['torch.mm']:.2f}",
            *(f"{row['ratio'][kind]:.3f}" for kind in kinds),
        ]
        for row in data["rows"]
    ]
    return "\n\n".join(
        [
            "## CPU, everything arrived",
            f"Against `torch.mm` with the same number of threads ({where(data)}). `auto` is what the plan picks by "
            "itself; the others force the persistent workers. Calls come after others whose OpenMP threads spin on for "
            "a while, which costs the workers the more the shorter the call.",
            table(["M x N x K", "torch.mm, ms", *(f"{kind}, ratio" for kind in kinds)], rows),
        ]
    )


def stream(data: dict[str, Any]) -> str:
    """The section for ``cpu_stream.json``."""
    rows = [
        [
            str(row["shape"][1]),
            *(f"{row['ms'][name]:.0f}" for name in ("read", "multiply", "in turn", "streamed")),
            f"{row['speedup']:.2f}",
            f"{row['hidden']:.0%}",
            f"{row['of_bound']:.3f}",
        ]
        for row in data["rows"]
    ]
    head = [
        "N",
        "read, ms",
        "multiply, ms",
        "in turn, ms",
        "streamed, ms",
        "in turn / streamed",
        "hidden",
        "of the bound",
    ]
    m, _, k = data["rows"][0]["shape"]
    return "\n\n".join(
        [
            "## CPU, input read cold from disk",
            f"`[{m}, {k}] @ [{k}, N]`, {data['bytes'] / 2**20:.0f} MiB read from a cold file while it is "
            f"multiplied ({where(data)}). "
            "*Hidden* is the time won, as a share of the shorter of reading and multiplying. The *bound* is "
            "1.15 x max(read, multiply + CPU time of the read / cores) + the first chunk.",
            table(head, rows),
            "![Streamed against reading first and multiplying then](images/cpu_stream.png)",
        ]
    )


def first_call(data: dict[str, Any]) -> str:
    """The section for ``cpu_first_call.json``: what of a first call is Python."""
    before = data["before"]["seconds"]
    rows = [[row["step"], row["whose"], f"{before[row['step']]:.2f}", f"{row['seconds']:.2f}"] for row in data["rows"]]
    whole = f"{sum(before.values()):.2f}", f"{sum(row['seconds'] for row in data['rows']):.2f}"
    call = data["rows"][-1]
    text = (
        "What a fresh process does at its first call whose kernel lies in Triton's cache, taken apart where there is "
        f"no GPU, torch imported before: seconds, the medians of {data['processes']} processes "
        f"({data['device']}, {data['cores']} cores, torch {data['torch']}, Triton {data['triton']}, commit "
        f"`{data['commit']}`, {data['date']}; *before*: commit `{data['before']['commit']}`). What was ours to cut: an "
        f"op's first call asked torch to check its shapes, which imports sympy ({before[call['step']]:.2f} s, now "
        f"{call['seconds']:.2f}). The records of GPUs further down are of before. What is left is Triton's import and "
        "the hash of all its files, by which it asks its cache. Next: that hash on a thread, beside the imports."
    )
    return "\n\n".join([
        "## A process's first call, taken apart",
        text,
        table(["step", "whose", "before, s", "now, s"], [*rows, ["all", "", *whole]]),
    ])  # fmt: skip


def gpu(data: dict[str, Any]) -> str:
    """The section for ``gpu_matmul.json``, or another GPU's."""
    kinds = list(data["rows"][0]["of_cublas"])
    rows = [
        [
            f"{row['shape']} {row['layout']}",
            f"{row['tflops']['cublas']:.0f}",
            f"{row['tflops']['auto']:.0f}",
            *(f"{row['of_cublas'][kind]:.3f}" for kind in kinds),
        ]
        for row in data["rows"]
    ]
    host = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in data["host_us"].items())
    return "\n\n".join(
        [
            f"## GPU, the portable Triton kernel, {data['device']}",
            f"Against cuBLAS, {data['dtype']}, L2 flushed ({data['device']}, torch {data['torch']}, Triton "
            f"{data['triton']}, commit `{data['commit']}`, {data['date']}). *nt*: B as it lies in a Linear weight. "
            "`auto` takes the queue; on an idle GPU `static` is faster. This kernel is the fallback for what the "
            "Hopper kernel refuses.",
            table(["M x N x K", "cuBLAS, TFLOP/s", "auto, TFLOP/s", *(f"{kind}, ratio" for kind in kinds)], rows),
            f"Host microseconds of a call: {host}.",
        ]
    )


def gpu_stream(data: dict[str, Any]) -> str:
    """The section for ``gpu_stream.json``, or another GPU's."""
    ways = ("copy", "multiply", "torch.mm", "in turn", "by chunks", "streamed")
    rows = [
        [
            row["shape"],
            *(f"{row['ms'][name]:.2f}" for name in ways),
            f"{row['of_larger']:.3f}",
            f"{1 / row['of_in_turn']:.3f}",
            f"{row['ms']['by chunks'] / row['ms']['streamed']:.3f}",
        ]
        for row in data["rows"]
    ]
    head = [
        "M x N x K",
        *(f"{name}, ms" for name in ways),
        "streamed / the larger",
        "in turn / streamed",
        "by chunks / streamed",
    ]
    links = [row["copy_gb_per_s"] for row in data["rows"]]
    return "\n\n".join(
        [
            f"## GPU, input copied from pinned memory, {data['device']}",
            f"{data['dtype']}, copied chunk by chunk at {min(links):.0f} to {max(links):.0f} GB/s while it is "
            f"multiplied ({data['device']}, torch {data['torch']}, Triton {data['triton']}, commit "
            f"`{data['commit']}`, {data['date']}); the host's clock, from an idle GPU to an idle GPU. *The larger* is "
            "max(copy, multiply): no overlap goes below it. *In turn*: one copy, then `torch.mm`, in one stream. *By "
            "chunks*: the same overlap written by hand, one `torch.mm` and one event a chunk.",
            table(head, rows),
        ]
    )


def gpu_stream_copies(data: dict[str, Any]) -> str:
    """The section for ``gpu_stream_copies_h200.json``: who makes the copies."""
    own = "by the kernel"
    counts = sorted({int(name.split()[3]) for row in data["rows"] for name in row["ms"] if name.startswith(f"{own},")})
    ways = {"copy": "copy", "multiply": "multiply", "engine": "streamed", "kernel": own}
    ways |= {f"{count} copiers": f"{own}, {count} copiers" for count in counts}
    rows = [
        [
            row["shape"], row["plan"].split()[0], row["copies"].split()[6],
            *(f"{row['ms'][way]:.2f}" if way in row["ms"] else "" for way in ways.values()),
            f"{row['of_larger']:.3f}", f"{row['of_larger_by_the_kernel']:.3f}",
        ]
        for row in data["rows"]
    ]  # fmt: skip
    head = ["M x N x K", "kernel", "its copiers", *(f"{name}, ms" for name in ways)]
    note = f" Its rows are {data['note']}." if "note" in data else ""
    return "\n\n".join(
        [
            f"## GPU, input copied from pinned memory by the matmul itself, {data['device']}",
            "As above. *Engine*: copies by a copy engine beside the kernel. *Kernel*: by the kernel's own copy items, "
            f"with as many copiers as its plan has, or as named ({data['device']}, torch {data['torch']}, Triton "
            f"{data['triton']}, commit `{data['commit']}`, {data['date']}).{note}",
            table([*head, "engine / the larger", "kernel / the larger"], rows),
        ]
    )


def plot_stream(data: dict[str, Any]) -> None:
    """Streamed beside in turn, and the longer of its two parts."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    widths = [str(row["shape"][1]) for row in data["rows"]]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    place = range(len(widths))
    read, multiply, streamed = ([row["ms"][name] for row in data["rows"]] for name in ("read", "multiply", "streamed"))
    axes.bar([x - 0.2 for x in place], read, 0.38, label="read", color="#9db4c0")
    axes.bar([x - 0.2 for x in place], multiply, 0.38, bottom=read, label="then multiply", color="#5c6b73")
    axes.bar([x + 0.2 for x in place], streamed, 0.38, label="streamed", color="#e09f3e")
    for x, row in zip(place, data["rows"], strict=True):
        longer = max(row["ms"]["read"], row["ms"]["multiply"])
        axes.hlines(longer, x, x + 0.4, color="black", linewidth=1.5, label="the longer of the two" if x == 0 else None)
    axes.set_xticks(list(place), widths)
    axes.set_xlabel("N: columns of the weight")
    axes.set_ylabel("ms")
    axes.set_title(f"256 MiB read cold and multiplied, {data['device']}, {data['cores']} cores", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / "cpu_stream.png", dpi=110)
    plt.close(figure)


def page() -> str:
    """The whole page."""
    sections = [HEAD]
    for name, section in (
        ("cpu_matmul", matmul),
        ("cpu_stream", stream),
        ("cpu_first_call", first_call),
        ("", None),
        ("gpu_matmul", gpu),
        ("gpu_matmul_h200", gpu),
        ("gpu_stream", gpu_stream),
        ("gpu_stream_h200", gpu_stream),
        ("gpu_stream_copies_h200", gpu_stream_copies),
    ):
        path = RESULTS / f"{name}.json"
        if section is None:
            sections += render_gemm.sections(RESULTS) + render_neighbours.sections(RESULTS)
            sections += render_attention.sections(RESULTS)
        elif path.exists():
            sections.append(section(json.loads(path.read_text(encoding="utf-8"))))
    sections += render_arrival.sections(RESULTS) + render_ranks.sections(RESULTS)
    return "\n\n".join(part.strip() for part in sections) + "\n"


def main() -> None:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE.relative_to(ROOT)} is not what benchmarks/results/ says: run python benchmarks/render.py")
        return
    PAGE.write_text(page(), encoding="utf-8")
    path = RESULTS / "cpu_stream.json"
    if path.exists():
        plot_stream(json.loads(path.read_text(encoding="utf-8")))
    render_gemm.plots(RESULTS, IMAGES)
    render_neighbours.plots(RESULTS, IMAGES)
    render_attention.plots(RESULTS, IMAGES)
    for timelines in (render_attention.TIMELINES, render_ranks.TIMELINES, render_ranks.LANES):
        timelines.plots(RESULTS, IMAGES)
