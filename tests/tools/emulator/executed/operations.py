"""Operations of LLVM's IR that `executed.folding` has compiled: a few lines each, of one value or of a vector."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

#: Numbers of a value, by a kind's name in IR: one, or two packed.
TYPES = {
    "i32": np.uint32, "i64": np.uint64, "i16": np.uint16, "i8": np.uint8, "float": np.float32, "half": np.float16,
    "double": np.float64, "2i16": np.uint16, "2half": np.float16, "2float": np.float32, "2bfloat": np.uint16,
    "bfloat": np.uint16,
}  # fmt: skip


class Kind:
    """A type of IR as an operation's text has it: ``{i32}``, ``{i32:5}`` for a constant, ``{i32!s}`` in a name."""

    def __init__(self, name: str, count: int) -> None:
        self.element = name.lstrip("2")
        self.count = count * (2 if name.startswith("2") else 1)
        self.is_vector = self.count > 1

    def __format__(self, constant: str) -> str:
        if constant:
            return f"splat ({self.element} {constant})" if self.is_vector else constant
        return f"<{self.count} x {self.element}>" if self.is_vector else self.element

    def __str__(self) -> str:
        name = {"float": "f32", "half": "f16", "double": "f64", "bfloat": "bf16"}.get(self.element, self.element)
        return f"v{self.count}{name}" if self.is_vector else name


class Operation(NamedTuple):
    """An operation. ``operands``: their kinds, called %a, %b, %c in the text, and that of the result, %r."""

    name: str
    operands: tuple[str, ...]
    result: str
    text: str

    @property
    def is_of_integers(self) -> bool:
        return all(kind in ("i32", "i64", "i16", "2i16") for kind in (*self.operands, self.result))


# Operations -----------------------------------------------------------------------------------------------------------

_PREDICATES = ("eq", "ne", "ugt", "uge", "ult", "ule", "sgt", "sge", "slt", "sle")
_ORDERS = ("oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno")
_WIDTH = {"i32": 32, "i64": 64, "i16": 16, "2i16": 16}


def _of(kind: str, count: int, name: str, *lines: str, to: str = "") -> Operation:
    """Lines with ``{T}`` for the kind."""
    text = "\n".join(lines).replace("{T", f"{{{kind}")
    return Operation(f"{kind} {name}", (kind,) * count, to or kind, text)


def _call(kind: str, count: int, function: str) -> Operation:
    given = ", ".join("{T} %" + letter for letter in "abc"[:count])
    return _of(kind, count, function, f"%r = call {{T}} @llvm.{function}.{{T!s}}({given})")


