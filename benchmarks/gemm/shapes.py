"""What the GEMM benchmarks measure, and the arithmetic of what they report. No torch, no GPU.

Problems are ``[M, K] @ [K, N]`` with B as it lies in a Linear weight, ``[N, K]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.gemm.draw import Draw


class Shape(NamedTuple):
    """A problem, the class it is counted in, and where it comes from."""

    m: int
    n: int
    k: int
    group: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def outputs(self) -> int:
        """Rows of the output."""
        return self.m

    @property
    def operations(self) -> int:
        """Multiply-adds, counted two each."""
        return 2 * self.m * self.n * self.k

    def read(self, itemsize: int = 2) -> int:
        """Bytes of A and B, each read once."""
        return itemsize * self.k * (self.m + self.n)

    def bytes(self, itemsize: int = 2, out: int = 2) -> int:
        """Bytes that must move at least."""
        return self.read(itemsize) + out * self.m * self.n


class Model(NamedTuple):
    """The extents of a model's layers, from its configuration."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def projections(self) -> dict[str, tuple[int, int]]:
        """``(N, K)`` of each weight of a layer, not sharded; Q, K and V are one, gate and up are one."""
        return {
            "QKV": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "O": (self.hidden, self.heads * self.head_dim),
            "gate+up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


#: From the published config.json of each.
MODELS = {"Llama-3 8B": Model(4096, 14336, 32, 8), "Llama-3 70B": Model(8192, 28672, 64, 8)}

#: The classes, in the order in which they are shown, and what they are.
GROUPS = {
    "square": "M = N = K",
    "decode": "a layer's projections at M = 1, 16, 64",
    "middle": "a layer's projections at M = 256",
    "prefill": "a layer's projections at M = 1024, 4096, 16384",
    "short K": "8192 x 8192 with K of 512, 1024, 2048",
    "odd": "odd extents, so that the output's rows are not aligned",
}
TOKENS = {"decode": (1, 16, 64), "middle": (256,), "prefill": (1024, 4096, 16384)}


def group_of(tokens: int) -> str:
    """The class of a projection at this many rows."""
    return "decode" if tokens <= 64 else "middle" if tokens < 1024 else "prefill"


def suite() -> list[Shape]:
    """Every shape of the suite, in the order of measuring: some of each class early, then all in step."""
    shapes = [Shape(size, size, size, "square") for size in (4096, 8192, 1024, 2048, 16384)]
    shapes += [Shape(8192, 8192, k, "short K") for k in (1024, 512, 2048)]
    shapes += [Shape(4096, 4097, 4096, "odd"), Shape(4095, 4099, 4104, "odd")]
    layers = [
        (f"{model[8:]} {name}", *extents)
        for name in ("QKV", "gate+up", "O", "down")
        for model in MODELS
        for extents in [MODELS[model].projections()[name]]
    ]
    for tokens in TOKENS.values():
        for turn in range(len(tokens)):  # so that the first eight are each projection once, at all sizes of M
            for i, (name, n, k) in enumerate(layers):
                m = tokens[(i + turn) % len(tokens)]
                shapes.append(Shape(m, n, k, group_of(m), name))
    return in_step(shapes)


def in_step(shapes: Sequence[Shape]) -> list[Shape]:
    """Order the shapes so that a run that is cut short has about the same share of each class."""
    sizes = {group: sum(s.group == group for s in shapes) for group in {s.group for s in shapes}}
    seen = dict.fromkeys(sizes, 0)
    placed = []
    for index, shape in enumerate(shapes):
        placed.append((seen[shape.group] / sizes[shape.group], index, shape))
        seen[shape.group] += 1
    return [shape for _, _, shape in sorted(placed)]


def parse(text: str) -> list[Shape]:
    """``"4096x4096x4096,16x8192x8192"``: M, N, K."""
    return [Shape(*(int(extent) for extent in one.split("x"))) for one in text.split(",")]


def _shapes(text: str) -> list[Shape]:
    return parse(",".join(text.split()))


#: Beside quack: shapes of its own published table, and a layer's projections.
QUACK = _shapes(
    "8192x8192x8192 4096x4096x4096 64x8192x8192 8192x8192x1024 2048x2048x2048 512x8192x8192 4096x14336x4096 "
    "8192x28672x8192 16384x1024x8192 16x8192x8192 1024x10240x8192 8192x8192x2048"
)

FP8 = _shapes(
    "8192x8192x8192 1024x8192x8192 16x8192x8192 4096x4096x4096 64x28672x8192 8192x8192x1024 1x8192x28672 "
    "4096x14336x4096 256x10240x8192 16384x8192x8192 64x8192x8192 2048x2048x2048"
)

#: M and N of the epilogue's shapes, and K with the activation.
EPILOGUE = [
    (Shape(8192, 8192, k), activation)
    for activation, ks in (("gelu", (1024, 4096, 512, 2048, 8192)), ("gelu_tanh", (1024, 4096, 2048)))
    for k in ks
]

#: Not what the cost model was fitted to: other models' layers, and sizes that nothing divides.
SEARCH = _shapes(
    "3072x3072x3072 24x7168x18432 777x3333x2048 10000x1000x512 2048x11008x4096 96x5120x13824 4095x4097x4096 "
    "640x640x20480 5120x5120x5120 320x5120x5120 12288x1536x6144 8x12288x4096 1536x6144x1536 6000x2560x10240 "
    "200x49152x4096 3000x7168x2048"
)

#: Shapes where the placement of tiles matters (short K, few columns, few rows), and others where it should not.
QUEUES = _shapes(
    "8192x8192x1024 8192x8192x512 8192x8192x8192 4096x4096x4096 1024x10240x8192 256x8192x28672 4096x14336x4096 "
    "16384x1024x8192 256x57344x8192"
)

#: Rows 112, 0, 16, 48, 64 and 112 bytes from a multiple of 128; then K a multiple of 4, and of 2.
PITCHES = _shapes(
    "2048x13312x15800 2048x13312x15872 4096x4096x4104 4096x4096x4120 4096x4096x4128 1024x10240x8184 4096x4096x4100 "
    "2048x8192x2052 4096x4096x4098 3000x5000x2050"
)


class Peaks(NamedTuple):
    """A device's data sheet: dense operations a second with 16-bit operands, and bytes a second from memory.

    fp8 is twice the first.
    """

    flops: float
    bandwidth: float

    def floor(self, shape: Shape | Draw, itemsize: int = 2, out: int = 2) -> tuple[float, str]:
        """Seconds that no implementation goes below, and what binds: the larger of operations and bytes."""
        compute = shape.operations / (self.flops * (2 if itemsize == 1 else 1))
        memory = shape.bytes(itemsize, out) / self.bandwidth
        return max(compute, memory), "operations" if compute >= memory else "bytes"


#: By a part of the device's name. SXM parts.
PEAKS = {"H200": Peaks(989.4e12, 4.8e12), "H100": Peaks(989.4e12, 3.35e12)}


def peaks_of(device: str) -> Peaks:
    """The data sheet of a device by torch's name for it; an unknown device has the H200's."""
    return next((peaks for name, peaks in PEAKS.items() if name in device), PEAKS["H200"])


def refuse_impossible(
    shape: Shape | Draw, peaks: Peaks, seconds: dict[str, float], itemsize: int = 2
) -> None:  # fmt: skip
    """Raise if a time is below what the operations take at the peak, or the operands' bytes from memory.

    The output's bytes do not count here: it may still lie in the cache when the kernel ends. 2 % of slack for the
    clock's own steps.
    """
    least = max(shape.operations / (peaks.flops * (2 if itemsize == 1 else 1)), shape.read(itemsize) / peaks.bandwidth)
    for name, value in seconds.items():
        if value < 0.98 * least:
            raise AssertionError(
                f"{shape}: {name} took {value * 1e6:.2f} us, the device's peak allows {least * 1e6:.2f}: the answer or "
                "the timing is wrong"
            )


def rounds_for(expected: float, functions: int, seconds: float, overhead: float = 0.5e-3) -> int:
    """How many rounds of so many calls, each taking ``expected`` and some overhead, fit into ``seconds``: 9 to 100."""
    return max(9, min(100, int(seconds / (functions * (expected + overhead)))))
