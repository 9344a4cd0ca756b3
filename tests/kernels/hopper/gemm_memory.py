"""Shared memory, byte for byte, that copies of boxes fill and multiplications read: the text of the Hopper GEMM on it.

The stand-ins of `test_hopper_protocol` know which stage a copy fills, and this machine where in it each element lies.
A box lies there as its tensor map's layout says, and a multiplication reads as the layout of its view says. Where the
two differ, as where two CTAs bring halves that are no half of what is read, products are wrong.

First all CTAs load, one after the other, then all multiply: no more K steps than there are stages. Their own text is
run; barriers only count bytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from texts import bind, jitted_of, structs_of
from triton.experimental.gluon import language as gl

from mutants.engine import Edit
from tilestream.core import ring, structs
from tilestream.core.structs import Item, Place
from tilestream.kernels.hopper import compat as compat_text
from tilestream.kernels.hopper import epilogue as epilogue_text
from tilestream.kernels.hopper import gemm as gemm_text
from tilestream.kernels.hopper import load as load_text
from tilestream.kernels.hopper import multiply as multiply_text
from tilestream.kernels.hopper import pair as pair_text
from tilestream.kernels.hopper import ring as ring_text

#: Of these all jitted functions that have no stand-in are run as they stand.
MODULES = (compat_text, pair_text, load_text, multiply_text, ring_text, gemm_text)
BF16, F8, F32 = gl.bfloat16, gl.float8e4nv, gl.float32
DTYPES = {1: F8, 2: BF16, 4: F32}


def places(shape: tuple[int, int], swizzle: int, size: int, start: int = 0) -> np.ndarray:
    """The byte at which each element of a matrix lies, as copies and multiplications know it.

    Blocks of ``swizzle`` bytes of all rows follow each other. The tensor memory accelerator and the tensor cores
    exchange pieces of 16 bytes by three bits of their address, or as many as count such a row's pieces.
    """
    row, column = np.indices(shape)
    width = swizzle or shape[1] * size
    block, inside = np.divmod(column * size, width)
    at = start + block * shape[0] * width + row * width + inside
    return at ^ ((at >> 7 & (max(swizzle, 16) // 16 - 1)) << 4)


class Memory:
    """A CTA's shared memory: a number at each byte where one begins. What nobody has written is NaN."""

    def __init__(self) -> None:
        self.bytes = np.full(0, np.nan, np.float32)

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> View:
        start = len(self.bytes)
        size = -(-math.prod(shape) * dtype.primitive_bitwidth // 8 // 1024) * 1024
        self.bytes = np.append(self.bytes, np.full(size, np.nan, np.float32))
        return View(self, start, dtype, tuple(shape), layout)


class View(NamedTuple):
    """A tensor in shared memory: matrices one behind the other, where it has more than two dimensions."""

    memory: Memory
    start: int
    dtype: Any
    shape: tuple[int, ...]
    layout: Any
    transposed: bool = False

    @property
    def size(self) -> int:
        return self.dtype.primitive_bitwidth // 8

    def index(self, at: int) -> View:
        assert 0 <= at < self.shape[0]
        rest = self.shape[1:]
        return self._replace(start=self.start + at * math.prod(rest) * self.size, shape=rest)

    def permute(self, order: tuple[int, int]) -> View:
        assert order == (1, 0)
        return self._replace(transposed=not self.transposed)

    def seen_as(self, dtype: Any, shape: list[int], layout: Any) -> View:
        assert math.prod(shape) * dtype.primitive_bitwidth == math.prod(self.shape) * 8 * self.size
        return self._replace(dtype=dtype, shape=tuple(int(extent) for extent in shape), layout=layout)

    @property
    def at(self) -> np.ndarray:
        """Where the elements of a matrix lie; a batch in front has the extent 1."""
        *front, rows, columns = self.shape
        assert set(front) <= {1}
        return places((rows, columns), self.layout.swizzle_byte_width, self.size, self.start)

    def load(self, _: object = None) -> np.ndarray:
        found = self.memory.bytes[self.at]
        return found.T if self.transposed else found


class TensorMap:
    """A tensor map of what an operand has; outside of it there is 0."""

    def __init__(self, made: Any, operand: np.ndarray, size: int, layout: Any) -> None:
        assert list(operand.shape) == list(made.shape)
        self.operand, self.dtype, self.layout, self.shape = operand, DTYPES[size], layout, list(made.box)

    @property
    def block_type(self) -> TensorMap:
        return self

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.primitive_bitwidth // 8

    def box(self, at: list[int]) -> np.ndarray:
        assert all(0 <= first < 2**31 for first in at)
        inside = tuple(slice(first, first + extent) for first, extent in zip(at, self.shape, strict=True))
        found = self.operand[inside]
        missing = [(0, extent - there) for extent, there in zip(self.shape, found.shape, strict=True)]
        return np.pad(found, missing)[(0,) * (found.ndim - 2)]


class Barriers(NamedTuple):
    """The bytes that a barrier still expects, by stage."""

    left: dict[int, int]

    def index(self, at: int) -> tuple[dict[int, int], int]:
        return self.left, at


class Products(list[tuple[np.ndarray, np.ndarray]]):
    """An accumulator: of each K step what is multiplied."""

    def __add__(self, other: Any) -> Products:
        return Products([*self, *other])


class Anything:
    """Stands for layouts, types and the like, of which nothing is asked."""

    def __getattr__(self, _: str) -> Anything:
        return self

    def __call__(self, *_: object, **__: object) -> Anything:
        return self


class Gluon:
    """``gl`` of a CTA; what it does not stand in for is Gluon's own."""

    def __init__(self, cta: Cta) -> None:
        self.program_id = lambda _: cta.rank
        self.num_programs = lambda _: cta.ctas
        self.static_range = range
        self.zeros = lambda *_: Products()
        self.allocate_shared_memory = cta.memory.allocate
        self.warp_specialize = cta.warp_specialize

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)


