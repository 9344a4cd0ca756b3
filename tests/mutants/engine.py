"""Edits of Python text by its syntax tree, and modules loaded from edited text.

An edit is a pattern and what is done to the place where it matches::

    at("tilestream.core.loop:store_and_count", replace("Count(item)", "Add(item)"))
    at("tilestream_tools.verify.gpu_loop:fixup", delete("yield Write(item)"))

A pattern is Python text: one expression, or statements that follow each other in one block. In a pattern

- ``...`` stands for any expression; as the only argument of a call for any arguments; as a block for any statements;
- a name that begins with two underscores stands for any expression and can be used again in the replacement.

A pattern must match in as many places as the edit says (`Edit.count`, one by default), else `MatchError` is raised.
Text outside the edited places, comments and line numbers in front of them included, stays as it was.

`mutated` rebuilds functions of pure Python and leaves the classes of their module alone, so that a checker still
recognises the operations they yield. `code_of` gives the code of one edited function, for a test that runs it on
stand-ins. `load` executes whole modules anew, for kernels that Triton compiles. In each case ``inspect.getsource``
shows the edited text.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import importlib
import importlib.util
import itertools
import linecache
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

Operation = Literal["replace", "before", "after", "body"]


class MatchError(ValueError):
    """A pattern matches in more places than the edit says, or in fewer."""


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes
    ----------
    how
        What is done.
    find
        The pattern. Empty for ``"body"``, which concerns the function itself.
    put
        The new text.
    statements
        Whether the pattern is of statements even if it is one expression.
    count
        In how many places the pattern matches.
    nth
        Which of them is edited; None: each.
    module, functions
        Where: functions or methods (``"Ring.barriers"``) of a module; no functions: all of its text.
    """

    how: Operation
    find: str
    put: str = ""
    statements: bool = False
    count: int = 1
    nth: int | None = None
    module: str = ""
    functions: tuple[str, ...] = ()


def replace(find: str, put: str, count: int = 1, nth: int | None = None) -> Edit:
    """Put other text in the place of an expression or of statements."""
    return Edit("replace", find, put, not (_is_expression(find) and _is_expression(put)), count, nth)


def delete(find: str, count: int = 1, nth: int | None = None) -> Edit:
    """Delete statements."""
    return Edit("replace", find, "pass", True, count, nth)


def at(where: str, *edits: Edit) -> tuple[Edit, ...]:
    """Edits in ``"module:function"``; several functions of the module are separated by commas."""
    module, _, functions = where.partition(":")
    names = tuple(name.strip() for name in functions.split(",") if name.strip())
    return tuple(with_fields(edit, module=module, functions=names) for edit in edits)


# Text -----------------------------------------------------------------------------------------------------------------


def edited(text: str, edits: Iterable[Edit]) -> str:
    """``text`` with each edit made, one after the other.

    Raises
    ------
    MatchError
        If a pattern matches in another number of places than its edit says.
    """
    for edit in edits:
        text = _edited(text, edit)
    ast.parse(text)
    return text


class _Match(NamedTuple):
    nodes: tuple[Any, ...]
    names: dict[str, ast.AST]


