"""Launches without a device: the kernel is really compiled, the driver is a stub that records what it is given."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_stub import build

from streaming import run_together
from tritons import triton

module = pytest.importorskip("tilestream.launch.launcher", exc_type=ImportError)

VARIES, Descriptor, Launcher = module.VARIES, module.Descriptor, module.Launcher

FLAT = Descriptor((1000, 4096), (4096, 1))
DEEP = Descriptor((3, 100, 4096), (409600, 4096, 1), tf32=True, nan=True)
X, Y, Z, WORDS = 0x7F0000000000, 0x7F0000100000, 0x7F0000200000, 0x7F0000300040
#: As `tma_kernel` compiles it: x, y, z, words, none, count, unit, one, large, scale, flag, tuple_, epoch, BLOCK.
ARGUMENTS = (FLAT, FLAT, DEEP, VARIES, None, 32, 1, 1, 2**40 + 1, VARIES, True, (3, VARIES), VARIES, 5)
NAMES = ["x", "y", "z", "words", "none", "count", "unit", "one", "large", "scale", "flag", "tuple_", "epoch", "BLOCK"]
VARYING = (X, Y, Z, WORDS, 0.375, 2**33, 77)


def run(script: str, python: str, cache: Path, **environment: str) -> Any:
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [python, Path(__file__).with_name(script)], env=inherited | environment, capture_output=True, text=True,
        timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def compiled(python: str, cache: Path) -> list[dict]:
    return run("tma_kernel.py", python, cache)


def made(told: dict, **metadata) -> SimpleNamespace:
    """A compiled kernel, as far as a launcher looks at one."""

    def nested(x):
        return tuple(map(nested, x)) if isinstance(x, list) else x

    return SimpleNamespace(
        name=told["name"], asm={"ptx": told["ptx"]}, function=0xF00D, _init_handles=lambda: None,
        metadata=SimpleNamespace(**{**told["metadata"], **metadata}),
        src=SimpleNamespace(
            signature={name: nested(type_) for name, type_ in told["signature"].items()},
            attrs={tuple(path): attrs for path, attrs in told["attrs"]},
            constants={tuple(path): value for path, value in told["constants"]},
        ),
        launch_metadata=lambda grid, stream, *arguments: {"grid": grid, "stream": stream, "arguments": arguments},
    )  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    found = compiled(sys.executable, tmp_path_factory.mktemp("triton"))
    check_sizes(found)
    return found


@pytest.fixture
def kernel(told) -> SimpleNamespace:
    return made(told[0])


@pytest.fixture
def launch(kernel, told, stub) -> Any:
    """A launcher of `tma_kernel.every`, whose parameters the stub records."""
    stub.expect(told[0]["declared"])
    return Launcher(kernel, (1, 1, 1), ARGUMENTS)


def tensor_map(address, type_, shape, strides, box, swizzle, fill, small=False) -> bytes:
    """What the stub makes of a tensor, innermost dimension first."""
    words = [0] * 16
    words[:3] = address, (0 if small else 1 << 21) | type_, len(shape)
    words[3 : 3 + len(shape)] = reversed(shape)
    words[8 : 8 + len(box)] = ((1 << 32) | extent for extent in reversed(box))
    words[11 : 10 + len(shape)] = reversed(strides)
    words[15] = swizzle << 16 | 2 << 8 | fill
    return struct.pack("<16Q", *words)


def expected(x=X, y=Y, z=Z, words=WORDS, scale=0.375, second=2**33, epoch=77) -> bytes:
    """The parameters of `tma_kernel.every` one after another, written by hand."""
    flat = struct.pack("<iiqq", 1000, 4096, 4096, 1)
    return b"".join((
        tensor_map(x, 9, (1000, 4096), (8192,), (64, 64), 3, 0), flat,
        tensor_map(y, 9, (1000, 4096), (8192,), (64, 64), 3, 0), flat,
        tensor_map(z, 11, (3, 100, 4096), (1638400, 16384), (1, 64, 32), 3, 1),
        struct.pack("<iiiqqq", 3, 100, 4096, 409600, 4096, 1),
        struct.pack("<Q", words), struct.pack("<ii", 32, 1), struct.pack("<q", 2**40 + 1), struct.pack("<f", scale),
        b"\1", struct.pack("<i", 3), struct.pack("<q", second), struct.pack("<i", epoch), struct.pack("<QQ", 0, 0),
    ))  # fmt: skip


def sent(launch) -> bytes:
    return bytes(launch.parameters)[: len(expected())]


def check_sizes(found: list[dict]) -> None:
    """The PTX is read as the assembler reads it."""
    for one in found:
        assert module.ptx_parameter_sizes(one["ptx"], one["name"]) == one["declared"], one["triton"]
    assert [one["metadata"]["num_warps"] for one in found] == [4, 8], "those of all partitions"


def check_against_triton(python: str, folder: Path) -> str:
    """Launch by Triton's own launcher too, of the same driver; returns which Triton it was."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs Python's headers: Triton builds its launcher")
    build(folder)
    told = run(
        "triton_launch.py", python, folder / "cache", LD_LIBRARY_PATH=str(folder), TRITON_LIBCUDA_PATH=str(folder)
    )
    assert [len(launches) for launches in told["launches"]] == [2] * 4
    for by_triton, by_launcher in told["launches"]:
        assert by_launcher == by_triton
    return told["triton"]