class Cta:
    """One CTA of a worker, and its loops; `couple` tells it of its cluster's."""

    def __init__(
        self, arguments: Any, x: np.ndarray, y: np.ndarray, sizes: tuple[int, int], rank: int, edits: tuple[Edit, ...]
    ) -> None:
        self.config, self.rank, self.ctas = arguments.config, rank, arguments.plan.ctas
        self.memory, self.cluster, self.to_all, self.made = Memory(), [self], False, 0
        x_map = TensorMap(arguments.x, x, sizes[0], described(arguments.x, sizes[0]))
        y_maps = [TensorMap(one, y, sizes[1], described(one, sizes[1])) for one in arguments.y if one is not None]
        self.names: dict[str, Any] = structs_of(structs, load_text) | {
            "range": range, "len": len, "gl": Gluon(self), "step": ring.step, "before": ring.before,
            "ITEMS": gemm_text.ITEMS.value, "start_of": epilogue_text.start_of.fn, "fragment": Anything(),
            "mma_layout": Anything(), "make_barriers": self.make_barriers, "make_slots": Anything(),
            "announce_barriers": Anything(), "do": self.do, "tma_load": self.tma_load,
            "reinterpret": View.seen_as, "_in_boxes": compat_text._in_boxes.fn,
            "warpgroup_mma": self.mma, "warpgroup_mma_wait": lambda _, found: found if len(found) > 1 else found[0],
            "mbarrier": self,
        }  # fmt: skip
        bind(self.names, jitted_of(*MODULES), edits)
        gemm = self.names["gemm"]
        code = gemm.__code__
        given: dict[str, Any] = dict.fromkeys(code.co_varnames[: code.co_argcount], 0)
        given |= {"x_map": x_map, "C": self.config, "x_batched": arguments._batched[0]}
        given |= {"y_batched": arguments._batched[1], "out_map": Outputs(self.config)}
        gemm(**given | dict(zip(("y_map", "y_map_1", "y_map_2"), y_maps, strict=False)))

    def warp_specialize(self, loops: Any, *_: object) -> None:
        count = self.config.LOOPS
        self.math_loops, (_, (self.loads, self.ring, *_)) = loops[:count], loops[count]

    def make_barriers(self, count: int, _: int) -> Barriers:
        return Barriers(dict.fromkeys(range(count), 0))

    def wait(self, bar: tuple[dict[int, int], int], _: int) -> None:
        left, stage = bar
        assert left[stage] == 0, "what is expected is what comes"

    def expect(self, bar: tuple[dict[int, int], int], nbytes: int) -> None:
        bar[0][bar[1]] += nbytes

    def arrive(self, bar: object, count: int = 1) -> None:
        pass

    def do(self, text: str) -> None:
        if "multicast" in text:
            self.to_all = "begins" in text

    def tma_load(self, tensor_map: TensorMap, at: list[int], bar: tuple[dict[int, int], int], buffer: View) -> None:
        assert buffer.memory is self.memory
        assert buffer.shape == tuple(tensor_map.shape)
        assert buffer.layout.swizzle_byte_width == tensor_map.layout.swizzle_byte_width
        box = tensor_map.box([int(first) for first in at])
        for cta in self.cluster if self.to_all else [self]:
            cta.memory.bytes[buffer.at] = box
            cta.ring.full.left[bar[1]] -= tensor_map.nbytes

    def mma(self, x: Any, y: View, acc: Products, is_async: bool, use_acc: bool = True) -> Products:
        assert is_async
        product = Products([(x.load() if isinstance(x, View) else x, y.load())])
        return acc + product if use_acc else product

    def load(self, item: Item) -> None:
        source = self.names["locate"](self.loads, item, self.config)
        self.names["load_steps"](
            item.k_begin, item.k_end, source, self.loads, self.ring, Place(0, 0), self.config
        )  # fmt: skip

    def multiply(self, who: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """What a consumer has multiplied: ``[rows, K]`` and ``[K, columns]``."""
        _, (_, whole, _, order, *_) = self.math_loops[who]
        accs, _ = self.names["product"](whole, order, Place(0, 0), steps, who, self.config)
        assert {len(acc) for acc in accs} == {steps}
        rows, *others = (np.concatenate([x for x, _ in acc], 1) for acc in accs)
        assert all(np.array_equal(rows, x) for x in others), "each part has the same rows"
        return rows, np.concatenate([np.concatenate([y for _, y in acc]) for acc in accs], 1)


class Outputs:
    """The map of the output, of which C buffers are made; nothing is stored."""

    dtype = BF16

    def __init__(self, config: Any) -> None:
        self.shape = [config.HALF_ROWS, config.STRIP]

    @property
    def block_type(self) -> Outputs:
        return self


def described(made: Any, size: int) -> Any:
    """A map's layout in shared memory: as `tilestream.launch.hopper.maps.described_by` has it."""
    rows = math.prod(made.box[:-1])
    return gl.NVMMASharedLayout.get_default_for([rows, made.box[-1]], DTYPES[size])


def multiplied(
    arguments: Any, x: np.ndarray, y: np.ndarray, sizes: tuple[int, int], item: Item, edits: tuple[Edit, ...] = ()
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """An item's rows of x, of all consumers of all CTAs, and the columns of y that each of them has.

    ``x``, ``y``: the operands, as their tensor maps' dimensions are. ``sizes``: bytes of an element.
    """
    ctas = [Cta(arguments, x, y, sizes, rank, edits) for rank in range(arguments.plan.ctas)]
    for cta in ctas:
        cta.cluster = ctas
    for cta in ctas:
        cta.load(item)
    steps = item.k_end - item.k_begin
    assert 0 < steps <= arguments.plan.stages
    assert not any(left for cta in ctas for left in cta.ring.full.left.values()), "each barrier counts what comes"
    rows, columns = zip(*[cta.multiply(who, steps) for cta in ctas for who in range(cta.config.HALVES)], strict=True)
    return np.concatenate(rows), list(columns)
