"""What the user may choose, and the device that it means. Imports torch only where a GPU may be meant."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Settings:
    """How a bench is run. ``n`` None: the bench's choice; the others None: `tilestream`'s defaults."""

    n: int | None = None
    repeats: int = 5
    workers: int | None = None
    schedule: str = "auto"
    rows_per_chunk: int | None = None


def is_gpu(device: str, *, file: bool) -> bool:
    """Whether ``--device`` means the GPU.

    Parameters
    ----------
    file
        Whether a file was asked for: then ``auto`` is the CPU, which multiplies it while it is read.

    Raises
    ------
    ValueError
        If there is no such device, or not here.
    """
    if device not in DEVICES:
        raise ValueError(f"--device {device}: it is one of {', '.join(DEVICES)}")
    if device == "cpu" or (device == "auto" and file):
        return False
    from tilestream.cli.doctor import backend

    found = backend("portable")
    if found != "yes" and device == "cuda":
        raise ValueError(f"--device cuda: {found.removeprefix('no: ')}; --device cpu streams from the disk to the CPU")
    return found == "yes"
