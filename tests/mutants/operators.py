"""Mutants that are drawn: every place of a module at which an operator changes one thing.

An operator is a function of a node of the syntax tree that gives what may stand in its place. `sites` lists the places
of a module; `draw` picks some, evenly by operator, by a hash of a seed and of the place's key. So a change of one file
leaves the mutants of the others as they are, and most of its own.

Left out are docstrings, annotations, decorators, messages (what is raised, warned or asserted, f-strings) and functions
that only describe.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mutants.engine import Text

#: What stands in the place of a node.
Changes = Iterator[ast.AST]

_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_OTHERS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
_ORDERS = {"acquire": "relaxed", "release": "relaxed", "acq_rel": "relaxed", "sys": "gpu", "gpu": "cta"}
_FENCES = (
    ("fence.proxy.async.global; ", ""), ("wait_group 0", "wait_group.read 0"), (".acquire", ".relaxed"),
    (".release", ".relaxed"), (".sys", ".gpu"),
)  # fmt: skip
_KEY = re.compile(r"(^|_)(key|keys|signature|decision|hash)(_|$)")
_SILENT = ("__repr__", "__str__", "explain", "describe", "draw")


def comparison(node: Any) -> Changes:
    """One comparison for its neighbour: < for <=, == for !=."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield _with(node, ops=[_COMPARISONS[type(node.ops[0])](), *node.ops[1:]])


def off_by_one(node: Any) -> Changes:
    """A bound of a comparison, of a range or of a slice that is one more."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        yield _with(node, comparators=[*node.comparators[:-1], _more(node.comparators[-1])])
    elif isinstance(node, ast.Call) and _name(node.func) == "range" and not node.keywords:
        at = 0 if len(node.args) == 1 else 1
        yield _with(node, args=[*node.args[:at], _more(node.args[at]), *node.args[at + 1 :]])


def arithmetic(node: Any) -> Changes:
    """One operation for another: + for -, * for +, min for max."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield _with(node, op=_ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Call) and _name(node.func) in _OTHERS:
        func = copy.deepcopy(node.func)
        setattr(func, "id" if isinstance(func, ast.Name) else "attr", _OTHERS[_name(node.func)])
        yield _with(node, func=func)


def constant(node: Any) -> Changes:
    """A whole number that is one more, or a truth for the other."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)


def condition(node: Any) -> Changes:
    """A condition that is negated."""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not _is_constexpr(node.test):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def dropped(node: Any) -> Changes:
    """A statement that is not there: a call, an update, a refusal."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.YieldFrom | ast.Yield)
    is_refusal = isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise)
    if is_call or is_refusal or isinstance(node, ast.AugAssign):
        yield ast.Pass()


def swapped(node: Any) -> Changes:
    """Two neighbouring arguments that have changed places, where the order matters."""
    is_call = isinstance(node, ast.Call) and _name(node.func) not in ("min", "max", "minimum", "maximum")
    if is_call and not any(isinstance(one, ast.Starred) for one in node.args):
        for at, (x, y) in enumerate(itertools.pairwise(node.args)):
            if ast.unparse(x) != ast.unparse(y) and type(x) is type(y):
                yield _with(node, args=[*node.args[:at], y, x, *node.args[at + 2 :]])


def key_element(node: Any) -> Changes:
    """A key without one of its elements."""
    value = node.value if isinstance(node, ast.Assign | ast.Return) else None
    if isinstance(node, ast.Assign) and not any(_KEY.search(_name(target)) for target in node.targets):
        return
    if isinstance(node, ast.Return) and not _KEY.search(getattr(node, "function", "")):
        return
    if isinstance(value, ast.Tuple) and len(value.elts) > 1:
        for at in range(len(value.elts)):
            yield _with(node, value=ast.Tuple([*value.elts[:at], *value.elts[at + 1 :]], ast.Load()))


