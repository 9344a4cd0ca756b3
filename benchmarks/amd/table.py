"""The table of ``docs/amd.md``: what the compiler made of each kernel for AMD, and what peers publish. Nothing is run.

python benchmarks/amd_table.py record            # compiles, no GPU: benchmarks/results/amd_isa.json
python benchmarks/amd_table.py render            # puts the tables into docs/amd.md
python benchmarks/amd_table.py render --check    # exit code 1 if the page is not what the record says
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.core.paths import DOCS, RESULTS
from benchmarks.report.gemm import table

RECORD = RESULTS / "amd_isa.json"
PAGE = DOCS / "amd.md"
#: What stands between these lines of the page is made here.
MARKS = {name: (f"<!-- {name}: benchmarks/amd_table.py -->", f"<!-- end of {name} -->") for name in ("ours", "theirs")}


class Published(NamedTuple):
    """What somebody says of a kernel of theirs; ``shape`` of a matmul is M x N x K.

    Attributes
    ----------
    device
        By its name in `tilestream.plan.known`.
    compiled, busy
        Registers and LDS; the share of the main loop's cycles that the matrix units work, measured: where published.
    """

    who: str
    device: str
    dtype: str
    shape: str
    tflops: float
    source: str
    compiled: str = ""
    busy: str = ""


_GLUON = "[gfx950-gluon-tutorials](https://github.com/ROCm/gfx950-gluon-tutorials), kernels/gemm"
_NEAR_PEAK = "[ROCm blogs](https://rocm.blogs.amd.com/software-tools-optimization/gluon-gemm-tutorial/README.html)"
_MAF = "[ROCm blogs](https://rocm.blogs.amd.com/software-tools-optimization/measuring-max-achievable-flops-part2/README.html)"
_HK = "[HipKittens](https://github.com/HazyResearch/HipKittens), analysis/mi350x_data_to_log.json"
_TLX = "[facebookexperimental/triton #2891](https://github.com/facebookexperimental/triton/pull/2891); GPU not named"
PUBLISHED = (
    Published("hipBLASLt", "mi300x", "bfloat16", "4096x4864x32896", 708, _MAF),
    Published("AMD, Gluon, 8 waves", "mi300x", "bfloat16", "4096x4864x4160", 651, f"{_GLUON}/gfx942",
              "224 VGPR, 64 KiB LDS", "86.5 %"),
    Published("AMD, Gluon, 4 waves", "mi300x", "bfloat16", "4096x4864x4160", 586, f"{_GLUON}/gfx942",
              "256 + 256 VGPR, 64 KiB LDS", "69.7 %"),
    Published("TLX", "mi300x", "bfloat16", "8192x8192x8192", 514, _TLX),
    Published("torch (aten)", "mi300x", "bfloat16", "8192x8192x8192", 635.3, _TLX),
    Published("TLX", "mi300x", "bfloat16", "4096x4096x4096", 502.6, _TLX),
    Published("AMD, Gluon, v9", "mi355x", "float16", "4096x4096x8192", 1489, _NEAR_PEAK, "384 VGPR, 132 KiB LDS",
              "98.75 %"),
    Published("AMD, Gluon, v9", "mi355x", "fp8", "4096x4096x16384", 3257, _NEAR_PEAK, "", "99.72 %"),
    Published("AITER", "mi350x", "bfloat16", "8192x8192x8192", 1188, _HK),
    Published("HipKittens", "mi350x", "bfloat16", "8192x8192x8192", 1068, _HK),
    Published("torch", "mi350x", "bfloat16", "8192x8192x8192", 1116.7, _HK),
    Published("HipKittens", "mi350x", "bfloat16", "4096x4096x4096", 1075.3, _HK),
    Published("AITER", "mi350x", "bfloat16", "4096x4096x4096", 605.8, _HK),
)  # fmt: skip
_HK_ATTENTION = "[HipKittens](https://github.com/HazyResearch/HipKittens), analysis/attn/fwd/plot.py"
_HEADS = "16 x 16 heads of 128, "
#: Attention. That file's numbers on an MI350X with a mask and without one seem to have changed places; AITER's two are
#: within 3 % of each other.
PUBLISHED_ATTENTION = (
    Published("Triton", "mi355x", "bfloat16", _HEADS + "4096", 944, _HK_ATTENTION),
    Published("Composable Kernel", "mi355x", "bfloat16", _HEADS + "4096", 816, _HK_ATTENTION),
    Published("Composable Kernel", "mi355x", "bfloat16", _HEADS + "16384", 914, _HK_ATTENTION),
    Published("Composable Kernel", "mi355x", "bfloat16", _HEADS + "4096, causal", 745, _HK_ATTENTION),
    Published("AITER", "mi350x", "bfloat16", _HEADS + "4096", 953.31, _HK_ATTENTION),
)  # fmt: skip


# The record -----------------------------------------------------------------------------------------------------------


def questions() -> Iterator[tuple[str, Any]]:
    """``(kernel, question)``: of each kernel what its plan picks, of the portable one the other large tiles, too."""
    from tilestream.isa.kernels import KERNELS, Question
    from tilestream.plan.portable import CDNA, fp8_units

    for arch in ("gfx942", "gfx950"):
        for name, entry in KERNELS.items():
            if arch not in entry.archs:
                continue
            eight = fp8_units(arch)[0]
            if name == "cdna-attention":
                for k in (64, 128, 256):
                    yield name, Question(arch, 4096, 4096, k)
                continue
            if name != "portable-gemm":
                yield name, Question(arch)
                if name == "cdna-gemm":
                    yield name, Question(arch, dtype=eight)
                continue
            for kind, dtype in (("16-bit", "bfloat16"), ("8-bit", eight), ("float32", "float32")):
                for row in CDNA[arch].get(kind, ())[: 3 if kind == "16-bit" else 1]:
                    yield name, Question(arch, dtype=dtype, tile=(row.block_m, row.block_n))


def record() -> dict[str, Any]:
    """Compile all of it, each in a process of its own."""
    from benchmarks.core.harness import gpu_about
    from tilestream.isa.report import of

    about = {key: value for key, value in gpu_about("amd_isa").items() if key not in ("device", "dtype", "date")}
    rows = []
    for name, question in questions():
        made = asdict(of(name, question))
        rows.append({"dtype": question.dtype, "k": question.k, **made})
        print(name, question.arch, question.dtype, made["tile"], made["cycles"].get("share"), flush=True)
    return {**about, "date": time.strftime("%Y-%m-%d"), "run": False, "rows": rows}


def written(data: dict[str, Any]) -> str:
    """A record as text, a row a line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in data["rows"])
    head = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


