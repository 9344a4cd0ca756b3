"""Launches a compiled kernel through the GPU's driver, at a low cost to the host.

Triton's own launch parses its arguments and makes its descriptors at each call. Here the memory of a kernel's launches
is laid out once. A launch packs the arguments that differ and calls the driver, without the GIL. With three descriptors
and four more values a launch took 1.5 us of Python; Triton 3.7's own took 14, its compiled kernel's `run` 4.6 (one CPU,
a driver that does nothing).

The kernel's parameters, in Triton 3.6 to 3.9: its arguments in order, without those that were compiled in (constexprs,
None, an integer specialised to 1); a descriptor is its tensor map, the shape as int32 and the strides as int64; then
the addresses of two scratch memories. Their sizes are compared to what the kernel's PTX declares, or its HSA metadata.
On HIP a kernel has no descriptors, no clusters and no launch attributes.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import triton

from tilestream.launch import tensor_map
from tilestream.launch.observe import observation
from tilestream.runtime.driver import INVALID_CONTEXT, bind_context, cuda_function, error_name, hip_function

#: The number of tensor maps that a launcher keeps for each descriptor, 128 bytes each.
_REMEMBERED_MAPS = 1024
#: Formats of `struct` by Triton's types.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
#: Element types whose numbers in Triton and in the driver differ.
_ELEM_TYPES = {8: 10, 9: 8, 10: 9}
_FLOAT32 = 7
_PTX_PARAMETER = re.compile(r"\.param\s+(\.align\s+\d+\s+)?\.[bsuf](?P<bits>\d+)\s[^\[]*(\[(?P<count>\d+)\])?")
_HSA_PARAMETER = re.compile(r"\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)")
_MAP_ALIGNMENT = 64
#: CUlaunchConfig: grid, block and shared memory; then stream, attributes and their number, which each launch packs.
_CONFIG_HEAD, _CONFIG_TAIL = struct.Struct("=7I4x"), struct.Struct("=QQI4x")
#: HIP's arguments for it: grid, block, shared memory, stream.
_HIP_CONFIG = struct.Struct("=7I4xQ")
#: CUlaunchAttribute; at most three integers of its value are used.
_ATTRIBUTE = struct.Struct("=I4x3I52x")  # the number of the attribute, then its value
_COOPERATIVE, _CLUSTER_DIMENSION, _CLUSTER_POLICY, _PROGRAMMATIC = 2, 4, 5, 6
_SPREAD = 1
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MOST_DYNAMIC_SHARED = 8
#: A larger cluster needs an attribute of the function.
_LARGEST_CLUSTER = 8

_hooks = triton.knobs.runtime


def watched() -> bool:
    """Whether one of Triton's launch hooks is in use, as by a profiler."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # a chain of calls, one call, or None


class Descriptor(NamedTuple):
    """An argument that is a tensor descriptor. A call gives the tensor's address; all else is fixed.

    The compiled kernel has the box, the swizzle and the element type.
    """

    #: shape, strides: in elements; see `tilestream.launch.tensor_map.TensorMap`.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tf32: bool = False  # whether the copy to shared memory rounds fp32 to tf32
    nan: bool = False  # whether elements outside the tensor read as NaN, or as 0
    promotion: int = 128  # see `tilestream.launch.tensor_map.TensorMap`; 128 in Triton


class _Varies:
    def __repr__(self) -> str:
        return "VARIES"


#: An argument that each call gives: an address for a pointer, or a number.
VARIES = _Varies()


class _Parameter(NamedTuple):
    """One parameter of the compiled kernel; ``tensor`` if it is a tensor map."""

    name: str
    format: str
    value: Any
    tensor: tensor_map.TensorMap | None = None

    @property
    def size(self) -> int:
        return struct.calcsize(f"={self.format}")

    @property
    def alignment(self) -> int:
        return self.size if self.tensor is None else _MAP_ALIGNMENT

    def packed(self) -> bytes:
        try:
            return struct.pack(f"={self.format}", self.value)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"argument {self.name} is {self.value!r}: {error}") from None