def _plain() -> Iterator[Operation]:
    """One instruction of IR each."""
    for kind, width in _WIDTH.items():
        for name in ("add", "sub", "mul", "and", "or", "xor"):
            yield _of(kind, 2, name, f"%r = {name} {{T}} %a, %b")
        for name in ("shl", "lshr", "ashr"):
            yield _of(kind, 2, name, f"%m = and {{T}} %b, {{T:{width - 1}}}", f"%r = {name} {{T}} %a, %m")
            yield _of(kind, 1, f"{name} by 3", f"%r = {name} {{T}} %a, {{T:3}}")
        for name in ("umin", "umax", "smin", "smax"):
            yield _call(kind, 2, name)
        if kind != "2i16":
            yield _call(kind, 1, "ctpop")
            if kind != "i64":
                yield _call(kind, 1, "bitreverse")
            yield _call(kind, 1, "bswap")
            for name in ("ctlz", "cttz", "abs"):
                yield _of(kind, 1, name, f"%r = call {{T}} @llvm.{name}.{{T!s}}({{T}} %a, i1 false)")
            for name in _PREDICATES:
                yield _of(
                    kind, 2, f"icmp {name}", f"%o = icmp {name} {{T}} %a, %b", "%r = zext {i1} %o to {i32}", to="i32"
                )
    for name in ("udiv", "urem", "sdiv", "srem"):
        yield _of("i32", 2, name, "%m = and {T} %b, {T:65535}", "%d = or {T} %m, {T:1}", f"%r = {name} {{T}} %a, %d")
    for kind in ("float", "half", "double", "2float", "2half"):
        for name in ("fadd", "fsub", "fmul"):
            yield _of(kind, 2, name, f"%r = {name} {{T}} %a, %b")
        if kind != "double":
            yield _call(kind, 3, "fma")
        yield _of(kind, 1, "fneg", "%r = fneg {T} %a")
        if kind != "double":
            for name in ("minnum", "maxnum", "copysign"):
                yield _call(kind, 2, name)
        if kind.startswith("2"):
            continue
        for name in ("fabs", "floor", "ceil", "trunc", "rint") if kind == "float" else ("fabs",):
            yield _call(kind, 1, name)
        for name in _ORDERS:
            yield _of(kind, 2, f"fcmp {name}", f"%o = fcmp {name} {{T}} %a, %b", "%r = zext {i1} %o to {i32}", to="i32")
    yield _of("float", 2, "fdiv", "%r = fdiv {T} %a, %b")
    yield Operation(
        "ldexp", ("float", "i32"), "float",
        "%m = and {i32} %b, {i32:255}\n%s = sub {i32} %m, {i32:128}\n"
        "%r = call {float} @llvm.ldexp.{float!s}.{i32!s}({float} %a, {i32} %s)",
    )  # fmt: skip


def _conversions() -> Iterator[Operation]:
    for name, one, other in (
        ("sitofp", "i32", "float"), ("uitofp", "i32", "float"), ("sitofp", "i32", "double"),
        ("uitofp", "i32", "double"),
        ("fptrunc", "float", "half"), ("fptrunc", "float", "bfloat"), ("fptrunc", "double", "float"),
        ("fptrunc", "2float", "2half"), ("fptrunc", "2float", "2bfloat"), ("fpext", "half", "float"),
        ("fpext", "bfloat", "float"), ("fpext", "float", "double"), ("sext", "i16", "i32"), ("zext", "i16", "i32"),
        ("sext", "i8", "i32"), ("sext", "i32", "i64"), ("trunc", "i64", "i32"), ("trunc", "i32", "i16"),
    ):  # fmt: skip
        yield Operation(f"{name} {one} {other}", (one,), other, f"%r = {name} {{{one}}} %a to {{{other}}}")
    for name, kind in itertools.product(("fptosi", "fptoui"), ("float", "double")):
        yield Operation(
            f"{name} {kind}",
            (kind,),
            "i32",
            f"%r = call {{i32}} @llvm.{name}.sat.{{i32!s}}.{{{kind}!s}}({{{kind}}} %a)",
        )


def _byte(which: int, of: str, to: str, extend: str = "zext") -> tuple[str, ...]:
    """A byte of an operand, as 32 bits."""
    return (
        f"%{to}x = lshr {{i32}} %{of}, {{i32:{8 * which}}}", f"%{to}y = trunc {{i32}} %{to}x to {{i8}}",
        f"%{to} = {extend} {{i8}} %{to}y to {{i32}}",
    )  # fmt: skip


def _half(which: int, of: str, to: str, extend: str = "zext") -> tuple[str, ...]:
    return (
        f"%{to}x = lshr {{i32}} %{of}, {{i32:{16 * which}}}", f"%{to}y = trunc {{i32}} %{to}x to {{i16}}",
        f"%{to} = {extend} {{i16}} %{to}y to {{i32}}",
    )  # fmt: skip


def _pick(name: str, result: str, *given: str) -> str:
    """``min`` or the like of two."""
    return f"%{result} = call {{T}} @llvm.{name}.{{T!s}}({{T}} %{given[0]}, {{T}} %{given[1]})"


