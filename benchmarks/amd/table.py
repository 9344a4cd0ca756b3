"""The tables of ``docs/amd.md``: what the compiler made of each kernel for AMD, and what others publish.

python benchmarks/run.py amd table record            # compiles, no GPU: benchmarks/results/amd/isa.json
python benchmarks/run.py amd table render            # puts the tables into docs/amd.md
python benchmarks/run.py amd table render --check    # status 1 if the page is not what the records say
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.core.paths import DOCS, RESULTS
from benchmarks.core.records import about, load, text_of
from benchmarks.report.tables import table

RECORD = RESULTS / "amd" / "isa.json"
#: What others publish, measured: devices as `tilestream.plan.known` names them.
PUBLISHED = RESULTS / "amd" / "published.json"
PAGE = DOCS / "amd.md"
#: What stands between these lines of the page is made here.
MARKS = {name: (f"<!-- {name}: made by run.py amd table -->", f"<!-- end of {name} -->") for name in ("ours", "theirs")}


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
    from tilestream.isa.report import of

    made_by = {key: value for key, value in about("isa").items() if key not in ("device", "dtype")}
    rows = []
    for name, question in questions():
        made = asdict(of(name, question))
        rows.append({"dtype": question.dtype, "k": question.k, **made})
        print(name, question.arch, question.dtype, made["tile"], made["cycles"].get("share"), flush=True)
    return {**made_by, "run": False, "rows": rows}


# The page -------------------------------------------------------------------------------------------------------------


def ours(data: dict[str, Any]) -> str:
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
    from tilestream.plan.known import named

    rows = []
    for one in load(PUBLISHED)["rows"]:
        device = named(one["device"])
        assert device is not None
        share = one["tflops"] * 1e12 / device.peak(one["dtype"], device.workers)
        rows.append([
            one["who"], device.name.removeprefix("AMD Instinct "), one["dtype"], one["shape"], f"{one['tflops']:.0f}",
            f"{share:.0%}", one["busy"], one["compiled"], one["source"],
        ])  # fmt: skip
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