class _Frame(NamedTuple):
    """The memory of one launch: the configuration, the parameters, and last the parameters' addresses."""

    memory: bytearray
    start: int  # the offset at which a launch packs
    config: ctypes.c_void_p  # the addresses of the first and of the last
    addresses: ctypes.c_void_p
    view: ctypes.Array[ctypes.c_char]  # keeps the memory in place


class Launcher:
    """A compiled kernel, a grid, and the arguments that all its launches share.

    It belongs to one device, which is torch's current device wherever it is made and called. Several threads may call
    it at once. It keeps no tensor alive.

    Parameters
    ----------
    kernel
        Triton's compiled kernel: ``kernel = fn[grid](...)``, or ``fn.warmup(...)``.
    grid
        The number of programs, or of clusters if the kernel has clusters: ``(x, y, z)``.
    arguments
        All arguments of the kernel, in its order: `Descriptor` for a descriptor, `VARIES` for an argument that a call
        gives, a number (for a pointer an address) for a fixed one. Compile-time arguments have the values that were
        compiled in.
    cluster
        CTAs of a cluster, for a kernel that was compiled for one CTA. Programs that follow each other in x form one.
    room
        Bytes of dynamic shared memory behind what Triton gives the kernel.

    Raises
    ------
    NotImplementedError
        If only Triton can launch this kernel: it has scratch memory, a large cluster (on HIP any cluster, or a
        cooperative grid), or parameters in an unknown form.
    ValueError, TypeError
        If the arguments do not fit the kernel: their number; a number outside its type's range; an argument that was
        compiled in, or specialised as a multiple of 16, and varies or differs; a tensor that no tensor map describes.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], cluster: int = 1, room: int = 0
    ) -> None:  # fmt: skip
        if min(grid) < 1:
            raise ValueError(f"a grid has extents of 1 and more, not {grid}")
        kernel._init_handles()
        parameters = [*_parameters(kernel, arguments)]
        parameters += [_Parameter("global scratch", "Q", 0), _Parameter("profile scratch", "Q", 0)]
        _check(kernel, parameters)
        self._kernel, self._grid, self._arguments = kernel, grid, tuple(arguments)
        #: All parameters of the kernel, in its order.
        self.parameters = tuple(parameters)
        self._issue = _hip_launch() if _is_hip(kernel) else cuda_function("cuLaunchKernelEx", *[ctypes.c_void_p] * 4)
        self._function = ctypes.c_void_p(kernel.function)
        self._attributes = _attributes(kernel.metadata, cluster)
        self._constant = (ctypes.addressof(self._attributes), len(self._attributes) // _ATTRIBUTE.size)

        # In a frame the varying parameters follow the end of the configuration, so that one packing writes both.
        varying = [parameter for parameter in parameters if parameter.value is VARIES]
        fixed = [parameter for parameter in parameters if parameter.value is not VARIES]
        offsets, format_, end = _place(varying, _CONFIG_HEAD.size + _CONFIG_TAIL.size)
        self._pack = struct.Struct(_CONFIG_TAIL.format + format_).pack_into
        fixed_offsets, _, end = _place(fixed, end)
        places = iter(offsets), iter(fixed_offsets)
        self._offsets = [next(places[parameter.value is not VARIES]) for parameter in parameters]
        self._template = bytearray(-(-end // 8) * 8)
        _CONFIG_HEAD.pack_into(
            self._template, 0, grid[0] * kernel.metadata.num_ctas, *grid[1:],
            kernel.metadata.warp_size * kernel.metadata.num_warps, 1, 1, kernel.metadata.shared + room,
        )  # fmt: skip
        if room:
            _allow_shared(self._function, kernel.metadata.shared + room)
        for parameter, offset in zip(fixed, fixed_offsets, strict=True):
            self._template[offset : offset + parameter.size] = parameter.packed()

        self._names = [parameter.name for parameter in varying]
        self._maps = [
            (i, functools.lru_cache(_REMEMBERED_MAPS)(parameter.tensor.at))
            for i, parameter in enumerate(varying)
            if parameter.tensor is not None
        ]
        #: Free frames. There are as many frames as launches have been in progress at once.
        self._free = [self._frame()]

    def __call__(self, stream: int, *varying: Any) -> None:
        """Launch on a stream of the current device.

        Returns when the launch is issued. If the driver blocks, neither the GIL nor a lock is held.

        Parameters
        ----------
        stream
            The stream's handle.
        varying
            The varying arguments in order: the tensor's address for a `Descriptor`, an address or a number for
            `VARIES`. An address that was a multiple of 16 when the kernel was compiled must be one.

        Raises
        ------
        ValueError
            If their number is wrong, or a descriptor's tensor cannot have the address.
        RuntimeError
            If the driver refuses the launch.
        """
        if watched():
            self._launch_watched(stream, varying)
        else:
            self._launch(stream, varying)
        if (seen := observation()) is not None:
            seen.issued.append((self, varying))

    def head(self) -> list[int]:
        """The constants of a launch, as `csrc/recipe.cpp` reads them.

        The function; the extents of grid and block; bytes of shared memory; the number of attributes; each attribute as
        nine integers.
        """
        attributes = struct.unpack(f"={len(self._attributes) // 8}q", self._attributes)
        return [
            self._function.value or 0, *_CONFIG_HEAD.unpack_from(self._template), self._constant[1], *attributes
        ]  # fmt: skip

    def _launch(self, stream: int, varying: tuple[Any, ...]) -> None:
        try:
            values = list(varying)
            for i, encode in self._maps:
                values[i] = encode(values[i])
            frame = self._take()
            self._pack(frame.memory, frame.start, stream, *self._constant, *values)
        except (struct.error, IndexError, OverflowError) as error:
            takes = ", ".join(self._names)
            raise ValueError(f"a launch of {self._kernel.name} takes ({takes}), not {varying}: {error}") from None
        code = self._issue(frame.config, self._function, frame.addresses, None)
        if code == INVALID_CONTEXT:  # a new thread that has not used CUDA's runtime yet
            bind_context()
            code = self._issue(frame.config, self._function, frame.addresses, None)
        self._free.append(frame)
        if code:
            raise RuntimeError(f"the driver did not launch {self._kernel.name}: {error_name(code)}")

    def _launch_watched(self, stream: int, varying: tuple[Any, ...]) -> None:
        """Launch between Triton's hooks, which get the address in place of a descriptor."""
        arguments = _filled(self._arguments, iter(varying))
        metadata = self._kernel.launch_metadata(self._grid, stream, *arguments)
        if _hooks.launch_enter_hook is not None:
            _hooks.launch_enter_hook(metadata)
        self._launch(stream, varying)
        if _hooks.launch_exit_hook is not None:
            _hooks.launch_exit_hook(metadata)

    def _take(self) -> _Frame:
        """A frame for this launch."""
        try:
            return self._free.pop()
        except IndexError:
            return self._frame()

    def _frame(self) -> _Frame:
        count, size = len(self._offsets), len(self._template)
        memory = bytearray(_MAP_ALIGNMENT + size + 8 * count)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        start = -ctypes.addressof(view) % _MAP_ALIGNMENT
        base = ctypes.addressof(view) + start
        memory[start : start + size] = self._template
        struct.pack_into(f"={count}Q", memory, start + size, *(base + offset for offset in self._offsets))
        where = ctypes.c_void_p(base), ctypes.c_void_p(base + size)
        return _Frame(memory, start + _CONFIG_HEAD.size, *where, view)


