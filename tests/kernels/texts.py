"""The text of kernels, bound to stand-ins: what the machines that run it as plain Python have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from mutants.engine import Edit, code_of


def structs_of(*modules: ModuleType) -> dict[str, Any]:
    """The named tuples that modules have, by name."""
    values = {name: value for module in modules for name, value in vars(module).items()}
    return {name: value for name, value in values.items() if isinstance(value, type) and issubclass(value, tuple)}


def constants_of(*modules: ModuleType) -> dict[str, Any]:
    """The values of the modules' constexprs, by name."""
    values = {name: value for module in modules for name, value in vars(module).items()}
    return {name: value.value for name, value in values.items() if type(value).__name__ == "constexpr"}


def jitted_of(*modules: ModuleType) -> Iterator[Any]:
    """The jitted functions that modules define."""
    for module in modules:
        for value in vars(module).values():
            if getattr(getattr(value, "fn", None), "__module__", "") == module.__name__:
                yield value


def bind(names: dict[str, Any], jitted: Iterable[Any], edits: Sequence[Edit] = ()) -> None:
    """Add functions that call what ``names`` has; those that have a stand-in there are left out."""
    stand_ins = set(names)
    for one in jitted:
        text = one.fn
        if text.__name__ not in stand_ins:
            names[text.__name__] = FunctionType(code_of(text, edits), names, text.__name__, text.__defaults__)