class Text:
    """Text, its tree, and where a node begins and ends in it."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.lines = list(itertools.accumulate((len(line) for line in self.data.splitlines(True)), initial=0))

    def span(self, nodes: Sequence[Any]) -> tuple[int, int]:
        first, last = nodes[0], nodes[-1]
        begin = min([first, *getattr(first, "decorator_list", ())], key=lambda node: (node.lineno, node.col_offset))
        return self.lines[begin.lineno - 1] + begin.col_offset, self.lines[last.end_lineno - 1] + last.end_col_offset

    def source(self, nodes: Sequence[Any]) -> str:
        begin, end = self.span(nodes)
        return textwrap.dedent(" " * nodes[0].col_offset + self.data[begin:end].decode())

    def spliced(self, splices: list[tuple[int, int, str]]) -> str:
        data = self.data
        for begin, end, new in sorted(splices, reverse=True):
            data = data[:begin] + new.encode() + data[end:]
        return data.decode()


def _edited(text: str, edit: Edit) -> str:
    of = Text(text)
    scopes = [_definition(of.tree, name) for name in edit.functions] or [of.tree]
    if edit.how == "body":
        return of.spliced([_placed(of, "replace", _statements(scope), edit.put, True) for scope in scopes])
    found = _found(edit.find, scopes, edit.statements)
    if len(found) != edit.count:
        where = f"{edit.module}:{','.join(edit.functions)}" if edit.module else "the text"
        raise MatchError(f"{len(found)} places, not {edit.count}, of {where} match {edit.find!r}")
    splices = []
    for match in found if edit.nth is None else [found[edit.nth]]:
        new = _filled(edit.put, match.names, edit.statements)
        splices.append(_placed(of, edit.how, match.nodes, new, edit.statements))
    return of.spliced(splices)


def _statements(function: Any) -> list[ast.stmt]:
    """What a function does, behind its docstring."""
    has_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
    return list(function.body[1:] if has_docstring else function.body)


def _placed(of: Text, how: str, nodes: Sequence[Any], new: str, statements: bool) -> tuple[int, int, str]:
    begin, end = of.span(nodes)
    if not statements:
        return begin, end, new
    line = of.data.rfind(b"\n", 0, begin) + 1
    column = begin - line
    if of.data[line:begin].strip():
        raise MatchError(f"{of.source(nodes)!r} does not begin a line, so it cannot be edited as a statement")
    new = textwrap.indent(textwrap.dedent(new).strip("\n"), " " * column).strip()
    if how == "before":
        return begin, begin, f"{new}\n{' ' * column}"
    if how == "after":
        return end, end, f"\n{' ' * column}{new}"
    kept = of.data[begin:end].count(b"\n") - new.count("\n")
    return begin, end, new + "\n" * max(kept, 0)  # what follows keeps its line where it can


# Patterns -------------------------------------------------------------------------------------------------------------


def _parsed(pattern: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(pattern).strip("\n")).body


def _is_expression(text: str) -> bool:
    parsed = _parsed(text)
    return len(parsed) == 1 and isinstance(parsed[0], ast.Expr)


def _definition(tree: ast.AST, name: str) -> Any:
    """The function, method or class of a dotted name."""
    scope: Any = tree
    for part in name.split("."):
        own = [n for n in ast.walk(scope) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if len(own) != 1:
            raise MatchError(f"{len(own)} definitions, not one, are called {name!r}")
        scope = own[0]
    return scope


def _found(pattern: str, scopes: Sequence[Any], statements: bool) -> list[_Match]:
    parsed = _parsed(pattern)
    found: list[_Match] = []
    for node in itertools.chain.from_iterable(_walk(scope) for scope in scopes):
        if statements:
            for block in _blocks(node):
                for start in range(len(block) - len(parsed) + 1):
                    names: dict[str, ast.AST] = {}
                    window = block[start : start + len(parsed)]
                    if all(_same(p, n, names) for p, n in zip(parsed, window, strict=True)):
                        found.append(_Match(tuple(window), names))
        elif isinstance(node, ast.expr):
            names = {}
            if _same(parsed[0].value, node, names):  # type: ignore[attr-defined]
                found.append(_Match((node,), names))
    return sorted(found, key=lambda match: (match.nodes[0].lineno, match.nodes[0].col_offset))


def _walk(node: Any) -> Iterator[Any]:
    """As `ast.walk`, without what is in f-strings, whose places no tree tells."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _blocks(node: Any) -> Iterator[list[Any]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield block


def _is_any(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _same(pattern: Any, node: Any, names: dict[str, ast.AST]) -> bool:
    if isinstance(pattern, list):
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and _is_any(pattern[0].value):
            return bool(node)
        return len(pattern) == len(node) and all(_same(p, n, names) for p, n in zip(pattern, node, strict=True))
    if _is_any(pattern) and isinstance(node, ast.expr):
        return True
    if isinstance(pattern, ast.Name) and pattern.id.startswith("__") and isinstance(node, ast.expr):
        known = names.setdefault(pattern.id, node)
        return ast.unparse(known) == ast.unparse(node)
    if type(pattern) is not type(node):
        return False
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    skipped = {"ctx", "type_comment", "kind"}
    if isinstance(pattern, ast.Call) and len(pattern.args) == 1 and _is_any(pattern.args[0]) and not pattern.keywords:
        skipped |= {"args", "keywords"}
    return all(
        _same(getattr(pattern, field), getattr(node, field), names) for field in pattern._fields if field not in skipped
    )


class _Fill(ast.NodeTransformer):
    def __init__(self, names: dict[str, ast.AST]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.names[node.id]) if node.id in self.names else node


_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript)