def _fused() -> Iterator[Operation]:
    """What an instruction of AMD's does at once, and what an encoding of its selects or negates."""
    shift = "%m = and {T} %b, {T:31}"
    for name, lines in {
        "add3": ("%x = add {T} %a, %b", "%r = add {T} %x, %c"),
        "lshl_add": ("%x = shl {T} %a, {T:7}", "%r = add {T} %x, %b"),
        "lshl1_add": ("%x = shl {T} %a, {T:1}", "%r = add {T} %x, %b"),
        "lshl2_add": ("%x = shl {T} %a, {T:2}", "%r = add {T} %x, %b"),
        "lshl3_add": ("%x = shl {T} %a, {T:3}", "%r = add {T} %x, %b"),
        "lshl4_add": ("%x = shl {T} %a, {T:4}", "%r = add {T} %x, %b"),
        "lshl_add by": (shift, "%x = shl {T} %a, %m", "%r = add {T} %x, %c"),
        "add_lshl": (shift, "%x = add {T} %a, %c", "%r = shl {T} %x, %m"),
        "lshl_or": (shift, "%x = shl {T} %a, %m", "%r = or {T} %x, %c"),
        "and_or": ("%x = and {T} %a, %b", "%r = or {T} %x, %c"),
        "or3": ("%x = or {T} %a, %b", "%r = or {T} %x, %c"),
        "xad": ("%x = xor {T} %a, %b", "%r = add {T} %x, %c"),
        "not": ("%r = xor {T} %a, {T:-1}",),
        "andn2": ("%x = xor {T} %b, {T:-1}", "%r = and {T} %a, %x"),
        "orn2": ("%x = xor {T} %b, {T:-1}", "%r = or {T} %a, %x"),
        "nand": ("%x = and {T} %a, %b", "%r = xor {T} %x, {T:-1}"),
        "nor": ("%x = or {T} %a, %b", "%r = xor {T} %x, {T:-1}"),
        "xnor": ("%x = xor {T} %a, %b", "%r = xor {T} %x, {T:-1}"),
        "bfi": ("%n = xor {T} %a, {T:-1}", "%x = and {T} %a, %b", "%y = and {T} %n, %c", "%r = or {T} %x, %y"),
        "majority": (
            "%x = and {T} %a, %b", "%y = or {T} %a, %b", "%z = and {T} %y, %c", "%r = or {T} %x, %z"
        ),
        "xor and": ("%x = xor {T} %a, %b", "%r = and {T} %x, %c"),
        "bfe_u": ("%x = lshr {T} %a, {T:5}", "%r = and {T} %x, {T:511}"),
        "bfe_i": ("%x = shl {T} %a, {T:9}", "%r = ashr {T} %x, {T:20}"),
        "bit is clear": (shift, "%x = lshr {T} %a, %m", "%y = and {T} %x, {T:1}", "%o = icmp eq {T} %y, {T:0}",
            "%r = select {i1} %o, {T} %b, {T} %c"),
        "bit is set": (shift, "%x = lshr {T} %a, %m", "%y = and {T} %x, {T:1}", "%o = icmp ne {T} %y, {T:0}",
            "%r = select {i1} %o, {T} %b, {T} %c"),
        "bit set": ("%r = or {T} %a, {T:131072}",),
        "alignbit": ("%r = call {T} @llvm.fshr.{T!s}({T} %a, {T} %b, {T} {T:13})",),
        "alignbyte": ("%r = call {T} @llvm.fshr.{T!s}({T} %a, {T} %b, {T} {T:8})",),
        "alignbit by": ("%r = call {T} @llvm.fshr.{T!s}({T} %a, {T} %b, {T} %c)",),
        "mul_u24": ("%x = and {T} %a, {T:16777215}", "%y = and {T} %b, {T:16777215}", "%r = mul {T} %x, %y"),
        "mad_u24": ("%x = and {T} %a, {T:65535}", "%y = and {T} %b, {T:65535}", "%z = mul {T} %x, %y",
            "%r = add {T} %z, %c"),
        "mul_i24": ("%x = ashr {T} %a, {T:9}", "%y = ashr {T} %b, {T:9}", "%r = mul {T} %x, %y"),
        "mad": ("%x = mul {T} %a, %b", "%r = add {T} %x, %c"),
        "sad": (_pick("umin", "x", "a", "b"), _pick("umax", "y", "a", "b"), "%z = sub {T} %y, %x",
            "%r = add {T} %z, %c"),
        "absdiff": ("%x = sub {T} %a, %b", "%r = call {T} @llvm.abs.{T!s}({T} %x, i1 false)"),
        "a literal": ("%r = add {T} %a, {T:1234567}",), "a short literal": ("%r = add {T} %a, {T:1234}",),
        "a factor": ("%r = mul {T} %a, {T:1234}",), "a negative factor": ("%r = mul {T} %a, {T:-77}",),
        "less than a literal": ("%o = icmp slt {T} %a, {T:1234}", "%r = select {i1} %o, {T} %b, {T} %c"),
        "more than a literal": ("%o = icmp sgt {T} %a, {T:-1234}", "%r = select {i1} %o, {T} %b, {T} %c"),
        "below a literal": ("%o = icmp ult {T} %a, {T:1234}", "%r = select {i1} %o, {T} %b, {T} %c"),
        "above a literal": ("%o = icmp ugt {T} %a, {T:1234}", "%r = select {i1} %o, {T} %b, {T} %c"),
        "is a literal": ("%o = icmp eq {T} %a, {T:1234}", "%r = select {i1} %o, {T} %b, {T} %c"),
        "is no literal": ("%o = icmp ne {T} %a, {T:1234}", "%r = select {i1} %o, {T} %b, {T} %c"),
        "bytes turned": (*_byte(0, "a", "p"), *_byte(1, "a", "q"), "%x = shl {T} %p, {T:8}", "%r = or {T} %x, %q"),
        "packed low": ("%x = and {T} %a, {T:65535}", "%y = shl {T} %b, {T:16}", "%r = or {T} %x, %y"),
        "packed low high": ("%x = and {T} %a, {T:65535}", "%y = and {T} %b, {T:-65536}", "%r = or {T} %x, %y"),
        "packed high": ("%x = lshr {T} %a, {T:16}", "%y = and {T} %b, {T:-65536}", "%r = or {T} %x, %y"),
        "sext_i8": _byte(0, "a", "r", "sext"), "sext_i16": _half(0, "a", "r", "sext"),
    }.items():  # fmt: skip
        yield _of("i32", 3, name, *lines)
    for which, extend, name in itertools.product(
        (0, 2, 3), ("zext", "sext"), ("add", "mul", "and", "shl", "smin", "smax", "umin", "icmp ne", "icmp slt")
    ):
        last = f"%r = {name} {{T}} %p, %b"
        if name == "shl":
            last = "%m = and {T} %p, {T:31}\n%r = shl {T} %b, %m"
        elif name.startswith(("s", "u")):
            last = _pick(name, "r", "p", "b")
        elif name.startswith("icmp"):
            last = f"%o = {name} {{T}} %p, %b\n%r = select {{i1}} %o, {{T}} %b, {{T}} %c"
        yield _of("i32", 3, f"{name} of a byte {which} {extend}", *_byte(which, "a", "p", extend), last)
        if which < 2:
            yield _of("i32", 3, f"{name} of a half {which} {extend}", *_half(1, "a", "p", extend), last)
    for sign in "us":
        low, high = f"{sign}min", f"{sign}max"
        yield _of("i32", 3, low + "3", _pick(low, "x", "a", "b"), _pick(low, "r", "x", "c"))
        yield _of("i32", 3, high + "3", _pick(high, "x", "a", "b"), _pick(high, "r", "x", "c"))
    for sign in ("zext", "sext"):
        yield Operation(
            f"mul_hi {sign}", ("i32", "i32"), "i32",
            f"%x = {sign} {{i32}} %a to {{i64}}\n%y = {sign} {{i32}} %b to {{i64}}\n%z = mul {{i64}} %x, %y\n"
            "%w = lshr {i64} %z, {i64:32}\n%r = trunc {i64} %w to {i32}",
        )  # fmt: skip
        yield Operation(
            f"mad 64 {sign}", ("i32", "i32", "i64"), "i64",
            f"%x = {sign} {{i32}} %a to {{i64}}\n%y = {sign} {{i32}} %b to {{i64}}\n%z = mul {{i64}} %x, %y\n"
            "%r = add {i64} %z, %c",
        )  # fmt: skip
    yield _of("i64", 2, "lshl_add", "%x = shl {T} %a, {T:3}", "%r = add {T} %x, %b")
    yield _of("i64", 2, "andn2", "%x = xor {T} %b, {T:-1}", "%r = and {T} %a, %x")
    yield _of("i64", 2, "nor", "%x = or {T} %a, %b", "%r = xor {T} %x, {T:-1}")
    yield _of("i64", 1, "bfe", "%x = lshr {T} %a, {T:13}", "%r = and {T} %x, {T:1048575}")
    yield from _of_floats()


