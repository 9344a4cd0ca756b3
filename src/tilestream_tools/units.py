"""Numbers with units, and errors, as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def milliseconds(seconds: float) -> str:
    """A time, always in ms so that times compare at a glance."""
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.3f}"


def one_line(error: BaseException) -> str:
    """The error's message as one line, with the file's name first where it is about a file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError):
        package = "triton" if error.name == "triton" else "'tilestream[cli]'"
        return f"{error.name} is missing: pip install {package}"
    return " ".join(str(error).split()) or type(error).__name__


def duration(seconds: float) -> str:
    """A time with its unit, in three digits: ``286 us``, ``3.16 ms``, ``1.25 s``."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if abs(seconds) * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def count(number: int, what: str) -> str:
    """``1 worker``, ``132 workers``."""
    return f"{number} {what}{'s' * (number != 1)}"
