"""The extension, built from `csrc/`, over a driver that records what it is given."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tilestream.launch import launcher, native, tensor_map
    from tilestream_tools import native_build

#: torch's index of the CPU, the "GPU" of these tests.
CPU_INDEX = -1
#: address or thread: the sanitizer that both libraries are built with (test_native_sanitized.py sets it).
SANITIZER = os.environ.get("TILESTREAM_TEST_SANITIZER", "")
#: The extension's ops are those of tensors on the CPU.
AS_CPU = "-DTILESTREAM_DEVICE_KEY=CPU", "-DTILESTREAM_AUTOCAST_KEY=AutocastCPU"
FAKE = Path(__file__).parent / "fake_driver.cpp"


def built(folder: Path) -> tuple[Path, Path, Path]:
    """The extension, the fake driver, and one of HIP, built once for all test processes of a source."""
    files = (*sorted(native_build.SOURCES[1].iterdir()), native_build.HERE, FAKE)
    texts = [path.read_bytes() for path in files]
    sanitized = ["-g", f"-fsanitize={SANITIZER}"] if SANITIZER else []
    digest = hashlib.sha256(b"".join([f"{torch.__version__}{SANITIZER}".encode(), *texts])).hexdigest()[:16]
    library, driver = folder / f"libtilestream_native_{digest}.so", folder / f"libfake_driver_{digest}.so"
    hip = folder / digest / "libamdhip64.so"  # the name by which Triton knows it
    with FileLock(folder / "lock"):
        if not hip.exists():
            failed = native_build.build(library, *AS_CPU, "-O1", "-Werror", *sanitized)
            assert not failed, failed
            flags = "-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra"
            hip.parent.mkdir(exist_ok=True)
            for made, more in ((driver, []), (hip, ["-DFAKE_HIP"])):
                subprocess.run([*native_build.compiler(), *flags, *sanitized, *more, FAKE, "-o", made], check=True)
    return library, driver, hip


class Driver:
    """What a test tells the fake driver, and asks of it."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for asked in (self.library.fake_launches, self.library.fake_launch, self.library.fake_operations):
            asked.restype = ctypes.c_int64
        self.library.fake_function.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
        self.library.fake_launch.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
        self.library.fake_note.argtypes = (ctypes.c_int, *[ctypes.c_uint64] * 4)
        self.library.fake_thread.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_void_p)

    def function(self, handle: int, sizes: list[int]) -> None:
        """A kernel with parameters of so many bytes."""
        self.library.fake_function(handle, (ctypes.c_int64 * len(sizes))(*sizes), len(sizes))

    def thread(self, device: int = CPU_INDEX, context: int | None = 1, stream: int = 0) -> None:
        """This thread's device, context and current stream."""
        self.library.fake_thread(device, context is not None, context or 0, stream)

    def state(self, capturing: bool = False, launch: int = 0, encode: int = 0, records: bool = True) -> None:
        """Whether streams are captured, what launches and tensor maps answer, and whether launches are recorded."""
        self.library.fake_state(capturing, launch, encode, records)

    def launches(self) -> list[bytes]:
        """Configuration, attributes and parameters of each launch, in order."""
        found = []
        for i in range(self.library.fake_launches()):
            memory = ctypes.create_string_buffer(8192)
            size = self.library.fake_launch(i, memory, 8192)
            found.append(memory.raw[:size])
        return found

    def operations(self) -> list[tuple[int, ...]]:
        """Kind and arguments of each operation of a stream, in order."""
        count = self.library.fake_operations(None, 0)
        found = (ctypes.c_uint64 * 5 * count)()
        self.library.fake_operations(found, count)
        return [tuple(one) for one in found]

    def forget(self) -> None:
        """No launch was recorded."""
        self.library.fake_forget()


def use(path: Path) -> Driver:
    """Have Python's launcher use the fake driver, for the whole process."""
    made = Driver(path)

    def function(name: str, *arguments: type):
        found = getattr(ctypes.CDLL(str(path)), name)
        found.argtypes = arguments
        return found

    for module in (launcher, tensor_map):
        module.cuda_function = module.hip_function = function
        module.error_name = str
    tensor_map._driver_version = lambda: 13000
    return made


@pytest.fixture(scope="session")
def libraries() -> tuple[Path, Path, Path]:
    if given := os.environ.get("TILESTREAM_TEST_LIBRARIES"):  # test_native_torches.py: built under another torch
        library, cuda, hip = map(Path, given.split(os.pathsep))
        return library, cuda, hip
    if why := native_build.why_not(native_build.torch_folder()):
        pytest.skip(why)
    if native.extension() is not None:
        pytest.skip("this process has the extension loaded, over a GPU's driver")
    folder = Path(tempfile.gettempdir()) / f"tilestream-native-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return built(folder)


@pytest.fixture(scope="session")
def loaded(libraries) -> native.Extension:
    library, driver, _ = libraries
    return native.Extension(library, str(driver), str(driver))


@pytest.fixture
def driver(libraries, monkeypatch) -> Driver:
    """The fake driver, at first with one context, one stream, nothing captured; Python's launcher uses it, too."""
    for module in (launcher, tensor_map):
        for name in ("cuda_function", "hip_function", "error_name"):
            monkeypatch.setattr(module, name, None, raising=False)
    monkeypatch.setattr(tensor_map, "_driver_version", None)
    made = use(libraries[1])
    made.thread()
    made.state()
    made.forget()
    return made


@pytest.fixture
def extension(loaded, driver, monkeypatch) -> native.Extension:
    """The extension without recipes, and without the streams and tables of other tests' fake GPUs."""
    for name, empty in (("_readers", {}), ("_tables", {}), ("_tables_before", {}), ("_keeps_tables", False)):
        monkeypatch.setattr(loaded, name, empty)
    loaded.set_capacity(8192)
    loaded._words.clear()
    return loaded
