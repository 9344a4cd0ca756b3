"""The examples, which lie elsewhere in a checkout than in an installed package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parent
#: Where the example lies: in an installed package, and in a checkout.
_PLACES = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


def example(name: str) -> ModuleType:
    """The module of an example that is installed with the package."""
    module = f"tilestream_tools.examples.{name}"
    if module not in sys.modules:
        path = next((place / f"{name}.py" for place in _PLACES if (place / f"{name}.py").is_file()), None)
        if path is None:
            raise ImportError(f"examples/{name}.py is not installed: install tilestream again, or run it in a checkout")
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        spec.loader.exec_module(found)
    return sys.modules[module]
