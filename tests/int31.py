"""`Int31`: an integer that raises where a device's 32-bit arithmetic may differ from Python's.

Leaf functions (see `tilestream.core.integers`) are run on it: an operand, an intermediate or a result outside
[0, 2**31) raises, and so does every operation but ``+ - * // % ^`` and comparisons.
"""

from __future__ import annotations

import operator

LIMIT = 2**31


class LeftInt31(AssertionError):
    """A value left [0, 2**31), or an operation was asked for that a device's integers do otherwise or lack."""


def checked(value: object) -> int:
    """The plain value of an operand: `Int31`, or an integer in range."""
    if isinstance(value, Int31):
        return value.value
    if type(value) is not int:
        raise LeftInt31(f"{value!r} is a {type(value).__name__}, not an integer")
    if not 0 <= value < LIMIT:
        raise LeftInt31(f"{value} is outside [0, 2**31)")
    return value


def _arithmetic(name: str, sign: str):
    plain = getattr(operator, name)

    def forward(self, other):
        a, b = self.value, checked(other)
        result = plain(a, b)
        if not 0 <= result < LIMIT:
            raise LeftInt31(f"{a} {sign} {b} = {result} is outside [0, 2**31)")
        return Int31(result)

    def backward(self, other):
        return forward(Int31(other), self)

    return forward, backward


def _comparison(name: str):
    plain = getattr(operator, name)
    return lambda self, other: plain(self.value, checked(other))


def _refused(name: str):
    def refuse(self, *_):
        raise LeftInt31(f"{name} on {self.value}: not among + - * // % ^ and comparisons")

    return refuse


class Int31:
    """An integer in [0, 2**31)."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = checked(value)

    __hash__ = None

    def __repr__(self) -> str:
        return f"Int31({self.value})"


for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "xor": "^"}.items():
    _forward, _backward = _arithmetic(_name, _sign)
    setattr(Int31, f"__{_name}__", _forward)
    setattr(Int31, f"__r{_name}__", _backward)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Int31, f"__{_name}__", _comparison(_name))
_REFUSED = (
    "and rand or ror lshift rlshift rshift rrshift truediv rtruediv pow rpow divmod rdivmod matmul neg pos abs invert "
    "int float index bool complex round trunc floor ceil"
)
for _name in _REFUSED.split():
    setattr(Int31, f"__{_name}__", _refused(_name))


def on_int31(leaf, *args: int):
    """``leaf(*args)`` computed on `Int31`, as plain integers."""
    result = leaf(*(Int31(arg) for arg in args))
    return tuple(map(checked, result)) if isinstance(result, tuple) else checked(result)
