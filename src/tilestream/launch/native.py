"""The native call path: equal calls are launched by `csrc/`, without Python.

A call that torch's dispatcher brings to the extension's op is looked up there by a key: shapes, strides, dtypes and
alignment of the operands, options, the context. If it is not found, the op says so, and the call goes Python's way,
observed (`tilestream.launch.observe`). `remember` then makes a *recipe* of what was launched: the kernels, the constant
parameters of each, and where each other parameter comes from. A recipe is made only if it reproduces every parameter
that was observed; a call with anything else (copies that the kernel makes, a second launch) goes Python's way always.

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
from tilestream.launch.observe import PRODUCTS, WORDS, Call, Observation
from tilestream.runtime.device_workspace import MOST_STREAMS
from tilestream.runtime.extension import find, open_library
from tilestream.runtime.streams import is_torchs

logger = logging.getLogger(__name__)

_VERSION = 3
_CONSTANT, _ADDRESS, _BASE, _FACTOR, _MAP, _WORD = range(6)
_ATTENTION = (
    "q", "k", "v", "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "block_table",
    "seqlens_k",
)  # fmt: skip
_MERGED = ("o_a", "lse_a", "o_b", "lse_b")
#: The order of `Operand` in csrc/recipe.h.
OPERANDS = ("a", "b", "out", "bias", "residual", "scale_a", "scale_b", *_ATTENTION, *_MERGED, "offsets", "local")
FACTORS = ("alpha", "beta")
#: The order of `Workspace.addresses`, which stand behind the operands' addresses.
REGIONS = ("counters", "counts", "partials", "starts", "order")
#: Pointers of the kernels that are operands, by whether a GEMM kernel's rows are B's columns (``swap_ab``).
_NAMES = {
    swapped: {
        "a": "a", "b": "b", "x": "a", "y": "b", "x_map": second, "y_map": first, "y_map_1": first, "y_map_2": first,
        "out_map": "out", "out": "out", "bias": "bias", "residual": "residual",
        "row_scale": f"scale_{second}", "column_scale": f"scale_{first}",
        **{name: name for name in (*_ATTENTION, *_MERGED)}, "q_map": "q", "k_map": "k", "v_map": "v",
        "local_map": "local", "offsets": "offsets",
    }
    for swapped, first, second in ((False, "b", "a"), (True, "a", "b"))
}  # fmt: skip
#: Words, by the names that attention's kernels have for them.
_WORD_OF = {
    **{name: name for name in WORDS}, "signals": "row_signals", "quarantine": "row_quarantine", "epoch": "row_epoch",
    "key": "row_key",
}  # fmt: skip
#: Numbers that differ from call to call. All pointers do.
_VARYING = {*FACTORS, *_WORD_OF, "base"}
#: What differs from call to call for `Launcher`, and is constant in a recipe: a key decides it, or, of the device's
#: error channel, it lasts as long as the process.
_OF_KEYS = {
    "base", "reset", "scale", "softcap_scale", "local_first", "local_tiles", "local_period", "records", "claims",
}  # fmt: skip


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
    varies = [
        value is not None and (name in _VARYING or str(compiled.src.signature[name]).startswith("*"))
        for name, value in zip(names, filled, strict=True)
    ]
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
    # Where a launch has words, `Extension` knows all its streams: it keeps the tables until those have read them.
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
    """Where a kernel's parameters come from.

    Attributes
    ----------
    names
        The operands that pointers are, by the pointers' names.
    partials
        The address of the launch's partial results, where it has such.
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
        """A parameter's kind, and what that kind takes."""
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
            return constant  # the last: of a kernel that waits for nothing
        return [_ADDRESS, *self._address(name, value)]

    def _address(self, name: str, value: int) -> tuple[int, int]:
        """Of what an address is, and how many bytes it stands behind that."""
        operand = self.names.get(name)
        tensor = None if operand is None else self.call.operands.get(operand)
        if operand is not None and tensor is not None and tensor.data_ptr() == value:
            return OPERANDS.index(operand), 0
        if any(self.needs) and name in REGIONS:
            return len(OPERANDS) + REGIONS.index(name), 0
        behind = -1 if self.partials is None else value - self.partials
        if 0 <= behind < 4 * self.needs[3]:  # the shares of a split, which a second kernel joins
            return len(OPERANDS) + REGIONS.index("partials"), behind
        if operand is not None:
            raise Moved(f"parameter {name} is not the address of the caller's {operand}")
        raise Unfit(f"parameter {name} differs from call to call")


