"""A section of a subject: what `run.py` can run. Neither torch nor Triton is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

SUBJECTS = (
    "gemm",
    "attention",
    "serving",
    "invariance",
    "arrival",
    "distributed",
    "contention",
    "cpu",
    "amd",
    "report",
)


class Section(NamedTuple):
    """What a name on the command line stands for.

    Attributes
    ----------
    call
        ``module:function`` below ``benchmarks``; the function is given the `Session`.
    what
        What is measured, in a line.
    seconds
        Time that the section needs, about; a budget is shared out in this proportion.
    usual
        Whether the section runs when none is named.
    gpus
        How many GPUs it needs at least; 0: none.
    nvidia
        Why it runs on NVIDIA GPUs only; empty if it runs on any GPU.
    tool
        It makes no record: the function is given the rest of the command line and may return an exit status.
    """

    call: str
    what: str = ""
    seconds: int = 60
    usual: bool = False
    gpus: int = 1
    nvidia: str = ""
    tool: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        return named(self.call)


def named(call: str) -> Any:
    """What ``module:name`` below ``benchmarks`` names."""
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)


def sections(subject: str) -> dict[str, Section]:
    """The sections of a subject. Names that begin with ``_`` are processes that other sections start."""
    found: dict[str, Section] = importlib.import_module(f"benchmarks.{subject}").SECTIONS
    return found
