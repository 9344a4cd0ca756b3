"""Compiling kernels, for this process's GPU or ahead for another one.

The first launch on a machine waits for three steps: Triton hashes its own library (460 MB), a C compiler builds its
driver module, and the kernel is compiled. `prepare` begins the first two in threads; for the first it uses the digest
that the installer has recorded. `compiled` needs no driver, only the target. Hashes are kept beside Triton's cache,
under the sizes and times of the files that they depend on.

Triton is changed for this package's kernels only: other threads see its own driver, and other kernels its own hash.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import csv
import functools
import hashlib
import inspect
import io
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import cache as triton_cache
from triton.runtime import driver as triton_driver

from tilestream.core.forks import free_in_child
from tilestream.core.whole_file import write_whole
from tilestream.kernels.device.jit import INTERPRETED
from tilestream.runtime import collector


class _Here(threading.local):
    #: The stand-in for Triton's driver in this thread; None: Triton's own driver.
    driver: _StandIn | None = None
    #: Whether this thread compiles ahead: see `ahead`.
    is_ahead = False
    #: Whether this thread is in `compiled`.
    compiles = False


_here = _Here()
T = TypeVar("T")
_blocks = itertools.count()
#: An hour in nanoseconds. An installer, or the unpacking of an image, writes all files of a package within it.
_WRITTEN_WITHIN = 3600 * 10**9
_making_driver, _making_key = free_in_child(threading.RLock()), free_in_child(threading.Lock())


# The driver -----------------------------------------------------------------------------------------------------------


class _StandIn:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, target: GPUTarget, device: int | str) -> None:
        self._target, self._device = target, device

    def get_current_device(self) -> int | str:
        """The key under which Triton keeps compiled kernels."""
        return self._device

    def get_current_stream(self, device: object = None) -> int:
        """No stream: nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The target of the compiler."""
        return self._target

    def __getattr__(self, name: str) -> Any:
        return getattr(triton_driver.default, name)


class _Drivers(type(triton_driver)):  # type: ignore[misc]
    """Triton's holder of its driver. A thread may have a stand-in, and only one thread makes the driver."""

    @property
    def active(self) -> Any:
        if _here.driver is not None:
            return _here.driver
        if self._active is not None:
            return self._active
        with _making_driver:
            return super().active


def _can_stand_in(holder: object) -> bool:
    """Whether `_Drivers` extends the holder's type. A later Triton may have another, which is not changed."""
    return isinstance(getattr(type(holder), "active", None), property) and hasattr(holder, "_active")


_STANDS_IN = _can_stand_in(triton_driver)
if _STANDS_IN:
    triton_driver.__class__ = _Drivers


@contextlib.contextmanager
def _standing_in(driver: _StandIn | None, is_ahead: bool) -> Iterator[None]:
    before, _here.driver, _here.is_ahead = (_here.driver, _here.is_ahead), driver, is_ahead
    try:
        yield
    finally:
        _here.driver, _here.is_ahead = before


def _present() -> _StandIn | None:
    """A stand-in for the driver of this process's GPU until that is made; None if Triton's own is used."""
    if not _STANDS_IN or _here.driver is not None or triton_driver._active is not None or torch.version.hip is not None:
        return _here.driver
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return _StandIn(GPUTarget("cuda", 10 * major + minor, 32), torch.cuda.current_device())


# Compiling ------------------------------------------------------------------------------------------------------------


def compiled(function: Any, filled: Sequence[Any], options: dict[str, Any]) -> Any:
    """The compiled kernel, or the one found in Triton's cache, for such arguments. It is not on the device yet.

    Parameters
    ----------
    function
        A ``triton.jit`` or ``gluon.jit`` function.
    filled, options
        Its arguments, as for a launch, and how it is compiled.
    """
    _remember_key()
    with collector.paused(), _standing_in(_present(), _here.is_ahead):
        _seed_hash(function)
        outer, _here.compiles = _here.compiles, True
        try:
            return function.warmup(*filled, grid=(1,), **options)
        finally:
            _here.compiles = outer


