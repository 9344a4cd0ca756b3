"""The native call path: the extension of `csrc/` launches equal calls without Python.

The extension's op looks a call up by a key: shapes, strides, dtypes and alignment of the operands, options, the
context. If it is not found, the call takes the Python path and is observed (`tilestream.launch.observe`). `remember`
then makes a *recipe* of its launches: the kernels, the constant parameters of each, and the source of each other
parameter. A recipe is made only if it reproduces every observed parameter. Other calls (with copies that the kernel
makes, or a second launch) always take the Python path.

The extension needs no CUDA to build and is optional: `extension` is None without it, and `why_not` says why.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilestream.core.forks import free_in_child
from tilestream.launch.cache import launch_cache
from tilestream.launch.launcher import VARIES, Launcher
from tilestream.launch.observe import ATTENTION_OPERANDS, MERGED_OPERANDS, OPERANDS, PRODUCTS, WORDS, Call, Observation
from tilestream.runtime.device_workspace import MOST_STREAMS
from tilestream.runtime.extension import find, open_library
from tilestream.runtime.outliving import outliving
from tilestream.runtime.streams import is_torchs

logger = logging.getLogger(__name__)

_VERSION = 3
_CONSTANT, _ADDRESS, _BASE, _FACTOR, _MAP, _WORD = range(6)
FACTORS = ("alpha", "beta")
#: The order of `Workspace.addresses`, which follow the operands' addresses.
REGIONS = ("counters", "counts", "partials", "starts", "order")
#: The kernels' pointers to operands, without and with ``swap_ab``, where a GEMM kernel's rows are B's columns.
_NAMES = {
    swapped: {
        "a": "a", "b": "b", "x": "a", "y": "b", "x_map": second, "y_map": first, "y_map_1": first, "y_map_2": first,
        "out_map": "out", "out": "out", "bias": "bias", "residual": "residual",
        "row_scale": f"scale_{second}", "column_scale": f"scale_{first}",
        **{name: name for name in (*ATTENTION_OPERANDS, *MERGED_OPERANDS)}, "q_map": "q", "k_map": "k", "v_map": "v",
        "local_map": "local", "offsets": "offsets",
    }
    for swapped, first, second in ((False, "b", "a"), (True, "a", "b"))
}  # fmt: skip
#: Words by their names in attention's kernels.
_WORD_OF = {
    **{name: name for name in WORDS}, "signals": "row_signals", "quarantine": "row_quarantine", "epoch": "row_epoch",
    "key": "row_key",
}  # fmt: skip
#: Numbers that differ from call to call. All pointers do.
_VARYING = {*FACTORS, *_WORD_OF, "base"}
#: Arguments that vary for a `Launcher` and are constant in a recipe: the key decides them, or they are the device's
#: error channel, which lasts as long as the process.
_OF_KEYS = {
    "base", "reset", "scale", "softcap_scale", "local_first", "local_tiles", "local_period", "records", "claims",
}  # fmt: skip


class Unfit(ValueError):
    """Why a launch cannot be repeated by a recipe."""


class Moved(Unfit):
    """An operand was launched at another address than the caller's. Another call of this launch may have a recipe."""


def issued(compiled: Any, grid: tuple[int, int, int], filled: Sequence[Any]) -> tuple[Launcher, tuple[Any, ...]] | None:
    """The `Launcher` of a Triton kernel's launch, and its varying arguments; None if only Triton can launch it.

    Parameters
    ----------
    filled
        All arguments of the kernel, with addresses in place of tensors.
    """
    try:
        launcher, varies = launcher_of(compiled, grid, filled)
    except (NotImplementedError, TypeError, ValueError) as error:
        logger.debug("%s", error)
        return None
    return launcher, varying_of(varies, filled)


def launcher_of(
    compiled: Any, grid: tuple[int, int, int], filled: Sequence[Any], cluster: int = 1, room: int = 0
) -> tuple[Launcher, list[bool]]:
    """The `Launcher` of a Triton kernel, and which of its arguments a launch gives; see `issued` and `Launcher`."""
    names = list(compiled.src.signature)
    varies = [
        value is not None and (name in _VARYING or str(compiled.src.signature[name]).startswith("*"))
        for name, value in zip(names, filled, strict=True)
    ]
    arguments = [VARIES if varying else value for varying, value in zip(varies, filled, strict=True)]
    return Launcher(compiled, grid, arguments, cluster, room), varies


