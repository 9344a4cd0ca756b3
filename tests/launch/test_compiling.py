"""What compiling waits for: Triton's driver, its hash of itself, and the hashes of kernels. Nothing is compiled."""

from __future__ import annotations

import base64
import contextvars
import hashlib
import importlib.util
import json
import linecache
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from forked import forks, in_a_child
from tilestream.kernels.device.varlen import list_sequences
from tilestream.kernels.hopper.attention import attend
from tilestream.kernels.hopper.gemm import gemm
from tilestream.kernels.portable.attention_merge import merge_shares
from tilestream.launch import compiling

SM_90 = GPUTarget("cuda", 90, 32)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Where hashes are remembered: in a cache of this test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path / "tilestream" / f"{compiling._stamp()}.json"


# The driver -----------------------------------------------------------------------------------------------------------


def test_a_thread_that_compiles_ahead_sees_the_target_and_no_other_thread_does():
    seen = []
    with compiling.ahead("sm_90"):
        assert compiling.is_ahead()
        assert triton.runtime.driver.active.get_current_target() == SM_90
        thread = threading.Thread(target=lambda: seen.append((compiling.is_ahead(), compiling._here.driver)))
        thread.start()
        thread.join()
        with compiling.ahead("gfx942"):
            assert triton.runtime.driver.active.get_current_target() == GPUTarget("hip", "gfx942", 64)
        assert triton.runtime.driver.active.get_current_target() == SM_90
    assert seen == [(False, None)]
    assert not compiling.is_ahead()


def test_blocks_share_no_compiled_kernels():
    devices = []
    for _ in range(2):
        with compiling.ahead("sm_90"):
            devices.append(triton.runtime.driver.active.get_current_device())
    assert devices[0] != devices[1]


def test_two_threads_make_one_driver(monkeypatch):
    made = []

    def make():
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(sys.modules["triton.runtime.driver"], "_create_driver", make)
    monkeypatch.setattr(triton.runtime.driver, "_default", None)
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(triton.runtime.driver.active)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == made * 4


@forks
def test_a_forked_child_does_not_wait_for_threads_of_its_parent():
    held, end = threading.Event(), threading.Event()

    def hold():
        with compiling._making_driver, compiling._making_key:
            held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(300)
    try:
        assert in_a_child(lambda: (compiling._making_driver.acquire(), compiling._making_key.acquire())) == 0
    finally:
        end.set()
        thread.join()


def test_nothing_is_prepared_while_the_interpreter_exits(monkeypatch):
    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(compiling.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiling.threading.Thread, "start", start)
    compiling.prepare.__wrapped__()