# The page -------------------------------------------------------------------------------------------------------------


def ours(data: dict[str, Any]) -> str:
    """The table of the record."""
    head = [
        "kernel", "arch", "tile, stages", "VGPR + AGPR", "spilled", "LDS", "waves a SIMD", "matrix instructions",
        "loads", "LDS reads, writes", "barriers", "waits", "all", "cycles: floor, estimate", "of the peak",
    ]  # fmt: skip
    rows = [_row(row) for row in data["rows"]]
    made = f"Triton {data['triton']}, commit `{data['commit']}`, {data['date']}"
    text = (
        "Compiled for 8192 x 8192 x 8192, attention for 16 sequences of 4096 in 16 heads of so many columns, and read, "
        f"**not run** ({made}). Instructions are those of one wave in an iteration of the main loop, attention's "
        "without a mask; cycles are a compute unit's, the estimate's share is of the peak at the same clock. The clock "
        "under load is half to two thirds of the data sheet's, so a share of 60 % is not 60 % of the data sheet's peak."
    )
    return f"{text}\n\n{table(head, rows)}"


def _row(row: dict[str, Any]) -> list[str]:
    loop, cycles, registers = row["loop"], row["cycles"], row["registers"]
    counts = loop["counts"]

    def sum_of(*kinds: str) -> str:
        found = {kind: n for kind, n in counts.items() if kind.rpartition(" ")[0] in kinds}
        return ", ".join(f"{n} x {kind.rpartition(' ')[2]} bit" for kind, n in found.items()) or "0"

    direct = sum_of("load_to_lds")
    loads = f"{direct}, to LDS" if direct != "0" else sum_of("load")
    floor = max(cycles["floor"].values())
    return [
        f"{row['kernel']}, {row['dtype']}" + (f", {row['k']} columns" if row["kernel"].endswith("attention") else ""),
        row["arch"],
        f"{'x'.join(map(str, row['tile']))}, {row['stages']}",
        f"{registers['vgpr'] - registers['agpr']} + {registers['agpr']}",
        str(sum(row["spilled"].values())),
        f"{row['shared'] / 1024:.0f} KiB",
        str(row["occupancy"]["waves"]),
        ", ".join(f"{n} x {shape}" for shape, n in loop["mfma"].items()),
        loads,
        f"{sum_of('lds_read')}; {sum_of('lds_write')}",
        str(counts.get("barrier", 0)),
        str(counts.get("wait", 0)),
        str(loop["instructions"]),
        f"{floor:.0f} ({cycles['binds']}), {cycles['estimate']:.0f}",
        f"{cycles['share']:.0%}",
    ]


def theirs() -> str:
    """What others publish, measured."""
    from tilestream.plan.known import named

    rows = []
    for one in PUBLISHED + PUBLISHED_ATTENTION:
        device = named(one.device)
        assert device is not None
        share = one.tflops * 1e12 / device.peak(one.dtype, device.workers)
        rows.append(
            [
                one.who, device.name.removeprefix("AMD Instinct "), one.dtype, one.shape, f"{one.tflops:.0f}",
                f"{share:.0%}", one.busy, one.compiled, one.source,
            ]
        )  # fmt: skip
    head = [
        "kernel", "GPU", "dtype", "M x N x K, or attention", "TFLOP/s", "of the data sheet", "matrix units busy",
        "compiled", "source",
    ]  # fmt: skip
    return "Measured by others, as they publish it; ours has no such column.\n\n" + table(head, rows)


def page(text: str, data: dict[str, Any]) -> str:
    """The page with its tables made anew."""
    for name, made in (("ours", ours(data)), ("theirs", theirs())):
        begin, end = MARKS[name]
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name} has no lines {begin} and {end}")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """As asked for."""
    what = sys.argv[1:]
    if what == ["record"]:
        RECORD.write_text(written(record()), encoding="utf-8")
        return 0
    if what not in (["render"], ["render", "--check"]):
        raise SystemExit(__doc__)
    before = PAGE.read_text(encoding="utf-8")
    after = page(before, json.loads(RECORD.read_text(encoding="utf-8")))
    if what[1:]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0
