"""Build hook: a wheel holds the native call path (csrc/) if it can be compiled here, and goes without it otherwise.

``TILESTREAM_BUILD_NATIVE=0`` leaves it out. With ``TILESTREAM_BUILD_NATIVE=1`` a build without it fails;
``TILESTREAM_BUILD_NATIVE=aarch64`` (or ``x86_64``) builds a wheel for that kind of machine, or fails.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ENVIRONMENT = "TILESTREAM_BUILD_NATIVE"
PRINT_TORCH = "import importlib.util as u; found = u.find_spec('torch'); print(found.origin if found else '', end='')"


class NativeHook(BuildHookInterface[Any]):
    """Compiles the library into a folder that lasts as long as the build, and gives the wheel its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it; an editable install uses what ``make native`` puts into the source tree."""
        asked, native_build = os.environ.get(ENVIRONMENT, ""), _native_build(Path(self.root))
        if asked not in ("", "0", "1", *native_build.MACHINES):
            raise ValueError(
                f"{ENVIRONMENT}={asked}: must be 0 (without), 1 (required), {' or '.join(native_build.MACHINES)} "
                "(required, for such machines), or unset (if it can be built)"
            )
        if version == "editable" or asked == "0":
            return
        machine = asked if asked in native_build.MACHINES else native_build.MACHINE
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name) / native_build.LIBRARY.name
        why = "not on Linux"
        if sys.platform == "linux":
            why = native_build.build(library, "-s", torch=_torch(native_build), machine=machine)
        if why and asked:
            raise RuntimeError(f"the native call path cannot be built: {why}")
        if why:
            self.app.display_warning(f"without the native call path: {why}")
            return
        build_data["force_include"][str(library)] = f"tilestream/_native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{native_build.platform_tag(library.read_bytes(), machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete what was built."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def _native_build(root: Path) -> ModuleType:
    """`tilestream_tools.native_build`, without the package."""
    spec = importlib.util.spec_from_file_location("native_build", root / "src/tilestream_tools/native_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torch(native_build: ModuleType) -> Path | None:
    """The folder of torch: where the build can import it, or where pip runs.

    An isolated build does not see the torch of the environment that it builds for; ``-I`` leaves the isolation, which
    pip makes by variables of the environment. Any torch's headers give the same library.
    """
    found: Path | None = native_build.torch_folder()
    if found is not None:
        return found
    asked = subprocess.run([sys.executable, "-I", "-c", PRINT_TORCH], capture_output=True, text=True, check=False)
    return Path(asked.stdout).parent if asked.stdout else None
