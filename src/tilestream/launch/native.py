"""The native call path: equal calls are launched by `csrc/`, without Python.

A call that torch's dispatcher brings to the extension's op is looked up there by a key: shapes, strides, dtypes and
alignment of the operands, options, the context. If it is not found, the op says so, and the call goes Python's way,
observed (`tilestream.launch.observe`). `remember` then makes a *recipe* of what was launched: the kernel, the constant
parameters, and where each other parameter comes from. A recipe is made only if it reproduces every parameter that was
observed; a call with anything else (a table, a gate, more than one kernel) goes Python's way always.

The extension needs no CUDA to build and is optional: `extension` is None without it, and `why_not` says why.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilestream.launch.cache import launch_cache
from tilestream.launch.launcher import VARIES, Launcher
from tilestream.launch.observe import Call, Observation

logger = logging.getLogger(__name__)

#: 0: the extension is not used. Any other value: the path of its library.
ENVIRONMENT = "TILESTREAM_NATIVE"
LIBRARY = "libtilestream_native.so"
#: Where `make native` and the wheel put it: beside the package's own files.
FOLDER = Path(__file__).resolve().parents[1] / "_native"

_VERSION = 1
_CONSTANT, _OPERAND, _WORKSPACE, _BASE, _FACTOR, _MAP = range(6)
#: The order of `Given` in csrc/recipe.h.
OPERANDS = ("a", "b", "out", "bias", "residual", "scale_a", "scale_b")
FACTORS = ("alpha", "beta")
_WORKSPACES = ("partials", "counts", "counters")
#: Parameters of the GEMM kernels that are operands, by whether the kernel's rows are B's columns (``swap_ab``).
_NAMES = {
    swapped: {
        "a": "a", "b": "b", "x_map": second, "y_map": first, "y_map_1": first, "y_map_2": first, "out_map": "out",
        "out": "out", "bias": "bias", "residual": "residual",
        "row_scale": f"scale_{second}", "column_scale": f"scale_{first}",
    }
    for swapped, first, second in ((False, "b", "a"), (True, "a", "b"))
}  # fmt: skip
_VARYING = {*_NAMES[False], *FACTORS, *_WORKSPACES, "base", "reset"}


class Unfit(Exception):
    """Why a launch cannot be repeated by a recipe."""


class Moved(Unfit):
    """An operand of this call was not launched where its caller has it: another call of this launch may be fit."""


def issued(compiled: Any, grid: tuple[int, int, int], filled: Sequence[Any]) -> tuple[Launcher, tuple[Any, ...]] | None:
    """A Triton kernel's launch as `Launcher` would make it, and what varies; None if only Triton can.

    Parameters
    ----------
    filled
        The kernel's arguments, all: addresses in place of tensors.
    """
    names = list(compiled.src.signature)
    varies = [name in _VARYING and value is not None for name, value in zip(names, filled, strict=True)]
    arguments = [VARIES if varying else value for varying, value in zip(varies, filled, strict=True)]
    try:
        launcher = Launcher(compiled, grid, arguments)
    except (NotImplementedError, TypeError, ValueError) as error:
        logger.debug("%s", error)
        return None
    return launcher, tuple(value for varying, value in zip(varies, filled, strict=True) if varying)


def recipe_of(seen: Observation, call: Call) -> list[int]:
    """The recipe of what was observed, as `csrc/recipe.cpp` reads it.

    Raises
    ------
    Unfit
        If a call of equal layout may have to be launched otherwise.
    """
    if len(seen.launches) != 1 or len(seen.issued) != 1 or seen.issued[0] is None:
        raise Unfit(f"{len(seen.launches)} launches of {len(seen.issued)} kernels; a recipe is of one")
    launch, (launcher, values) = seen.launches[0], seen.issued[0]
    names, needs, given = _NAMES[launch.plan.swap_ab], launch.needs, iter(values)
    made = [_VERSION, *launcher.head(), *needs, len(launcher.parameters)]
    read = {parameter.name for parameter in launcher.parameters}
    for parameter in launcher.parameters:
        value = next(given) if parameter.value is VARIES else parameter.value
        made += [parameter.size, parameter.alignment, *_filled_by(parameter, value, names, call, needs, read)]
    return made


def _filled_by(
    parameter: Any, value: Any, names: Mapping[str, str], call: Call, needs: tuple[int, ...], read: set[str]
) -> list[int]:
    """Where a parameter comes from: its kind, and what that kind takes."""
    name = parameter.name
    if parameter.value is not VARIES or name == "reset":
        return [_CONSTANT, _bits(parameter, value)]
    if name in names:
        operand = call.operands[names[name]]
        if operand is None or operand.data_ptr() != value:
            raise Moved(f"parameter {name} is not the address of the caller's {names[name]}")
        index = OPERANDS.index(names[name])
        return [_OPERAND, index] if parameter.tensor is None else [_MAP, index, *parameter.tensor.integers()]
    if name in FACTORS:
        factor = call.factors[FACTORS.index(name)]
        if name == "beta" and "residual" not in read:
            return [_CONSTANT, _bits(parameter, value)]
        if value != factor:
            raise Moved(f"parameter {name} is {value}, and the caller's is {factor}")
        return [_FACTOR, FACTORS.index(name)]
    if needs[0] and name in _WORKSPACES:
        return [_WORKSPACE, _WORKSPACES.index(name)]
    if needs[0] and name == "base":
        return [_BASE]
    if name == "base":
        return [_CONSTANT, _bits(parameter, value)]
    raise Unfit(f"parameter {name} differs from call to call")


def _bits(parameter: Any, value: Any) -> int:
    return int.from_bytes(parameter._replace(value=value).packed().ljust(8, b"\0"), "little", signed=True)


class Extension:
    """The loaded library: its ops, and what is kept for it.

    Attributes
    ----------
    try_matmul, try_matmul_out, remember_matmul
        The ops of ``csrc/ops.cpp``.
    """

    def __init__(self, library: Path, driver: str, torch_library: str) -> None:
        torch.ops.load_library(str(library))
        self._library = found = ctypes.CDLL(str(library))
        found.tilestream_open.restype = ctypes.c_char_p
        found.tilestream_size.restype = ctypes.c_int64
        found.tilestream_set_capacity.argtypes = (ctypes.c_int64,)
        found.tilestream_give_workspace.argtypes = (
            ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        why = found.tilestream_open(driver.encode(), torch_library.encode())
        if why is not None:
            raise OSError(why.decode())
        ops = torch.ops.tilestream
        self.try_matmul, self.try_matmul_out = ops.try_matmul.default, ops.try_matmul_out.default
        self.remember_matmul = ops.remember_matmul.default
        self._lock = threading.Lock()
        #: The words of each stream, by device and stream: the library has their addresses.
        self._words: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._unfit: weakref.WeakSet[Any] = weakref.WeakSet()
        launch_cache.followers.append(self.clear)

    def remember(
        self, seen: Observation, call: Call, stream: int, into: bool, arguments: tuple[Any, ...]
    ) -> bool:  # fmt: skip
        """Keep the recipe of what was observed for the next equal call; returns whether there is one.

        Parameters
        ----------
        stream
            That it was launched on, the current one.
        into
            Whether the caller gave the output.
        arguments
            Of `try_matmul`.
        """
        if len(seen.launches) != 1 or seen.launches[0] in self._unfit:
            return False
        launch, result = seen.launches[0], call.operands["out"]
        try:
            recipe = recipe_of(seen, call)
            kept = bool(self.remember_matmul(recipe, result, into, *arguments))
        except (Unfit, RuntimeError, ValueError) as error:
            logger.debug("no recipe: %s", error)
            if not isinstance(error, Moved):
                self._unfit.add(launch)
            return False
        if kept and launch.needs[0]:
            assert result is not None
            self._give_words(result.device, stream, launch.needs[1:])
        return kept

    def clear(self) -> None:
        """Forget all recipes: where what decides a plan has changed, and no key says so."""
        self._library.tilestream_clear()

    def __len__(self) -> int:
        """How many recipes there are."""
        return int(self._library.tilestream_size())

    def set_capacity(self, entries: int) -> None:
        """Keep so many recipes at most; one more empties the table."""
        self._library.tilestream_set_capacity(entries)

    def _give_words(self, device: torch.device, stream: int, sizes: Sequence[int]) -> None:
        """Have the stream's workspace hold so many counters, counts and partials.

        They are this path's own, beside those of `tilestream.runtime.device_workspace`: launches of one stream run one
        after the other, whichever words they count with.
        """
        place = -1 if device.index is None else device.index, stream  # -1: torch's index of the CPU
        with self._lock, torch.inference_mode(False):
            held = self._words.get(place, ())
            if held and all(size <= one.numel() for size, one in zip(sizes, held, strict=True)):
                return
            most = [max(size, one.numel()) for size, one in zip(sizes, held, strict=True)] if held else [*sizes]
            made = (
                torch.zeros(most[0], dtype=torch.int64, device=device),
                torch.zeros(most[1], dtype=torch.int32, device=device),
                torch.empty(most[2], dtype=torch.float32, device=device),
            )
            addresses = (ctypes.c_uint64 * 3)(*[one.data_ptr() for one in made])
            if self._library.tilestream_give_workspace(place[0], stream, addresses, (ctypes.c_int64 * 3)(*most)):
                self._words[place] = made


@functools.cache
def load() -> Extension | str:
    """The extension, or why there is none. The first call loads it; it makes no CUDA context."""
    asked = os.environ.get(ENVIRONMENT, "")
    if asked == "0":
        return f"{ENVIRONMENT}=0"
    if torch.version.hip is not None:
        return "it knows CUDA's driver, and not HIP's"
    library = Path(asked) if asked else FOLDER / LIBRARY
    if not library.exists():
        return f"{library} is not there: `python -m tilestream.launch.native_build` builds it, with a C++ compiler"
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not torch_library.exists():
        return "this torch is built without CUDA"
    try:
        return Extension(library, "libcuda.so.1", str(torch_library))
    except (OSError, RuntimeError) as error:
        return f"{library}: {error}"


def extension() -> Extension | None:
    """The extension, if it is there and can be used."""
    found = load()
    return found if isinstance(found, Extension) else None


def why_not() -> str:
    """Why there is no extension; empty if there is one."""
    found = load()
    return found if isinstance(found, str) else ""