def _filled(put: str, names: dict[str, ast.AST], statements: bool) -> str:
    parsed = _parsed(put)
    if names:
        put = "\n".join(ast.unparse(_Fill(names).visit(node)) for node in parsed)
    if statements or isinstance(parsed[0].value, _ATOMS):  # type: ignore[attr-defined]
        return put
    return f"({put.strip()})"


# Loading --------------------------------------------------------------------------------------------------------------

_numbers = itertools.count()


def source_of(module: str) -> str:
    """A module's text."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _remembered(text: str, module: str) -> str:
    """A file name under which `linecache`, and so `inspect`, has the text."""
    name = f"mutant-{next(_numbers)}/{module.rpartition('.')[2]}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    return name


def mutated(entry: str, edits: Sequence[Edit], uses: Iterable[Any] = (), name: str = "") -> Any:
    """A function or class, ``"module:name"``, of modules whose functions are edited.

    All functions of the modules concerned are rebuilt, so that they call each other's edited forms. Classes stay the
    ones they are, but those that are edited.

    Parameters
    ----------
    uses
        What the new text names beside what its module has.
    name
        What the result is called from now on.
    """
    home, _, wanted = entry.partition(":")
    spaces: dict[str, dict[str, Any]] = {}
    new: dict[int, Any] = {}
    for module in dict.fromkeys([home, *(edit.module for edit in edits)]):
        original = importlib.import_module(module)
        space = spaces[module] = vars(original) | {one.__name__: one for one in uses}
        for key, value in vars(original).items():
            if isinstance(value, FunctionType) and value.__module__ == module:
                space[key] = new[id(value)] = _rebuilt(value, space)
        own = [edit for edit in edits if edit.module == module]
        text = edited(source_of(module), own)
        file, tops = _remembered(text, module), {name.partition(".")[0] for edit in own for name in edit.functions}
        for node in ast.parse(text).body:
            if getattr(node, "name", None) in tops:
                flags = __future__.annotations.compiler_flag
                exec(compile(ast.Module([node], []), file, "exec", flags, True), space)
                new[id(getattr(original, node.name))] = space[node.name]  # type: ignore[attr-defined]
    for space in spaces.values():
        space |= {key: new[id(value)] for key, value in space.items() if id(value) in new}
    result = spaces[home][wanted]
    if name:
        result.__name__ = name
    return result


def _rebuilt(function: FunctionType, space: dict[str, Any]) -> FunctionType:
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__doc__, made.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    return made


def code_of(function: FunctionType, edits: Sequence[Edit]) -> CodeType:
    """A function's code as the edits make it; its own where they do not concern it."""
    own = tuple(edit for edit in edits if edit.module == function.__module__)
    if not any(function.__name__ in edit.functions for edit in own):
        return function.__code__
    return _codes(function.__module__, own)[function.__name__]


@functools.cache
def _codes(module: str, edits: tuple[Edit, ...]) -> dict[str, CodeType]:
    """Code of the functions of a module that are edited, by name; decorators are left out."""
    text = edited(source_of(module), edits)
    file, names = _remembered(text, module), {name for edit in edits for name in edit.functions}
    found: dict[str, CodeType] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            made = compile(ast.Module([node], []), file, "exec", __future__.annotations.compiler_flag, True)
            found[node.name] = next(code for code in made.co_consts if isinstance(code, CodeType))
    return found


def load(modules: Sequence[str], edits: Sequence[Edit]) -> dict[str, ModuleType]:
    """Modules executed anew from edited text; each imports the new ones of those before it."""
    stray = {edit.module for edit in edits} - set(modules)
    if stray:
        raise ValueError(f"edits of {', '.join(sorted(stray))}, which are not among the modules to load")
    made: dict[str, ModuleType] = {}
    kept = {name: importlib.import_module(name) for name in modules}
    parents = {name: sys.modules[name.rpartition(".")[0]] for name in modules}
    try:
        for name in modules:
            text = edited(source_of(name), [edit for edit in edits if edit.module == name])
            module = made[name] = ModuleType(name, kept[name].__doc__)
            module.__file__, module.__package__ = _remembered(text, name), name.rpartition(".")[0]
            sys.modules[name] = module
            setattr(parents[name], name.rpartition(".")[2], module)
            exec(compile(text, module.__file__, "exec", dont_inherit=True), vars(module))
    finally:
        for name, module in kept.items():
            sys.modules[name] = module
            setattr(parents[name], name.rpartition(".")[2], module)
    return made
