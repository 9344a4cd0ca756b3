"""Plans as they were recorded: a change of the cost model, of a table or of a rule moves the plans that it means to.

`recorded_plans.json` has, for each device and problem, the plan that is taken, with the seconds that are expected, and
a digest of all that was considered. Where a change is meant, make the file anew and say in the commit what moved:

    cd tests; PYTHONPATH=../src python -m plan.test_recorded_plans
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, fields, is_dataclass
from pathlib import Path

import pytest

from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.device import DeviceProperties
from tilestream.core.gpu_specs import GPU_SPECS, gpu_properties, named
from tilestream.plan import attention_planner, planner
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import plan_groups
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import cpu, cpu_attention, portable
from tilestream.plan.problem import GroupedProblem, Problem

RECORD = Path(__file__).with_name("recorded_plans.json")
DEVICES = {
    "cpu": DeviceProperties("a CPU", "cpu", 8, 64 * 4e9, 96e9, "made up"),
    **{name: named(name) for name in GPU_SPECS},
}
#: Of every kind of kernel one; the other devices plan what is dense and of 16 bits.
CHOSEN = ("cpu", "a100", "h100", "h100 by portable", "rtx5090", "mi300x by cdna", "mi355x by cdna", "mi300x", "b200")
BF16 = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
FP8 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
FNUZ = {"dtype": "float8_e4m3fnuz", "out_dtype": "bfloat16"}
ROWS, COLUMNS = Incoming(Chunks.uniform(4096, 512), pivot=3), Incoming(Chunks.uniform(3072, 256))
PROBLEMS = {
    "dense": Problem(4096, 4096, 4096, **BF16),
    "few rows": Problem(64, 7168, 2048, **BF16),
    "long K": Problem(1024, 1100, 16384, **BF16),
    "batches": Problem(384, 640, 512, batch=12, **BF16),
    "rows arrive": Problem(4096, 3072, 1024, rows=ROWS, **BF16),
    "a batch's rows arrive": Problem(1024, 3072, 1024, batch=4, rows=ROWS, **BF16),
    "both arrive": Problem(4096, 3072, 2048, rows=ROWS, columns=COLUMNS, **BF16),
    "rows are published": Problem(4096, 3072, 2048, publishes=ROWS, **BF16),
    "float32": Problem(1024, 1536, 2048),
    "float32, unaligned": Problem(1023, 1537, 2049, aligned=False, no_tma="odd"),
    "tf32": Problem(2048, 1536, 4096, tf32=True),
    "tf32, batches": Problem(1024, 1100, 8192, batch=2, tf32=True),
    "16 bits, unaligned": Problem(1023, 1537, 2049, aligned=False, no_tma="odd", **BF16),
    "8 bits": Problem(2048, 3072, 4096, scales="rowwise", **FP8),
    "8 bits, promoted": Problem(2048, 3072, 4096, fast_accum=False, plain=False, **FP8),
    "8 bits, unaligned": Problem(1023, 1537, 2049, aligned=False, no_tma="odd", **FP8),
    "8 bits, fnuz": Problem(2048, 3072, 4096, **FNUZ),
    "8 bits, fnuz, unaligned": Problem(1023, 1537, 2049, aligned=False, no_tma="odd", **FNUZ),
}
HEADS = {"batch": 2, "heads_q": 16, "heads_kv": 4}
ATTENTION = {
    "causal": AttentionProblem(**HEADS, seqlen_q=4096, seqlen_k=4096, head_dim=128, causal=True),
    "one row": AttentionProblem(1, 1, 1, seqlen_q=1, seqlen_k=512, head_dim=64),
    "one query": AttentionProblem(**HEADS, seqlen_q=1, seqlen_k=32768, head_dim=128, lengths=True),
    "a window": AttentionProblem(**HEADS, seqlen_q=2048, seqlen_k=4096, head_dim=64, window=(512, 64)),
    "capped": AttentionProblem(**HEADS, seqlen_q=2048, seqlen_k=2048, head_dim=128, softcap=0.5),
    "packed": AttentionProblem(
        **HEADS, seqlen_q=2048, seqlen_k=2048, head_dim=96, varlen=True, tokens_q=3000, tokens_k=3000, causal=True
    ),
    "pages": AttentionProblem(**HEADS, seqlen_q=4, seqlen_k=8192, head_dim=128, page_size=64, pages=300, lengths=True),
    "pages of 8": AttentionProblem(**HEADS, seqlen_q=4, seqlen_k=8192, head_dim=128, page_size=8, pages=2400),
    "8 bits": AttentionProblem(
        **HEADS, seqlen_q=1024, seqlen_k=1024, head_dim=128, dtype="float8_e4m3fn", scaled=True, softcap=30.0
    ),
    "wide heads": AttentionProblem(**HEADS, seqlen_q=1024, seqlen_k=1024, head_dim=256, head_dim_v=192),
    "float32": AttentionProblem(**HEADS, seqlen_q=1024, seqlen_k=1024, head_dim=64, dtype="float32"),
    "keys arrive": AttentionProblem(
        **HEADS, seqlen_q=2048, seqlen_k=2048, head_dim=128, keys=Incoming(Chunks.uniform(4096, 512)), causal=True
    ),
}
GROUPS = {
    "groups of rows": GroupedProblem(8192, 2048, 1024, groups=16, **BF16),
    "as many groups as Hopper finds": GroupedProblem(8192, 2048, 1024, groups=256, **BF16),
    "a group more": GroupedProblem(8192, 2048, 1024, groups=257, **BF16),
    "groups of K": GroupedProblem(2048, 1024, 8192, groups=8, along="k", **BF16),
}


def text_of(value: object) -> str:
    """A plan's field, numbers to four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text_of, value))})"
    return text_of(astuple(value)) if is_dataclass(value) else str(value)


