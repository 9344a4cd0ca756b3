"""The error rule of docs/design.md, once, for every test that compares numbers.

An answer passes if its maximum and its Frobenius error against a finer reference are at most twice those of the same
maths done by torch in the same dtype on the same inputs, plus one ulp at the result's scale. NaN never passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
#: Of the two halves of the columns.
HALVES = {"swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NARROW = (*FP8, *FNUZ)


@dataclass(frozen=True)
class Maths:
    """``activation(alpha * scale_a * scale_b * a @ b + bias + beta * residual)``: what an answer is an answer to.

    Scales are such that they broadcast to ``a @ b``. ``tf32``: float32 operands count as rounded to tf32, whatever a
    library makes of them: cuBLAS does not round at each shape where torch's flag lets it.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    fast_accum: bool = True
    tf32: bool = False

    def by_torch(self) -> torch.Tensor:
        """In the operands' own dtype, as one would write it with torch."""
        a, b = (to_tf32(x.detach()) if self.tf32 else x.detach() for x in (self.a, self.b))
        dtype = self.out_dtype or (torch.bfloat16 if a.dtype in NARROW else a.dtype)
        product = fp8_product(a, b, self.fast_accum) if a.dtype in NARROW else torch.matmul(a, b)
        return self._epilogue(product, lambda t: t.detach()).to(dtype)

    def finer(self) -> torch.Tensor:
        """In float64; for float64 operands the product is accumulated in the C library's long double."""
        if self.a.dtype == torch.float64:
            wide = (t.detach().numpy().astype(np.longdouble) for t in (self.a, self.b))
            product = torch.from_numpy(np.asarray(np.matmul(*wide), dtype=np.float64))
        else:
            product = torch.matmul(self.a.detach().double(), self.b.detach().double())
        return self._epilogue(product, lambda t: t.detach().double())

    def _epilogue(self, x: torch.Tensor, of) -> torch.Tensor:
        for scale in (self.scale_a, self.scale_b):
            x = x if scale is None else x * of(scale)
        x = x * self.alpha if self.alpha != 1 else x
        x = x + of(self.bias) if self.bias is not None else x
        x = x + self.beta * of(self.residual) if self.residual is not None and self.beta != 0 else x
        return (ACTIVATIONS | HALVES)[self.activation](x)


def units_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """The kinds of 8 bits that a GPU multiplies."""
    hip = torch.version.hip is not None
    return FNUZ if hip and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942") else FP8


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 with tf32's ten bits, halves away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def fp8_product(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> torch.Tensor:
    """The product of 8-bit operands in float32: on a GPU by ``torch._scaled_mm``, which has the hardware's sums.

    It wants K and N in multiples of 16, A row by row and B column by column: zeros and copies change nothing. Two
    float8_e5m2 it does not take, nor what is not of the GPU's kind; those are multiplied in float32.
    """
    two_e5m2 = {a.dtype, b.dtype} in ({FP8[1]}, {FNUZ[1]})
    if not a.is_cuda or two_e5m2 or a.dtype not in units_of(a.device) or not a.numel() or not b.numel():
        return torch.matmul(a.float(), b.float())
    if a.dim() == 3:
        return torch.stack([fp8_product(x, y, fast_accum) for x, y in zip(a, b, strict=True)])
    (m, k), n = a.shape, b.shape[1]
    rows = torch.zeros(m, -(-k // 16) * 16, dtype=a.dtype, device=a.device)
    columns = torch.zeros(-(-n // 16) * 16, rows.shape[1], dtype=b.dtype, device=b.device)
    rows[:, :k], columns[:n, :k] = a, b.t()
    one = torch.ones((), device=a.device)
    product = torch._scaled_mm(rows, columns.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast_accum)
    return product[:, :n]


def errors(answer: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Maximum and Frobenius error; NaN in either makes both NaN."""
    difference = answer.detach().double() - reference.double()
    if not difference.numel():
        return 0.0, 0.0
    return difference.abs().max().item(), difference.norm().item()


def one_ulp(reference: torch.Tensor, dtype: torch.dtype) -> float:
    """The distance between neighbours of ``dtype`` at the reference's largest magnitude."""
    scale = reference.abs().max().item() if reference.numel() else 0.0
    finfo = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(scale)) * finfo.eps if scale > finfo.tiny else finfo.tiny


def passes(answer: torch.Tensor, reference: torch.Tensor, by_torch: torch.Tensor) -> bool:
    """Whether ``answer`` keeps the rule, as seen from ``reference``, where torch gives ``by_torch``."""
    if answer.shape != reference.shape:
        return False
    ulp = one_ulp(reference, answer.dtype)
    slack = (ulp, ulp * math.sqrt(max(answer.numel(), 1)))
    pairs = zip(errors(answer, reference), errors(by_torch, reference), slack, strict=True)
    return all(mine <= 2 * theirs + more for mine, theirs, more in pairs)


def check(answer: torch.Tensor, maths: Maths) -> torch.Tensor:
    """Assert the rule, and torch's shape and dtype. Returns the reference."""
    reference, by_torch = maths.finer(), maths.by_torch()
    assert answer.shape == by_torch.shape, f"shape {list(answer.shape)}, torch has {list(by_torch.shape)}"
    assert answer.dtype == by_torch.dtype, f"{answer.dtype}, torch has {by_torch.dtype}"
    assert passes(answer, reference, by_torch), (
        f"max and Frobenius error {errors(answer, reference)}, torch's {errors(by_torch, reference)}, "
        f"ulp {one_ulp(reference, answer.dtype):.3g}; NaN: {int(answer.isnan().sum())} of {answer.numel()}"
    )
    return reference


def check_gradient(mine: torch.Tensor | None, reference: torch.Tensor, by_torch: torch.Tensor) -> None:
    """The rule for a gradient, whose reference comes from autograd on float64 copies."""
    assert mine is not None, "no gradient"
    assert mine.shape == by_torch.shape
    assert mine.dtype == by_torch.dtype
    assert passes(mine, reference, by_torch), (errors(mine, reference), errors(by_torch, reference))


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> torch.Tensor:
    """Fresh normal numbers; seeded by the shape where no seed is given, so that a failure can be seen again."""
    generator = torch.Generator().manual_seed(hash(shape) % 2**31 if seed is None else seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output, or an input that has not arrived."""
    return torch.full(shape, float("nan"), dtype=dtype)