def test_the_driver_is_given_what_triton_gives_it(stub, tmp_path):
    check_against_triton(sys.executable, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_each_triton(version, stub, tmp_path):
    python = triton(version)
    found = compiled(python, tmp_path / "cache")
    check_sizes(found)
    stub.expect(found[0]["declared"])
    Launcher(made(found[0]), (1, 1, 1), ARGUMENTS)(0, *VARYING)
    assert sent(stub.launches[0]) == expected()
    assert check_against_triton(python, tmp_path) == version


def test_what_the_driver_is_given(kernel, told, stub):
    stub.expect(told[0]["declared"])
    Launcher(kernel, (7, 5, 3), ARGUMENTS)(0xABC0, *VARYING)
    launch, config = stub.launches[0], stub.launches[0].config
    assert (config.grid[:], config.block[:]) == ([7, 5, 3], [128, 1, 1])
    assert (config.shared, config.stream, config.count) == (kernel.metadata.shared, 0xABC0, 0)
    assert launch.function == 0xF00D
    assert sent(launch) == expected()


def test_only_what_varies_changes(launch, stub):
    launch(1, *VARYING)
    launch(2, Y, X, Z + 16, WORDS + 16, -1e9, -1, -(2**31))
    launch(3, *VARYING)
    first, second, third = stub.launches
    assert [one.config.stream for one in stub.launches] == [1, 2, 3]
    assert sent(first) == sent(third) == expected()
    assert sent(second) == expected(Y, X, Z + 16, WORDS + 16, -1e9, -1, -(2**31))


def test_maps_are_made_once_an_address(launch, stub):
    for _ in range(3):
        launch(0, *VARYING)
    assert stub.get("encoded") == 3
    launch(0, Y, *VARYING[1:])  # y has one for this address; x may be of another shape
    assert stub.get("encoded") == 4


@pytest.mark.parametrize(
    ("metadata", "attributes"),
    [
        ({"launch_pdl": True}, [[6, 1, 0, 0]]),
        ({"launch_cooperative_grid": True}, [[2, 1, 0, 0]]),
        ({"num_ctas": 2, "launch_pdl": True}, [[6, 1, 0, 0], [4, 2, 1, 1], [5, 1, 0, 0]]),
    ],
)
def test_attributes_are_tritons(told, stub, metadata, attributes):
    Launcher(made(told[1], **metadata), (5, 1, 1), (VARIES, 16))(0, WORDS)
    launch = stub.launches[0]
    assert [list(one) for one in launch.attributes][: launch.config.count] == attributes
    assert launch.config.grid[0] == 5 * metadata.get("num_ctas", 1)


def test_programs_of_a_kernel_that_knows_no_clusters_are_launched_in_clusters(told, stub):
    Launcher(made(told[1], launch_pdl=True), (6, 1, 1), (VARIES, 16), 2)(0, WORDS)
    launch = stub.launches[0]
    assert [list(one) for one in launch.attributes][: launch.config.count] == [[6, 1, 0, 0], [4, 2, 1, 1]]
    assert launch.config.grid[0] == 6


def test_a_launch_may_have_room_behind_the_kernels_shared_memory(told, stub, monkeypatch):
    asked, find = [], module.cuda_function

    def found(name, *types):
        if name != "cuFuncSetAttribute":
            return find(name, *types)
        return lambda function, what, size: asked.append((function.value, what, size)) or answer

    monkeypatch.setattr(module, "cuda_function", found)
    answer, kernel = 0, made(told[1], shared=40_000)
    Launcher(kernel, (4, 1, 1), (VARIES, 16), 4, 20_016)(0, WORDS)
    assert stub.launches[0].config.shared == 60_016
    assert asked == [(kernel.function, 8, 60_016)]
    Launcher(kernel, (4, 1, 1), (VARIES, 16), 4)(0, WORDS)
    assert stub.launches[1].config.shared == 40_000
    assert len(asked) == 1
    answer = 1
    with pytest.raises(RuntimeError, match=r"gives no kernel 60016 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"):
        Launcher(kernel, (4, 1, 1), (VARIES, 16), 4, 20_016)


def test_four_threads_launch_at_once(launch, stub):
    stub.set("pause_us", 50)  # before the stub reads the parameters, without the GIL

    def run(thread: int) -> None:
        for i in range(200):
            launch(thread, X + 4096 * i + 16 * thread, Y, Z, WORDS, float(i), thread, i)

    run_together(4, run)
    want = {
        (thread, expected(X + 4096 * i + 16 * thread, scale=float(i), second=thread, epoch=i))
        for thread in range(4)
        for i in range(200)
    }
    assert {(one.config.stream, sent(one)) for one in stub.launches} == want
    assert 1 < len(launch._free) <= 5, "a frame a launch under way, and those are used again"


def test_hooks_see_each_launch(kernel, stub, monkeypatch):
    seen = []
    hooks = module._hooks
    launch = Launcher(kernel, (2, 1, 1), ARGUMENTS)
    chain = type(hooks.launch_enter_hook)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        made_chain = chain()
        monkeypatch.setattr(hooks, name, made_chain)
    launch(9, *VARYING)
    assert not seen
    hooks.launch_enter_hook.add(lambda metadata: seen.append(("enter", stub.get("launched"), metadata)))
    hooks.launch_exit_hook.add(lambda metadata: seen.append(("exit", stub.get("launched"), metadata)))
    launch(9, *VARYING)
    assert [one[:2] for one in seen] == [("enter", 1), ("exit", 2)]
    assert seen[0][2] is seen[1][2]
    assert (seen[0][2]["grid"], seen[0][2]["stream"]) == ((2, 1, 1), 9)
    assert seen[0][2]["arguments"] == (
        X, Y, Z, WORDS, None, 32, 1, 1, 2**40 + 1, 0.375, True, (3, 2**33), 77, 5,
    )  # fmt: skip


def with_(**changed) -> list:
    return [changed.get(name, value) for name, value in zip(NAMES, ARGUMENTS, strict=True)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (ARGUMENTS[:-1], ValueError, r"every has 14 arguments \(x, y.*BLOCK\), not 13"),
        (with_(unit=VARIES), ValueError, "argument unit was compiled in, as 1, and cannot be VARIES"),
        (with_(BLOCK=VARIES), ValueError, "argument BLOCK was compiled in, as 5, and cannot be VARIES"),
        (with_(unit=2), ValueError, "argument unit was compiled in, as 1, and cannot be 2"),
        (with_(none=X), ValueError, "argument none was compiled in, as None, and cannot be"),
        (with_(count=VARIES), ValueError, "argument count varies, but was compiled as a multiple of 16"),
        (with_(count=17), ValueError, "argument count was compiled as a multiple of 16, and is 17"),
        (with_(one=2**31), ValueError, "argument one is 2147483648"),
        (with_(x=X), TypeError, "argument x is a descriptor: give a Descriptor"),
        (with_(one=FLAT), TypeError, "argument one is of type i32: give VARIES or a number"),
        (with_(words=None), TypeError, "argument words is of type .fp32: give VARIES or a number"),
        (with_(x=Descriptor((10, 20), (20, 1))), ValueError, "descriptor x: .* strides multiples of 16 bytes"),
        (with_(x=DEEP), ValueError, "descriptor x is not of fp32: nothing to round to tf32"),
        (with_(z=FLAT), ValueError, "descriptor z: .* as many of the box"),
    ],
)
def test_arguments_that_are_not_the_kernels(kernel, stub, arguments, error, message):
    with pytest.raises(error, match=message):
        Launcher(kernel, (1, 1, 1), arguments)