class NoLauncher(Launcher):
    """A launcher of a kernel that is compiled ahead: it launches nothing. See `tilestream.launch.compiling`."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, stream: int, *varying: Any) -> None:
        """Nothing."""


def _allow_shared(function: ctypes.c_void_p, size: int) -> None:
    """Let launches of a kernel have so many bytes of dynamic shared memory. Triton allows what it gives it itself."""
    allow = cuda_function("cuFuncSetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    if code := allow(function, _MOST_DYNAMIC_SHARED, size):
        raise RuntimeError(f"the driver gives no kernel {size} bytes of shared memory: {error_name(code)}")


def _is_hip(kernel: Any) -> bool:
    return "amdgcn" in kernel.asm


def _hip_launch() -> Callable[..., int]:
    """HIP's launch function, with the arguments of CUDA's."""
    launch = hip_function(
        "hipModuleLaunchKernel", ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
    )  # fmt: skip

    def issue(config: ctypes.c_void_p, function: ctypes.c_void_p, parameters: ctypes.c_void_p, extra: None) -> int:
        head = _HIP_CONFIG.unpack(ctypes.string_at(config, _HIP_CONFIG.size))
        return launch(function, *head, parameters, extra)

    return issue


def _varies(argument: Any) -> bool:
    return argument is VARIES or isinstance(argument, Descriptor)


def _filled(arguments: tuple[Any, ...], given: Iterator[Any]) -> tuple[Any, ...]:
    """The arguments with the varying ones filled in, in tuples, too."""
    return tuple(
        next(given, None) if _varies(x) else _filled(x, given) if isinstance(x, tuple) else x for x in arguments
    )


def _place(parameters: Sequence[_Parameter], at: int) -> tuple[list[int], str, int]:
    """The offsets of consecutive parameters from ``at`` on, their format, and their end."""
    offsets, format_ = [], ""
    for parameter in parameters:
        padding = -at % parameter.alignment
        offsets.append(at + padding)
        format_ += f"{padding}x{parameter.format}"
        at += padding + parameter.size
    return offsets, format_, at


def _parameters(kernel: Any, arguments: Sequence[Any]) -> Iterator[_Parameter]:
    """The kernel's parameters, without the scratch memories."""
    source = kernel.src
    names = list(source.signature)
    if len(arguments) != len(names):
        raise ValueError(f"{kernel.name} has {len(names)} arguments ({', '.join(names)}), not {len(arguments)}")
    descriptors = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    for path, type_, value in _leaves((), tuple(source.signature.values()), tuple(arguments)):
        name = names[path[0]]
        if type_ == "constexpr":
            constant = source.constants.get(path, value)
            numbers = isinstance(constant, (int, float)) and isinstance(value, (int, float))
            if _varies(value) or (numbers and value != constant) or (constant is None) != (value is None):
                raise ValueError(
                    f"argument {name} was compiled in, as {constant!r}, and cannot be {value!r}: compile with "
                    "another value, or name it in do_not_specialize"
                )
        elif type_.startswith("tensordesc"):
            if not isinstance(value, Descriptor):
                raise TypeError(f"argument {name} is a descriptor: give a Descriptor, not {value!r}")
            yield _Parameter(name, f"{tensor_map.SIZE}s", VARIES, _tensor(name, value, next(descriptors, None)))
            yield from (_Parameter(f"{name}.shape", "i", extent) for extent in value.shape)
            yield from (_Parameter(f"{name}.strides", "q", stride) for stride in value.strides)
        else:
            format_ = "Q" if type_.startswith("*") else _FORMATS.get(type_)
            if format_ is None:
                raise NotImplementedError(f"argument {name} is of type {type_}, which only Triton passes")
            if isinstance(value, Descriptor) or not (value is VARIES or isinstance(value, (int, float))):
                raise TypeError(f"argument {name} is of type {type_}: give VARIES or a number, not {value!r}")
            if ["tt.divisibility", 16] in source.attrs.get(path, ()):
                if isinstance(value, (int, float)):
                    if value % 16:
                        raise ValueError(f"argument {name} was compiled as a multiple of 16, and is {value}")
                elif not type_.startswith("*"):
                    raise ValueError(
                        f"argument {name} varies, but was compiled as a multiple of 16: name it in do_not_specialize"
                    )
            yield _Parameter(name, format_, value)


