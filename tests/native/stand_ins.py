"""A compiled kernel and its launch, for tests without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tilestream.launch.launcher import VARIES, Descriptor, Launcher
from tilestream.launch.native import Extension
from tilestream.launch.observe import Call, Observation, observe
from tilestream.ops import native

#: torch's index of the CPU, the "GPU" of these tests.
CPU_INDEX = -1
#: What a launch that counts draws at most.
TICKETS = 11
_BYTES = {"i32": 4, "fp32": 4, "i64": 8, "fp64": 8}
_handles = itertools.count(0x1000, 0x10)


def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, extension: Extension | None) -> None:
    """Tensors of the CPU count as a GPU's, and ``extension`` is loaded."""
    monkeypatch.setattr(native._loaded, "asked", True)
    monkeypatch.setattr(native._loaded, "extension", extension)
    monkeypatch.setattr(native._loaded, "watched", lambda: False, raising=False)
    monkeypatch.setattr(native, "allows_tf32", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


class Matmul(NamedTuple):
    """A call of `try_matmul`, with its arguments' names."""

    op: int = 0
    a: Any = None
    b: Any = None
    bias: Any = None
    residual: Any = None
    scale_a: Any = None
    scale_b: Any = None
    alpha: float = 1.0
    beta: float = 1.0
    options: int = 0
    workers: int = 0
    limit: int = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """The operands, by name."""
        return dict(zip(self._fields[1:7], self[1:7], strict=True))

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fresh outputs."""
        return torch.zeros(*self.a.shape[:-1], self.b.shape[-1], dtype=self.a.dtype), None


def call(m: int = 16, n: int = 32, k: int = 64, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Matmul:
    """``[m, k] @ [k, n]``."""
    return Matmul(0, torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype))._replace(**more)


class Attention(NamedTuple):
    """A call of `try_attention`, with its arguments' names."""

    q: Any = None
    k: Any = None
    v: Any = None
    options: int = 0
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    block_table: Any = None
    seqlens_k: Any = None
    max_seqlen_q: int = -1
    max_seqlen_k: int = -1
    scale: float = 0.0
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    sinks: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None
    workers: int = 0
    splits: int = 0
    limit: int = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """The operands, by name."""
        return {name: getattr(self, name) for name in (*self._fields[:3], *self._fields[4:8], *self._fields[14:18])}

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fresh outputs."""
        return torch.zeros_like(self.q), None


def attention_call(**more: Any) -> Attention:
    """Two sequences of eight queries and eight keys, four heads over two."""
    q, k = torch.zeros(2, 8, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 8, 2, 16, dtype=torch.bfloat16)
    return Attention(q, k, torch.zeros_like(k))._replace(**more)


class Merge(NamedTuple):
    """A call of `try_merge_attention`, with its arguments' names."""

    o_a: Any
    lse_a: Any
    o_b: Any
    lse_b: Any
    layout: int = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """The operands, by name."""
        return dict(zip(self._fields[:4], self[:4], strict=True))

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fresh outputs."""
        return torch.zeros_like(self.o_a), torch.zeros_like(self.lse_a)


def merge_call(**more: Any) -> Merge:
    """Two sequences of eight queries, four heads."""
    o, lse = torch.zeros(2, 8, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 4, 8)
    return Merge(o, lse, torch.zeros_like(o), torch.zeros_like(lse))._replace(**more)


class Grouped(NamedTuple):
    """A call of `try_grouped`, with its arguments' names."""

    a: Any
    b: Any
    offsets: Any
    options: int = 0
    bias: Any = None
    scale_a: Any = None
    scale_b: Any = None
    workers: int = 0
    limit: int = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """The operands, by name."""
        return {name: getattr(self, name) for name in ("a", "b", "offsets", "bias", "scale_a", "scale_b")}

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fresh outputs."""
        return torch.zeros(self.a.shape[0], self.b.shape[2], dtype=self.a.dtype), None


def grouped_call(**more: Any) -> Grouped:
    """Sixteen rows in three groups."""
    a, b = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(3, 64, 32, dtype=torch.bfloat16)
    return Grouped(a, b, torch.zeros(3, dtype=torch.int32))._replace(**more)


def kernel(
    driver: Any, signature: dict[str, str], constants: dict[tuple[int, ...], Any], boxes: list[list[int]]
) -> Any:
    """What Triton has compiled: as much of it as `Launcher` reads."""
    sizes = []
    for type_ in signature.values():
        if type_.startswith("tensordesc"):
            sizes += [128, 4, 4, 8, 8]
        elif type_ != "constexpr":
            sizes.append(_BYTES.get(type_, 8))
    sizes += [8, 8]
    declared = [
        f".param .align 64 .b8 p{i}[128]" if size == 128 else f".param .b{8 * size} p{i}"
        for i, size in enumerate(sizes)
    ]
    described = [{"elem_type": 9, "elem_size": 2, "block_size": box, "swizzle": 3} for box in boxes]
    handle = next(_handles)
    driver.function(handle, sizes)
    return SimpleNamespace(
        name="gemm",
        function=handle,
        _init_handles=lambda: None,
        asm={"ptx": f".visible .entry gemm({', '.join(declared)})"},
        src=SimpleNamespace(signature=signature, constants=constants, attrs={}),
        metadata=SimpleNamespace(
            num_ctas=1,
            num_warps=12,
            warp_size=32,
            shared=1000,
            launch_pdl=True,
            launch_cooperative_grid=False,
            global_scratch_size=0,
            profile_scratch_size=0,
            tensordesc_meta=described,
        ),
    )


class Launch:
    """A GEMM launch: two tensor maps, pointers for all else that is given, alpha and beta.

    Parameters
    ----------
    needs
        As `tilestream.launch.launch.Launch.needs`; the kernel takes words if there are tickets.
    extra
        Further parameters that vary, and their values.
    local
        Rows that are read by a tensor map of their own.
    """

    tables: Sequence[torch.Tensor] = ()

    def __init__(
        self, driver: Any, x: Matmul, needs: tuple[int, ...] = (0, 0, 0, 0, 0), swapped: bool = False,
        extra: dict[str, int] | None = None, local: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.needs = SimpleNamespace(swap_ab=swapped), needs
        self._swapped, self._extra, self._base = swapped, extra or {}, 0
        self._words = torch.zeros(3, 1024)
        rows, columns = (x.b.T, x.a) if swapped else (x.a, x.b.T)
        scales = ("scale_b", "scale_a") if swapped else ("scale_a", "scale_b")
        self._pointers = {
            name: field
            for name, field in (
                ("bias", "bias"), ("residual", "residual"), ("row_scale", scales[0]), ("column_scale", scales[1])
            )
            if getattr(x, field) is not None
        }  # fmt: skip
        words = {"partials": "*fp32", "counts": "*i32", "counters": "*i64"} if needs[0] else {}
        signature = {
            "x_map": "tensordesc<bf16>", "y_map": "tensordesc<bf16>", "out": "*bf16",
            **dict.fromkeys(self._pointers, "*bf16"), **words, **{name: _type(name) for name in self._extra},
            "base": "i64", "reset": "i32", "rows": "i32", "alpha": "fp32", "beta": "fp32", "C": "constexpr",
        }  # fmt: skip
        mapped = [rows, columns]
        if local is not None:
            mapped, signature = [local, *mapped], {"local_map": "tensordesc<bf16>", **signature}
        compiled = kernel(driver, signature, {}, [[8, 64], [8, 64], [16, 64]][-len(mapped) :])
        maps = [Descriptor(tuple(one.shape), (64, 1)) for one in mapped]
        varies = len(signature) - 4 - len(maps)
        given = [*maps, *[VARIES] * varies, rows.shape[0], VARIES, VARIES, None]
        self._launcher = Launcher(compiled, (7, 1, 1), given)

    def issue(
        self, x: Matmul, out: torch.Tensor, _: torch.Tensor | None = None, /, stream: int = 0, **moved: int
    ) -> None:  # fmt: skip
        """Launch by Python; ``moved``: addresses of operands that are not where the caller has them."""
        address = {name: tensor.data_ptr() for name, tensor in x.tensors.items() if tensor is not None}
        address |= moved
        first, second = ("b", "a") if self._swapped else ("a", "b")
        words = [one.data_ptr() for one in self._words] if self.needs[0] else []
        residual = x.residual is not None
        local = [address["local"]] if "local" in address else []
        extra = [moved.get(name, value) for name, value in self._extra.items()]
        self._launcher(
            stream, *local, address[first], address[second], out.data_ptr(),
            *[address[field] for field in self._pointers.values()], *words, *extra, self._base, 0, x.alpha,
            x.beta if residual else 1.0,
        )  # fmt: skip
        self._base += self.needs[0]


def _type(name: str) -> str:
    """The type of a kernel's parameter for what arrives."""
    if name.endswith(("signals", "quarantine", "counts", "table", "records", "claims")):
        return "*i32"
    return "i64" if name == "allowed" else "i32"


#: What kernels call pointers that are not named as their operands are.
_POINTERS = {"scale_a": "row_scale", "scale_b": "column_scale"}


class AttentionLaunch:
    """A launch of attention, of one or two kernels, of a merge, or of groups: pointers for all that is given.

    Parameters
    ----------
    listed
        Whether a kernel in front makes a list, which is found in the workspace.
    extra
        As of `Launch`.
    """

    tables: Sequence[torch.Tensor] = ()

    def __init__(
        self, driver: Any, x: Attention | Merge | Grouped, lse: bool = False, listed: bool = False,
        extra: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._extra = extra or {}
        self.plan, self.needs = SimpleNamespace(), (TICKETS if listed else 0, 8 * listed, 0, 0, 4 * listed)
        self._base, self._words = 0, torch.zeros(3, 1024)
        self._names = [name for name, tensor in x.tensors.items() if tensor is not None] + ["out"] + ["lse"] * lse
        lists = ["starts", "order"] if listed else []
        self._launchers = []
        for names in ([["cu_seqlens_q", *lists]] if listed else []) + [[*self._names, *lists, *["counters"] * listed]]:
            numbers = {name: _type(name) for name in self._extra}
            numbers |= {"base": "i64", "reset": "i32", "scale": "fp32"} if "q" in names else {}
            pointers = [_POINTERS.get(name, name) for name in names]
            signature = {**dict.fromkeys(pointers, "*bf16"), **numbers, "C": "constexpr"}
            given = [VARIES] * (len(names) + len(numbers)) + [None]
            self._launchers.append(
                (names, "base" in numbers, Launcher(kernel(driver, signature, {}, []), (7, 1, 1), given))
            )

    def issue(
        self, x: Attention | Merge | Grouped, out: torch.Tensor, lse: torch.Tensor | None = None, /, stream: int = 0,
        **moved: int,
    ) -> None:  # fmt: skip
        """Launch by Python; ``moved``: addresses of operands that are not where the caller has them."""
        tensors = {**x.tensors, "out": out, "lse": lse}
        address = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        address |= dict(zip(("counters", "starts", "order"), [one.data_ptr() for one in self._words], strict=True))
        address |= moved
        extra = [moved.get(name, value) for name, value in self._extra.items()]
        for names, numbers, launcher in self._launchers:
            launcher(stream, *[address[name] for name in names], *extra, *([self._base, 0, x.scale] if numbers else []))
        self._base += self.needs[0]


def observed(
    launch: Launch | AttentionLaunch, x: Matmul | Attention | Merge | Grouped, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, /, stream: int = 0, **moved: int,
) -> tuple[Observation, Call]:  # fmt: skip
    """Launch by Python, observed."""
    fresh, sums = x.results
    out, lse = fresh if out is None else out, sums if lse is None else lse
    with observe() as seen:
        launch.issue(x, out, lse, stream=stream, **moved)
        seen.launches.append(launch)
    factors = (x.alpha, x.beta) if isinstance(x, Matmul) else (1.0, 1.0)
    return seen, Call({**x.tensors, "out": out, "lse": lse}, factors)


def remember(
    extension: Extension, launch: Launch | AttentionLaunch, x: Matmul | Attention | Merge | Grouped,
    out: torch.Tensor | None = None, lse: torch.Tensor | None = None, /, stream: int = 0, **moved: int,
) -> bool:  # fmt: skip
    """Launch by Python, observed, and have the extension keep the recipe."""
    seen, made = observed(launch, x, out, lse, stream=stream, **moved)
    return extension.remember(seen, made, stream, out is not None, tuple(x))


def tried(
    extension: Extension, x: Matmul | Attention | Merge | Grouped, out: torch.Tensor | None = None
) -> tuple[Any, Any]:  # fmt: skip
    """What a native call gives for the output and for the log-sum-exp."""
    name = {Matmul: "matmul", Attention: "attention", Merge: "merge_attention", Grouped: "grouped"}[type(x)]
    found = getattr(extension, f"try_{name}")(*x) if out is None else getattr(extension, f"try_{name}_out")(out, *x)
    return found if isinstance(found, tuple) else (found, None)
