"""The tables of ``docs/amd.md``: what the compiler made for AMD, what the emulator executed, and what others publish.

python benchmarks/run.py amd table record            # compiles, no GPU: benchmarks/results/amd/isa.json
python benchmarks/run.py amd table render            # puts the tables into docs/amd.md
python benchmarks/run.py amd table render --check    # status 1 if the page is not what the records say

What was executed is recorded by ``python tests/tools/emulator/executed all --seeds 3 --landing late,random,early
--record benchmarks/results/amd/emulated.json``, and the same with ``faults --seeds 8``; which tiles add alike by
``python tests/tools/emulator/executed alike --record benchmarks/results/amd/alike.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.amd.alike import alike
from benchmarks.core.paths import DOCS, RESULTS
from benchmarks.core.records import Data, Row, about, load, text_of
from benchmarks.report.notes import Notes
from benchmarks.report.tables import columns

NOTES = Notes("amd")
RECORD = RESULTS / "amd" / "isa.json"
#: What others publish, measured: devices as `tilestream.core.gpu_specs` names them.
PUBLISHED = RESULTS / "amd" / "published.json"
#: What was executed on the emulator: `tests/tools/emulator/executed`.
EMULATED = RESULTS / "amd" / "emulated.json"
#: The same cases as another Triton compiles them; and the most instructions a second of a record, on a faster machine.
EMULATED_TOO, RATE = (EMULATED.with_name(f"emulated_{name}.json") for name in ("triton36", "rate"))
PAGE = DOCS / "amd.md"
#: The text between these lines of the page is made here.
MARKS = {
    name: (f"<!-- {name}: made by run.py amd table -->", f"<!-- end of {name} -->")
    for name in ("executed", "alike", "faults", "ours", "theirs")
}


# The record -----------------------------------------------------------------------------------------------------------


def questions() -> Iterator[tuple[str, Any]]:
    """``(kernel, request)``: each kernel with its plan's tile; the portable one with the other large tiles, too."""
    from tilestream.plan.policy.portable import CDNA, fp8_units
    from tilestream_tools.isa.kernels import KERNELS, CompileRequest

    for arch in ("gfx942", "gfx950"):
        for name, entry in KERNELS.items():
            if arch not in entry.archs:
                continue
            eight = fp8_units(arch)[0]
            if name.endswith("-attention"):
                for k in (64, 128, 256):
                    yield name, CompileRequest(arch, 4096, 4096, k)
                continue
            if name != "portable-gemm":
                yield name, CompileRequest(arch)
                if name == "cdna-gemm":
                    yield name, CompileRequest(arch, dtype=eight)
                continue
            for kind, dtype in (("16-bit", "bfloat16"), ("8-bit", eight), ("float32", "float32")):
                for row in CDNA[arch].get(kind, ())[: 3 if kind == "16-bit" else 1]:
                    yield name, CompileRequest(arch, dtype=dtype, tile=(row.block_m, row.block_n))


def record() -> dict[str, Any]:
    """Compile all of it, each in a process of its own."""
    from tilestream_tools.isa.report import of

    made_by = {key: value for key, value in about("isa").items() if key not in ("device", "dtype")}
    rows = []
    for name, request in questions():
        made = asdict(of(name, request))
        rows.append({"dtype": request.dtype, "k": request.k, **made})
        print(name, request.arch, request.dtype, made["tile"], made["cycles"].get("share"), flush=True)
    return {**made_by, "run": False, "rows": rows}


# The page -------------------------------------------------------------------------------------------------------------


def ours(data: Data) -> str:
    return NOTES("ours", **data) + "\n\n" + columns(map(_counted, data["rows"]), {
        "kernel": "{kernel}, {dtype}{wide}", "arch": "{arch}", "tile, stages": "{tile}, {stages}",
        "VGPR + AGPR": "{vgpr} + {registers[agpr]}", "spilled": "{spilled}", "LDS": "{kib:.0f} KiB",
        "waves a SIMD": "{occupancy[waves]}", "matrix instructions": "{mfma}", "loads": "{loads}",
        "LDS reads, writes": "{reads}; {writes}", "barriers": "{barriers}", "waits": "{waits}",
        "all": "{loop[instructions]}",
        "cycles: floor, estimate": "{floor:.0f} ({cycles[binds]}), {cycles[estimate]:.0f}",
        "of the peak": "{cycles[share]:.0%}",
    })  # fmt: skip


def _counted(row: Row) -> Row:
    """A row with its sums."""
    loop, registers, counts = row["loop"], row["registers"], row["loop"]["counts"]

    def sum_of(kind: str) -> str:
        found = {name: n for name, n in counts.items() if name.rpartition(" ")[0] == kind}
        return ", ".join(f"{n} x {name.rpartition(' ')[2]} bit" for name, n in found.items()) or "0"

    direct = sum_of("load_to_lds")
    return row | {
        "wide": f", {row['k']} columns" if row["kernel"].endswith("attention") else "",
        "tile": "x".join(map(str, row["tile"])), "vgpr": registers["vgpr"] - registers["agpr"],
        "spilled": sum(row["spilled"].values()), "kib": row["shared"] / 1024,
        "mfma": ", ".join(f"{n} x {shape}" for shape, n in loop["mfma"].items()),
        "loads": f"{direct}, to LDS" if direct != "0" else sum_of("load"), "reads": sum_of("lds_read"),
        "writes": sum_of("lds_write"), "barriers": counts.get("barrier", 0), "waits": counts.get("wait", 0),
        "floor": max(row["cycles"]["floor"].values()),
    }  # fmt: skip