def side_by_side(first: Callable[[], T], *others: Callable[[], object]) -> T:
    """Run ``first`` in this thread and the others in threads like it. Returns the result of ``first``; raises errors.

    Triton's compiler holds the GIL in its front end, and releases it in LLVM and while it waits for the assembler.
    """
    driver, is_ahead, context = _here.driver, _here.is_ahead, contextvars.copy_context()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(step: Callable[[], object]) -> None:
        with contextlib.nullcontext() if device is None else torch.cuda.device(device), _standing_in(driver, is_ahead):
            context.copy().run(step)

    with ThreadPoolExecutor(max(1, len(others))) as pool:
        begun = [pool.submit(run, step) for step in others]
        made = first()
        for one in begun:
            one.result()
    return made


def target_of(arch: str) -> GPUTarget:
    """The target of `tilestream.core.device.DeviceProperties.arch`: ``sm_90``, ``gfx942``."""
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


@contextlib.contextmanager
def ahead(arch: str) -> Iterator[None]:
    """In this block and thread, launches compile their kernels for a GPU of this arch, and launch nothing.

    Their operands are on the meta device: see `tilestream_tools.warm.ahead`.

    Raises
    ------
    NotImplementedError
        If Triton holds its driver in another way.
    """
    if not _STANDS_IN:
        raise NotImplementedError(
            f"Triton {triton.__version__} compiles for the GPU that is here alone; 3.6 does ahead"
        )
    # A device of this block alone: Triton reuses nothing of it later.
    with _standing_in(_StandIn(target_of(arch), f"ahead of {arch}, {next(_blocks)}"), True):
        yield


def is_ahead() -> bool:
    """Whether this thread is in a block of `ahead`. Launches end there when their kernel is compiled."""
    return _here.is_ahead


# The first launch of a process ----------------------------------------------------------------------------------------


@functools.cache
def prepare() -> None:
    """Begin the steps that the first launch of this process waits for, each in a thread. Errors are raised later."""

    def quietly(step: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            step()

    if not INTERPRETED and torch.cuda.is_available():
        for step in (_triton_key, lambda: triton_driver.active):
            with contextlib.suppress(RuntimeError):  # at exit no thread can be started
                threading.Thread(target=quietly, args=(step,), name="tilestream prepares").start()


_hash_triton: Callable[[], str] | None = getattr(triton_cache, "triton_key", None)


@functools.cache
def _known_key() -> str:
    assert _hash_triton is not None
    own = _hash_triton
    return remembered("triton", lambda: _key_by_record(own) or own())


def _key_by_record(own: Callable[[], str]) -> str | None:
    """Triton's key of itself, from the digest of its library that the installer has recorded.

    Triton's own function runs on a stand-in for the library, whose digest is then replaced. None if no digest is
    recorded, if the library has changed since, or if Triton hashes otherwise.
    """
    library = Path(getattr(sys.modules.get("triton._C.libtriton"), "__file__", None) or "").resolve()
    noted = _noted_digest(library)
    function = inspect.unwrap(own)
    if noted is None or not isinstance(function, FunctionType) or function.__closure__ is not None:
        return None
    stand_in = os.urandom(64)

    def opened(path: Any, *how: Any, **more: Any) -> Any:
        there = Path(path)
        return io.BytesIO(stand_in) if there.resolve() == library else there.open(*how, **more)

    key = FunctionType(function.__code__, {**function.__globals__, "open": opened})()
    digest = hashlib.sha256(stand_in).hexdigest()
    return key.replace(digest, noted) if isinstance(key, str) and key.count(digest) == 1 else None


def _noted_digest(path: Path) -> str | None:
    """The SHA-256 of an installed file, in hexadecimal, as its installer has recorded it; None if it may have changed.

    It has not changed if its size is the recorded one, its contents are no newer than the record, and its inode is at
    most an hour newer.
    """
    root = Path(triton.__file__).resolve().parents[1]
    with contextlib.suppress(OSError, ValueError):
        status, name = path.stat(), path.relative_to(root).as_posix()
        for record in root.glob("*.dist-info/RECORD"):
            noted, late = record.stat(), status.st_ctime_ns - _WRITTEN_WITHIN
            if "triton" not in record.parent.name or status.st_mtime_ns > noted.st_mtime_ns or late > noted.st_ctime_ns:
                continue
            with record.open(encoding="utf-8", newline="") as file:
                for row in csv.reader(file):
                    if row[:1] == [name] and row[1].startswith("sha256=") and row[2] == str(status.st_size):
                        return base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "==").hex()
    return None


def _triton_key() -> str:
    """Triton's key of itself, which is kept from process to process."""
    with _making_key:
        return _known_key()


