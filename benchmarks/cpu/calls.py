"""What a call on the CPU takes beside torch's own: small products, which are mostly the host's work, and attention.

Floor: torch's call. Ours looks an equal call up and then makes torch's, so a small one costs the look-up more, 3 to
10 us whatever its size; attention of a thousand rows costs nothing more. Each answer is checked in the run that times
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody has it

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import interleave, medians
from tilestream_tools.sweep.check import errors

Call = Callable[..., torch.Tensor]


class Product(NamedTuple):
    """A product of operands of ``size`` rows and columns: torch's call, and this package's, of a, b and a bias."""

    name: str
    size: int
    torch: Call
    ours: Call
    dtype: torch.dtype = torch.float32

    def operands(self) -> tuple[torch.Tensor, ...]:
        """a, b, bias."""
        a, b = (torch.randn(self.size, self.size, dtype=self.dtype) for _ in range(2))
        return a, b, torch.randn(self.size, dtype=self.dtype)

    def __str__(self) -> str:
        return f"{self.name}, {self.size} x {self.size}, {str(self.dtype).removeprefix('torch.')}"


def products(size: int) -> list[Product]:
    """The products of one size."""
    out = torch.empty(size, size)
    return [
        Product("mm", size, lambda a, b, bias: torch.mm(a, b), lambda a, b, bias: ts.mm(a, b)),
        Product("matmul", size, lambda a, b, bias: torch.matmul(a, b), lambda a, b, bias: ts.matmul(a, b)),
        Product(
            "matmul, out=", size, lambda a, b, bias: torch.matmul(a, b, out=out),
            lambda a, b, bias: ts.matmul(a, b, out=out),
        ),
        Product("linear, bias", size, F.linear, ts.linear),
        Product(
            "linear, bias, relu", size, lambda a, b, bias: F.relu(F.linear(a, b, bias)),
            lambda a, b, bias: ts.linear(a, b, bias, activation="relu"),
        ),
        Product("addmm", size, torch.addmm, ts.addmm),
        Product(
            "matmul", size, lambda a, b, bias: torch.matmul(a, b), lambda a, b, bias: ts.matmul(a, b), torch.bfloat16
        ),
    ]  # fmt: skip


class Attention(NamedTuple):
    """Self-attention of one sequence with 64 columns a head."""

    rows: int
    heads: int
    dtype: torch.dtype = torch.float32
    causal: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + ", causal" * self.causal
        return f"{self.rows} rows, {self.heads} heads, {kind}"


ATTENTION = (
    Attention(64, 2), Attention(1024, 8), Attention(2048, 8), Attention(2048, 8, causal=True),
    Attention(2048, 8, torch.bfloat16), Attention(2048, 8, torch.bfloat16, True),
)  # fmt: skip


def of_product(product: Product, threads: int) -> dict[str, Any]:
    """A row: microseconds of torch's call and of this package's."""
    a, b, bias = operands = product.operands()
    given = (bias, a, b) if product.name == "addmm" else operands
    wide = [x.double() for x in operands]
    turned = wide[1].t() if product.name.startswith("linear") else wide[1]
    reference = wide[0] @ turned + (wide[2] if product.name not in ("mm", "matmul", "matmul, out=") else 0)
    reference = reference.relu() if "relu" in product.name else reference
    peer = product.torch(*given).clone()
    found = [errors(product.ours(*given), peer, reference) for _ in range(2)][1]  # of a call that was looked up
    functions = {"torch": lambda: product.torch(*given), "tilestream": lambda: product.ours(*given)}
    return _row(str(product), threads, functions, 50, 151) | {"errors": found}


def of_attention(case: Attention, threads: int) -> dict[str, Any]:
    """The same for attention; in between, through `use_attention`."""
    q, k, v = (torch.randn(1, case.rows, case.heads, 64, dtype=case.dtype) for _ in range(3))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    routes = ts.use_attention(cpu=True)

    def torchs() -> torch.Tensor:
        return F.scaled_dot_product_attention(*turned, is_causal=case.causal)

    def routed() -> torch.Tensor:
        with routes:
            return torchs()

    def ours() -> torch.Tensor:
        return ts.attention(q, k, v, causal=case.causal)

    some = slice(None, None, max(1, case.rows // 64))  # of the rows: all scores in float64 take gigabytes
    scores = turned[0].double()[:, :, some] @ turned[1].double().mT / 8
    if case.causal:
        hidden = torch.arange(case.rows) > torch.arange(case.rows)[some, None]
        scores.masked_fill_(hidden, -torch.inf)
    reference = scores.softmax(-1) @ turned[2].double()
    peer = torchs()[:, :, some]
    for _ in range(2):
        found = errors(ours().transpose(1, 2)[:, :, some], peer, reference)
    errors(routed()[:, :, some], peer, reference)
    batch, rounds = (50, 151) if case.rows < 512 else (1, 9)
    functions = {"torch": torchs, "tilestream": ours, "use_attention": routed}
    return _row(str(case), threads, functions, batch, rounds) | {"errors": found}


def _row(
    name: str, threads: int, functions: dict[str, Callable[[], torch.Tensor]], batch: int, rounds: int
) -> dict[str, Any]:
    def several(function: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: [function() for _ in range(batch)][:0]

    seconds = interleave({way: several(function) for way, function in functions.items()}, rounds=rounds)
    us = {way: round(1e3 * ms / batch, 2) for way, ms in medians(seconds).items()}
    ratios = {way: round(value / us["torch"], 3) for way, value in us.items() if way != "torch"}
    return {"name": name, "threads": threads, "us": us, "ratios": ratios}


def _each(session: Session, name: str, cases: list[Any], measure: Callable[[Any, int], dict[str, Any]]) -> None:
    before = torch.get_num_threads()

    def row(item: tuple[Any, int]) -> dict[str, Any]:
        case, threads = item
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                return measure(case, threads)
        finally:
            torch.set_num_threads(before)

    session.rows(session.record(name, cpu=True), [(case, threads) for threads in (1, 2) for case in cases], row)


def calls(session: Session) -> None:
    """Small products."""
    _each(session, "calls", [*products(8), *products(64)], of_product)


def attention(session: Session) -> None:
    """Attention."""
    _each(session, "calls_attention", list(ATTENTION), of_attention)
