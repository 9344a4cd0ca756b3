"""The code blocks of a Markdown page, and how to run them.

The words behind a fence's language say what becomes of its block. ``python`` runs, in one namespace a page; where it
begins with ``>>>`` it is a doctest. ``python file=NAME`` is written into the page's folder. ``sh run`` runs there in
bash. ``gpu`` runs where there is a CUDA device, ``needs=PACKAGE`` where that is installed; a ``fragment`` is compiled.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: The scripts by their modules: those on PATH may be another installation's.
_SCRIPTS = """
tilestream() { "$PYTHON" -m tilestream "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run "$@"; }
"""
_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words behind that, its text and its first line's number."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def at(self) -> str:
        return f"{self.page.name}:{self.line}"

    def word(self, name: str) -> str | None:
        """``"demo.py"`` of ``file=demo.py``."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), None)


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page that name a language, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(page, found[1], tuple(found[2].split()), found[3], line)


def runs(block: Block) -> bool:
    """Whether the block is run, on some machine."""
    return "fragment" not in block.words and (block.language == "python" or "run" in block.words)


def left_out(block: Block) -> str:
    """Why this machine cannot run the block; empty where it can."""
    import torch

    package = block.word("needs")
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{block.at}: needs {package}"
    return f"{block.at}: needs a GPU" if "gpu" in block.words and not torch.cuda.is_available() else ""


def run_page(page: Path, folder: Path) -> tuple[int, list[str]]:
    """Run a page's blocks in ``folder``, which is the current one; how many ran, and why others did not."""
    names: dict[str, Any] = {"__name__": "__main__"}
    ran, skipped = 0, []
    for block in blocks(page):
        file = block.word("file")
        if not runs(block):
            continue
        if why := left_out(block):
            skipped.append(why)
        elif file is not None:
            (folder / file).write_text(block.text, encoding="utf-8")
        else:
            _run(block, names, folder)
            ran += 1
    return ran, skipped


def _run(block: Block, names: dict[str, Any], folder: Path) -> None:
    if block.language == "python" and block.text.startswith(">>>"):
        _run_doctest(block, names)
    elif block.language == "python":
        # Blank lines in front, so that a traceback's line is the page's.
        exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)
    else:
        _run_shell(block, folder)


def _run_doctest(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, block.at, str(block.page), block.line - 1)
    test.globs = names  # not a copy: later blocks see what this one binds
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_DOCTEST, verbose=False)
    failed = runner.run(test, out=said.append, clear_globs=False).failed
    assert not failed, "".join(said)


def _run_shell(block: Block, folder: Path) -> None:
    """With this interpreter's commands and the package that this process has imported."""
    import tilestream

    source = str(Path(tilestream.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _SCRIPTS + block.text], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.at}:\n{block.text}\n{done.stdout}\n{done.stderr}"
