"""Real kernels, compiled without their GPU: does the extension give the driver what Python's launch gives it?

For an H100; and for an MI300X, where Triton's own launcher, over the same driver, is compared, too. A process of its
own, because Triton's driver is replaced for good. ``real_kernels.py TARGET LIBRARY FAKE_DRIVER NAME...`` prints a line
a case: its name, the bytes that were compared, and "equal".
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from stand_ins import CPU_INDEX, Attention, Matmul, Merge
from triton.backends.amd.driver import HIPLauncher, HIPUtils

from conftest import Driver
from tilestream.core.operands import AttentionOperands, Epilogue, GemmOperands, MergeOperands
from tilestream.launch import launcher, native, tensor_map
from tilestream.launch.cdna.launch import GemmLaunch as CdnaLaunch
from tilestream.launch.hopper.launch import GemmLaunch as HopperLaunch
from tilestream.launch.launch import Kernel, address
from tilestream.launch.observe import Call, observation, observe
from tilestream.launch.portable.arguments import Layout
from tilestream.launch.portable.attention_launch import PairLaunch
from tilestream.launch.portable.launch import GemmLaunch as PortableLaunch
from tilestream.ops import attention_gpu
from tilestream.ops.attention_operands import Settings, problem_of
from tilestream.plan.api import device_properties
from tilestream.plan.api import plan as make_plan
from tilestream.plan.attention_planner import plan_attention
from tilestream_tools.isa.build import TARGETS, NoGpu

BF16 = torch.bfloat16
#: By the target that kernels are compiled for.
DEVICES = {"sm_90a": "h100", "gfx942": "mi300x"}


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    return (x.stride(0) if x.dim() == 3 else 0, *x.stride()[-2:])


def case(target: str, backend: str, schedule: str, epilogue: bool, m: int, n: int, k: int) -> tuple[Any, Matmul]:
    """A launch, and the call that it is of."""
    a, b = torch.zeros(m, k, dtype=BF16), torch.zeros(n, k, dtype=BF16).T
    out = torch.zeros(m, n, dtype=BF16)
    x = Matmul(0, a, b)
    if epilogue:
        x = x._replace(
            bias=torch.zeros(n, dtype=BF16), residual=torch.zeros(m, n, dtype=BF16), scale_a=torch.ones(m, 1),
            scale_b=torch.ones(1, n), alpha=0.5, beta=0.25,
        )  # fmt: skip
    layout = Layout(
        strides(a), strides(b), strides(out), 1 if epilogue else None, strides(x.residual) if epilogue else None,
        epilogue, "none", (0, 1) if epilogue else (0, 0), (0, 1) if epilogue else (0, 0),
    )  # fmt: skip
    plan = make_plan(
        m, n, k, dtype="bfloat16", device=DEVICES[target], backend=backend, schedule=schedule,
        scales="row" if epilogue else "none", layout="nt",
    )  # fmt: skip
    if backend == "cdna":
        return CdnaLaunch(plan, layout, (True, True)), x
    return (HopperLaunch if backend == "hopper" else PortableLaunch)(plan, layout), x


CASES = {
    "hopper, static": ("hopper", "static", False, 1024, 1024, 256),
    "hopper, stream-K, epilogue": ("hopper", "stream_k", True, 1152, 1152, 4096),
    "hopper, few rows": ("hopper", "dynamic", True, 16, 4096, 1024),
    "hopper, realigned": ("hopper", "static", False, 1024, 1024, 257),
    "hopper, realigned, stream-K, epilogue": ("hopper", "stream_k", True, 1152, 1152, 4098),
    "portable, dynamic": ("portable", "dynamic", False, 1024, 1024, 256),
    "portable, stream-K, epilogue": ("portable", "stream_k", True, 1152, 1152, 4096),
    "cdna, dynamic": ("cdna", "dynamic", False, 1024, 1024, 256),
    "cdna, stream-K, epilogue": ("cdna", "stream_k", True, 1152, 1152, 4096),
}


ATTENTION_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hopper, attention": ("hopper", {"causal": True}),
    "hopper, attention, packed, lse": ("hopper", {"packed": True, "lse": True}),
    "hopper, attention, split": ("hopper", {"queries": 1, "keys": 8192, "splits": 4, "sinks": True}),
    "portable, attention, paged": ("portable", {"paged": True}),
    "portable, attention, packed": ("portable", {"packed": True}),
    "cdna, attention, packed, lse": ("cdna", {"packed": True, "lse": True}),
    "cdna, attention": ("cdna", {"causal": True}),
}


def attention_case(
    target: str, backend: str, queries: int = 512, keys: int = 512, packed: bool = False, paged: bool = False,
    lse: bool = False, sinks: bool = False, causal: bool = False, splits: int = 0,
) -> tuple[Any, AttentionOperands, Attention]:  # fmt: skip
    """A launch, its operands, and the call that it is of."""
    first = (2 * queries,) if packed else (2, queries)
    q, out = torch.zeros(*first, 8, 64, dtype=BF16), torch.zeros(*first, 8, 64, dtype=BF16)
    shape = (2 * keys // 64, 64) if paged else (2 * keys,) if packed else (2, keys)
    k, v = torch.zeros(*shape, 2, 64, dtype=BF16), torch.zeros(*shape, 2, 64, dtype=BF16)
    x = Attention(q, k, v, sinks=torch.zeros(8) if sinks else None)
    if packed:
        x = x._replace(cu_seqlens_q=torch.zeros(3, dtype=torch.int32), cu_seqlens_k=torch.zeros(3, dtype=torch.int32))
    if paged:
        table = torch.zeros(2, keys // 64, dtype=torch.int32)
        x = x._replace(block_table=table, seqlens_k=torch.zeros(2, dtype=torch.int32))
    sums = torch.zeros((2 * queries, 8) if packed else (2, 8, queries)) if lse else None
    operands = AttentionOperands(
        q, k, v, out, 0.125, sums, x.sinks, None, None, None, x.cu_seqlens_q, x.cu_seqlens_k, x.block_table, x.seqlens_k
    )
    s = Settings(causal, "bottom_right", -1, -1, 0.0, 0.125, return_lse=lse, splits=splits)
    device = device_properties(DEVICES[target])
    problem = replace(problem_of(operands, s, None), no_tma="")
    plan = plan_attention(problem, None, "auto", device=device, splits=splits or None, backend=backend)
    return attention_gpu.launch_of(plan, attention_gpu.layout_of(operands)), operands, x


#: What Triton's own launcher is to launch once more: kernels, their grids and all of their arguments.
by_triton: list[tuple[Any, tuple[int, int, int], list[Any]]] = []


def compared(extension: native.Extension, driver: Driver, launch: Any, operands: Any, call: Call, x: Any) -> int:
    """Bytes of a launch that are equal; ``x``: the arguments of the extension's op."""
    extension._words.clear()  # counted from 0 again
    by_triton.clear()
    with observe() as seen:
        launch(operands)
    assert seen.issued, "nothing was launched"
    assert all(seen.issued), "only Triton launches it"
    for python, _ in seen.issued:
        driver.function(python._function.value, [parameter.size for parameter in python.parameters])
    assert extension.remember(seen, call, 0, False, tuple(x)), native.recipe_of(seen, call)
    driver.forget()
    if isinstance(x, Matmul):
        fresh = extension.try_matmul(*x), None
    else:
        fresh = (extension.try_attention if isinstance(x, Attention) else extension.try_merge_attention)(*x)
    assert fresh[0] is not None
    results = call.operands["out"], call.operands.get("lse")
    moved = {old.data_ptr(): new.data_ptr() for old, new in zip(results, fresh, strict=True) if old is not None}
    words = extension._words.get(extension._place(CPU_INDEX, 0), ())
    there = {name: one.data_ptr() for name, one in zip(native.REGIONS, words, strict=False)} | {"base": 0}
    given = [
        [(one.name, value) for one, value in native._values(python, values) if one.value is launcher.VARIES]
        for python, values in seen.issued
    ]
    partials = next((value for values in given for name, value in values if name == "partials"), None)
    if partials is not None:  # shares, too
        room = 4 * words[2].numel()
        moved |= {
            value: there["partials"] + value - partials
            for values in given
            for name, value in values
            if name not in there and isinstance(value, int) and 0 <= value - partials < room
        }
    for (python, _), values in zip(seen.issued, given, strict=True):
        python(0, *[there.get(name, moved.get(value, value)) for name, value in values])
    for kernel, grid, filled in by_triton:
        signature = kernel.src.signature.items()
        varies = [name == "base" or str(type_).startswith("*") for name, type_ in signature]
        again = [
            there.get(name, moved.get(value, value)) if varying else value
            for (name, _), varying, value in zip(signature, varies, filled, strict=True)
        ]
        kernel.run(*grid, 0, kernel.function, kernel.packed_metadata, None, None, None, *again)
    launched, count = driver.launches(), len(given)
    assert len(launched) == 2 * count + len(by_triton)
    assert len(by_triton) in (0, count)
    for i, other in enumerate(launched[count:]):
        one = launched[i % count]
        different = [i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
        assert not different, (different, [(p.name, p.size) for p in seen.issued[i % count][0].parameters])
    return sum(map(len, launched[:count]))


def compared_matmul(extension: native.Extension, driver: Driver, target: str, name: str) -> int:
    launch, x = case(target, *CASES[name])
    out = torch.zeros(x.a.shape[0], x.b.shape[1], dtype=BF16)
    operands = GemmOperands(x.a, x.b, out, Epilogue(x.alpha, x.bias, x.residual, x.beta, "none", x.scale_a, x.scale_b))
    fields = ("a", "b", "bias", "residual", "scale_a", "scale_b")
    call = Call({**{name: getattr(x, name) for name in fields}, "out": out}, (x.alpha, x.beta))
    return compared(extension, driver, launch, operands, call, x)


def compared_attention(extension: native.Extension, driver: Driver, target: str, name: str) -> int:
    backend, options = ATTENTION_CASES[name]
    launch, operands, x = attention_case(target, backend, **options)
    given = {field: tensor for field, tensor in operands._asdict().items() if field != "scale"}
    return compared(extension, driver, launch, operands, Call(given), x)


def compared_merge(extension: native.Extension, driver: Driver, target: str, name: str) -> int:
    """As `tilestream.ops.attention_merge` has it: the kernel's log-sum-exps are views of the caller's."""
    packed, heads_first = "packed" in name, "heads first" in name
    shape = (100, 8, 64) if packed else (2, 8, 50, 64) if heads_first else (2, 50, 8, 64)
    o_a, o_b, out = (torch.zeros(shape, dtype=BF16) for _ in range(3))
    lse_a, lse_b, lse = (torch.zeros((100, 8) if packed else (2, 8, 50)) for _ in range(3))
    in_rows = [x if packed or heads_first else x.transpose(1, 2) for x in (lse_a, lse_b, lse)]
    operands = MergeOperands(o_a, in_rows[0], o_b, in_rows[1], out, in_rows[2])
    call = Call({"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b, "out": out, "lse": lse})
    x = Merge(o_a, lse_a, o_b, lse_b, int(heads_first))
    return compared(extension, driver, PairLaunch(operands), operands, call, x)


def main() -> None:
    target, library, fake, *names = sys.argv[1:]
    active = NoGpu(TARGETS[target])
    triton.runtime.driver.set_active(active)
    hip = TARGETS[target].backend == "hip"
    if hip:
        os.environ["TRITON_LIBHIP_PATH"] = fake
        active.utils = HIPUtils()
    handles = iter(range(0x1000, 0x10000, 0x10))

    def init_handles(kernel: Any) -> None:
        kernel.function = kernel.function or next(handles)
        if hip:
            kernel._run = HIPLauncher(kernel.src, kernel.metadata)

    triton.compiler.CompiledKernel._init_handles = init_handles

    def load_first(kernel: Kernel, stream: int, filled: Any) -> None:
        """`Kernel.__call__`, where nothing can be launched."""
        kernel.load(filled)
        values = [address(x) for x in filled]
        if hip:
            by_triton.append((kernel._compiled, kernel._grid, values))
        if (seen := observation()) is not None:
            seen.issued.append(native.issued(kernel._compiled, kernel._grid, values))

    Kernel.__call__ = load_first
    cdll = ctypes.CDLL(fake)

    def function(name: str, *arguments: type) -> Any:
        found = getattr(cdll, name)
        found.argtypes = arguments
        return found

    for module in (launcher, tensor_map):
        module.cuda_function = module.hip_function = function
    driver = Driver(Path(fake))
    driver.thread()
    extension = native.Extension(Path(library), fake, fake)
    for name in names:
        made = compared_matmul if name in CASES else compared_merge if "merge" in name else compared_attention
        print(name, made(extension, driver, target, name), "equal", flush=True)


if __name__ == "__main__":
    main()
