"""What plans take from the layers above them, which the package registers: no plan imports those.

Each hook is a function that imports what it calls, since a plan by itself needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tilestream.core.device import DeviceProperties


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("tilestream.plan: nothing is registered to do this; import tilestream")


@dataclass
class Hooks:
    """The functions."""

    run_plan: Callable[..., Any] = _missing  # `Plan.run`, with the plan and its arguments
    #: The properties of the GPU with an index; None: of the current one.
    cuda_properties: Callable[[int | None], DeviceProperties] = _missing
    allows_tf32: Callable[[], bool] = _missing  # whether float32 operands may be rounded to tf32


hooks = Hooks()


def register(**functions: Callable[..., Any]) -> None:
    """Set hooks by name."""
    assert set(functions) <= {field.name for field in fields(Hooks)}, functions
    for name, function in functions.items():
        setattr(hooks, name, function)