def test_kernels_that_only_triton_launches_and_grids_that_nothing_does(kernel, told, stub):
    for metadata, message in (
        ({"global_scratch_size": 128}, "has scratch memory: launch it through Triton"),
        ({"num_ctas": 16}, "has a cluster of 16"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            Launcher(made(told[0], **metadata), (1, 1, 1), ARGUMENTS)
    with pytest.raises(ValueError, match="extents of 1 and more"):
        Launcher(kernel, (1, 0, 1), ARGUMENTS)


def test_parameters_that_are_not_known(kernel, stub):
    ptx = kernel.asm["ptx"]
    for kernel.asm, message in (
        ({"ptx": ptx.replace(".param .u8 ", ".param .u32 ")}, "where its signature"),
        ({"ptx": ptx.replace("every(", "every(\n\t.param .u64 more,", 1)}, "where its signature"),
        ({"ptx": ptx.replace(".param .u8 ", ".param .texref ")}, "of a kind unknown here"),
        ({"ptx": ""}, "no entry every"),
        ({"spv": ""}, "neither CUDA's nor HIP's"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            Launcher(kernel, (1, 1, 1), ARGUMENTS)


@pytest.mark.parametrize(
    "varying",
    [
        VARYING[:-1], (*VARYING, 1), VARYING[:1], (*VARYING[:-1], 2**31), (*VARYING[:-1], 0.5),
        (*VARYING[:3], -1, 1, 1, 1),
    ],
)  # fmt: skip
def test_a_call_with_other_arguments(launch, stub, varying):
    with pytest.raises(ValueError, match=r"a launch of every takes \(x, y, z, words, scale, tuple_, epoch\), not"):
        launch(0, *varying)
    assert not stub.launches
    launch(0, *VARYING)
    assert sent(stub.launches[0]) == expected()


def test_an_address_that_no_map_has(launch):
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        launch(0, X + 2, *VARYING[1:])


def test_the_drivers_errors(launch, stub):
    launch(0, *VARYING)
    for code, said in ((1, r"CUDA_ERROR_INVALID_VALUE \(invalid argument\)"), (719, "code 719")):
        stub.set("fails", code)
        with pytest.raises(RuntimeError, match=f"did not launch every: {said}"):
            launch(0, *VARYING)
    stub.set("fails", 0)
    launch(0, *VARYING)
    assert sent(stub.launches[-1]) == expected()


def test_a_fresh_thread_is_given_the_devices_context(launch, stub, monkeypatch):
    launch(0, *VARYING)  # makes the maps
    stub.set("fails", 201)
    monkeypatch.setattr(module, "bind_context", lambda: stub.set("fails", 0))
    launch(0, *VARYING)
    assert [sent(one) for one in stub.launches] == [expected()] * 2


# HIP ------------------------------------------------------------------------------------------------------------------

HSA_ARGUMENT = """      - .offset:         {offset}
        .size:           {size}
        .value_kind:     {kind}
"""
HSA = """
amdhsa.kernels:
  - .agpr_count:     0
    .args:
{arguments}    .group_segment_fixed_size: 0
    .name:           work
    .symbol:         work.kd
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
"""


def hip_kernel(signature: dict[str, str] | None = None, sizes=(8, 4, 8, 8), **metadata) -> SimpleNamespace:
    """What Triton has compiled for gfx942, as far as a launcher looks at it."""
    kinds = [*["by_value"] * len(sizes), "hidden_block_count_x"]
    declared = [
        HSA_ARGUMENT.format(offset=8 * i, size=size, kind=kind)
        for i, (size, kind) in enumerate(zip((*sizes, 4), kinds, strict=True))
    ]
    plain = {"num_ctas": 1, "num_warps": 4, "warp_size": 64, "shared": 512, "launch_cooperative_grid": False}
    return SimpleNamespace(
        name="work",
        asm={"amdgcn": HSA.format(arguments="".join(declared))},
        function=0xF00D,
        _init_handles=lambda: None,
        metadata=SimpleNamespace(**plain | {"profile_scratch_size": 0, "tensordesc_meta": []} | metadata),
        src=SimpleNamespace(
            signature=signature or {"words": "*fp32", "none": "constexpr", "count": "i32"}, attrs={}, constants={}
        ),
    )


@pytest.fixture
def hip_launches(monkeypatch) -> list[tuple]:
    """What HIP was given: function, grid, block, shared memory, stream; and the bytes of the parameters."""
    launches = []

    def launch(function, *given):
        *config, addresses, extra = given
        pointers = ctypes.cast(addresses, ctypes.POINTER(ctypes.c_void_p))
        sizes = (8, 4, 8, 8)
        launches.append(
            (function.value, *config, b"".join(ctypes.string_at(pointers[i], n) for i, n in enumerate(sizes)))
        )
        return 0 if extra is None and config[-1] != 0xBAD else 1

    def found(name, *arguments):
        assert (name, len(arguments)) == ("hipModuleLaunchKernel", 11)
        return launch

    monkeypatch.setattr(module, "hip_function", found)
    monkeypatch.setattr(module, "error_name", str)
    return launches


def test_hip_is_given_the_parameters_and_blocks_of_its_warps(hip_launches):
    launch = Launcher(hip_kernel(), (7, 2, 1), (VARIES, None, 32))
    launch(0xAB0, WORDS)
    assert hip_launches == [(0xF00D, 7, 2, 1, 256, 1, 1, 512, 0xAB0, struct.pack("<QiQQ", WORDS, 32, 0, 0))]
    assert launch.head() == [0xF00D, 7, 2, 1, 256, 1, 1, 512, 0], "no attributes"
    with pytest.raises(RuntimeError, match="the driver did not launch work: 1"):
        launch(0xBAD, WORDS)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_ctas": 2}, "has a cluster of 2: launch it through Triton"),
        ({"launch_cooperative_grid": True}, "has a cooperative grid: launch it through Triton"),
        ({"profile_scratch_size": 8}, "has scratch memory"),
        ({"sizes": (8, 8, 8, 8)}, r"parameters of \[8, 8, 8, 8\] bytes, where its signature .* \[8, 4, 8, 8\]"),
        ({"signature": {"words": "*fp32", "none": "constexpr", "count": "bf16"}}, "of type bf16, which only Triton"),
        (
            {
                "signature": {"words": "tensordesc<bf16[64, 64]>", "none": "constexpr", "count": "i32"},
                "tensordesc_meta": [{"elem_bits": 16, "block_size": [64, 64]}],
            },
            "descriptor words was compiled to something that only Triton passes",
        ),
    ],
)
def test_kernels_that_only_triton_launches_on_hip(hip_launches, how, message):
    kernel = hip_kernel(**how)
    first = FLAT if "tensordesc_meta" in how else VARIES
    with pytest.raises(NotImplementedError, match=message):
        Launcher(kernel, (1, 1, 1), (first, None, 32))


def test_hsa_metadata_of_another_kernel(hip_launches):
    kernel = hip_kernel()
    kernel.name = "other"
    with pytest.raises(NotImplementedError, match="not of the one kernel other"):
        Launcher(kernel, (1, 1, 1), (VARIES, None, 32))
