"""AMD GPUs for tests without one: HIP's runtime, whose kernels execute on the emulator, and torch's tensors on them.

The library of `emulated_hip.c` stands in for libamdhip64. The package, Triton's own driver and its launcher load it and
call it as they would the real one: a code object is loaded, a launch gives the addresses of its parameters. The code
object is found in Triton's cache, the assembly beside it is executed (`tilestream_tools.emulator`). Memory is one block
of this process's own, so addresses are real.

Streams are those of `fake_cuda`: work waits there until something is read. A kernel executes when its turn comes, and
while it does other streams go on: their copies and writes land in between, every so many turns of its waves.

For a process of its own: `begin` changes torch and Triton for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.cpp_extension import include_paths, library_paths

import fake_cuda
from tilestream.arrival import device, publishing
from tilestream.runtime import driver
from tilestream_tools.emulator import Machine, Memory, decode
from tilestream_tools.emulator.kernel import fill_hidden, grid_of

#: What torch says of the GPU that is emulated.
NAMES = {"gfx942": "AMD Instinct MI300X", "gfx950": "AMD Instinct MI355X"}
_UNITS = {"gfx942": 304, "gfx950": 256}
_SHARED = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))
#: hipErrorLaunchFailure.
_FAILED = 719
#: Fills what nothing has written: NaN in each floating-point type.
_POISON = 0xFF


def build(folder: Path) -> Path:
    """Compile the library, and load what torch needs beside it."""
    library = folder / "libamdhip64.so"
    headers = Path(triton.__file__).parent / "backends" / "amd" / "include"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-I{headers}", "-o", library, source], check=True)
    guard = folder / "guard.so"
    source = source.with_name("emulated_hip_guard.cpp")
    flags = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-o", guard, source, *flags, "-lc10"], check=True)
    ctypes.CDLL(str(guard))
    return library


class Kernel:
    """A launch that waits in a stream."""

    def __init__(self, hip: Hip, text: str, packed: bytes, groups: int, waves: int, shared: int) -> None:
        self._hip, self._text, self._launch = hip, text, (packed, groups, waves, shared)
        self._machine: Machine | None = None
        self._goes_on = True

    def __call__(self) -> None:
        """Execute all of it."""
        while self._goes_on:
            self.go_on()

    def again(self) -> Kernel:
        """The same launch once more: a replay's."""
        return Kernel(self._hip, self._text, *self._launch)

    def go_on(self) -> None:
        """Execute a bit of it."""
        if self._machine is None:
            program, hip = decode(self._text), self._hip
            self._machine = Machine(hip.memory, host=hip.beside, **hip.how)
            hip.machines.append(self._machine)
            self._machine.begin(program.steps, grid_of(program, hip.memory, *self._launch)._replace(dies=2))
        self._goes_on = self._goes_on and self._machine.go_on()