def _leaves(path: tuple[int, ...], types: tuple[Any, ...], values: Any) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """``(path, type, value)`` of all arguments, also of those inside tuples."""
    for i, (type_, value) in enumerate(zip(types, values, strict=True)):
        if isinstance(type_, tuple):
            yield from _leaves((*path, i), type_, value)
        else:
            yield (*path, i), type_, value


def _tensor(name: str, given: Descriptor, metadata: dict[str, Any] | None) -> tensor_map.TensorMap:
    """The tensor map of a descriptor, as the kernel was compiled for it."""
    if metadata is None or "elem_type" not in metadata or metadata.get("fp4_padded") or metadata.get("is_im2col"):
        raise NotImplementedError(f"descriptor {name} was compiled to something that only Triton passes: {metadata}")
    elem_type = _ELEM_TYPES.get(metadata["elem_type"], metadata["elem_type"])
    if given.tf32:
        if elem_type != _FLOAT32:
            raise ValueError(f"descriptor {name} is not of fp32: nothing to round to tf32")
        elem_type = tensor_map.TFLOAT32
    try:
        return tensor_map.TensorMap(
            elem_type, metadata["elem_size"], given.shape, given.strides, metadata["block_size"], metadata["swizzle"],
            given.nan, given.promotion,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"descriptor {name}: {error}") from None


