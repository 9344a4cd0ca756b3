"""Records: what a run measured, as JSON in ``results/<device>/``. Neither torch nor Triton is imported to read them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Data = dict[str, Any]
#: Devices whose records have a folder of that name, in the order in which pages show them.
DEVICES = ("h100", "h200")


def folder_of(device: str) -> str:
    """The folder of a device's records, from what torch calls the device: ``h100``, ``h200``, ``no_gpu``."""
    return next((name for name in DEVICES if name.upper() in device), "_".join(device.lower().split()))


def load(path: Path) -> Data:
    """The record at ``path``; ``folder`` and ``stem`` say where it lies."""
    data: Data = json.loads(path.read_text(encoding="utf-8"))
    data |= {"folder": path.parent.name, "stem": path.stem}
    return data


def paths(results: Path, pattern: str) -> list[Path]:
    """The files of all devices whose names match: an H100's first, then an H200's, then the others'."""

    def place(path: Path) -> tuple[int, str, str]:
        device = path.parent.name
        return (DEVICES.index(device) if device in DEVICES else len(DEVICES)), device, path.name

    return sorted(results.glob(f"*/{pattern}"), key=place)


def records(results: Path, pattern: str) -> list[Data]:
    """The records whose names match, that have rows."""
    return [data for path in paths(results, f"{pattern}.json") if (data := load(path))["rows"]]


def text_of(data: Data) -> str:
    rows = ",\n".join(f"  {json.dumps(row)}" for row in data["rows"])
    head = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def about(name: str, cpu: bool = False) -> Data:
    """What ran where. COMMIT names the commit where the tree is a copy without its history."""
    import torch

    import tilestream as ts
    from tilestream.plan import cpu_properties

    if cpu:
        found = cpu_properties()
        device: Data = {"device": found.name, "cores": found.workers, "torch_threads": torch.get_num_threads()}
    else:
        device = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"}
    return {
        "name": name, **device, "python": platform.python_version(), "torch": torch.__version__,
        "triton": _triton_version(), "tilestream": ts.__version__, "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"), "dtype": "float32" if cpu else "bfloat16",
    }  # fmt: skip


class Record:
    """A record that is written again with each row, so that a run that is killed leaves what it has measured.

    Parameters
    ----------
    name
        Of the file, without its ending.
    out
        The record lies in a folder of this one that is named by the device.
    resume
        What to begin with: see `resume`. It may lie where this one will.
    """

    def __init__(
        self, name: str, out: Path, *, cpu: bool = False, resume: Path | None = None, **extra: Any
    ) -> None:  # fmt: skip
        found = about(name, cpu)
        self.path = out / ("cpu" if cpu else folder_of(found["device"])) / f"{name}.json"
        self.data: Data = {**found, **extra, "failures": [], "missing": [], "rows": []}
        #: What the rows of the run that was cut off are known by.
        self.earlier: set[str] = set()
        if resume is not None:
            self.resume(resume)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def rows(self) -> list[Row]:
        """The rows so far."""
        rows: list[Row] = self.data["rows"]
        return rows

    def add(self, row: Row) -> None:
        """Append a row, and write."""
        self.rows.append(row)
        self.write()

    def resume(self, path: Path) -> None:
        """Begin with the rows of a run that was cut off.

        Parameters
        ----------
        path
            Its record, or the folder that it wrote records to; with none of this name there, nothing is begun with.

        Raises
        ------
        ValueError
            If it is the record of something else, or of another device or version: rows of one record are of one.
        """
        if path.is_dir():
            path = path / self.path.parent.name / self.path.name
            if not path.exists():
                return
        earlier = load(path)
        for key in ("name", "device", "torch", "triton", "tilestream", "commit"):
            if earlier[key] != self.data[key]:
                raise ValueError(
                    f"--resume {path}: its {key} is {earlier[key]!r}, this run's {self.data[key]!r}: measure anew"
                )
        self.rows.extend(earlier["rows"])
        self.earlier = {row["item"] for row in earlier["rows"] if "item" in row}

    def fail(self, what: str) -> None:
        """Note what went wrong."""
        self.data["failures"].append(what[:300])

    def write(self) -> None:
        """Write the whole file, or leave the old one."""
        new = self.path.with_suffix(".tmp")
        new.write_text(text_of(self.data), encoding="utf-8")
        new.replace(self.path)


def _triton_version() -> str:
    try:
        import triton
    except ImportError:  # a dry run on a machine without Triton
        return "none"
    return str(triton.__version__)


def _commit() -> str:
    if named := os.environ.get("COMMIT"):
        return named
    return _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "src") else "")


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:  # a machine without git
        return ""
    return run.stdout.strip()
