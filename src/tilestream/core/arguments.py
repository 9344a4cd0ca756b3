"""Checks of arguments that every part of the package makes."""

from __future__ import annotations

from collections.abc import Container
from typing import TypeGuard


def is_whole(x: object) -> TypeGuard[int]:
    """Whether a value is an integer, of any library, and neither a bool nor a tensor."""
    return hasattr(type(x), "__index__") and not isinstance(x, bool) and not hasattr(x, "__len__")


def is_one_of(x: object, names: Container[object]) -> bool:
    """Whether a value is one of some names; an array is none, though it can be compared with them."""
    return not (hasattr(x, "__len__") and not isinstance(x, str)) and x in names
