"""The collectives that torch's compiler has left unfused, with the reason for each.

The compiler's async-TP pass replaces a collective and its adjacent matmuls by one op, and does not report the
collectives that it skips. A later pass finds these in the compiled graph, and leaves the graph unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

#: Ops that only rearrange their input, by name.
_TRANSPARENT = frozenset({
    "wait_tensor", "view", "_unsafe_view", "reshape", "split", "split_with_sizes", "cat", "permute", "transpose", "t",
    "slice", "select", "squeeze", "unsqueeze", "clone", "expand", "convert_element_type", "_to_copy",
    "force_stride_order",
})  # fmt: skip
#: Matmuls, by name.
_MATMULS = {"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
#: Matmuls that also add; ops that add; ops that scale a product before a sum.
_ADDING = {"addmm", "baddbmm"}
_SUMS, _SCALINGS = frozenset({"add", "sub"}), frozenset({"mul", "div", "neg"})
_WITH_BIAS = (
    "the matmul adds a bias in the same op ({}), as the compiler makes it of an addition behind it, too: torch's pass "
    "does not look for that"
)


class UnfusedCollective(NamedTuple):
    """A collective that is not fused."""

    group: str  # the group's name
    #: op, what: the collective, and the shape and the dtype of its input.
    op: str
    what: str
    why: str  # the reason why it is not fused


def unfused_collectives(graph: Graph) -> Iterator[UnfusedCollective]:
    """The gathers and scatters of ``graph``, and its all-reduces of a product; none of these overlaps a matmul."""
    reasons: dict[str, Callable[[Node], str | None]] = {
        "all_gather_into_tensor": _why_gathered, "reduce_scatter_tensor": _why_scattered, "all_reduce": _why_reduced,
    }  # fmt: skip
    for node in graph.nodes:
        name = _name(node)
        if name in reasons and _is_functional(node):
            why = reasons[name](node)
            if why is not None:
                given = _shape_of(node.args[0])
                yield UnfusedCollective(str(node.args[-1]), name, given or f"to {_shape_of(node) or '?'}", why)


def _why_gathered(node: Node) -> str:
    found, between = _walk(node, lambda one: list(one.users), _TRANSPARENT)
    return _skipped(found[0], between) if found else "no matmul reads what is gathered"


def _why_scattered(node: Node) -> str:
    found, between = _producers(node, _TRANSPARENT | _SUMS | _SCALINGS)
    if not found:
        return "no matmul makes what is scattered"
    product = found[0]
    if _SUMS.intersection(between) or _adds_more_than_a_bias(product):
        count = _products(found)
        return (
            f"what is scattered is a sum, of {count} product{'s' * (count != 1)} among other things: torch's pass "
            "knows a product alone. So is the backward of a gather that several matmuls read"
        )
    if len(product.users) > 1:
        return "something else reads the product too, which the fused op does not give"
    return _skipped(product, between)


def _why_reduced(node: Node) -> str | None:
    if not _producers(node, _TRANSPARENT | _SUMS)[0]:
        return None
    return "all ranks get the sum of a product: torch's pass knows gathers and scatters, as SequenceParallel makes them"


def _adds_more_than_a_bias(matmul: Node) -> bool:
    """Whether a fused matmul-and-add adds a matrix: the compiler makes this op from any sum with a product."""
    added = matmul.args[0] if _name(matmul) in _ADDING else None
    value = added.meta.get("val") if isinstance(added, Node) else None
    return isinstance(value, torch.Tensor) and value.dim() > 1


def _products(matmuls: list[Node]) -> int:
    """The number of products in a sum: a matmul that adds may add another product."""
    seen: set[Node] = set()
    todo = list(matmuls)
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if _name(one) in _ADDING and isinstance(added := one.args[0], Node):
            todo += [added] if _name(added) in _MATMULS else _producers(added, _TRANSPARENT | _SUMS)[0]
    return len(seen)


def _skipped(matmul: Node, between: list[str]) -> str:
    name = _name(matmul)
    if name in _ADDING:
        return _WITH_BIAS.format(name)
    way = ", ".join(dict.fromkeys(between)) or "nothing; the pass wants a torch with NCCL"
    return f"torch's pass did not take it; between it and the matmul ({name}) there is: {way}"


def _producers(node: Node, through: frozenset[str]) -> tuple[list[Node], list[str]]:
    """The matmuls from which a node's input is computed, and the ops in between."""

    def step(one: Node) -> list[Node]:
        made_of = list(one.all_input_nodes)
        return made_of if _name(one) in {"cat", *_SUMS} else made_of[:1]

    return _walk(node, step, through)


def _walk(node: Node, step: Callable[[Node], list[Node]], through: frozenset[str]) -> tuple[list[Node], list[str]]:
    found: list[Node] = []
    between: list[str] = []
    seen, todo = {node}, step(node)
    while todo:
        one = todo.pop(0)
        if one in seen:
            continue
        seen.add(one)
        name = _name(one)
        if name in _MATMULS:
            found.append(one)
        elif name in through or one.target is operator.getitem:
            if name != "wait_tensor" and one.target is not operator.getitem:
                between.append(name)
            todo += step(one)
    return found, between


def _name(node: Node) -> str:
    """The op's name without its overload; empty if the node calls no op."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return str(target.overloadpacket.__name__)


def _is_functional(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def _shape_of(node: Any) -> str:
    """Shape and dtype; empty for nodes without metadata, which torch's passes make."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{list(value.shape)}, {value.dtype}".replace("torch.", "")


class UnfusedPass(CustomGraphPass):
    """The pass that calls ``report`` with each unfused collective, after the user's own pass ``before``, if any.

    Graphs from the compiler's cache do not pass through it.
    """

    def __init__(self, report: Callable[[UnfusedCollective], None], before: Any = None) -> None:
        self.report, self.before = report, before
        several = before if isinstance(before, (list, tuple)) else [before]
        self._others = [one for one in several if one is not None]

    def __call__(self, graph: Graph) -> None:
        """Examine a graph that is about to be compiled."""
        for other in self._others:
            other(graph)
        for found in unfused_collectives(graph):
            self.report(found)

    def uuid(self) -> Any:
        """The pass's key in the compiler's cache; None, which disables the cache, if the user's pass has none."""
        known = [other.uuid() if hasattr(other, "uuid") else None for other in self._others]
        return None if None in known else ("tilestream.unfused_report", *map(str, known))