def _check(kernel: Any, parameters: Sequence[_Parameter]) -> None:
    """Raise unless this kernel's parameters have the known form."""
    metadata, hip, reasons = kernel.metadata, _is_hip(kernel), []
    if not hip and "ptx" not in kernel.asm:
        raise NotImplementedError(f"{kernel.name} is neither CUDA's nor HIP's: launch it through Triton")
    if getattr(metadata, "global_scratch_size", 0) or metadata.profile_scratch_size:
        reasons.append("scratch memory")
    if metadata.num_ctas > (1 if hip else _LARGEST_CLUSTER):
        reasons.append(f"a cluster of {metadata.num_ctas}")
    if hip and metadata.launch_cooperative_grid:
        reasons.append("a cooperative grid")
    known = [parameter.size for parameter in parameters]
    declared = (
        hsa_parameter_sizes(kernel.asm["amdgcn"], kernel.name)
        if hip
        else ptx_parameter_sizes(kernel.asm["ptx"], kernel.name)
    )
    if declared != known:
        reasons.append(f"parameters of {declared} bytes, where its signature and Triton 3.6 to 3.9 would make {known}")
    if reasons:
        raise NotImplementedError(f"{kernel.name} has {', and '.join(reasons)}: launch it through Triton")


def ptx_parameter_sizes(ptx: str, entry: str) -> list[int]:
    """The bytes of each parameter of a kernel, from its PTX."""
    found = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise NotImplementedError(f"the PTX has no entry {entry}")
    sizes = []
    for declaration in filter(str.strip, found[1].split(",")):
        parts = _PTX_PARAMETER.fullmatch(declaration.strip())
        if parts is None:
            raise NotImplementedError(f"the PTX of {entry} declares a parameter of a kind unknown here: {declaration}")
        sizes.append(int(parts["bits"]) // 8 * int(parts["count"] or 1))
    return sizes


def hsa_parameter_sizes(assembly: str, entry: str) -> list[int]:
    """The bytes of each parameter of a kernel, from the metadata of its AMD assembly, without HIP's hidden ones."""
    kernels = assembly.partition("amdhsa.kernels:")[2]
    if re.findall(r"^    \.name:\s+(\S+)", kernels, re.MULTILINE) != [entry]:
        raise NotImplementedError(f"the assembly's metadata are not of the one kernel {entry}")
    return [int(size) for size, kind in _HSA_PARAMETER.findall(kernels) if not kind.startswith("hidden_")]


def _attributes(metadata: Any, cluster: int) -> ctypes.Array[ctypes.c_char]:
    """The attributes that Triton launches such a kernel with."""
    found = []
    if getattr(metadata, "launch_pdl", False):
        found.append((_PROGRAMMATIC, 1, 0, 0))
    if metadata.launch_cooperative_grid:
        found.append((_COOPERATIVE, 1, 0, 0))
    if cluster != 1:
        found.append((_CLUSTER_DIMENSION, cluster, 1, 1))
    if metadata.num_ctas != 1:
        found += [(_CLUSTER_DIMENSION, metadata.num_ctas, 1, 1), (_CLUSTER_POLICY, _SPREAD, 0, 0)]
    packed = b"".join(_ATTRIBUTE.pack(*attribute) for attribute in found)
    return (ctypes.c_char * len(packed)).from_buffer_copy(packed)