def memory_order(node: Any) -> Changes:
    """A weaker memory order, a smaller scope, a fence that is missing."""
    if isinstance(node, ast.keyword) and node.arg in ("sem", "scope"):
        value = getattr(node.value, "value", None)
        if value in _ORDERS:
            yield ast.keyword(node.arg, ast.Constant(_ORDERS[value]))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "; " in node.value:
        for old, new in _FENCES:
            if old in node.value:
                yield ast.Constant(node.value.replace(old, new))
    elif isinstance(node, ast.Expr) and ast.unparse(node).endswith("barrier()"):
        yield ast.Pass()


#: By name.
OPERATORS: dict[str, Callable[[Any], Changes]] = {
    one.__name__: one
    for one in (
        comparison, off_by_one, arithmetic, constant, condition, dropped, swapped, key_element, memory_order
    )
}  # fmt: skip


def _with(node: Any, **fields: Any) -> Any:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _more(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _name(node: Any) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _is_text(node: Any) -> bool:
    """Whether text, lists or tuples are joined, as far as it is written there."""
    literal = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    return any(
        isinstance(one, literal) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in (node.left, node.right)
    )


def _is_constexpr(node: Any) -> bool:
    return _name(node) == "TYPE_CHECKING"


# Places ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes
    ----------
    key
        Names it for as long as its function has the place: module, function, operator, text before and after, which of
        several alike.
    line
        Where it is now.
    begin, end, put
        The bytes of the module's text that go, and what comes.
    """

    key: str
    module: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    begin: int
    end: int
    put: str

    @property
    def says(self) -> str:
        """What is changed, in one line."""
        return f"{self.before}  ->  {self.after}"

    def apply(self, text: str) -> str:
        """The module's text with the change."""
        made = Text(text).spliced([(self.begin, self.end, self.put)])
        ast.parse(made)
        return made


def sites(module: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    of = Text(text)
    met: Counter[str] = Counter()
    for node, function in _nodes(of.tree, ""):
        node.function = function.rpartition(".")[2]
        for name, operator in OPERATORS.items():
            for changed in operator(node):
                made = _mutant(of, module, function, name, node, changed, met)
                if made is not None:
                    yield made


def _mutant(
    of: Text, module: str, function: str, operator: str, node: Any, changed: Any, met: Counter[str]
) -> Mutant | None:
    if isinstance(node, ast.If | ast.While) and not isinstance(changed, ast.Pass):
        node, changed = node.test, changed.test  # not the block as well
    begin, end = of.span([node])
    put = ast.unparse(changed)
    if isinstance(changed, ast.expr) and not isinstance(changed, ast.Constant | ast.Call):
        put = f"({put})"
    before, after = (" ".join(ast.unparse(one).split()) for one in (node, changed))
    key = f"{module}:{function}:{operator}:{before}:{after}"
    met[key] += 1
    key = hashlib.sha1(f"{key}:{met[key]}".encode()).hexdigest()[:12]
    if of.data[begin:end].decode() == put:
        return None
    return Mutant(key, module, function, operator, node.lineno, before[:90], after[:90], begin, end, put)


def _nodes(node: Any, function: str) -> Iterator[tuple[Any, str]]:
    """The nodes that may be changed, and the function that each is in."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Call) and _name(child.func) in ("warn", "static_assert", "print", "TypeVar"):
                continue
            if isinstance(child, ast.If) and _is_constexpr(child.test):
                continue
            inside = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                if child.name in _SILENT:
                    continue
                inside = f"{function}.{child.name}".lstrip(".")
            yield child, inside
            yield from _nodes(child, inside)


def rank(seed: str, key: str) -> str:
    """Orders keys at random, the same for one seed."""
    return hashlib.sha1(f"{seed}:{key}".encode()).hexdigest()


def draw(mutants: Iterable[Mutant], count: int, seed: str) -> list[Mutant]:
    """``count`` of them: evenly by operator, as far as there are so many, and of each by `rank`."""
    by_operator: dict[str, list[Mutant]] = {name: [] for name in OPERATORS}
    for one in sorted(mutants, key=lambda one: rank(seed, one.key)):
        by_operator[one.operator].append(one)
    rounds = itertools.zip_longest(*by_operator.values())
    return list(itertools.islice((one for row in rounds for one in row if one is not None), count))
