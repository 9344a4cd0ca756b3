"""The functions of higher layers that plans call. The package registers them, so plans do not import those layers.

A hook imports its dependencies when it is called, because planning needs neither torch nor a GPU.
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
    """The registered functions."""

    run_plan: Callable[..., Any] = _missing  # implements `Plan.run`, with the plan as first argument
    #: The properties of the GPU with an index; None means the current GPU.
    cuda_properties: Callable[[int | None], DeviceProperties] = _missing
    allows_tf32: Callable[[], bool] = _missing  # whether float32 operands may be rounded to tf32


hooks = Hooks()


def register(**functions: Callable[..., Any]) -> None:
    """Set hooks by name."""
    assert set(functions) <= {field.name for field in fields(Hooks)}, functions
    for name, function in functions.items():
        setattr(hooks, name, function)