def _of_floats() -> Iterator[Operation]:
    for kind in ("float", "half"):
        yield _of(kind, 2, "negated", "%x = fneg {T} %a", "%r = fmul {T} %x, %b")
        yield _of(kind, 2, "absolute", "%x = call {T} @llvm.fabs.{T!s}({T} %a)", "%r = fadd {T} %x, %b")
        yield _of(
            kind, 2, "of the absolute, negated", "%x = call {T} @llvm.fabs.{T!s}({T} %a)", "%y = fneg {T} %x",
            "%r = fadd {T} %y, %b",
        )  # fmt: skip
        yield _of(kind, 3, "fma, negated", "%x = fneg {T} %a", "%r = call {T} @llvm.fma.{T!s}({T} %x, {T} %b, {T} %c)")
        if kind == "float":
            yield _of(kind, 3, "max3", _pick("maxnum", "x", "a", "b"), _pick("maxnum", "r", "x", "c"))
            yield _of(kind, 3, "min3", _pick("minnum", "x", "a", "b"), _pick("minnum", "r", "x", "c"))
        yield _of(kind, 2, "times a literal", "%x = fmul {T} %a, {T:3.0}", "%r = fadd {T} %x, %b")
        yield _of(kind, 2, "fma of a literal", "%r = call {T} @llvm.fma.{T!s}({T} %a, {T} {T:3.0}, {T} %b)")
        yield _of(kind, 2, "fma on a literal", "%r = call {T} @llvm.fma.{T!s}({T} %a, {T} %b, {T} {T:3.0})")
        yield _of(
            kind, 3, "select", "%o = fcmp olt {T} %a, %b", "%x = fadd {T} %a, %c", "%r = select {i1} %o, {T} %x, {T} %c"
        )
    yield _of("2half", 2, "negated", "%x = fneg {T} %a", "%r = fmul {T} %x, %b")
    yield _of("2float", 2, "negated", "%x = fneg {T} %a", "%r = fmul {T} %x, %b")
    extended = "%x = fpext {half} %a to {float}\n%y = fpext {half} %b to {float}\n"
    yield Operation(
        "fma of halves", ("half", "half", "float"), "float",
        extended + "%r = call {float} @llvm.fma.{float!s}({float} %x, {float} %y, {float} %c)",
    )  # fmt: skip
    yield Operation(
        "fma of halves, rounded", ("half", "half", "float"), "half",
        extended + "%z = call {float} @llvm.fma.{float!s}({float} %x, {float} %y, {float} %c)\n"
        "%r = fptrunc {float} %z to {half}",
    )  # fmt: skip
    yield Operation("fadd of halves", ("half", "half"), "float", extended + "%r = fadd {float} %x, %y")


@functools.cache
def operations() -> tuple[Operation, ...]:
    """All of them."""
    return (*_plain(), *_conversions(), *_fused())
