"""Dtypes by name: what a matmul takes, and what comes of it. No torch here."""

from __future__ import annotations

from typing import Literal

#: The kinds of 8 bits: OCP's, and those that AMD's gfx942 has matrix units for. They have another exponent, no infinity
#: and no negative zero: of the same bits the value is half.
OCP = ("float8_e4m3fn", "float8_e5m2")
FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
#: All of them: operands only, in pairs of one kind. The default result is bfloat16.
FP8 = (*OCP, *FNUZ)
FP8_RESULT = "bfloat16"
#: Bytes of each dtype that a matmul takes.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, **dict.fromkeys(FP8, 1)}
#: Short names, as people type them.
SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64", "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip
#: What the products are scaled by: nothing, one factor, or a factor for each row of A and each column of B.
Scales = Literal["none", "tensor", "row"]
#: The same of grouped products, which also have a factor for each row of A and 128 of K, and for each 128 of K and 128
#: columns of B.
GroupedScales = Literal["none", "tensor", "row", "block"]


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"`` -> ``"bfloat16"``, checked.

    Raises
    ------
    TypeError
        If it is none that a matmul takes.
    """
    name = str(dtype).removeprefix("torch.")
    if name in ITEMSIZE:
        return name
    if name not in SHORT:
        raise TypeError(
            f"dtype: {dtype}; tilestream multiplies {', '.join(ITEMSIZE)}: convert first, or use torch.matmul"
        )
    return SHORT[name]


def are_a_pair(a: str, b: str) -> bool:
    """Whether operands of these dtypes are multiplied: of one, or of two of 8 bits of one kind."""
    return a == b or any(a in kind and b in kind for kind in (OCP, FNUZ))


def pairs_text() -> str:
    """What operands may be, for messages."""
    return f"they have one dtype, or two of {', '.join(OCP)}, or two of {', '.join(FNUZ)}"


def result_name(dtype: str, out_dtype: str | None) -> str:
    """The dtype of the result of operands of ``dtype``.

    Raises
    ------
    TypeError
        If nothing writes ``out_dtype``, or it is finer than what products are added up in.
    """
    if out_dtype is None:
        return FP8_RESULT if dtype in FP8 else dtype
    if out_dtype in FP8:
        raise TypeError(
            f"out_dtype={out_dtype}: results have 16 bits or more, there is no scale for fewer; take bfloat16 and "
            "convert the result"
        )
    if ITEMSIZE[out_dtype] > (8 if dtype == "float64" else 4):
        raise TypeError(
            f"out_dtype={out_dtype}: {dtype} operands are added up in float32; convert the operands or the result"
        )
    return out_dtype
