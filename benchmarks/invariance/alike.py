"""Which ways to compute a row give it the same bits: the table that the plan's classes are derived from.

Each process of a core runs its share of `ways` (the kernels are compiled there, side by side), and writes a digest of
the bits that each way gave each place of the pool's rows. The record has a row a way: per K the first way of its group
with the same bits (``like``), and whether the same rows had the same bits at every place (``places``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.core.paths import command
from benchmarks.core.session import Session

RECORD = "invariance_alike"


def share(arguments: list[str]) -> int:
    """A process: its share of the ways, each written to a file of its own when it is done; until the time is over."""
    import torch

    from benchmarks.invariance import ways

    folder, what, index, count, seconds = arguments
    end = time.monotonic() + float(seconds)
    torch.set_grad_enabled(False)
    every = list({"products": ways.products, "attention": ways.attentions}[what]())
    for number in range(int(index), len(every), int(count)):
        if time.monotonic() > end:
            break
        found = _of_way(every[number], Path(folder) / f"{number:04}.pt")
        path = Path(folder) / f"{number:04}.json"
        path.with_suffix(".tmp").write_text(json.dumps(found))
        path.with_suffix(".tmp").replace(path)
    return 0


def _of_way(way: Any, kept: Path) -> dict[str, Any]:
    """What a way gives: digests of its bits, and at which places the pool's rows differ; the rows are ``kept``."""
    import torch

    from benchmarks.invariance.ways import PLACES

    found: dict[str, Any] = {"group": way.group, "way": way.name, "bits": {}, "places": {}, "failures": []}
    answers: dict[str, torch.Tensor] = {}
    for k in way.inputs:
        base: Any = None
        try:
            for place, rows in way.run(k):
                if way.group.startswith("attention"):
                    answers[place] = rows.cpu()
                    continue
                if base is None:
                    base, answers = rows.clone(), {str(k): rows.cpu()}
                    found["bits"][str(k)] = digest(base)
                    found["places"][str(k)] = []
                elif not torch.equal(rows, PLACES[place](base)):
                    found["places"][str(k)].append(place)
                if rows.isnan().any():
                    raise AssertionError(f"{place}: NaN")
            torch.cuda.synchronize()
        except Exception as error:
            found["failures"].append(f"{k}: {type(error).__name__}: {error}"[:300])
    torch.save(answers, kept)
    return found


def digest(x: Any) -> str:
    """A digest of a tensor's bits."""
    import torch

    return hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a way: the parts of attention's ways become one, and each is compared with the first of its group."""
    ways: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        one = ways.setdefault((row["group"], row["way"]), row | {"answers": {}, "failures": []})
        one["answers"] |= row["answers"]
        one["failures"] = one["failures"] + row["failures"]
    first: dict[tuple[str, str, str], str] = {}
    of_group: dict[str, dict[str, Any]] = {}
    for (group, way), row in ways.items():
        answers, bits = row.pop("answers"), row.pop("bits")
        if group.startswith("attention") and answers:
            of_place = answers
            base = answers = {"all": next(iter(answers.values()))}
            bits = {name: digest(x) for name, x in base.items()}
            row["places"] = {"all": [name for name, x in of_place.items() if share_of_others(x, base["all"])]}
            row["seen"] = list(of_place)
        row["like"] = {k: first.setdefault((group, k, one), way) for k, one in bits.items()}
        whole = of_group.setdefault(group, answers)
        row["differ"] = {k: share_of_others(x, whole[k]) for k, x in answers.items() if k in whole}
    return list(ways.values())


def share_of_others(x: Any, y: Any) -> float:
    """The share of numbers that differ, of those that both have."""
    both = ~(x.isnan() | y.isnan())
    return round(float((x != y)[both].double().mean()), 6) if both.any() else 0.0


def alike(session: Session) -> None:
    """All ways, of products and of attention, in as many processes as there are cores."""
    import torch

    record = session.record(RECORD, dtype="as each row says")
    for what, part in (("products", 0.45), ("attention", 0.95)):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            _run(Path(folder), what, part * session.left)
            found = [
                json.loads(path.read_text()) | {"answers": torch.load(path.with_suffix(".pt"))}
                for path in sorted(Path(folder).glob("*.json"))
            ]
        for row in joined(found):
            record.rows.append(row)
            if row["failures"]:
                record.data["failures"].append({"what": f"{row['group']}: {row['way']}", "error": row["failures"]})
        record.data[f"{what}_seconds"] = round(time.monotonic() - begin, 1)
        record.data[f"{what}_calls"] = len(found)
        record.write()


def _run(folder: Path, what: str, seconds: float) -> None:
    """The processes, which end themselves; those that do not are ended after a while."""
    count = min(os.cpu_count() or 1, 16)
    end = time.monotonic() + seconds
    running = [
        subprocess.Popen(command("invariance", "_alike", str(folder), what, str(i), str(count), str(0.85 * seconds)))
        for i in range(count)
    ]
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.1))
        if process.poll() is None:
            process.kill()
            process.wait()