class Hip(fake_cuda.FakeCuda):
    """The runtime.

    Parameters
    ----------
    cache
        Triton's.
    devices, size
        GPUs, and bytes of the memory that they share.
    how
        Of each execution: see `tilestream_tools.emulator.Machine`.

    Attributes
    ----------
    asked
        The functions that were called, in order.
    machines
        What each kernel left.
    every
        Turns of a kernel's waves between two pieces of other streams' work.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, library: Path, cache: Path, arch: str, devices: int = 1, size: int = 1 << 26,
        **how: Any,
    ) -> None:  # fmt: skip
        self._cache, self.arch, self.devices, self.how = cache, arch, devices, how
        self._device = 0
        self._block = np.full(size + 4096, _POISON, np.uint8)
        start = -self._block.ctypes.data % 4096
        self.memory = Memory(self._block.ctypes.data + start, self._block[start : start + size])
        self._modules: list[str] = []
        self._dead: list[tuple[int, int]] = []
        self.machines: list[Machine] = []
        self.asked: list[str] = []
        self.every, self._turns, self._is_beside, self._is_busy = 20, 0, False, False
        self._library = ctypes.CDLL(str(library))
        self._handler = _HANDLER(self._handle)
        self._library.emulated_hip_begin(self._handler, arch.encode(), _UNITS[arch], _SHARED[arch])
        super().__init__(patch)

    # The runtime's functions ------------------------------------------------------------------------------------------

    def _handle(self, name: bytes, arguments: Any) -> int:
        self.asked.append(name.decode())
        try:
            return _METHODS[name.decode()](self, arguments) or 0
        except Exception as error:
            self._library.emulated_hip_say(f"{type(error).__name__}: {error}".encode())
            return _FAILED

    def _create_stream(self, a: Any) -> None:
        ctypes.c_uint64.from_address(a[0]).value = self.stream().cuda_stream

    def _write_value(self, a: Any) -> None:
        at, value = a[1], np.array([a[2]], np.uint32)
        self.streams[a[0]].give(lambda: self.write(at, value))

    def _wait_value(self, a: Any) -> None:
        at, value = a[1], a[2]
        self.streams[a[0]].give(fake_cuda.Until(lambda: ctypes.c_uint32.from_address(at).value >= value))

    def _copy(self, a: Any) -> None:
        to, source, size = a[:3]
        self.streams[a[3]].give(lambda: self.write(to, self.read(source, size)))

    def _is_capturing(self, a: Any) -> None:
        ctypes.c_int.from_address(a[1]).value = int(self.graph is not None)

    def _capture_info(self, a: Any) -> None:
        self._is_capturing(a)
        if a[2]:
            ctypes.c_uint64.from_address(a[2]).value = 0 if self.graph is None else self.graph.number

    def _current_stream(self, a: Any) -> None:
        ctypes.c_uint64.from_address(a[1]).value = self.current.cuda_stream

    def _create_event(self, a: Any) -> None:
        ctypes.c_uint64.from_address(a[0]).value = self.driver.create_event() + 1

    def _destroy_event(self, a: Any) -> None:
        self.driver.destroy_event(a[0] - 1)

    def _record_event(self, a: Any) -> None:
        self.driver.record_event(a[1], a[0] - 1)

    def _wait_event(self, a: Any) -> None:
        self.driver.wait_event(a[0], a[1] - 1)

    def _query_event(self, a: Any) -> int:
        return 0 if self.driver.has_come(a[0] - 1) else 600

    def _await_event(self, a: Any) -> None:
        self.driver.await_event(a[0] - 1)

    def _load_module(self, a: Any) -> None:
        """Of the code objects in Triton's cache it is the one with these bytes; the assembly lies beside it."""
        for file in self._cache.glob("*/*.hsaco"):
            image = file.read_bytes()
            if ctypes.string_at(a[1], len(image)) == image:
                self._modules.append(file.with_suffix(".amdgcn").read_text())
                ctypes.c_uint64.from_address(a[0]).value = len(self._modules)
                return
        raise LookupError("a code object that Triton's cache does not have")

    def _get_function(self, a: Any) -> None:
        name = ctypes.string_at(a[2]).decode()
        assert decode(self._modules[a[1] - 1]).kernel.name == name, f"the module has no function {name}"
        ctypes.c_uint64.from_address(a[0]).value = a[1]

    def _launch(self, a: Any) -> None:
        """Take a copy of the parameters: the launch may be executed when they are gone."""
        function, grid, block, shared, stream, parameters = a[0], a[1:4], a[4:7], a[7], a[8], a[9]
        text = self._modules[function - 1]
        program = decode(text)
        assert (grid[1:], block[1:]) == ([1, 1], [1, 1])
        assert block[0] % 64 == 0
        raw = bytearray(program.argument_bytes)
        given = [place for place in program.arguments if not place.kind.startswith("hidden_")]
        for place, at in zip(given, (ctypes.c_uint64 * len(given)).from_address(parameters), strict=True):
            raw[place.offset : place.offset + place.size] = ctypes.string_at(at, place.size)
        waves = block[0] // 64
        fill_hidden(program, raw, grid[0], waves)
        self.streams[stream].give(Kernel(self, text, bytes(raw), grid[0], waves, shared))

    # Memory, execution ------------------------------------------------------------------------------------------------

    def write(self, at: int, data: Any) -> None:
        """What a copy engine or a stream writes, to the device or the host."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        if self.is_here(at):
            self.memory.write(at, raw)
        else:
            ctypes.memmove(at, raw.ctypes.data, raw.size)

    def read(self, at: int, size: int) -> Any:
        """What a copy engine reads."""
        if self.is_here(at):
            return self.memory.read(at, np.empty(size, np.uint8))
        return np.frombuffer(ctypes.string_at(at, size), np.uint8)

    def is_here(self, at: int) -> bool:
        """Whether an address is in the emulated memory."""
        return 0 <= at - self.memory.base < self.memory.bytes.size

    def beside(self, machine: Machine) -> None:
        """Let another stream go on while a kernel executes: a piece of its work, or another kernel for a turn."""
        self._turns += 1
        if self._is_beside or self._turns % self.every:
            return
        self._is_beside = True
        try:
            for stream in self.streams:
                work = stream._work[0] if stream._work else None
                if isinstance(work, Kernel):
                    if work._machine is not machine:
                        work.go_on()
                elif work is not None and stream.run(1):
                    return
        finally:
            self._is_beside = False

    def finish(self, index: int | None = None) -> None:
        """Execute all that was given to the current stream of a device, and what that waits for."""
        if self._is_busy:
            return  # this is a part of a stream's work
        stream, self._is_busy = self._current(index), True
        try:
            stream.run()
            if stream.done < stream.issued:
                self.run()
        finally:
            self._is_busy = False
        while self._dead and not any(stream._work for stream in self.streams):
            self.memory.free(*self._dead.pop())  # as of torch's allocator, not before a launch that was given it ends

    # Torch ------------------------------------------------------------------------------------------------------------

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        asked = driver.current
        super()._patch(patch)
        patch.setattr(driver, "current", asked)
        for module in (device, publishing):
            patch.setattr(module, "capture_id", driver.capture_id)
        self.streams[0].device = torch.device("cuda", 0)
        for index in range(1, self.devices):  # stream i is the default stream of device i
            self.streams.append(fake_cuda.Stream(self, index))
            self.streams[index].device = torch.device("cuda", index)
        patch.setattr(fake_cuda, "_storage", lambda x: getattr(x, "held", x).untyped_storage().data_ptr())
        tensor = torch.tensor

        def of_list(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            made = tensor(*args, **kwargs)
            return self.pin(self.place(made, "pinned memory")) if pin_memory else made

        patch.setattr(torch, "tensor", of_list)  # it does not ask a dispatch mode for pinned memory
        patch.setattr(torch.version, "hip", "7.0")
        patch.setattr(torch.cuda, "device", self._on_device)
        patch.setattr(torch.cuda, "current_stream", self._current)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self._current(index).cuda_stream)
        properties = SimpleNamespace(
            name=NAMES[self.arch], gcnArchName=f"{self.arch}:sramecc+:xnack-", multi_processor_count=_UNITS[self.arch],
            shared_memory_per_block=_SHARED[self.arch], clock_rate=0, warp_size=64, major=9, minor=4,
        )  # fmt: skip
        for name, answer in {
            "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": self.devices,
            "get_device_properties": properties, "get_device_capability": (9, 4),
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
        patch.setattr(torch.cuda, "current_device", lambda: self._device)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: self.run())

    @contextlib.contextmanager
    def _on_device(self, device: Any) -> Iterator[None]:
        before, self._device = (
            self._device,
            torch.device("cuda", device).index if isinstance(device, int) else device.index,
        )
        try:
            yield
        finally:
            self._device = before

    def _current(self, device: Any = None) -> fake_cuda.Stream:
        """The current stream of a device; its default one unless this thread has set another."""
        index = self._device if device is None else device if isinstance(device, int) else torch.device(device).index
        index = self._device if index is None else index
        found = getattr(self._here, "stream", None)
        return found if found is not None and found.device.index == index else self.streams[index]

    @property
    def current(self) -> fake_cuda.Stream:
        """The current stream of the current device."""
        return self._current()

    def replay(self, graph: fake_cuda.Graph) -> None:
        """Issue what was captured to the current stream."""
        for work in graph.work:
            self.current.give(work.again() if isinstance(work, Kernel) else work)

    def stream(self) -> fake_cuda.Stream:
        """A new stream of the current device."""
        made = super().stream()
        made.device = torch.device("cuda", self._device)
        return made

    def place(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of a tensor of the CPU in the emulated memory."""
        made = self.empty(x.shape, x.dtype, name, x.stride())
        made.copy_(x)
        return made

    def empty(self, shape: Any, dtype: torch.dtype, name: str, strides: Any = None) -> torch.Tensor:
        """A tensor of the CPU in the emulated memory. It is given back when nothing refers to it any more."""
        shape = tuple(shape)
        like = torch.empty(shape, dtype=dtype, device="meta")
        strides = tuple(like.stride() if strides is None else strides)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if like.numel() else 0
        size = max(count, 1) * like.element_size()
        address = self.memory.reserve(size, name)
        raw = (ctypes.c_uint8 * size).from_address(address)
        ctypes.memset(address, _POISON, size)
        flat = torch.frombuffer(raw, dtype=torch.uint8)
        if self.graph is None:
            weakref.finalize(flat.untyped_storage(), self._dead.append, (address, size))
        else:  # of the graph's own memory
            self.graph.work.append(lambda: flat)
        return flat.view(dtype).as_strided(shape, strides)


