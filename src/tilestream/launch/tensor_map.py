"""Tensor maps: 128 bytes that describe a tensor in memory, and the boxes of copies, to the tensor memory accelerator.

The driver makes them, with the same bytes as for Triton. They contain an address and keep no memory alive.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from tilestream.runtime.driver import INVALID_CONTEXT, bind_context, cuda_function, error_name

#: Bytes of a tensor map.
SIZE = 128
#: The driver's number of an element type that is fp32 in memory, rounded to tf32 by the copy to shared memory.
TFLOAT32 = 11

_ALIGNMENT = 64
#: The driver's number of each promotion: bytes that L2 loads from memory at a time.
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_NAN_REQUEST_ZERO_FMA = 1
_ENCODE_ARGUMENTS = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
)  # fmt: skip
#: The largest bytes of a box's row, by the driver's number of the swizzle.
_SWIZZLED_BYTES = {1: 32, 2: 64, 3: 128}
#: Up to driver 13.1 a small tensor's map needs a bit cleared, as CUTLASS (copy_traits_sm90_tma) does, and Triton.
_LAST_FAULTY_DRIVER = 13010
_SMALL_BYTES = 128 * 1024


class TensorMap:
    """A tensor of fixed shape and strides, at any address.

    Parameters
    ----------
    elem_type, elem_size
        The driver's number of the element type (`CUtensorMapDataType`), and bytes of an element.
    shape, strides
        In elements, outermost first, as in torch. The innermost stride is 1; the stride of a dimension of extent 1 is
        free.
    box
        The extents of one copy, outermost first.
    swizzle
        0 for none; 1, 2, 3 for 32, 64, 128 bytes.
    nan
        Whether elements outside the tensor read as NaN, or as 0.
    promotion
        Bytes that L2 loads from memory at a time: 0, 64, 128 or 256.

    Raises
    ------
    ValueError
        If the hardware does not support such a tensor. The message names the rule.
    """

    def __init__(
        self, elem_type: int, elem_size: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int],
        swizzle: int, nan: bool = False, promotion: int = 128,
    ) -> None:  # fmt: skip
        rank = len(shape)
        self._what = f"shape {tuple(shape)}, strides {tuple(strides)}, box {tuple(box)}, {elem_size} bytes an element"
        steps = _steps(elem_size, shape, strides)
        row = box[-1] * elem_size if box else 0
        # The rules of cuTensorMapEncodeTiled, which itself does not say which rule is broken.
        rules = {
            "1 to 5 dimensions, as many strides, and as many of the box": 0 < rank <= 5
            and rank == len(strides) == len(box),
            "extents from 1 to 2**32": all(0 < extent <= 2**32 for extent in shape),
            "an innermost stride of 1": not strides or strides[-1] == 1 or shape[-1] == 1,
            "the other strides multiples of 16 bytes, from 0 to 2**40": all(
                step % 16 == 0 and 0 <= step < 2**40 for step in steps
            ),
            "box extents from 1 to 256": all(0 < extent <= 256 for extent in box),
            "rows of the box that are multiples of 16 bytes": row % 16 == 0,
            f"rows of the box no longer than the swizzle ({_SWIZZLED_BYTES.get(swizzle)} bytes)": row
            <= _SWIZZLED_BYTES.get(swizzle, row),
        }
        broken = [rule for rule, kept in rules.items() if not kept]
        if broken:
            raise ValueError(f"a tensor map has {broken[0]}; this one has {self._what}")
        self._rank, self._elem_type, self._swizzle = rank, elem_type, swizzle
        self._encode = cuda_function("cuTensorMapEncodeTiled", *_ENCODE_ARGUMENTS)
        self._fill = _NAN_REQUEST_ZERO_FMA if nan else 0
        self._promotion = _PROMOTIONS[promotion]
        self._shape = (ctypes.c_uint64 * rank)(*reversed(shape))
        self._steps = (ctypes.c_uint64 * rank)(*reversed(steps))  # one more than are read
        self._box = (ctypes.c_uint32 * rank)(*reversed(box))
        self._ones = (ctypes.c_uint32 * rank)(*[1] * rank)
        last = sum((extent - 1) * step for extent, step in zip(shape, (*steps, elem_size), strict=True))
        self._small = last + 1 < _SMALL_BYTES

    def integers(self) -> list[int]:
        """All but the address, as `csrc/recipe.cpp` reads them."""
        clears = self._small and _driver_version() <= _LAST_FAULTY_DRIVER
        return [
            self._elem_type, self._rank, *self._shape, *self._steps, *self._box, self._swizzle, self._promotion,
            self._fill, int(clears),
        ]  # fmt: skip

    def at(self, address: int) -> bytes:
        """The map of such a tensor at ``address``, which is a multiple of 16.

        Raises
        ------
        ValueError
            If it is none, or the driver refuses.
        """
        if address % 16:
            raise ValueError(
                f"a tensor that is copied by tensor maps starts at a multiple of 16 bytes, not {address:#x}"
            )
        memory = ctypes.create_string_buffer(SIZE + _ALIGNMENT)
        offset = -ctypes.addressof(memory) % _ALIGNMENT
        arguments = (
            ctypes.addressof(memory) + offset, self._elem_type, self._rank, address, self._shape, self._steps,
            self._box, self._ones, 0, self._swizzle, self._promotion, self._fill,
        )  # fmt: skip
        code = self._encode(*arguments)
        if code == INVALID_CONTEXT:  # some drivers want one, and a fresh thread has none yet
            bind_context()
            code = self._encode(*arguments)
        if code:
            raise ValueError(
                f"the driver makes no tensor map: {error_name(code)}; element type {self._elem_type}, {self._what}, "
                f"swizzle {self._swizzle}, address {address:#x}"
            )
        if self._small and _driver_version() <= _LAST_FAULTY_DRIVER:
            word = ctypes.c_uint64.from_buffer(memory, offset + 8)
            word.value &= ~(1 << 21)
        return memory.raw[offset : offset + SIZE]


def _steps(elem_size: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides in bytes of all but the innermost; one that is never stepped along is as if all were packed."""
    steps: list[int] = []
    inner = elem_size * (shape[-1] if shape else 0)  # bytes that the dimensions inside this one span
    for extent, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=False):
        step = -(-inner // 16) * 16 if extent == 1 else stride * elem_size
        steps.append(step)
        inner = max(inner, extent * step)
    return steps[::-1]


@functools.cache
def _driver_version() -> int:
    version = ctypes.c_int()
    code = cuda_function("cuDriverGetVersion", ctypes.POINTER(ctypes.c_int))(ctypes.byref(version))
    if code:
        raise RuntimeError(f"the driver does not say its version: {error_name(code)}")
    return version.value
