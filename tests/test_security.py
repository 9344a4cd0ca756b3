"""What SECURITY.md says of formats and files, held over the whole source: no pickles, and caches written whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
#: What runs what it reads, or may: a module to import, or a call by its last names.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "dbm"}
CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "eval"}
#: What writes a file: methods, and `open` with such a mode.
WRITERS, MODES = {"write_text", "write_bytes", "tofile"}, set("wax+")


def name_of(call: ast.Call) -> str:
    """``torch.load`` of ``torch.load(x)``; the method's name alone behind what is no name."""
    parts, node = [], call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def runs_what_it_reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if name_of(node) in CALLS:
                yield name_of(node)
            if any(one.arg == "allow_pickle" and ast.unparse(one.value) != "False" for one in node.keywords):
                yield "allow_pickle"


def writes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = name_of(node).rpartition(".")[2]
            modes = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            modes += [ast.literal_eval(one.value) for one in node.keywords if one.arg == "mode"]
            if name in WRITERS or (name == "open" and any(set(mode) & MODES for mode in modes if len(mode) < 4)):
                yield name


def found(look, folder: Path) -> dict[str, list[str]]:
    """What ``look`` finds in the files of a folder."""
    every = {
        path.relative_to(SRC).as_posix(): list(look(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(folder.rglob("*.py"))
    }
    return {path: what for path, what in every.items() if what}


def test_nothing_is_read_by_a_format_that_runs_code():
    assert not found(runs_what_it_reads, SRC)


def test_the_library_writes_files_whole_or_not_at_all():
    """All by `tilestream.core.whole_file`, which gives private rights: see tests/core/test_whole_file.py."""
    assert not found(writes, SRC / "tilestream")


@pytest.mark.parametrize(
    ("look", "text", "what"),
    [
        (runs_what_it_reads, "import pickle", "pickle"), (runs_what_it_reads, "from marshal import loads", "marshal"),
        (runs_what_it_reads, "x = torch.load(path)", "torch.load"), (runs_what_it_reads, "eval(text)", "eval"),
        (runs_what_it_reads, "np.load(path, allow_pickle=True)", "allow_pickle"),
        (writes, "path.write_text('')", "write_text"), (writes, "open(path, 'wb')", "open"),
        (writes, "path.open(mode='a')", "open"), (writes, "(a / b).write_bytes(x)", "write_bytes"),
    ],
)  # fmt: skip
def test_a_line_that_does_is_found(look, text, what):
    assert list(look(ast.parse(text))) == [what]


def test_a_line_that_does_not_is_not():
    fine = "np.load(path, allow_pickle=False); path.open('rb'); open('a.txt'); model.eval(); json.loads(text)"
    assert not [*runs_what_it_reads(ast.parse(fine)), *writes(ast.parse(fine))]


def test_the_page_names_what_is_trusted():
    """Files, peers, the environment, caches, and how to report: issue by issue what a reader looks for."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for word in ("## Report", "peers", "TILESTREAM_*", "files for `stream_in`", "## Caches on disk", "pickles"):
        assert word in text, word
