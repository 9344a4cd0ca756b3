"""DTensor's strategies of the registered ops: which shards of the operands give which shards of the results.

The dimensions of each tensor are a word, as in einsum: a product is ``mk,kn->mn``. A strategy shards one letter.
Tensors with that letter are sharded there, the others are replicated, and a result without the letter is a partial sum.
DTensor combines strategies over the dimensions of its mesh and takes the combination that moves the fewest bytes; where
none fits, all tensors are replicated.

DTensor takes a second to import, so nothing here imports it. `with_strategies` registers an op's strategies when
DTensor first asks for the shape of its result, which it does before it asks for a strategy. torch's
``register_sharding`` would not do: its cache ignores arguments in front of the first integer, so products with and
without an activation would share a strategy.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from tilestream.ops.operands import untracked

_DTENSOR = "torch.distributed.tensor"


class _Words(NamedTuple):
    """The dimensions of an op's tensors, a letter each.

    Attributes
    ----------
    inputs
        By argument: the word of each tensor that is given, and perhaps of others.
    results
        The word of each result; empty for a result that is empty or has one element.
    letters
        The letters that may be sharded. Of two with one cost DTensor takes the first.
    addends
        Inputs that are added to a result. They are partial sums where the result is one.
    factors
        Inputs in each of which the results are linear.
    aligned
        An input and its letter whose shards must have one size.
    """

    inputs: Mapping[str, str]
    results: tuple[str, ...]
    letters: str
    addends: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    aligned: tuple[str, str] | None = None


def _gemm(given: Mapping[str, Any]) -> _Words:
    """A product. With an activation it is not linear, and K is not sharded."""
    batch, linear = "b" * (len(given["a"].shape) - 2), given["activation"] == "none"
    words = {"a": "mk", "b": "kn", "residual": "mn", "scale_a": "m1", "scale_b": "1n"}
    words = {name: batch + word for name, word in words.items()} | {"bias": "n"}
    for name in ("scale_a", "scale_b"):
        if name in given and given[name] is not None and math.prod(given[name].shape) == 1:
            words[name] = ""
    return _Words(
        words, (batch + "mn",), batch + ("kmn" if linear else "mn"), ("bias", "residual"), ("a", "b") if linear else ()
    )


def _attention(given: Mapping[str, Any]) -> _Words:
    """Attention, sharded by batch if queries have one, and by heads if each rank has the keys of its query heads."""
    q, k, batch = given["q"], given["k"], "b" * (given["cu_seqlens_q"] is None)
    keys = "phd" if given["cu_seqlens_k"] is not None else ("b" if given["block_table"] is None else "p") + "khd"
    words = {
        "q": batch + "qhd", "k": keys, "v": keys, "sinks": "h", "scale_q": "bh", "scale_k": "bh", "scale_v": "bh",
        "cu_seqlens_q": "c", "cu_seqlens_k": "c", "block_table": "bt", "seqlens_k": "b",
    }  # fmt: skip
    lse = (batch + "hq" if batch else "qh") if given["return_lse"] else ""
    aligned = None if q.shape[-2] == k.shape[-2] else ("k", "h")
    return _Words(words, (words["q"], lse), batch + "h", aligned=aligned)


def _attention_backward(given: Mapping[str, Any]) -> _Words:
    """Gradients of q, k, v and the sinks; the last are summed over the batch."""
    x = _attention(given)
    out, lse = x.results
    words = {**x.inputs, "grad": out, "grad_lse": lse, "out": out, "lse": lse}
    sinks = "h" if given["sinks"] is not None else ""
    return x._replace(inputs=words, results=(out, words["k"], words["v"], sinks))


#: By op: its words, and the first argument from which on numbers and strings count for a strategy.
_OPS: dict[str, tuple[Callable[[Mapping[str, Any]], _Words], str]] = {
    "gemm": (_gemm, "activation"),
    "attention": (_attention, "sinks"),
    "attention_backward": (_attention_backward, "grad_lse"),
}


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor; without importing it."""
    module = sys.modules.get(_DTENSOR)
    return module is not None and isinstance(x, module.DTensor)


