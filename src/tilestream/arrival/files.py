"""Matrices in files: the place of their bytes (safetensors, .npy), and reads of byte ranges into memory.

`RangeReader` reads with O_DIRECT if the file system allows it: the bytes go from the disk into the destination without
a copy through the page cache. This saves CPU time, which is scarce while the cores multiply (256 MB: about 10 ms of CPU
time, 55 ms through the cache). O_DIRECT needs file offset, address and length to be multiples of a block. So address
and file offset agree modulo a page, and reads are rounded out to pages. Without O_DIRECT the reader uses the page
cache, and reports why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

PAGE = 4096
#: O_NONBLOCK: without it, opening a FIFO would wait for its writer.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)

#: The dtypes that a matmul takes: from safetensors' name to torch's name and the bytes of an element.
_SAFETENSORS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_NUMPY = {"<f8": ("float64", 8), "<f4": ("float32", 4), "<f2": ("float16", 2)}
_MAX_HEADER = 100 * 2**20  # the safetensors format's own limit


@dataclass(frozen=True)
class StoredMatrix:
    """A row-major tensor in a file. ``dtype`` is torch's name; ``offset`` and ``itemsize`` are in bytes."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.itemsize * math.prod(self.shape)


def find_matrix(path: str | os.PathLike[str], tensor: str | None = None) -> StoredMatrix:
    """The tensor ``tensor`` of a ``.safetensors`` or ``.npy`` file; None: the file's only matrix.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is not a regular file, has neither format, is damaged, lacks the tensor or has several to choose
        from, or if the tensor is not a matrix or its shape is too large for torch.
    TypeError
        If a matmul does not take the tensor's dtype.
    """
    path = Path(path)
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r}: no file has a zero in its name")
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _READ)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{path}: no regular file; save it as one, or stream an iterable of its blocks: stream_in(blocks, "
                "shape=..., dtype=...)"
            )
        magic, size = file.read(8), status.st_size
        file.seek(0)
        if magic[:6] == b"\x93NUMPY":
            found = _npy(path, file, tensor)
        elif len(magic) == 8 and int.from_bytes(magic, "little") <= min(size - 8, _MAX_HEADER):
            found = _safetensors(path, file, tensor)
        else:
            raise ValueError(f"{path}: neither a safetensors nor a .npy file (it begins with {magic!r})")
    if len(found.shape) < 2:
        raise ValueError(
            f"{path}: tensor {found.name!r} has shape {list(found.shape)}; a matrix has at least 2 dimensions"
        )
    if found.offset + found.nbytes > size:
        raise ValueError(
            f"{path}: tensor {found.name!r} should end at byte {found.offset + found.nbytes}, the file has {size}: "
            "it is cut off"
        )
    if found.itemsize * math.prod(max(extent, 1) for extent in found.shape) >= 2**63:
        raise ValueError(
            f"{path}: tensor {found.name!r} has shape {list(found.shape)}; the strides of a tensor of that shape are "
            "2^63 and more"
        )
    return found


def _safetensors(path: Path, file: BinaryIO, tensor: str | None) -> StoredMatrix:
    # The format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header, the data. The
    # library maps the file and returns tensors; a stream needs the place of the bytes instead.
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length))
        entries = {name: _entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not a safetensors file: its header cannot be read ({error})") from None
    shapes = {name: shape for name, (_, shape, _, _) in entries.items()}
    if tensor is None:
        matrices = [name for name, shape in shapes.items() if len(shape) >= 2]
        if len(matrices) != 1:
            raise ValueError(f"{path}: holds {len(matrices)} matrices; say which: {_names(shapes)}")
        tensor = matrices[0]
    if tensor not in entries:
        raise ValueError(f"{path}: no tensor {tensor!r}; there are {_names(shapes)}")
    stored, shape, begin, end = entries[tensor]
    if stored not in _SAFETENSORS:
        raise TypeError(f"{path}: tensor {tensor!r} has dtype {stored}; a matmul takes {', '.join(_SAFETENSORS)}")
    dtype, itemsize = _SAFETENSORS[stored]
    found = StoredMatrix(path, tensor, shape, dtype, itemsize, 8 + length + begin)
    if end - begin != found.nbytes:
        raise ValueError(
            f"{path}: tensor {tensor!r} of shape {list(shape)} has {end - begin} bytes, not {found.nbytes}"
        )
    return found


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's dtype, shape, first byte and end byte from its entry in the header."""
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"an entry is {entry!r}")
    return dtype, shape, begin, end