def varying_of(varies: Sequence[bool], filled: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments that a launch gives."""
    return tuple(value for varying, value in zip(varies, filled, strict=True) if varying)


def recipe_of(seen: Observation, call: Call) -> list[int]:
    """The recipe of an observation, as `csrc/recipe.cpp` reads it.

    Raises
    ------
    Unfit
        If an equal call may need another launch.
    """
    kernels = [one for one in seen.issued if one is not None]
    if len(seen.launches) != 1 or not kernels or len(kernels) != len(seen.issued):
        raise Unfit(
            f"{len(seen.launches)} launches of {len(seen.issued)} kernels, of which {len(kernels)} need no Triton; a "
            "recipe is of one launch, and of such kernels"
        )
    launch = seen.launches[0]
    names = _NAMES[getattr(launch.plan, "swap_ab", False)]
    filled = [_values(launcher, values) for launcher, values in kernels]
    partials = next((value for values in filled for one, value in values if one.name == "partials"), None)
    made = [_VERSION, *launch.needs, len(kernels)]
    # If a launch has words, `Extension` knows all its streams, and keeps the tables until those have read them.
    tables = {table.data_ptr() for table in launch.tables} if any(launch.needs) else set()
    for (launcher, _), values in zip(kernels, filled, strict=True):
        sources = _Sources(names, call, launch.needs, partials, tables, {one.name for one, _ in values})
        made += [*launcher.head(), len(values)]
        for parameter, value in values:
            made += [parameter.size, parameter.alignment, *sources.of(parameter, value)]
    return made


def _values(launcher: Launcher, varying: Sequence[Any]) -> list[tuple[Any, Any]]:
    """A launch's parameters with their values."""
    given = iter(varying)
    return [(one, next(given) if one.value is VARIES else one.value) for one in launcher.parameters]


class _Sources(NamedTuple):
    """The sources of a kernel's parameters.

    Attributes
    ----------
    names
        The operands of pointers, by the pointers' names.
    partials
        The address of the launch's partial results, if it has any.
    tables
        The addresses of the launch's tables that may be constant.
    read
        The kernel's parameters.
    """

    names: Mapping[str, str]
    call: Call
    needs: tuple[int, ...]
    partials: int | None
    tables: set[int]
    read: set[str]

    def of(self, parameter: Any, value: Any) -> list[int]:
        """A parameter's kind, and the kind's arguments."""
        name = parameter.name
        if parameter.tensor is not None:
            return [_MAP, *self._address(name, value), *parameter.tensor.integers()]
        constant = [_CONSTANT, _bits(parameter, value)]
        if parameter.value is not VARIES:
            return constant
        if name in FACTORS:
            if name == "beta" and "residual" not in self.read:
                return constant
            factor = self.call.factors[FACTORS.index(name)]
            if value != factor:
                raise Moved(f"parameter {name} is {value}, and the caller's is {factor}")
            return [_FACTOR, FACTORS.index(name)]
        if name == "base" and any(self.needs):
            return [_BASE]
        if self.call.words and name in _WORD_OF:
            word = _WORD_OF[name]
            if value != self.call.words[word]:
                raise Moved(f"parameter {name} is {value}, and the caller's {word} is {self.call.words[word]}")
            return [_WORD, WORDS.index(word)]
        if name in _OF_KEYS or value in self.tables or (name in _WORD_OF and parameter.format != "Q"):
            return constant  # the epoch of a kernel that waits for nothing
        return [_ADDRESS, *self._address(name, value)]

    def _address(self, name: str, value: int) -> tuple[int, int]:
        """The object that an address belongs to, and its offset in bytes."""
        operand = self.names.get(name)
        tensor = None if operand is None else self.call.operands.get(operand)
        if operand is not None and tensor is not None and tensor.data_ptr() == value:
            return OPERANDS.index(operand), 0
        if any(self.needs) and name in REGIONS:
            return len(OPERANDS) + REGIONS.index(name), 0
        behind = -1 if self.partials is None else value - self.partials
        if 0 <= behind < 4 * self.needs[3]:  # shares of split keys, which a second kernel joins
            return len(OPERANDS) + REGIONS.index("partials"), behind
        if operand is not None:
            raise Moved(f"parameter {name} is not the address of the caller's {operand}")
        raise Unfit(f"parameter {name} differs from call to call")


def recipe_of_kernel(
    launcher: Launcher, varying: Sequence[Any]
) -> tuple[list[int], dict[str, tuple[bool, int]], dict[str, int]]:
    """The recipe of one launch whose varying addresses and integers have places of their own.

    Returns
    -------
    recipe, places, given
        ``places``: by parameter, whether it is a word, and its number among the words or the addresses. ``given``: its
        value in this launch.

    Raises
    ------
    Unfit
        If there are more of them than places, or one is no address and no integer.
    """
    values = _values(launcher, varying)
    recipe = [_VERSION, *[0] * 5, 1, *launcher.head(), len(values)]
    places: dict[str, tuple[bool, int]] = {}
    given: dict[str, int] = {}
    for parameter, value in values:
        recipe += [parameter.size, parameter.alignment]
        if parameter.value is not VARIES:
            recipe += [_CONSTANT, _bits(parameter, value)]
            continue
        is_word = parameter.format != "Q"
        number = sum(word == is_word for word, _ in places.values())
        most = len(WORDS if is_word else OPERANDS)
        if parameter.tensor is not None or type(value) is not int or number >= most:
            raise Unfit(f"parameter {parameter.name} is no address and no integer, or there are more than {most}")
        places[parameter.name], given[parameter.name] = (is_word, number), value
        recipe += [_WORD, number] if is_word else [_ADDRESS, number, 0]
    return recipe, places, given


def _bits(parameter: Any, value: Any) -> int:
    return int.from_bytes(parameter._replace(value=value).packed().ljust(8, b"\0"), "little", signed=True)


class Extension:
    """The loaded extension: the ops of ``csrc/ops.cpp``, and the memory that its recipes refer to."""

    def __init__(self, library: Path, driver: str, torch_library: str) -> None:
        self._library = found = open_library(library, driver, torch_library)
        found.tilestream_size.restype = found.tilestream_context.restype = ctypes.c_int64
        found.tilestream_context.argtypes = (ctypes.c_int32,)
        found.tilestream_set_capacity.argtypes = (ctypes.c_int64,)
        found.tilestream_take_workspace.argtypes = (ctypes.POINTER(ctypes.c_int64),)
        found.tilestream_give_workspace.argtypes = (
            ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        ops = torch.ops.tilestream
        # `_op`: an overload's own function, without the Python around it.
        #: By the public op: a product with at most a bias, into a new or a given output.
        self.try_plain = {op: getattr(ops.try_plain, op)._op for op in PRODUCTS}
        self.try_plain_out = {op: getattr(ops.try_plain_out, op)._op for op in PRODUCTS}
        self.try_matmul, self.try_matmul_out = ops.try_matmul.default._op, ops.try_matmul_out.default._op
        self.remember_matmul = ops.remember_matmul.default._op
        self.find_gated_matmul = ops.find_gated_matmul.default._op
        self.launch_found = ops.launch_found.default._op
        self.remember_gated_matmul = ops.remember_gated_matmul.default._op
        self.try_plain_attention = ops.try_plain_attention.default._op
        self.try_plain_attention_out = ops.try_plain_attention_out.default._op
        self.try_attention, self.try_attention_out = ops.try_attention.default._op, ops.try_attention_out.default._op
        self.remember_attention = ops.remember_attention.default._op
        self.find_gated_attention = ops.find_gated_attention.default._op
        self.remember_gated_attention = ops.remember_gated_attention.default._op
        self.try_merge_attention = ops.try_merge_attention.default._op
        self.remember_merge_attention = ops.remember_merge_attention.default._op
        self.try_grouped, self.try_grouped_out = ops.try_grouped.default._op, ops.try_grouped_out.default._op
        self.remember_grouped = ops.remember_grouped.default._op
        self.number_layouts = ops.number_layouts.default._op
        self._lock = free_in_child(threading.Lock())
        #: The words of each stream, by device, stream and context. The extension has their addresses.
        self._words: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}
        self._unfit: weakref.WeakSet[Any] = weakref.WeakSet()
        #: By address: the tables of recipes, and of the recipes that were dropped last, which a thread may be about to
        #: launch.
        self._tables: dict[int, torch.Tensor] = {}
        #: Torch's own streams with words, which are few: their launches may read any table. And whether a caller's own
        #: stream has words: it may be gone, so torch's allocator is not told of it, and tables are kept.
        self._readers: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        self._keeps_tables = False
        self._tables_before: dict[int, torch.Tensor] = {}
        launch_cache.followers.append(self.clear)

    def remember(
        self, seen: Observation, call: Call, stream: int, into: bool, arguments: tuple[Any, ...]
    ) -> bool:  # fmt: skip
        """Keep the recipe of an observed call for the next equal call. Returns whether there is one.

        Parameters
        ----------
        stream
            The current stream, on which it was launched.
        into
            Whether the caller gave the output.
        arguments
            Those of `try_matmul`, `try_grouped`, `try_attention` or `try_merge_attention`; or those of
            `find_gated_matmul` or `find_gated_attention` after the output.
        """
        if len(seen.launches) != 1 or seen.launches[0] in self._unfit:
            return False
        launch, result = seen.launches[0], call.operands["out"]
        try:
            recipe = recipe_of(seen, call)
            with launch_cache.unless_cleared_since(seen.generation) as may_keep:
                if not may_keep:
                    return False
                if "q" in call.operands:
                    keep = self.remember_gated_attention if call.words else self.remember_attention
                    kept = bool(keep(recipe, result, call.operands["lse"], into, *arguments))
                elif "o_a" in call.operands:
                    kept = bool(self.remember_merge_attention(recipe, result, call.operands["lse"], *arguments))
                elif "offsets" in call.operands:
                    kept = bool(self.remember_grouped(recipe, result, into, *arguments))
                else:
                    keep = self.remember_gated_matmul if call.words else self.remember_matmul
                    kept = bool(keep(recipe, result, into, *arguments))
        except (RuntimeError, ValueError) as error:
            logger.debug("no recipe: %s", error)
            if not isinstance(error, Moved):
                self._unfit.add(launch)
            return False
        if kept and any(launch.needs):
            assert result is not None
            self._give_words(result.device, stream, launch.needs[1:])
            with self._lock:
                self._tables |= {table.data_ptr(): table for table in launch.tables}
                if result.is_cuda:
                    current = torch.cuda.current_stream(result.device)
                    if is_torchs(current):
                        self._readers[self._place(result.get_device(), stream)] = current
                    else:
                        self._keeps_tables = True
        return kept

    def clear(self) -> None:
        """Drop all recipes: for a change that decides plans and is not part of the keys."""
        self._library.tilestream_clear()
        with self._lock:
            for table, reader in itertools.product(self._tables_before.values(), self._readers.values()):
                if reader.device == table.device:
                    table.record_stream(reader)
            kept = self._tables_before if self._keeps_tables else {}
            self._tables_before, self._tables = kept | self._tables, {}

    def __len__(self) -> int:
        """The number of recipes."""
        return int(self._library.tilestream_size())

    def set_capacity(self, entries: int) -> None:
        """Set the largest number of recipes. One more empties the table."""
        self._library.tilestream_set_capacity(entries)

    def _place(self, index: int, stream: int) -> tuple[int, int, int]:
        """The key of a stream's words: the default streams of all contexts have the handle 0."""
        return index, stream, self._library.tilestream_context(index)

    def _give_words(self, device: torch.device, stream: int, sizes: Sequence[int]) -> None:
        """Grow the stream's workspace to these numbers of counters, counts, partials and elements of half a list.

        This path has its own words beside those of `tilestream.runtime.device_workspace`: launches of one stream run
        one after the other, so both may be in use. Freed words were allocated on their own stream, so torch's allocator
        gives them only to later work of that stream.
        """
        index = -1 if device.index is None else device.index  # -1: torch's index of the CPU
        place = self._place(index, stream)
        with self._lock, torch.inference_mode(False):
            held = self._words.get(place, ())
            counts = [one.numel() for one in held[:4]] if held else [0] * 4
            if held and all(size <= there for size, there in zip(sizes, counts, strict=True)):
                return
            most = [max(pair) for pair in zip(sizes, counts, strict=True)]
            made = outliving(device, lambda: _words(most, device))
            addresses = (ctypes.c_void_p * len(made))(*[one.data_ptr() for one in made])
            if self._library.tilestream_give_workspace(index, stream, addresses, (ctypes.c_int64 * 4)(*most)):
                self._words[place] = made
            oldest = (ctypes.c_int64 * 3)()
            while len(self._words) > MOST_STREAMS and self._library.tilestream_take_workspace(oldest):
                self._words.pop((oldest[0], oldest[1], oldest[2]), None)


@functools.cache
def load() -> Extension | str:
    """The extension, or why there is none. The first call loads it. Makes no CUDA context."""
    found = find()
    if isinstance(found, str):
        return found
    try:
        return Extension(*found)
    except (OSError, RuntimeError) as error:
        return f"{found[0]}: {error}"


def extension() -> Extension | None:
    """The extension; None if it is missing or cannot be used."""
    found = load()
    return found if isinstance(found, Extension) else None


def why_not() -> str:
    """Why there is no extension; empty if there is one."""
    found = load()
    return found if isinstance(found, str) else ""


def _words(sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    counters, counts, partials, listed = sizes
    return (
        torch.zeros(counters, dtype=torch.int64, device=device),
        torch.zeros(counts, dtype=torch.int32, device=device),
        torch.empty(partials, dtype=torch.float32, device=device),
        torch.empty(listed, dtype=torch.int32, device=device),
        torch.empty(listed, dtype=torch.int32, device=device),
    )
