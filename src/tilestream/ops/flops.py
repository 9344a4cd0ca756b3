"""FLOP formulas of the registered ops. They are registered when torch's counter is imported.

Importing the counter imports Triton, so this module does not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[Any, Callable[..., int]]] = []


def register_flop_formula(ops: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the formula of an op, or of several, as torch's decorator of this name."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        if _COUNTER in sys.modules:
            # import_module waits for a thread that is importing it; sys.modules may hold it half done.
            importlib.import_module(_COUNTER).register_flop_formula(ops)(formula)
        else:
            _formulas.append((ops, formula))
        return formula

    return register


class _Finder(MetaPathFinder):
    """Hooks the import of torch's counter, and registers the formulas after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _COUNTER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        for ops, formula in _formulas:
            module.register_flop_formula(ops)(formula)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)  # the source, for tracebacks and `inspect`


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _Finder())
