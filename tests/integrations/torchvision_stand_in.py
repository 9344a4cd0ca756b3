"""torchvision, which SGLang imports for its image models: a package index has no build for the CPU, so a stand-in."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from unittest import mock

for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional", ".io", ".ops"):
    module = mock.MagicMock(__spec__=ModuleSpec(f"torchvision{name}", None), __path__=[], __version__="0.29.0")
    sys.modules.setdefault(f"torchvision{name}", module)
