"""Calls as people describe them: by their shapes, in a file, or by a model's configuration. Imports no Triton."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.by_source import SourceArrival
from tilestream.arrival.flat import FlatArrival
from tilestream.core.operands import HALVES
from tilestream.ops.attention import attention
from tilestream.ops.grouped import grouped_mm
from tilestream.ops.grouped_sources import by_source_op
from tilestream.ops.matmul import linear, matmul
from tilestream.ops.request import ACTIVATIONS
from tilestream.plan.problem import dtype_name

#: Makes a tensor of a dtype and a shape.
Make = Callable[..., torch.Tensor]
LAYOUTS = ("linear", "nn", "nt", "tn", "tt")
SCALES = ("none", "tensor", "row")


@dataclass(frozen=True)
class Gemm:
    """A product ``[m, k] @ [k, n]``.

    Attributes
    ----------
    layout
        ``"linear"``: of a weight ``[n, k]``; else as for `tilestream.plan`.
    scales
        ``"none"``, ``"tensor"`` or ``"row"``: see `tilestream.plan`.
    chunk
        Rows of A that arrive at a time; 0: all are there.
    backward
        Whether the products of the gradients of A and of B are compiled, too.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    layout: str = "linear"
    bias: bool = False
    activation: str | None = None
    scales: str = "none"
    chunk: int = 0
    backward: bool = False

    def __call__(self) -> None:
        """Make the call, on the meta device; with ``backward`` the backward pass, too."""
        operands = [x.requires_grad_(self.backward) for x in self.operands(_meta)]
        with torch.set_grad_enabled(self.backward):
            made = self.product(*operands, **self.options(_meta))
        if self.backward:
            torch.autograd.grad(made, operands, torch.empty_like(made))

    def __str__(self) -> str:
        options = (
            ["bias"] * self.bias + ["backward"] * self.backward + [self.activation] * (self.activation is not None)
        )
        options += [self.layout] * (self.layout != "linear") + [f"scales={self.scales}"] * (self.scales != "none")
        return _text("gemm", (self.m, self.n, self.k, self.dtype), options, chunk=self.chunk)

    def operands(self, make: Make) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[m, k]`` and B ``[k, n]``, as the layout says."""
        m, n, k = self.m, self.n, self.k
        a = make(self.dtype, m, k) if self.layout in ("linear", "nn", "nt") else make(self.dtype, k, m).t()
        b = make(self.dtype, k, n) if self.layout in ("nn", "tn") else make(self.dtype, n, k).t()
        return a, b

    def options(self, make: Make) -> dict[str, Any]:
        """What the call has beside its operands."""
        m, n = self.m, self.n
        wide = "bfloat16" if self.dtype.startswith("float8") else self.dtype
        sizes = {"none": None, "tensor": ((1,), (1,)), "row": ((m, 1), (1, n))}[self.scales]
        return {
            "bias": make(wide, n) if self.bias else None,
            "activation": self.activation,
            "scale_a": None if sizes is None else make("float32", *sizes[0]),
            "scale_b": None if sizes is None else make("float32", *sizes[1]),
            "arrival": _arrival(m, self.chunk),
        }

    def product(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        """The call itself."""
        return linear(a, b.t(), **options) if self.layout == "linear" else matmul(a, b, **options)


@dataclass(frozen=True)
class Attention:
    """Attention of ``rows`` queries of each sequence to ``keys`` keys (0: as many); ``layout`` as for `attention`.

    ``chunk``: rows of the keys of all sequences that arrive at a time; 0: all are there.
    """

    batch: int
    rows: int
    heads: int
    heads_kv: int
    columns: int
    dtype: str = "bfloat16"
    causal: bool = False
    keys: int = 0
    lse: bool = False
    layout: str = "bshd"
    chunk: int = 0

    def __call__(self) -> None:
        """Make the call, on the meta device."""
        self.attend(*self.operands(_meta))

    def __str__(self) -> str:
        shape = (self.batch, self.rows, self.heads, self.heads_kv, self.columns, self.dtype)
        options = ["causal"] * self.causal + ["lse"] * self.lse + [self.layout] * (self.layout != "bshd")
        return _text("attention", shape, options, keys=self.keys, chunk=self.chunk)

    def operands(self, make: Make) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V; ``"bhsd"`` as models do: views of what their projections give."""
        keys = self.keys or self.rows
        q = make(self.dtype, self.batch, self.rows, self.heads, self.columns)
        k, v = (make(self.dtype, self.batch, keys, self.heads_kv, self.columns) for _ in range(2))
        return (q, k, v) if self.layout == "bshd" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    @property
    def mask(self) -> bool | str:
        """What the call gives as ``causal``: models' layout goes with torch's corner of the mask."""
        return "top_left" if self.causal and self.layout == "bhsd" else self.causal

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The call itself, without its ``lse``."""
        made = attention(  # type: ignore[call-overload]
            q, k, v, causal=self.mask, return_lse=self.lse, layout=self.layout,
            arrival=_arrival(self.batch * (self.keys or self.rows), self.chunk),
        )  # fmt: skip
        out: torch.Tensor = made[0] if self.lse else made
        return out


@dataclass(frozen=True)
class Grouped:
    """A product ``[m, k] @ [groups, k, n]`` of groups of rows, as a mixture's experts have them.

    Attributes
    ----------
    bias
        Whether each group has one.
    sources
        For rows by source, ``m`` of all places, how many there are; 0: rows are packed.
    arrives
        Whether rows by source arrive.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bfloat16"
    bias: bool = False
    activation: str | None = None
    sources: int = 0
    arrives: bool = False

    def __call__(self) -> None:
        """Make the call, on the meta device."""
        a, b = _meta(self.dtype, self.m, self.k), _meta(self.dtype, self.groups, self.n, self.k).mT
        bias = _meta("bfloat16" if self.dtype.startswith("float8") else self.dtype, self.groups, self.n)
        more: Any = {"bias": bias if self.bias else None, "activation": self.activation}
        if not self.sources:
            grouped_mm(a, b, _meta("int32", self.groups), **more)
            return
        counts = _meta("int32", self.sources, self.groups)
        if not self.arrives:
            grouped_mm(a, b, counts=counts, **more)
            return
        # Signals are the CPU's, since the meta device has no words.
        there = torch.zeros(counts.shape, dtype=torch.int32, device="cpu")
        arrival = SourceArrival(there, self.m // self.sources)
        by_source_op(
            a, b, counts, bias.unsqueeze(1) if self.bias else None, self.activation or "none", None, "auto", 0, 0,
            FlatArrival.of(arrival).ints, None, math.inf, [], None,
        )  # fmt: skip

    def __str__(self) -> str:
        options = ["bias"] * self.bias + [self.activation] * (self.activation is not None) + ["arrives"] * self.arrives
        return _text("grouped", (self.m, self.n, self.k, self.groups, self.dtype), options, sources=self.sources)


#: What `tilestream report` measures, and all that `tilestream warm` compiles.
Measured = Gemm | Attention
Call = Measured | Grouped


def _meta(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _text(kind: str, shape: Sequence[object], options: Sequence[str | None], **numbers: int) -> str:
    """A call as `parse` takes it."""
    named = [f"{name}={number}" for name, number in numbers.items() if number]
    return f"{kind} {','.join(map(str, [*shape, *options, *named]))}"


def _arrival(rows: int, chunk: int) -> Arrival | None:
    return Arrival.uniform(chunk, -(-rows // chunk)) if chunk else None


#: By kind: the call, and the form of its extents; its options that are a word, and those that are a number.
_KINDS: dict[str, tuple[type[Any], str]] = {
    "gemm": (Gemm, "M,N,K"), "attention": (Attention, "B,S,H,Hkv,D"), "grouped": (Grouped, "M,N,K,G"),
}  # fmt: skip
_FLAGS = {"gemm": ("bias", "backward"), "attention": ("causal", "lse"), "grouped": ("bias", "arrives")}
_NUMBERS = {"gemm": ("chunk",), "attention": ("chunk", "keys"), "grouped": ("sources",)}


def parse(kind: str, text: str) -> Call:
    """A call by its kind and shape: ``("gemm", "512,4096,4096,float16,bias")``.

    Parameters
    ----------
    kind
        ``"gemm"``: ``M,N,K``, then any of a dtype, a layout, ``bias``, an activation, ``scales=tensor|row``,
        ``backward``. ``"attention"``: ``B,S,H,Hkv,D``, then any of a dtype, ``causal``, ``lse``, ``bhsd``, ``keys=N``.
        Of either, ``chunk=N``: rows (of all keys) that arrive at a time. ``"grouped"``: ``M,N,K,G``, then any of a
        dtype, ``bias``, an activation, ``sources=N`` (rows by source, that divide M), ``arrives`` (with these).

    Raises
    ------
    ValueError
        If it is no such text.
    """
    made, form = _KINDS[kind]
    count = form.count(",") + 1
    extents, words = text.split(",")[:count], text.split(",")[count:]
    if len(extents) < count or not all(one.strip().isdecimal() and int(one) for one in extents):
        raise ValueError(f"{kind} {text}: give {form}, positive whole numbers")
    fields: dict[str, Any] = {}
    for word in map(str.strip, words):
        name, _, value = word.partition("=")
        if kind == "gemm" and word in LAYOUTS:
            fields["layout"] = word
        elif word in {"gemm": ACTIVATIONS, "grouped": (*ACTIVATIONS[1:], *HALVES)}.get(kind, ()):
            fields["activation"] = word
        elif kind == "gemm" and name == "scales" and value in SCALES:
            fields["scales"] = value
        elif word in _FLAGS[kind]:
            fields[word] = True
        elif (kind, word) == ("attention", "bhsd"):
            fields["layout"] = word
        elif name in _NUMBERS[kind] and value.isdecimal() and int(value):
            fields[name] = int(value)
        else:
            try:
                fields["dtype"] = dtype_name(word)
            except TypeError:
                raise ValueError(f"{kind} {text}: {word!r} is neither a dtype nor an option of {kind}") from None
    call: Call = made(*map(int, extents), **fields)
    if isinstance(call, Gemm) and call.backward and (call.dtype.startswith("float8") or call.scales != "none"):
        raise ValueError(f"{kind} {text}: operands of 8 bits and scales get no gradient: leave backward away")
    if isinstance(call, Grouped) and (call.m % (call.sources or 1) or call.arrives > bool(call.sources)):
        raise ValueError(f"{kind} {text}: give sources=N, which divide the {call.m} rows in equal places")
    return call


def of_model(
    config: Mapping[str, Any], tokens: Sequence[int], keys: Sequence[int] = (), dtype: str | None = None,
    backward: bool = False,
) -> list[Call]:  # fmt: skip
    """The linear layers and the attention of a decoder, by its Hugging Face configuration.

    Parameters
    ----------
    tokens
        Rows of the linear layers, and (beyond 1) queries of a prompt's attention.
    keys
        Keys that one query of a sequence sees: the attention of decoding.
    dtype
        None: the configuration's.
    backward
        As of `Gemm`, of each linear layer. Attention's backward pass is in torch's own operations.

    Raises
    ------
    ValueError
        If it does not say how wide the model is, or what it says is no size or no dtype.
    """
    if isinstance(config, Mapping):
        config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ValueError("the configuration is no JSON object")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    if missing := [name for name in needed if config.get(name) is None]:
        raise ValueError(
            f"the configuration has no {', '.join(missing)}: describe its layers by --gemm and --attention"
        )
    for name in (*needed, "num_key_value_heads", "head_dim", "vocab_size"):
        if (size := config.get(name)) is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"the configuration's {name} is {size!r}, and no positive whole number: describe its layers by --gemm "
                "and --attention"
            )
    hidden, inner, heads = (config[name] for name in needed)
    heads_kv = config.get("num_key_value_heads") or heads
    if heads % heads_kv:
        raise ValueError(f"the configuration's num_key_value_heads {heads_kv} does not divide its {heads} heads")
    columns = config.get("head_dim") or hidden // heads
    if dtype is None:
        whose, dtype = "the configuration's dtype", str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    else:
        whose = "--dtype"
    try:
        dtype = dtype_name(dtype.removeprefix("torch."))
    except TypeError:
        raise ValueError(f"{whose} {dtype} is none that is multiplied: give --dtype bfloat16") from None
    # Qwen2 has a bias of these three whatever its configuration says.
    qkv_bias = bool(config.get("attention_bias")) or str(config.get("model_type", "")).startswith("qwen2")
    mlp_bias = bool(config.get("mlp_bias"))
    weights = {
        (heads * columns, hidden, qkv_bias),
        (heads_kv * columns, hidden, qkv_bias),
        (hidden, heads * columns, bool(config.get("attention_bias"))),
        (inner, hidden, mlp_bias),
        (hidden, inner, mlp_bias),
    }
    if isinstance(config.get("vocab_size"), int):
        weights.add((config["vocab_size"], hidden, False))
    found: list[Call] = [
        Gemm(m, n, k, dtype, bias=bias, backward=backward) for m in tokens for n, k, bias in sorted(weights)
    ]
    shape = (heads, heads_kv, columns, dtype)
    for layout in ("bshd", "bhsd"):
        found += [Attention(1, rows, *shape, causal=True, layout=layout) for rows in tokens if rows > 1]
        found += [Attention(1, 1, *shape, keys=count, layout=layout) for count in keys]
    return found


def described(
    model: Path | None, gemms: Sequence[str], attentions: Sequence[str], shapes: Path | None, tokens: str, keys: str,
    dtype: str | None, backward: bool = False, grouped: Sequence[str] = (),
) -> list[Call]:  # fmt: skip
    """The calls that the options of `tilestream warm` and `tilestream report` describe."""
    given = {"gemm": gemms, "attention": attentions, "grouped": grouped}
    found = [parse(kind, text) for kind, texts in given.items() for text in texts]
    try:
        lines = [] if shapes is None else shapes.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--shapes {shapes}: no text: {error}") from None
    for line in lines:
        kind, _, text = line.partition("#")[0].strip().partition(" ")
        if kind and kind not in _KINDS:
            lines_are = ", ".join(f"'{name} {form}...'" for name, (_, form) in _KINDS.items())
            raise ValueError(f"{shapes}: {line!r}; a line is one of {lines_are}")
        found += [parse(kind, text.strip())] if kind else []
    if model is not None:
        path = model / "config.json" if model.is_dir() else model
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: no configuration: {error}") from None
        rows, seen = counts("--tokens", tokens), counts("--keys", keys)
        try:
            found += of_model(config, rows, seen, dtype, backward)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def counts(option: str, text: str) -> list[int]:
    """``"1,16"`` -> ``[1, 16]``."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{option} {text}: give positive whole numbers, as 1,16,512")
    return [int(word) for word in words]