@functools.cache
def _remember_key() -> None:
    """Let `compiled` use the kept key. Other users of Triton's key get Triton's own."""
    own = _hash_triton
    if own is None:
        return

    @functools.wraps(own)
    def triton_key() -> str:
        return _triton_key() if _here.compiles else own()

    triton_cache.triton_key = triton_key


def _seed_hash(function: Any) -> None:
    """Give a kernel its kept hash, which Triton would compute by parsing all functions that it calls."""
    if getattr(function, "hash", "") is None:
        with _making_key:
            package = _package_stamp(function.__module__.partition(".")[0])
            name = f"{function.__module__}.{function.__name__} {_text_digest(function)} {package}"
            function.hash = remembered(name, lambda: str(function.cache_key))


def _text_digest(function: Any) -> str:
    """A digest of a kernel's text in this process: of all functions and constants that it refers to.

    It covers more than Triton's hash: each name that a function looks up anywhere, in its own module and in the modules
    that it names. For Triton's own functions the name is enough, since `_stamp` covers their files.
    """
    said, seen, reached = [], {id(function)}, [function]
    while reached:
        one = reached.pop()
        said.append(f"{one.__module__}:{one.starting_line_number} {getattr(one, 'noinline', False)} {one.src}")
        names = sorted(_names(one.fn.__code__))
        closure = inspect.getclosurevars(one.fn).nonlocals if one.fn.__closure__ else {}
        values = {name: closure.get(name, one.__globals__.get(name)) for name in names}
        for name, module in list(values.items()):
            if isinstance(module, ModuleType):
                values |= {f"{name}.{inner}": getattr(module, inner, None) for inner in names}
        defaults = (*(one.fn.__defaults__ or ()), *(one.fn.__kwdefaults__ or {}).values())
        for key, value in (*values.items(), *enumerate(defaults)):
            if not hasattr(value, "starting_line_number"):
                # A constant is its value; constexprs can be callable, too.
                named = isinstance(value, ModuleType) or (callable(value) and not isinstance(value, tl.constexpr))
                said.append(f"{key} {getattr(value, '__qualname__', '') if named else repr(value)}")
            elif not value.__module__.startswith("triton.") and id(value) not in seen:
                seen.add(id(value))
                reached.append(value)
            else:
                said.append(f"{key} {value.__module__}.{value.__name__}")
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


def _names(code: CodeType) -> set[str]:
    """The names that a function, and the functions and comprehensions inside it, look up."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inner))


def remembered(name: str, make: Callable[[], str]) -> str:
    """The value of ``make``, kept from an earlier process as long as no file of Triton changes."""
    path = Path(triton.knobs.cache.dir) / "tilestream" / f"{_stamp()}.json"
    try:
        known: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found := known.get(name), str):
            return found
    except (OSError, ValueError, AttributeError):
        known = {}
    made = make()
    with contextlib.suppress(OSError):  # if the cache cannot be written, the next process hashes again
        path.parent.mkdir(parents=True, exist_ok=True)
        what = name.partition(" ")[0]  # one value is kept for each
        kept = {key: old for key, old in known.items() if key.partition(" ")[0] != what}
        write_whole(path, json.dumps(kept | {name: made}).encode())
    return made


@functools.cache
def _stamp() -> str:
    """A digest of the names, sizes and times of Triton's files, and of the versions of it and of Python.

    The times include the inode's last change, which differs in a copy that keeps the time of modification.
    """
    said = [triton.__version__, sys.version, _files_of(Path(triton.__file__).resolve().parent)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


def _files_of(root: Path) -> str:
    """The names, sizes and times of the code files of a folder."""
    said = []
    for path in sorted(_code_within(root)):
        try:
            status = path.stat()
        except FileNotFoundError:  # an editor's lock is a dangling link
            continue
        said.append(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    return "\n".join(said)


@functools.cache
def _package_stamp(name: str) -> str:
    """A digest of `_files_of` for the folder of a package or module."""
    where = Path(str(sys.modules[name].__file__)).resolve().parent
    return hashlib.sha256(_files_of(where).encode()).hexdigest()[:32]


def _code_within(root: Path) -> Iterator[Path]:
    """Python and shared objects. In a source tree of Triton the backends are links to folders outside of it."""
    seen = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in names if name.endswith((".py", ".so")))