#: By the runtime's function: what does its work, given its arguments.
_METHODS = {
    "hipStreamCreateWithFlags": Hip._create_stream,
    "hipStreamWriteValue32": Hip._write_value,
    "hipStreamWaitValue32": Hip._wait_value,
    "hipMemcpyHtoDAsync": Hip._copy,
    "hipStreamGetCaptureInfo_v2": Hip._capture_info,
    "hipStreamIsCapturing": Hip._is_capturing,
    "hipEventCreateWithFlags": Hip._create_event,
    "hipEventDestroy": Hip._destroy_event,
    "hipEventRecord": Hip._record_event,
    "hipStreamWaitEvent": Hip._wait_event,
    "hipEventQuery": Hip._query_event,
    "hipEventSynchronize": Hip._await_event,
    "hipModuleLoadDataEx": Hip._load_module,
    "hipModuleGetFunction": Hip._get_function,
    "hipModuleLaunchKernel": Hip._launch,
    "hipMemcpyDtoDAsync": Hip._copy,
    "aoti_torch_get_current_cuda_stream": Hip._current_stream,
}


class HipTensor(torch.Tensor):
    """A tensor on a device ``cuda:i``, as torch's build for HIP calls it. ``held``: it, as one of the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> HipTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("cuda", index),
        )  # fmt: skip
        made.held = inner
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Device.current.dispatch(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Torch's operations on tensors of the GPU: in the order of the current stream, computed by the CPU."""

    current: Device

    def __init__(self, hip: Hip) -> None:
        super().__init__()
        self.hip = hip
        Device.current = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace in ("tilestream", "symm_mem"):
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        found: list[HipTensor] = []

        def unwrapped(x: Any) -> Any:
            if isinstance(x, HipTensor):
                found.append(x)
                return x.held
            return x

        args, kwargs = tree_map(unwrapped, args), tree_map(unwrapped, kwargs)
        given = kwargs.get("device")
        where = found[0].device if given is None and found else torch.device(given or "cpu")
        to_gpu, index = where.type == "cuda", self.hip._device if where.index is None else where.index
        if given is not None:
            kwargs["device"] = torch.device("cpu")
        is_pinned = bool(kwargs.pop("pin_memory", False))
        with _disable_current_modes():
            is_empty = func._schema.name in (
                "aten::empty",
                "aten::new_empty",
                "aten::empty_strided",
                "aten::empty_like",
            )
            if found and not is_empty and not func.is_view:
                for device in {one.device.index for one in found}:
                    self.hip.finish(device)
            made = func(*args, **kwargs)

            def wrapped(x: Any) -> Any:
                if not isinstance(x, torch.Tensor):
                    return x
                same = next((one for one in found if one.held is x), None)
                if same is not None:
                    return same
                if is_pinned and not to_gpu:
                    return self.hip.pin(self.hip.place(x, "pinned memory"))
                if not to_gpu:
                    return x
                if self.hip.is_here(x.data_ptr()) and x.numel():
                    return HipTensor(x, index)
                return HipTensor(self.hip.place(x, str(func)), index)

            return tree_map(wrapped, made)


@contextlib.contextmanager
def emulated_hip(library: Path, cache: Path, arch: str = "gfx942", **how: Any) -> Iterator[Hip]:
    """An AMD GPU in place of torch's, for the length of the block."""
    with pytest.MonkeyPatch.context() as patch:
        hip = Hip(patch, library, cache, arch, **how)
        try:
            with Device(hip):
                yield hip
        finally:
            hip.over = True