def test_a_gpu_here_is_compiled_for_before_its_driver_is_made(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    monkeypatch.setattr(compiling.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiling.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(compiling.torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(compiling, "_seed_hash", lambda function: None)

    def warmup(*filled, grid, **options):
        active = triton.runtime.driver.active
        return active.get_current_target(), active.get_current_device(), filled, options

    compiled = compiling.compiled(SimpleNamespace(warmup=warmup), (1, 2), {"num_warps": 4})
    assert compiled == (SM_90, 3, (1, 2), {"num_warps": 4})
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(
        get_current_target=lambda: "the driver's", get_current_device=lambda: 5
    ))  # fmt: skip
    assert compiling.compiled(SimpleNamespace(warmup=warmup), (), {})[:2] == ("the driver's", 5)


def test_a_triton_that_holds_its_driver_otherwise_is_left_alone(monkeypatch):
    assert compiling._can_stand_in(compiling._Drivers.__bases__[0]())
    assert not compiling._can_stand_in(SimpleNamespace(active=None, _active=None))
    assert not compiling._can_stand_in(type("Holder", (), {"active": property(lambda self: None)})())
    monkeypatch.setattr(compiling, "_STANDS_IN", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    monkeypatch.setattr(compiling.torch.cuda, "is_available", lambda: pytest.fail("asked"))
    assert compiling._present() is None
    with pytest.raises(NotImplementedError, match="compiles for the GPU that is here alone"), compiling.ahead("sm_90"):
        pass


def test_steps_side_by_side_are_done_as_by_their_caller():
    setting = contextvars.ContextVar("setting", default="the default")
    setting.set("the caller's")
    seen, both = [], threading.Barrier(3)

    def step():
        both.wait(300)  # all of them at a time
        seen.append((triton.runtime.driver.active.get_current_target(), compiling.is_ahead(), setting.get()))

    with compiling.ahead("sm_90"):
        assert compiling.side_by_side(lambda: both.wait(300) is not None, step, step)
    assert seen == [(SM_90, True, "the caller's")] * 2


def test_a_step_that_fails_beside_others_is_raised():
    def fails():
        raise KeyError("the step's")

    with pytest.raises(KeyError, match="the step's"):
        compiling.side_by_side(lambda: None, lambda: None, fails)


# What is remembered ---------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A Triton of a few files."""
    files = {"__init__.py": "1", "compiler/code.py": "2", "_C/libtriton.so": "3", "_C/notes.txt": "4"}
    for name, text in files.items():
        (tmp_path / "triton" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "triton" / name).write_text(text)
    there = SimpleNamespace(__version__="3.7.1", __file__=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(compiling, "triton", there)
    return tmp_path / "triton"


def stamp() -> str:
    return compiling._stamp.__wrapped__()


@pytest.mark.parametrize("name", ["__init__.py", "compiler/code.py", "_C/libtriton.so"])
def test_a_file_that_changes_is_another_stamp(package, name):
    before, path = stamp(), package / name
    assert stamp() == before
    times = path.stat()
    path.write_text("9")  # as long, and of the same time of modification
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert stamp() != before


def test_files_behind_links_are_of_the_stamp(package, tmp_path):
    (tmp_path / "third_party").mkdir()
    (tmp_path / "third_party" / "compiler.py").write_text("1")  # as in an editable build of Triton
    (tmp_path / "third_party" / "again").symlink_to(tmp_path / "third_party")
    (package / "backends").mkdir()
    (package / "backends" / "nvidia").symlink_to(tmp_path / "third_party")
    (package / "compiler" / ".#code.py").symlink_to("nowhere")  # an editor's lock
    before = stamp()
    (tmp_path / "third_party" / "compiler.py").write_text("22")
    assert stamp() != before


def test_a_file_more_or_less_and_another_version_are_other_stamps(package, monkeypatch):
    stamps = [stamp()]
    (package / "compiler" / "new.py").write_text("")
    stamps.append(stamp())
    (package / "compiler" / "code.py").unlink()
    stamps.append(stamp())
    compiling.triton.__version__ = "3.7.2"
    stamps.append(stamp())
    monkeypatch.setattr(compiling.sys, "version", "another Python")
    stamps.append(stamp())
    assert len(set(stamps)) == 5
    (package / "_C" / "notes.txt").write_text("no code")
    assert stamp() == stamps[-1]


def test_a_value_is_made_once_for_all_processes(memory):
    assert compiling.remembered("a", lambda: "1") == "1"
    assert compiling.remembered("a", lambda: pytest.fail("made again")) == "1"
    assert compiling.remembered("b", lambda: "2") == "2"
    assert json.loads(memory.read_text()) == {"a": "1", "b": "2"}


def test_of_a_kernel_only_the_last_text_is_remembered(memory):
    for text in ("kernel old", "another old", "kernel new"):
        compiling.remembered(text, lambda: "hash")
    assert set(json.loads(memory.read_text())) == {"kernel new", "another old"}


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', '{"a": 1}'])
def test_a_spoiled_memory_is_made_anew(memory, content):
    memory.parent.mkdir()
    memory.write_text(content)
    assert compiling.remembered("a", lambda: "made") == "made"
    assert json.loads(memory.read_text())["a"] == "made"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert compiling.remembered("a", lambda: "made") == "made"


def test_triton_s_key_is_known_without_reading_its_library(monkeypatch):
    """From what the installer has noted: 4 ms in place of 300. Equal to Triton's own, whatever that hashes besides."""
    own, read, opener = compiling._hash_triton, [], Path.open
    assert own is not None
    monkeypatch.setattr(compiling, "_WRITTEN_WITHIN", 10**18)  # another link to the file changes its inode
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: read.append(path.name) or opener(path, *how, **more))
    key = compiling._key_by_record(own)
    if key is None:
        pytest.skip("Triton was not installed from a wheel, or has changed since")
    assert "cache.py" in read, "its sources are read"
    assert not [name for name in read if name.startswith("libtriton")]
    monkeypatch.undo()
    assert key == own()


@pytest.fixture
def installed(package, monkeypatch):
    """A Triton of a few files, of which the installer has noted the digests; and a key as Triton makes it."""
    library = package / "_C" / "libtriton.so"
    note = package.parent / "triton-3.7.1.dist-info" / "RECORD"
    note.parent.mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"3").digest()).decode().rstrip("=")
    note.write_text(f"triton/__init__.py,,\ntriton/_C/libtriton.so,sha256={digest},1\n")
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", SimpleNamespace(__file__=str(library)))
    path = str(library)

    def own() -> str:
        with open(LIBRARY, "rb") as file:  # noqa: F821, PTH123 -- as Triton does
            return "3.7.1" + hashlib.sha256(file.read()).hexdigest()

    return library, note, FunctionType(own.__code__, {**own.__globals__, "LIBRARY": path})


def test_a_noted_digest_stands_for_the_library(installed):
    library, _, own = installed
    assert compiling._key_by_record(own) == own() == "3.7.1" + hashlib.sha256(b"3").hexdigest()
    assert compiling._noted_digest(library.parent / "notes.txt") is None, "of which nothing is noted"


@pytest.mark.parametrize(
    "change",
    [
        lambda library, note: library.write_text("33"),
        lambda library, note: os.utime(library, ns=(0, note.stat().st_mtime_ns + 1)),
        lambda library, note: note.unlink(),
        lambda library, note: note.write_text("triton/_C/libtriton.so,,\n"),
        lambda library, note: note.write_text("no note"),
        lambda library, note: library.unlink(),
    ],
    ids=["of another size", "newer than the note", "no note", "no digest", "another note", "no library"],
)
def test_a_library_that_may_have_changed_is_hashed(installed, change):
    library, note, own = installed
    change(library, note)
    os.utime(note.parent)
    assert compiling._key_by_record(own) is None


def test_a_library_whose_inode_changed_long_after_the_note_is_hashed(installed, monkeypatch):
    _, _, own = installed
    monkeypatch.setattr(compiling, "_WRITTEN_WITHIN", -(10**18))
    assert compiling._key_by_record(own) is None


def test_a_triton_that_hashes_otherwise_hashes(installed):
    assert compiling._key_by_record(lambda: "no digest of the library") is None
    assert compiling._key_by_record(lambda: hashlib.sha256(b"").hexdigest()) is None


def test_only_compiled_takes_the_remembered_key(memory):
    compiling._remember_key()
    assert triton.runtime.cache.triton_key() == compiling._hash_triton()
    assert not memory.exists()  # other kernels have the key that Triton hashes, whatever is remembered
    asked = SimpleNamespace(hash="seeded", warmup=lambda grid: triton.runtime.cache.triton_key())
    compiling._known_key.cache_clear()
    assert compiling.compiled(asked, (), {}) == compiling._hash_triton()
    assert json.loads(memory.read_text())["triton"] == compiling._hash_triton()
    memory.write_text('{"triton": "of an earlier process"}')
    compiling._known_key.cache_clear()
    assert compiling.compiled(asked, (), {}) == "of an earlier process"
    assert triton.runtime.cache.triton_key() == compiling._hash_triton()
    compiling._known_key.cache_clear()


# Hashes of kernels ----------------------------------------------------------------------------------------------------

HELPER = """
import triton

@triton.jit
def helper(x):
    return x * 3
"""
KERNEL = """
import triton
import triton.language as tl
import helper_of_a_test as tools

WIDTH: tl.constexpr = tl.constexpr(4)
OTHER: tl.constexpr = tl.constexpr(5)

@triton.jit
def inner(x):
    return x + WIDTH

@triton.jit
def outer(p):
    tl.store(p, tools.helper(inner(tl.load(p))))
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The kernel ``outer`` of a text, with ``edits`` (old, new), each loaded from the same files."""

    def load(*edits: tuple[str, str]):
        for name, text in (("helper_of_a_test", HELPER), ("kernel_of_a_test", KERNEL)):
            for old, new in edits:
                text = text.replace(old, new)
            (tmp_path / f"{name}.py").write_text(text)
            importlib.invalidate_caches()
            linecache.checkcache()
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return module.outer

    return load


def test_equal_text_has_one_digest(load):
    assert compiling._text_digest(load()) == compiling._text_digest(load())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + WIDTH", "x - WIDTH"),
        ("x * 3", "x * 4"),
        ("constexpr(4)", "constexpr(8)"),
        ("tl.load(p)", "tl.load(p + 1)"),
        ("x + WIDTH", "x + OTHER"),
        ("@triton.jit\ndef inner", "@triton.jit(noinline=True)\ndef inner"),
        ("\n@triton.jit\ndef outer", "\n\n@triton.jit\ndef outer"),  # Triton hashes the line, too
    ],
)
def test_what_a_kernel_reaches_is_in_its_digest(load, old, new):
    before = compiling._text_digest(load())
    changed = load((old, new))
    assert compiling._text_digest(changed) != before
    assert changed.cache_key != load().cache_key


