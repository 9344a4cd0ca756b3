"""Equal mixtures of experts that kernels push, each issued by one native call, on a fake GPU."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import AttentionLaunch, Grouped, kernel, on_fake_gpu, remember, tried
from test_native_program import LAUNCH
from test_native_repeats import BF16, RECORD, WAIT_EVENT, Asked, zeros

from fake_cuda import DEVICE, fake_cuda
from tilestream.core.protocols import experts as text
from tilestream.distributed import call_queue, graph_experts, moe_experts, moe_repeats
from tilestream.distributed.graph_experts import GraphExperts
from tilestream.distributed.moe_experts import Experts
from tilestream.distributed.moe_repeats import MixtureRepeat, PlainMixture
from tilestream.launch import native_program
from tilestream.launch.launcher import VARIES, Launcher
from tilestream.launch.layout import Layout
from tilestream.launch.native_program import ProgramError
from tilestream.launch.observe import observation
from tilestream.launch.portable import experts, rank_calls
from tilestream.ops.limit import worker_limit
from tilestream.runtime import sequence

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from fake_graph_ranks import Memory, RankMemory
from fake_ranks import GroupState, patch_driver

WORLD, EXPERTS, TOKENS, TOP_K, WIDTH, HIDDEN = 2, 3, 4, 2, 64, 32
LAYOUT = Layout(WORLD, EXPERTS, TOKENS * TOP_K, WIDTH, 2)
#: The kernels around products, in the order of their launches in a call of two ranks without a second product.
NAMES = [
    "begin_call",
    "push_rows",
    "take_rows",
    "push_results",
    "take_rows",
    "push_results",
    "take_results",
    "end_call",
]


class Mixtures:
    """Mixtures of rank 0 of two in the usual way, whose products are native from the second time on."""

    def __init__(self, state: Any, extension: Any, driver: Any, halves: bool) -> None:
        self.state, self.extension, self.driver, self.halves = state, extension, driver, halves
        self.launches: dict[object, AttentionLaunch] = {}
        self.launchers: dict[str, Launcher] = {}
        self.issued: list[tuple[str, int]] = []
        self.names: dict[int, str] = {}
        self.queue = GraphExperts(state, DEVICE, RankMemory(Memory(WORLD), 0))
        self.queue.reserve(LAYOUT.size, text.signals(WORLD, EXPERTS))

    def launch_keyed(
        self, function: Any, grid: Any, before: tuple[Any, ...], numbers: tuple[int, ...], behind: Any, **_: Any
    ) -> None:  # fmt: skip
        """As `tilestream.launch.portable.add.launch_keyed`, of a stand-in whose parameters have the kernel's names."""
        names = function.arg_names[: len(before) + len(numbers)]
        types = ["*bf16" if isinstance(x, torch.Tensor) else "i32" for x in before] + ["i32"] * len(numbers)
        name = function.__name__
        if name not in self.launchers:
            made = kernel(self.driver, dict(zip(names, types, strict=True)), {}, [])
            self.names[made.function] = name
            self.launchers[name] = Launcher(made, grid, [VARIES] * len(names))
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else int(x) % 2**31 for x in (*before, *numbers)]
        self.issued.append((name, torch.cuda.current_stream().cuda_stream))
        self.launchers[name](self.issued[-1][1], *values)
        if (seen := observation()) is not None:
            assert seen.issued[-1] == (self.launchers[name], tuple(values))

    def grouped_mm(self, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, activation: Any = None) -> torch.Tensor:
        """A product; of two halves the first one's, which is as wide as the result, and begins where they do."""
        x = Grouped(a, b[..., : b.shape[2] // 2] if activation == "swiglu" else b, ends)
        out = tried(self.extension, x)[0] if self.launches else None
        if out is None:
            launch = self.launches.setdefault((a.shape, b.shape), AttentionLaunch(self.driver, x))
            assert remember(self.extension, launch, x)
            out = x.results[0]
        return out

    def given(self) -> tuple[torch.Tensor, ...]:
        """New operands: tokens, weights, choices, and the experts'."""
        both = zeros(EXPERTS, 2 * HIDDEN, WIDTH)
        w1, w3 = both.chunk(2, 1) if self.halves else (zeros(EXPERTS, HIDDEN, WIDTH), zeros(EXPERTS, HIDDEN, WIDTH))
        choices = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % (WORLD * EXPERTS)
        return zeros(TOKENS, WIDTH), torch.ones(TOKENS, TOP_K), choices, w1, zeros(EXPERTS, WIDTH, HIDDEN), w3

    def check(self, asked: Asked, out: torch.Tensor) -> None:
        """Each launch reads what another has written: hidden rows, results of both sources, and the sum."""
        functions = [one[2] for one in asked.operations if one[0] == LAUNCH]
        by_name = [
            (self.names.get(number, "product"), launch)
            for number, launch in zip(functions, asked.launches, strict=True)
        ]
        products = [addresses_of(launch, 4) for name, launch in by_name if name == "product"]
        pushed = [addresses_of(launch, 5, 2)[0] for name, launch in by_name if name == "push_results"]
        multiplied = [addresses_of(launch, 3)[:2] for name, launch in by_name if name == "multiply_rows"]
        each = 2 if self.halves else 3
        for source in range(WORLD):
            *hidden, down = products[each * source : each * source + each]
            assert down[0] == hidden[0][3]
            assert down[3] == pushed[source]
            if not self.halves:
                assert multiplied[source] == (hidden[0][3], hidden[1][3])
        assert len(set(pushed)) == WORLD, "the other stream reads one while the next is made"
        (added,) = [launch for name, launch in by_name if name == "add_results"]
        assert addresses_of(added, 6, 1)[5] == out.data_ptr()

    def plain(self, given: tuple[torch.Tensor, ...]) -> PlainMixture:
        return PlainMixture(self.state, ("key",), *given)

    def usual(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, weights, choices, w1, w2, w3 = given
        plan: Any = SimpleNamespace(layout=LAYOUT, pushers=24, number=7, handshake=b"", counted=True)
        return graph_experts.mix(
            self.state, plan, x, weights, choices, Experts(w1, w2, w3, "silu"), 7.0, self.plain(given)
        )


@pytest.fixture
def cuda(extension, libraries, monkeypatch):
    """A fake GPU; sequences and programs are native, over the fake driver."""
    found = ctypes.CDLL(str(libraries[0]))
    with fake_cuda() as made:
        made.clock = patch_driver(made, monkeypatch)
        for module in (sequence, native_program):
            monkeypatch.setattr(module, "library", lambda: found)
        monkeypatch.setattr(native_program, "error_name", str)
        monkeypatch.setattr(call_queue.Watchdog, "wake", lambda self: None)
        on_fake_gpu(monkeypatch, extension)
        yield made


@pytest.fixture(params=[True, False], ids=["halves", "apart"])
def mixtures(request, extension, driver, cuda, monkeypatch):
    state = GroupState(0, WORLD)
    state.lock, state.timeout = threading.Lock(), lambda kind: 7.0
    made = Mixtures(state, extension, driver, request.param)
    for module in (experts, rank_calls):
        monkeypatch.setattr(module, "launch_keyed", made.launch_keyed)
    monkeypatch.setattr(moe_experts, "grouped_mm", made.grouped_mm)
    monkeypatch.setattr(GraphExperts, "of", lambda *_: made.queue)
    monkeypatch.setattr(graph_experts, "cuda_properties", lambda index: SimpleNamespace(workers=132))
    monkeypatch.setattr(graph_experts.graph_calls, "note_prepared", lambda state, plan: None)
    return made


def stream_of(launch: bytes) -> int:
    """The stream in a launch's configuration, behind seven numbers."""
    return int.from_bytes(launch[28:36], "little")


def addresses_of(launch: bytes, count: int, numbers: int = 0) -> tuple[int, ...]:
    """Its first ``count`` parameters of 8 bytes, before ``numbers`` of 4 bytes and two addresses of Triton's own."""
    return struct.unpack_from(f"={count}Q", launch, len(launch) - 8 * (count + 2) - 4 * numbers)


def test_a_repeated_mixture_launches_what_the_usual_way_launches(mixtures, driver):
    for _ in range(3):
        mixtures.usual(mixtures.given())
    (repeat,) = mixtures.state.repeats.values()
    assert isinstance(repeat, MixtureRepeat)
    assert repeat._program is not None
    for _ in range(4):
        given = mixtures.given()
        Asked.of(driver)
        mixtures.issued.clear()
        out = mixtures.plain(given).repeated()
        assert out.shape == given[0].shape
        assert not mixtures.issued, "Python launches nothing"
        repeated = Asked.of(driver)
        mixtures.usual(given)
        usual = Asked.of(driver)
        assert len(repeated.launches) == len(usual.launches)
        assert [len(one) for one in repeated.launches] == [len(one) for one in usual.launches]
        # Others are given what each call allocates.
        same = [mine == other for mine, other in zip(repeated.launches, usual.launches, strict=True)]
        assert sum(same) >= 5, "begin, two that take rows, one that takes results, end"
        mixtures.check(repeated, out)
        for one in (given[0], given[1], *given[3:5], *(() if mixtures.halves else given[5:])):
            there = one.data_ptr().to_bytes(8, "little")
            counts = [sum(there in launch for launch in asked.launches) for asked in (repeated, usual)]
            assert counts[0] == counts[1] > 0
        kinds = [one[0] for one in repeated.operations]
        assert (kinds[0], kinds[-1]) == (WAIT_EVENT, RECORD), "behind the last call, and before the next one"
    assert mixtures.state.repeated == 4


def test_rows_and_results_are_pushed_on_the_other_stream(mixtures, driver):
    for _ in range(3):
        mixtures.usual(mixtures.given())
    names = [name for name, _ in mixtures.issued[-(len(NAMES) + (0 if mixtures.halves else 2) + 1) :]]
    assert [name for name in names if name not in ("multiply_rows", "add_results")] == NAMES
    side = mixtures.queue.side.cuda_stream
    pushed = dict(mixtures.issued)
    assert (pushed["push_rows"], pushed["push_results"]) == (side, side)
    assert side not in (pushed["take_rows"], pushed["add_results"])
    Asked.of(driver)
    mixtures.usual(mixtures.given())
    usual = Asked.of(driver).launches
    assert mixtures.plain(mixtures.given()).repeated() is not None
    repeated = Asked.of(driver).launches
    streams = [[stream_of(one) for one in launches] for launches in (repeated, usual)]
    assert streams[0] == streams[1]
    assert streams[0].count(side) == 3


def test_a_group_whose_peer_has_given_up_takes_the_usual_way(mixtures, monkeypatch):
    for _ in range(3):
        mixtures.usual(mixtures.given())
    monkeypatch.setattr(type(mixtures.queue.flags), "aborted", lambda self: True)
    assert mixtures.plain(mixtures.given()).repeated() is None


def test_a_mixture_that_is_issued_in_part_breaks_the_group(mixtures, driver):
    for _ in range(3):
        mixtures.usual(mixtures.given())
    driver.state(launch=719)
    try:
        with pytest.raises(ProgramError, match="719"):
            mixtures.plain(mixtures.given()).repeated()
    finally:
        driver.state()
    assert "719" in mixtures.state.why


def test_a_call_that_raises_while_it_is_learned_raises(mixtures, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise ValueError("product refused")

    monkeypatch.setattr(moe_experts, "grouped_mm", refused)
    with pytest.raises(ValueError, match="product refused"):
        mixtures.usual(mixtures.given())
    assert "product refused" in mixtures.state.why, "peers wait for the rest"


def test_what_only_triton_can_launch_is_not_repeated(mixtures, monkeypatch):
    launch_keyed = mixtures.launch_keyed

    def launched(*given: Any, **options: Any) -> None:
        launch_keyed(*given, **options)
        if (seen := observation()) is not None:
            seen.issued[-1] = None

    for module in (experts, rank_calls):
        monkeypatch.setattr(module, "launch_keyed", launched)
    for _ in range(3):
        assert mixtures.usual(mixtures.given()) is not None
    assert not mixtures.state.why
    assert mixtures.plain(mixtures.given()).repeated() is None


def test_a_repeat_keeps_the_memory_that_its_launches_are_given(mixtures):
    for _ in range(3):
        mixtures.usual(mixtures.given())
    (prepared,) = mixtures.queue._prepared.values()
    taken = weakref.ref(prepared.local.taken)
    del prepared
    mixtures.queue._prepared.clear()
    gc.collect()
    assert taken() is not None
    assert mixtures.plain(mixtures.given()).repeated() is not None


def test_products_that_python_makes_are_not_repeated(mixtures, monkeypatch):
    monkeypatch.setattr(
        moe_experts, "grouped_mm", lambda a, b, ends, activation=None: zeros(
            a.shape[0], b.shape[2] // (2 if activation == "swiglu" else 1)
        ),
    )  # fmt: skip
    for _ in range(3):
        mixtures.usual(mixtures.given())
    assert mixtures.plain(mixtures.given()).repeated() is None


@pytest.fixture
def asked(extension, cuda, monkeypatch):
    """`plain_mixture` of a group of two ranks; what is given replaces what a usual call gives."""
    state = GroupState(0, WORLD)
    state.timeout = lambda kind: 7.0
    monkeypatch.setattr(moe_repeats, "known_state", lambda group: state)
    both = zeros(EXPERTS, 2 * HIDDEN, WIDTH)
    w1, w3 = both.chunk(2, 1)
    usual = {
        "x": zeros(TOKENS, WIDTH), "weights": torch.ones(TOKENS, TOP_K),
        "choices": torch.zeros(TOKENS, TOP_K, dtype=torch.int64), "w1": w1, "w2": zeros(EXPERTS, WIDTH, HIDDEN),
        "w3": w3,
    }  # fmt: skip

    def ask(activation: str = "silu", deadline: object = None, most_tokens: object = TOKENS, **other: torch.Tensor):
        tensors = (usual | other).values()
        options = {"deadline": deadline, "most_tokens": most_tokens}
        return moe_repeats.plain_mixture(*tensors, None, activation, "auto", **options)

    return ask


def test_equal_mixtures_have_one_key(asked):
    first = asked()
    assert first.key == asked(x=zeros(TOKENS, WIDTH)).key == asked(deadline=7.0).key
    apart = zeros(EXPERTS, HIDDEN, WIDTH)
    others = [
        asked(activation="relu"), asked(deadline=8.0), asked(most_tokens=TOKENS + 1), asked(x=zeros(TOKENS - 1, WIDTH)),
        asked(choices=torch.zeros(TOKENS, TOP_K, dtype=torch.int32)), asked(w1=apart),
        asked(w1=apart, w3=apart.clone()),
        asked(w2=zeros(EXPERTS, HIDDEN, WIDTH).mT), asked(weights=torch.ones(TOKENS, TOP_K, dtype=BF16)),
    ]  # fmt: skip
    keys = [first.key, *(one.key for one in others)]
    assert len(set(keys)) == len(keys)
    with worker_limit(8):
        assert asked().key not in keys


def test_other_mixtures_take_the_usual_way(asked, monkeypatch):
    assert asked() is not None
    leaf = zeros(TOKENS, WIDTH).requires_grad_()
    assert asked(x=leaf) is None
    with torch.no_grad():
        assert asked(x=leaf) is not None
    assert asked(x=zeros(WIDTH, TOKENS).T) is None, "rows are copied first"
    assert asked(x=torch.zeros(TOKENS, WIDTH)) is None
    assert asked(x=zeros(TOKENS, WIDTH).to_sparse_csr()) is None
    assert asked(most_tokens=None) is None
    assert asked(most_tokens=True) is None
    for wrong in (-1.0, float("nan"), "soon"):
        assert asked(deadline=wrong) is None
    monkeypatch.setattr(moe_repeats, "open_streams", [object()])
    assert asked() is None
