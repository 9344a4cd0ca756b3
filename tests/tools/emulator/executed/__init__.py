"""The project's kernels, compiled for AMD and executed on the emulator at small sizes.

``python tests/tools/emulator/executed quick|all|NAME`` prints a JSON object a case: see `executed.engine`. It runs in a
process of its own, which compiles for a GPU that is not there.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[3]
sys.path[:0] = [str(_TESTS), str(_TESTS / "kernels"), str(_TESTS.parent / "src")]