def test_a_constant_that_is_changed_in_this_process_is_in_the_digest(load):
    kernel = load()
    before = compiling._text_digest(kernel)
    kernel.__globals__["WIDTH"] = triton.language.constexpr(16)
    assert compiling._text_digest(kernel) != before


def test_a_remembered_hash_is_triton_s_own(load, memory, monkeypatch):
    first, second, own = load(), load(), load()
    compiling._seed_hash(first)
    assert first.hash == own.cache_key
    monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: pytest.fail("parsed again")))
    compiling._seed_hash(second)
    assert second.hash == first.hash


def test_a_hash_is_forgotten_when_a_file_of_the_package_changes(load, memory, tmp_path):
    kernel, again = load(), load()
    compiling._package_stamp.cache_clear()
    compiling._seed_hash(kernel)
    (remembered,) = json.loads(memory.read_text())
    (tmp_path / "that_no_digest_reaches.py").write_text("1")
    compiling._package_stamp.cache_clear()
    compiling._seed_hash(again)
    (other,) = json.loads(memory.read_text())
    assert other.split()[:2] == remembered.split()[:2]
    assert other != remembered
    compiling._package_stamp.cache_clear()


@pytest.mark.parametrize("kernel", [gemm, attend, list_sequences, merge_shares], ids=lambda kernel: kernel.__name__)
def test_every_function_that_triton_hashes_is_in_the_digest(kernel, monkeypatch):
    functions = [
        one
        for name, module in list(sys.modules.items())
        if name.startswith(("tilestream.kernels", "tilestream.core"))
        for one in vars(module).values()
        if hasattr(one, "starting_line_number") and hasattr(one, "hash")
    ]
    functions = list({id(one): one for one in functions}.values())
    for one in functions:
        monkeypatch.setattr(one, "hash", None)
    assert kernel.cache_key
    reached = [one for one in functions if one.hash is not None and not one.__module__.startswith("triton.")]
    assert kernel in reached
    before = compiling._text_digest(kernel)
    for one in reached:
        with monkeypatch.context() as patch:
            patch.setattr(one, "_src", one.src + "\n")
            assert compiling._text_digest(kernel) != before, one.__name__
    assert compiling._text_digest(kernel) == before


# Imports --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("tilestream.launch.hopper.attention_launch", ("hopper.gemm", "hopper.multiply", "portable.gemm", "cdna")),
        ("tilestream.launch.hopper.launch", ("hopper.attention", "portable", "cdna")),
        ("tilestream.launch.portable.launch", ("hopper", "portable.attention", "cdna")),
        ("tilestream.launch.portable.attention_launch", ("hopper", "portable.gemm", "cdna")),
    ],
)
def test_a_first_launch_imports_the_kernels_of_its_own(module, without):
    """Each of a kernel's functions costs 0.2 ms to import: Triton parses the text around it."""
    code = f"import {module}, sys; print(*(name for name in sys.modules if name.startswith('tilestream.kernels.')))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said
    folders = [f"tilestream.kernels.{name}" for name in without]
    assert not [name for name in said for folder in folders if name == folder or name.startswith(f"{folder}.")]