def digest(found: list) -> str:
    every = sorted(map(text_of, found))
    return f"{len(every)} considered, {hashlib.sha1(repr(every).encode()).hexdigest()[:8]}"


def line(one) -> str:
    """What is taken."""
    schedule = one.schedule
    raster = schedule.raster
    left_out = ("variant", "block", "schedule", "predicted", "problem", "device", "backend", "why", "refused")
    given = {x.name: text_of(getattr(one, x.name)) for x in fields(one) if x.name not in left_out}
    rest = [f"{name} {value}" for name, value in given.items() if name != "realigned" or value]
    return (
        f"{one.backend} {one.variant} {'x'.join(map(str, one.block))} {schedule.kind}, {schedule.workers} workers, "
        f"{schedule.queues} queues by {schedule.split}, {schedule.num_shares} shares, batch {schedule.first_batch}, "
        f"{raster.order} by {raster.group}, {', '.join(rest)}, {one.predicted:.4g} s"
    )


def planned(device: DeviceProperties, problem: object, backend: str | None) -> list[str]:
    """The plan, and a digest of all candidates; or why there is none."""
    try:
        if isinstance(problem, GroupedProblem):
            return [line(plan_groups(problem, device=device, backend=backend))]
        if isinstance(problem, AttentionProblem):
            made = attention_planner.plan_attention(problem, device=device, backend=backend)
            return [line(made), digest(of_attention(device, problem, backend))]
        made = plan_problem(problem, device=device, backend=backend, consult=False)
        return [line(made), digest(of_product(device, problem, backend))]
    except NotImplementedError as error:
        return [f"refused: {error}"]


def of_product(device: DeviceProperties, problem: Problem, backend: str | None) -> list:
    kinds, workers = ("dynamic", "stream_k"), device.workers
    if device.backend == "cpu":
        return list(cpu.candidates(problem, device, workers, kinds=kinds, inline=True, forced=Asked().forced))
    found = planner._on_gpu(problem, device, workers, Asked(backend=backend), kinds)[1]
    return [*found, *portable.tiles(problem, device)]


def of_attention(device: DeviceProperties, problem: AttentionProblem, backend: str | None) -> list:
    if device.backend == "cpu":
        return list(cpu_attention.candidates(problem, device, device.workers, kind="dynamic", forced=False))
    return list(attention_planner._on_gpu(problem, device, device.workers, "dynamic", backend, None, False)[1])


def cases() -> dict[str, tuple[DeviceProperties, object, str | None]]:
    """Device, problem and backend of each row."""
    attention = {f"attention, {name}": one for name, one in ATTENTION.items()}
    everywhere = {"dense": PROBLEMS["dense"], "float32": PROBLEMS["float32"], "causal": ATTENTION["causal"]}
    found = {
        f"{device}: {name}": (DEVICES[device], one, None) for device in DEVICES for name, one in everywhere.items()
    }
    for chosen in CHOSEN:
        device, _, backend = chosen.partition(" by ")
        for name, one in {**PROBLEMS, **({} if backend == "cdna" else GROUPS), **attention}.items():
            found[f"{chosen}: {name}"] = DEVICES[device], one, backend or None
    return found


CASES = cases()


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def figures() -> dict[str, list[str]]:
    """What plans go by: of each device, and the columns of a strip by those of a tile."""
    known = DEVICES | {"an unknown GPU": gpu_properties("a GPU", "sm_70", 80, 1e9, 1e12, 98304)}
    tiles = 16, 64, 128, 256
    return {
        f"{name}, figures": [text_of(one), text_of([portable.strip(one.arch, columns, True) for columns in tiles])]
        for name, one in known.items()
    }


def test_all_cases_are_recorded(recorded):
    assert recorded.keys() == {*CASES, *figures()}


def test_the_figures_are_as_recorded(recorded):
    assert {name: recorded[name] for name in figures()} == figures()


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_as_recorded(recorded, name):
    assert planned(*CASES[name]) == recorded[name]


if __name__ == "__main__":
    rows = {name: planned(*CASES[name]) for name in CASES} | figures()
    made = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    RECORD.write_text("{\n" + made + "\n}\n", encoding="utf-8")
