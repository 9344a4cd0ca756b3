"""What `tilestream report` and ``python -m tilestream_tools.report`` share: the options' words, and what is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilestream_tools.report.measure import Tell

OPTIONS = {
    "report": "Measure this machine, and write what was found as one HTML file, with the JSON beside it.",
    "gemm": "M,N,K, then any of a dtype, linear|nn|nt|tn|tt, bias, an activation; repeatable.",
    "attention": "B,S,H,Hkv,D, then any of a dtype, causal, bhsd, keys=N; repeatable.",
    "shapes": "A file with a line a call: 'gemm M,N,K...' or 'attention B,S,H,Hkv,D...'.",
    "device": "cpu, cuda, or auto: the GPU where torch and Triton have one.",
    "quick": "Fewer of the default calls, fewer samples, a smaller stream.",
    "seconds": "No call's measurement begins later; default: 180, with --quick 60.",
    "out": "The page; the JSON lies beside it.",
    "source": "Make the page of a report's JSON again; nothing is measured.",
}


def make(
    *, gemm: Sequence[str], attention: Sequence[str], shapes: Path | None, device: str, quick: bool,
    seconds: float | None, out: Path, source: Path | None, tell: Tell,
) -> tuple[dict[str, Any], Path, Path]:  # fmt: skip
    """Measure, or read what was measured; write the page. The data, and the two files.

    Raises
    ------
    ValueError, OSError
        If an option is not usable; before anything is measured.
    """
    if out.suffix != ".html":
        raise ValueError(f"--out {out}: the page ends with .html; its JSON lies beside it")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--seconds {seconds:g}: it must be a positive number")
    from tilestream_tools.report import measure, page
    from tilestream_tools.warm.calls import Grouped, described

    if source is not None:
        data = page.read(source)
    else:
        found = described(None, gemm, attention, shapes, "1", "", None)
        calls = [call for call in found if not isinstance(call, Grouped)]
        if len(calls) < len(found):
            raise ValueError(f"{shapes}: it has grouped products, of which no report is made: leave them away")
        data = measure.report(
            calls, device=device, quick=quick, seconds=seconds, tell=tell, folder=out.absolute().parent
        )  # fmt: skip
    return data, *page.write(data, out)