def executed() -> str:
    """By kernel and architecture: the cases, and how many of their orders were right."""
    record = load(EMULATED)
    rows = []
    for kernel, arch in dict.fromkeys((row["kernel"], row["arch"]) for row in record["rows"]):
        of_it = [row for row in record["rows"] if (row["kernel"], row["arch"]) == (kernel, arch)]
        sums = {key: sum(row[key] for row in of_it) for key in ("orders", "right", "instructions")}
        rows.append({"kernel": kernel, "arch": arch, "cases": "; ".join(row["name"] for row in of_it), **sums})
    figures = {key: sum(row[key] for row in record["rows"]) for key in ("instructions", "seconds", "orders", "right")}
    rate = figures["instructions"] / figures["seconds"]
    other, fastest = load(EMULATED_TOO), load(RATE)
    about_it = NOTES(
        "executed", **record, **figures, count=len(record["rows"]), rate=rate, other=other["triton"],
        others=sum(row["orders"] for row in other["rows"]), also=sum(row["right"] for row in other["rows"]),
        **{key: fastest[key] for key in ("instructions_per_second", "cases", "commit", "date")},
    )  # fmt: skip
    return about_it + "\n\n" + columns(rows, {
        "kernel": "{kernel}", "arch": "{arch}", "cases": "{cases}", "orders": "{orders}", "right": "{right}",
        "instructions": "{instructions:,}",
    })  # fmt: skip


def faults() -> str:
    """By kind: the faults that were seeded into machine code, and those that were found."""
    rows = load(EMULATED)["faults"]
    tried, found = (sum(row[key] for row in rows) for key in ("tried", "found"))
    heads = ("tried", "found", "by a check", "by numbers", "by no end")
    harmless = [{"fault": row["fault"], **one} for row in rows for one in row["harmless"]]
    about_it = NOTES("faults", tried=tried, found=found, share=found / tried, harmless=len(harmless))
    parts = [about_it, columns(rows, {"fault": "{fault}", **{head: f"{{{head}}}" for head in heads}})]
    missed = [{"fault": row["fault"], **one} for row in rows for one in row["missed"]]
    if missed:
        parts.append(columns(missed, {"missed": "{fault}", "instruction": "`{line}`", "of": "`{place}`"}))
    parts.append(
        columns(harmless, {"harmless": "{fault}", "instruction": "`{line}`", "of": "`{place}`", "why": "{why}"})
    )
    return "\n\n".join(parts)


def theirs() -> str:
    from tilestream.core.gpu_specs import named

    rows = []
    for row in load(PUBLISHED)["rows"]:
        device = named(row["device"])
        assert device is not None
        share = row["tflops"] * 1e12 / device.peak(row["dtype"], device.workers)
        ours = {f"model_{backend}": modelled(row, backend) for backend in ("portable", "cdna")}
        rows.append(row | ours | {"share": share, "gpu": device.name.removeprefix("AMD Instinct ")})
    return NOTES("theirs") + "\n\n" + columns(rows, {
        "kernel": "{who}", "GPU": "{gpu}", "dtype": "{dtype}", "M x N x K, or attention": "{shape}",
        "TFLOP/s": "{tflops:.0f}", "of the data sheet": "{share:.0%}",
        "our model: portable": "{model_portable}", "CDNA": "{model_cdna}", "matrix units busy": "{busy}",
        "compiled": "{compiled}", "source": "{source}",
    })  # fmt: skip


def modelled(row: Row, backend: str) -> str:
    """TFLOP/s that the cost model expects of our kernel on a row's problem; ``-`` where the row names none."""
    import tilestream as ts

    how = {"dtype": "float8_e4m3fn" if row["dtype"] == "fp8" else row["dtype"], "device": row["device"]}
    product = re.fullmatch(r"(\d+)x(\d+)x(\d+)", row["shape"])
    heads = re.fullmatch(r"(\d+) x (\d+) heads of (\d+), (\d+)(, causal)?", row["shape"])
    made: Any = None
    if product is not None:
        made = ts.plan(*map(int, product.groups()), layout="nt", backend=backend, **how)
    elif heads is not None:
        batch, count, columns, rows = map(int, heads.groups()[:4])
        made = ts.attention_plan(
            rows, batch=batch, heads_q=count, head_dim=columns, causal=bool(heads[5]), backend=backend, **how
        )
    return "-" if made is None else f"{made.floor.operations / made.predicted / 1e12:.0f}"


def page(text: str, data: Data) -> str:
    """The page with its tables made again."""
    tables = {"executed": executed(), "alike": alike(), "faults": faults(), "ours": ours(data), "theirs": theirs()}
    for name, made in tables.items():
        begin, end = MARKS[name]
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name} has no lines {begin} and {end}")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: list[str]) -> int:
    if arguments == ["record"]:
        RECORD.write_text(text_of(record()), encoding="utf-8")
        return 0
    if arguments not in (["render"], ["render", "--check"]):
        raise SystemExit(__doc__)
    before = PAGE.read_text(encoding="utf-8")
    after = page(before, load(RECORD))
    if arguments[1:]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0