def _bits(parameter: Any, value: Any) -> int:
    return int.from_bytes(parameter._replace(value=value).packed().ljust(8, b"\0"), "little", signed=True)


class Extension:
    """The loaded library: the ops of ``csrc/ops.cpp``, and what is kept for it."""

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
        #: By the public op: a product with no more than a bias, fresh and into an output.
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
        self._lock = free_in_child(threading.Lock())
        #: The words of each stream, by device, stream and context: the library has their addresses.
        self._words: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}
        self._unfit: weakref.WeakSet[Any] = weakref.WeakSet()
        #: By address: the tables that recipes have, and those of the recipes that were forgotten last. A thread may be
        #: about to launch one.
        self._tables: dict[int, torch.Tensor] = {}
        #: Torch's own streams, of which there are few, that have words: launches may read any table there. Whether a
        #: stream of a caller's own has such, too: it may be gone, so torch is not told of it, and tables are kept.
        self._readers: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        self._keeps_tables = False
        self._tables_before: dict[int, torch.Tensor] = {}
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
            Of `try_matmul`, `try_grouped`, `try_attention`, or `try_merge_attention`; of `find_gated_matmul` or of
            `find_gated_attention` behind the output.
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
        except (Unfit, RuntimeError, ValueError) as error:
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
        """Forget all recipes: where what decides a plan has changed, and no key says so."""
        self._library.tilestream_clear()
        with self._lock:
            for table, reader in itertools.product(self._tables_before.values(), self._readers.values()):
                if reader.device == table.device:
                    table.record_stream(reader)
            kept = self._tables_before if self._keeps_tables else {}
            self._tables_before, self._tables = kept | self._tables, {}

    def __len__(self) -> int:
        """How many recipes there are."""
        return int(self._library.tilestream_size())

    def set_capacity(self, entries: int) -> None:
        """Keep so many recipes at most; one more empties the table."""
        self._library.tilestream_set_capacity(entries)

    def _place(self, index: int, stream: int) -> tuple[int, int, int]:
        """Where words are: the default stream's handle is 0 in every context, and each has its own."""
        return index, stream, self._library.tilestream_context(index)

    def _give_words(self, device: torch.device, stream: int, sizes: Sequence[int]) -> None:
        """Have the stream's workspace hold so many counters, counts, partials, and elements of either half of a list.

        They are this path's own, beside those of `tilestream.runtime.device_workspace`: launches of one stream run one
        after the other, whichever words they count with. What is freed here was allocated on the stream that it served:
        torch's allocator gives it to later work of that stream alone.
        """
        index = -1 if device.index is None else device.index  # -1: torch's index of the CPU
        place = self._place(index, stream)
        with self._lock, torch.inference_mode(False):
            held = self._words.get(place, ())
            counts = [one.numel() for one in held[:4]] if held else [0] * 4
            if held and all(size <= there for size, there in zip(sizes, counts, strict=True)):
                return
            most = [max(pair) for pair in zip(sizes, counts, strict=True)]
            made = (
                torch.zeros(most[0], dtype=torch.int64, device=device),
                torch.zeros(most[1], dtype=torch.int32, device=device),
                torch.empty(most[2], dtype=torch.float32, device=device),
                torch.empty(most[3], dtype=torch.int32, device=device),
                torch.empty(most[3], dtype=torch.int32, device=device),
            )
            addresses = (ctypes.c_void_p * len(made))(*[one.data_ptr() for one in made])
            if self._library.tilestream_give_workspace(index, stream, addresses, (ctypes.c_int64 * 4)(*most)):
                self._words[place] = made
            oldest = (ctypes.c_int64 * 3)()
            while len(self._words) > MOST_STREAMS and self._library.tilestream_take_workspace(oldest):
                self._words.pop((oldest[0], oldest[1], oldest[2]), None)


@functools.cache
def load() -> Extension | str:
    """The extension, or why there is none. The first call loads it; it makes no CUDA context."""
    found = find()
    if isinstance(found, str):
        return found
    try:
        return Extension(*found)
    except (OSError, RuntimeError) as error:
        return f"{found[0]}: {error}"


def extension() -> Extension | None:
    """The extension, if it is there and can be used."""
    found = load()
    return found if isinstance(found, Extension) else None


def why_not() -> str:
    """Why there is no extension; empty if there is one."""
    found = load()
    return found if isinstance(found, str) else ""