def dtensor_views(*tensors: object) -> AbstractContextManager[None]:
    """A block in which DTensors can be viewed in inference mode, too. Torch's own ops make views below autograd."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return untracked() if any(map(is_dtensor, tensors)) else nullcontext()


def refuse_dtensors(op: str, **tensors: object) -> None:
    """Raise `TypeError` for a DTensor in a call whose chunks arrive or are published: a DTensor has no chunks."""
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(
                f"{op}: {name} is a DTensor, and chunks arrive or are published; they are rows of one rank's tensor: "
                f"pass {name}.to_local()"
            )


def with_strategies(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake`` of ``tilestream::name``, wrapped to register the op's strategies: see the module's text."""
    if name not in _OPS:
        return fake

    @functools.wraps(fake)
    def seen(*args: Any) -> Any:
        if _DTENSOR in sys.modules:
            _register(name)
        return fake(*args)

    return seen


@functools.cache
def _register(name: str) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    words_of, first = _OPS[name]
    op = getattr(torch.ops.tilestream, name).default
    names = [argument.name for argument in op._schema.arguments]

    def strategy(schema: Any) -> Any:
        given = dict(zip(names, schema.args_schema, strict=False))  # arguments at their defaults are missing
        return _strategy(schema, given, words_of(given))

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(op, strategy, RuntimeSchemaInfo(names.index(first)))


def _strategy(schema: Any, given: Mapping[str, Any], words: _Words) -> Any:
    """An ``OpStrategy``: the combinations of rules over the mesh, without those whose shards do not fit together."""
    from torch.distributed.tensor._op_schema import OpStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    tensors = {name: x for name, x in given.items() if isinstance(x, OpStrategy)}
    made: Any = expand_to_full_mesh_op_strategy(
        schema.get_mesh_from_args(), schema, list(_rules(words, tensors)), input_index=len(words.results)
    )
    given_specs = [x.strategies[0].output_spec for x in tensors.values()]
    made.strategies = [one for one in made.strategies if not any(map(_mixes, given_specs, one.input_specs))]
    if words.aligned is not None:
        name, letter = words.aligned
        at, dim = list(tensors).index(name), words.inputs[name].index(letter)
        extent = tensors[name].shape[dim]
        made.strategies = [one for one in made.strategies if extent % _parts(one.input_specs[at], dim) == 0]
    return made


def _mixes(given: Any, wanted: Any) -> bool:
    """Whether a partial sum would become a partial mean, or the reverse: some versions of DTensor confuse the two."""
    pairs = zip(given.placements, wanted.placements, strict=True)
    return any(p.is_partial() and q.is_partial() and p != q for p, q in pairs)


def _rules(words: _Words, tensors: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Placements of the results and of the inputs, on one dimension of a mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    inputs = {name: words.inputs[name] for name in tensors}
    placements: list[Any] = [p for x in tensors.values() for p in x.strategies[0].output_spec.placements]
    # Flattened dimensions have shards of several pieces, which are strided; DTensor compares them by value.
    strided = [p for i, p in enumerate(placements) if hasattr(p, "split_factor") and p not in placements[:i]]
    shards: list[Callable[[int], Any]] = [
        Shard, *(functools.partial(p.__class__, split_factor=p.split_factor) for p in strided)
    ]  # fmt: skip
    yield [Replicate()] * (len(words.results) + len(inputs))
    for letter in words.letters:
        for shard in shards:
            results = [
                shard(word.index(letter)) if letter in word else Partial() if word else Replicate()
                for word in words.results
            ]
            addend = Partial() if Partial() in results else Replicate()
            yield results + [
                shard(word.index(letter)) if letter in word else addend if name in words.addends else Replicate()
                for name, word in inputs.items()
            ]
    for total in ("sum", "avg"):
        for factor in words.factors:
            partial = (factor, *words.addends)
            yield [Partial(total)] * len(words.results) + [
                Partial(total) if name in partial else Replicate() for name in inputs
            ]


def _parts(spec: Any, dim: int) -> int:
    """The number of pieces of a tensor's dimension."""
    return math.prod(
        spec.mesh.size(i) * getattr(p, "split_factor", 1)
        for i, p in enumerate(spec.placements)
        if getattr(p, "dim", None) == dim
    )
