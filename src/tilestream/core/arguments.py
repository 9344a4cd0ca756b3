"""Checks of arguments for all parts of the package."""

from __future__ import annotations

from collections.abc import Container
from typing import TypeGuard


def is_whole(x: object) -> TypeGuard[int]:
    """Whether ``x`` is an integer of any library; a bool or a tensor is not."""
    return hasattr(type(x), "__index__") and not isinstance(x, bool) and not hasattr(x, "__len__")


def is_one_of(x: object, names: Container[object]) -> bool:
    """Whether ``x`` is one of some names. An array is not, although it can be compared with them."""
    return not (hasattr(x, "__len__") and not isinstance(x, str)) and x in names