def _npy(path: Path, file: BinaryIO, tensor: str | None) -> StoredMatrix:
    try:
        from numpy.lib import format as npy
    except ImportError as error:
        raise ImportError(f"{path}: reading .npy files takes numpy: pip install 'tilestream[cli]'") from error
    if tensor is not None:
        raise ValueError(f"{path}: tensor={tensor!r}; a .npy file holds one array without a name")
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(file)
        if version not in readers:
            raise ValueError(f"version {version}; versions 1.0 and 2.0 are read")
        shape, fortran, dtype = readers[version](file)
    except Exception as error:  # numpy passes on any exception of its parser
        raise ValueError(f"{path}: not a .npy file that can be read ({error})") from None
    offset = file.tell()
    if fortran:
        raise ValueError(
            f"{path}: column-major; rows arrive from a row-major array: np.save(numpy.ascontiguousarray(x))"
        )
    if dtype.str not in _NUMPY:
        raise TypeError(f"{path}: dtype {dtype.str}; a matmul takes {', '.join(_NUMPY)}")
    name, itemsize = _NUMPY[dtype.str]
    return StoredMatrix(path, path.stem, tuple(shape), name, itemsize, offset)


def _names(shapes: dict[str, tuple[int, ...]]) -> str:
    listed = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def drop_from_page_cache(path: str | os.PathLike[str]) -> bool:
    """Make the next read of the file come from the disk. False if the system cannot do this."""
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(path, _READ)
    try:
        os.fsync(fd)  # pages not yet written stay in the cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True


class RangeReader:
    """Reads byte ranges of a stored matrix into a buffer of its own, each range once.

    Reads are of whole pages, so a range includes the first bytes of the next range, which then skips that page. A byte
    of an earlier range is never written again, because a consumer may be reading it after its signal.

    Parameters
    ----------
    matrix
        The matrix to read.
    direct
        False: read through the page cache; otherwise bypass it if the file system allows it.

    Attributes
    ----------
    how
        The way in which the file is read, and the reason.
    """

    def __init__(self, matrix: StoredMatrix, direct: bool | None = None) -> None:
        self.matrix = matrix
        is_aligned = matrix.offset % matrix.itemsize == 0
        self._shift = matrix.offset % PAGE if is_aligned else 0
        self._base = matrix.offset - self._shift  # file offset of the buffer's first byte
        self._end = self._shift + matrix.nbytes
        self._buffer = mmap.mmap(-1, PAGE * math.ceil(self._end / PAGE) + PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults; only a hint
        self._view = memoryview(self._buffer)
        self._whole: set[int] = set()  # pages with a range's end, read whole with the range claimed first
        self._lock = threading.Lock()
        self._files: list[int] = []  # open descriptors: reads use the last, some may still use an earlier one
        self._direct = direct is not False and is_aligned
        self.how = "through the page cache (asked to)"
        if not is_aligned:
            self.how = f"through the page cache (byte {matrix.offset} is no multiple of its elements' size)"
        self._open()

    @property
    def data(self) -> memoryview:
        """The matrix's bytes; valid where they were read."""
        return self._view[self._shift : self._end]

    def _open(self) -> None:
        if self._direct:
            try:
                self._files.append(os.open(self.matrix.path, _READ | os.O_DIRECT))
                self.how = "O_DIRECT: from the disk into place, past the page cache"
                return
            except AttributeError:
                reason = "this system has no O_DIRECT"
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, str(error.errno))
                reason = f"O_DIRECT refused by the file system: {name}"
            self._direct, self.how = False, f"through the page cache ({reason})"
        self._files.append(os.open(self.matrix.path, _READ))

    def again(self) -> None:
        """Forget the ranges that were read: the next epoch reads all of them again into the same buffer."""
        self._whole.clear()
        if not self._files:
            self._open()

    def close(self) -> None:
        """Close the file; the bytes that were read stay."""
        while self._files:
            os.close(self._files.pop())

    def claim(self, begin: int, end: int) -> Callable[[], None]:
        """The job that reads bytes [begin, end) of the matrix.

        Claims are made one at a time; the jobs may run at the same time. A page that two ranges share is read with the
        range claimed first, so the later range is complete only when both jobs are. A job raises `OSError` if the disk
        cannot be read, and `EOFError` if the file has become shorter than its header says.
        """
        begin, end = begin + self._shift, end + self._shift
        if begin >= end:
            return lambda: None
        first, last = begin // PAGE, (end - 1) // PAGE
        start = (first + 1 if first in self._whole else first) * PAGE
        stop = (last if last in self._whole else last + 1) * PAGE
        self._whole.update((first, last))
        return lambda: self._fill(start, stop)

    def _fill(self, start: int, stop: int) -> None:
        needed = min(stop, self._end)  # whole pages, or the matrix's end
        while start < needed:
            direct, file = self._direct, self._files[-1]
            at = start - start % PAGE if direct else start  # a direct read restarts at a page
            try:
                count = os.preadv(file, [self._view[at:stop]], self._base + at)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._leave_direct()
                continue
            if at + count <= start:
                raise EOFError(f"{self.matrix.path}: ends at byte {self._base + start}, {needed - start} bytes early")
            start = at + count

    def _leave_direct(self) -> None:
        with self._lock:
            if self._direct:  # a concurrent read may have done this already
                # In this order, because reads take `_direct` before `_files`.
                self._files.append(os.open(self.matrix.path, _READ))
                self._direct = False
                self.how = "through the page cache (the file system took O_DIRECT and then refused the read)"
