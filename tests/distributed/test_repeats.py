"""Which calls between ranks may repeat an earlier one, and what a repeat is found by."""

from __future__ import annotations

import contextlib
import datetime
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tilestream as ts
from tilestream.distributed import all_gather_matmul, dispatch, group_state, library, repeats, unfused
from tilestream.distributed.repeats import NO_EXTRAS, Extras, PlainCall, Repeat, plain_call
from tilestream.launch.cache import launch_cache
from tilestream.ops import native
from tilestream.plan.limit import limit as native_limit
from tilestream.runtime import streams

A, B = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.bfloat16)


def numbered(*tensors: torch.Tensor) -> int:
    """As the extension's: one number for one layout."""
    layouts = tuple((x.shape, x.stride(), x.dtype) for x in tensors)
    return hash(layouts) % (1 << 30) + 1


@pytest.fixture
def state(monkeypatch):
    made = SimpleNamespace(
        repeats={}, repeated=0, broken=False, lock=threading.Lock(), world=2, timeout=lambda kind: 600.0,
        backend=lambda kind: "nccl", capture=lambda x: 0,
    )  # fmt: skip
    monkeypatch.setattr(repeats, "known_state", lambda group: made)
    monkeypatch.setattr(native._loaded, "extension", SimpleNamespace(number_layouts=numbered))
    monkeypatch.setattr(native._loaded, "watched", lambda: False, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(streams, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def plain(a=A, b=B, dim=0, deadline=None, *options):
    return plain_call("all_gather_matmul", None, a, b, dim, deadline, *options)


def test_equal_calls_have_one_key(state):
    one, other = plain(A, B, 0, 1.0, "auto", None), plain(torch.ones_like(A), B.clone(), 0, 2, "auto", None)
    assert one.key == other.key
    assert (one.seconds, other.seconds, plain().seconds) == (1.0, 2.0, 600.0)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(6, 4, dtype=torch.bfloat16)}, {"b": torch.zeros(2, 4, dtype=torch.bfloat16).t()},
        {"b": [B]}, {"b": [B, B]}, {"dim": -2}, {"deadline": 1.0}, {"a": A.half(), "b": B.half()},
    ],
    ids=["rows", "strides", "a list", "two products", "dim", "a deadline", "dtype"],
)  # fmt: skip
def test_other_calls_have_other_keys(state, other):
    assert plain(**other).key != plain().key


def test_options_and_the_generation_of_plans_are_in_the_key(state):
    keys = {plain(A, B, 0, None, *options).key for options in (("auto",), ("fused",), ("auto", True), ("auto", None))}
    launch_cache.clear()
    keys.add(plain(A, B, 0, None, "auto").key)
    assert len(keys) == 5


GRADIENT = A.clone().requires_grad_()
BLOCKS = {
    "a trial": lambda: dispatch.trial(True, 1),
    "a mode of functions": lambda: torch.device("cpu"),
    "a profiler": torch.profiler.profile,
    "forward derivatives": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize(
    "given",
    [
        {"a": A.float()}, {"a": torch.zeros(8, 4, dtype=torch.float64)}, {"a": [1]}, {"b": []}, {"b": [B] * 5},
        {"b": [B, None]}, {"dim": True}, {"dim": 0.0}, {"deadline": "1"}, {"deadline": -1.0},
        {"deadline": float("inf")}, {"a": GRADIENT}, {"b": GRADIENT},
    ],
    ids=str,
)  # fmt: skip
def test_what_takes_the_usual_way(state, given):
    assert plain(**given) is None


def test_an_option_of_another_type_is_another_call(state):
    assert plain(A, B, 0, None, True) is not None
    assert plain(A, B, 0, None, 1) is None, "it equals True, and the usual way says what is wrong with it"
    assert plain(A, B, 0, None, [1]) is None


def test_without_gradients_a_parameter_may_repeat(state):
    with torch.no_grad():
        assert plain(GRADIENT, B) is not None


def test_the_exit_waits_for_a_thread_that_asks_for_a_number(state, monkeypatch):
    asked, goes_on = threading.Event(), threading.Event()

    def number(*tensors: torch.Tensor) -> int:
        asked.set()
        goes_on.wait()
        return 0

    monkeypatch.setattr(native._loaded, "extension", SimpleNamespace(number_layouts=number))
    thread = threading.Thread(target=plain, daemon=True)
    thread.start()
    asked.wait()
    is_seen = native._is_called_elsewhere()
    goes_on.set()
    thread.join()
    assert is_seen, "it may be inside the extension"
    assert not native._is_called_elsewhere()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_has_to_see_the_call_takes_the_usual_way(state, name):
    with BLOCKS[name]():
        assert plain() is None
    assert plain() is not None


def test_another_limit_of_workers_or_a_promise_is_another_call(state):
    keys = [plain().key]
    for block in (ts.worker_limit(3), ts.worker_limit(4), ts.invariant()):
        with block:
            keys.append(plain().key)
    assert len(set(keys)) == 4


def test_a_profiler_and_a_blocking_launch_take_the_usual_way(state, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "_blocks", True)
        assert plain() is None
    with monkeypatch.context() as patch:
        patch.setattr(native._loaded, "watched", lambda: True)
        assert plain() is None
    with monkeypatch.context() as patch:
        patch.setattr(native._loaded, "extension", None)
        assert plain() is None
    with monkeypatch.context() as patch:
        patch.setattr(native._loaded, "extension", SimpleNamespace(number_layouts=lambda *_: 0))
        assert plain() is None, "torch's dispatcher has to see it"
    assert plain() is not None


class Known(Repeat):
    """Its calls give the sum of A, in a list."""

    def issue(self, call):
        return [call.a.sum()]


def test_a_repeat_serves_calls_with_its_key(state, monkeypatch):
    call = plain()
    assert call.repeated() is None
    made = Known.of(call, torch.device("cpu"))
    assert Known.of(call, torch.device("cpu")) is made
    assert call.repeated() == [0]
    assert plain(dim=1).repeated() is None
    assert state.repeated == 1
    state.broken = True
    assert call.repeated() is None, "the usual way raises"
    state.broken = False
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert call.repeated() is None
    with monkeypatch.context() as patch:
        patch.setattr(streams, "current_device", lambda: 1)
        assert call.repeated() is None
    assert call.repeated() == [0]
    assert state.repeated == 2


def test_a_public_gather_with_all_rows_is_another_call(state):
    made = []

    class Rows(Repeat):
        def issue(self, call):
            made.append(call)
            return call.a, [call.a.sum()]

    for return_a in (False, True):
        options = None, True, "auto", return_a
        Rows.of(plain(A, B, 0, None, *options), torch.device("cpu"))
    first, second = (all_gather_matmul(A, B, return_a=return_a) for return_a in (False, True))
    assert first == 0
    assert second[0] is A
    assert second[1] == 0
    one, other = made
    assert one.key != other.key


GATHERED = ([B], 0, "group", [A.new_empty(0)], ["none"], None, [None], None, True, False, "auto", -1.0, 0)
SUMMED = ("sum", "group", None, None, None, None, True, "auto", -1.0, 0)
#: Of a registered op: its kernel, and its arguments behind A.
REGISTERED = {
    op: (library._repeating(op, kernel), given)
    for op, kernel, given in (
        ("all_gather_matmul", library._all_gather_matmul, GATHERED),
        ("matmul_reduce_scatter", library._matmul_reduce_scatter, (B, 0, *SUMMED)),
        ("matmul_all_reduce", library._matmul_all_reduce, (B, *SUMMED)),
    )
}


@pytest.fixture
def usual(state, monkeypatch):
    """The calls of registered ops that take the usual way: each's request, and what may repeat it."""
    found, state.group = [], "group"
    monkeypatch.setattr(library, "states_of", lambda op, name: [state])
    monkeypatch.setattr(library, "group_of", lambda name: name)

    def run(states, request, *, plain=None):
        found.append((request, plain))
        return (A.new_empty(0), [A]) if request.op == "all_gather_matmul" else A

    for module in (library.all_gather, library.reduce_scatter, library.all_reduce):
        monkeypatch.setattr(module, "run", run)
    return found


class KnownGather(Repeat):
    """Its calls give A where all rows are asked for, and the sum of A."""

    def issue(self, call):
        return call.a if call.key[-1] else None, [call.a.sum()]


@pytest.mark.parametrize(("op", "return_a"), [*((op, False) for op in REGISTERED), ("all_gather_matmul", True)])
def test_a_registered_op_repeats_as_a_plain_call_does(state, usual, op, return_a):
    """A compiled graph calls it again and again."""
    run, given = REGISTERED[op]
    if return_a:
        given = (*given[:9], True, *given[10:])
    run(A, *given)
    ((request, plain),) = usual
    assert (request.op, plain.key[0], plain.dim) == (op, op, 0)
    (KnownGather if op == "all_gather_matmul" else Known).of(plain, torch.device("cpu"))
    made = run(A, *given)
    if op == "all_gather_matmul":
        gathered, made = made
        assert gathered.equal(A if return_a else A.new_empty(0))
    assert made == [0]
    assert (len(usual), state.repeated) == (1, 1)
    with ts.worker_limit(3):
        limit = native_limit()
    run(A, *given[:-1], limit)
    assert len(usual) == 2, "another limit is another call"


@pytest.mark.parametrize(
    ("op", "at", "value"),
    [
        ("all_gather_matmul", 3, [B]), ("all_gather_matmul", 4, ["relu"]), ("all_gather_matmul", 5, B),
        ("all_gather_matmul", 6, [B]), ("matmul_reduce_scatter", 4, B), ("matmul_reduce_scatter", 5, B),
        ("matmul_reduce_scatter", 6, B), ("matmul_all_reduce", 3, B), ("matmul_all_reduce", 4, B),
    ],
)  # fmt: skip
def test_registered_calls_with_a_bias_an_activation_or_a_scale_are_other_calls(state, usual, op, at, value):
    run, given = REGISTERED[op]
    changed = list(given)
    changed[at] = value
    for arguments in (given, changed, changed):
        run(A, *arguments)
    (_, one), (request, other), (_, again) = usual
    assert one.key != other.key == again.key
    assert one.extras is NO_EXTRAS
    assert [*other.extras.tensors, *filter(None, other.extras.activations)] == (value if type(value) is list else [B])
    assert other.extras.scale_a is request.scale_a


class KnownSum(Repeat):
    """Its calls give a sum of A."""

    def issue(self, call):
        return call.a.sum(1)


@pytest.mark.parametrize("op", REGISTERED)
def test_a_registered_op_repeats_above_torchs_gradients(state, usual, monkeypatch, op):
    """Whose Python costs more than a repeat. A call that needs gradients goes there, and is repeated below."""
    # Dense, on CUDA: the kernels of GPUs, for these tensors of the CPU.
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in ("AutogradCUDA", "CUDA")]
    run, given = getattr(torch.ops.tilestream, op).default, REGISTERED[op][1]
    run.redispatch(keys[0] | keys[1], A, *given)
    ((request, _),) = usual
    assert request.op == op
    call, asked = library._of_op(op, A, *given), []
    (KnownGather if op == "all_gather_matmul" else KnownSum).of(call, torch.device("cpu"))
    repeated = library._repeated
    monkeypatch.setattr(library, "_repeated", lambda *of_call: asked.append(op) or repeated(*of_call))
    with torch.enable_grad():
        made = run.redispatch(keys[0] | keys[1], A, *given)
        assert (len(usual), state.repeated, len(asked)) == (1, 1, 1)
        assert (made[1][0] if op == "all_gather_matmul" else made).eq(0).all()
        made = run.redispatch(keys[0] | keys[1], A.clone().requires_grad_(), *given)
    assert (len(usual), state.repeated, len(asked)) == (1, 2, 3)
    assert (made[1][0] if op == "all_gather_matmul" else made).grad_fn is not None


@pytest.mark.parametrize("op", REGISTERED)
def test_tensors_of_gpus_without_data_are_traced(usual, op):
    """As by torch's compiler."""
    with torch._subclasses.FakeTensorMode():
        a, b = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (A, B))
        given = [[b] if x is GATHERED[0] else b if x is B else x for x in REGISTERED[op][1]]
        given = [[a.new_empty(0)] if x is GATHERED[3] else x for x in given]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "world_of", lambda name: 2)
            made = getattr(torch.ops.tilestream, op)(a, *given)
    out = made[1][0] if op == "all_gather_matmul" else made
    assert out.shape == {"all_gather_matmul": (16, 2), "matmul_reduce_scatter": (4, 2), "matmul_all_reduce": (8, 2)}[op]
    assert not usual


def test_a_registered_call_without_a_product_takes_the_usual_way(state, usual):
    run, given = REGISTERED["all_gather_matmul"]
    changed = list(given)
    changed[0] = changed[3] = changed[4] = changed[6] = []
    run(A, *changed)
    assert usual[0][1] is None


def test_a_repeat_that_another_thread_has_dropped_issues_nothing(state):
    call, asked = plain(), []

    class Asked(Known):
        def issue(self, call):
            asked.append(call)
            return 0

    Asked.of(call, torch.device("cpu"))
    with state.lock:
        thread = threading.Thread(target=call.repeated)
        state.repeats = Dropping(state.repeats, thread)
        thread.start()
        state.repeats.found.wait()  # the thread has the repeat, and waits for the lock
        state.repeats.clear()
    thread.join()
    assert not asked


class Dropping(dict):
    """Says that a thread has found a repeat."""

    def __init__(self, repeats, thread):
        super().__init__(repeats)
        self.found, self._thread = threading.Event(), thread

    def get(self, key):
        found = super().get(key)
        if threading.current_thread() is self._thread:
            self.found.set()
        return found


def test_repeats_are_bounded(state, monkeypatch):
    monkeypatch.setattr(repeats, "_MOST_REPEATS", 3)
    for i in range(8):
        Known.of(PlainCall(state, (i,), A, (B,), 0, None), torch.device("cpu"))
        assert 1 <= len(state.repeats) <= 3


class Collectives:
    """A group that says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, torch.Tensor, torch.Tensor | None]] = []

    def _allgather_base(self, into, shard, options):
        assert not options.asyncOp
        self.asked.append(("gather", into, shard))
        into.copy_(torch.cat([shard, 2 * shard]))

    def _reduce_scatter_base(self, out, whole, options):
        self.asked.append(("scatter", out, whole))
        out.copy_(whole[: len(out)])

    def allreduce(self, tensors, options):
        self.asked.append(("reduce", tensors[0], None))
        tensors[0].mul_(2)


@pytest.fixture
def group(state, monkeypatch):
    state.group = Collectives()
    monkeypatch.setattr(native, "product", lambda op, a, b, **how: a @ b)
    return state.group


def test_unfused_calls_are_a_collective_and_products(state, group):
    a, b = torch.randn(8, 4, dtype=torch.bfloat16), torch.randn(4, 2, dtype=torch.bfloat16)
    whole = torch.cat([a, 2 * a])
    call, device = plain(a, [b, b[:, :1]]), torch.device("cpu")
    for return_a in (False, True):
        state.repeats.clear()
        unfused.UnfusedGather.of(call, device, None, True, return_a)
        gathered, outs = call.repeated()
        for out, right in zip(outs, (b, b[:, :1]), strict=True):
            torch.testing.assert_close(out, whole @ right)
        assert gathered.equal(whole) if return_a else gathered is None
    state.repeats.clear()
    call = plain(a, b)
    unfused.UnfusedSum.of(call, device, None, True)
    torch.testing.assert_close(call.repeated(), (a @ b)[:4])
    state.repeats.clear()
    for by_torch in (False, True):
        state.repeats.clear()
        unfused.UnfusedAllReduce.of(call, device, None, True, by_torch)
        torch.testing.assert_close(call.repeated(), 2 * (a @ b))
    assert [one[0] for one in group.asked] == ["gather", "gather", "scatter", "reduce", "reduce"]


@pytest.mark.parametrize(
    ("out_dtype", "fast_accum", "options"),
    [
        (None, True, set()), (torch.bfloat16, True, set()),
        (torch.float32, True, {"out_dtype", "fast_accum", "activation", "bias", "scale_a", "scale_b"}),
        (None, False, {"out_dtype", "fast_accum", "activation", "bias", "scale_a", "scale_b"}),
    ],
)  # fmt: skip
def test_an_unfused_product_with_the_default_options_names_none(
    state, group, monkeypatch, out_dtype, fast_accum, options
):
    """A first call, without a native launch, names as few: it has the key by which the next one is found."""
    asked = []
    monkeypatch.setattr(native, "product", lambda op, a, b, **how: asked.append(how))
    monkeypatch.setattr(unfused, "multiply", lambda request: asked.append(request) or A @ B)
    call = plain(A, B)
    unfused.UnfusedAllReduce.of(call, torch.device("cpu"), out_dtype, fast_accum)
    assert call.repeated() is not None
    how, request = asked
    assert set(how) == options
    assert request.out_dtype == (torch.float32 if out_dtype is torch.float32 else None)
    assert request.fast_accum == fast_accum


def test_unfused_calls_have_their_biases_activations_and_scales(state, group, monkeypatch):
    def product(op, a, b, *, bias, activation, scale_a, scale_b, **how):
        out = (a.float() @ b.float()) * (1 if scale_a is None else scale_a) * (1 if scale_b is None else scale_b)
        out = out if bias is None else out + bias
        return (out.relu() if activation == "relu" else out).to(torch.bfloat16)

    monkeypatch.setattr(native, "product", product)
    monkeypatch.setattr(group, "_allgather_base", lambda into, x, options: (into.copy_(torch.cat([x, x])), None)[1])
    a, b = torch.randn(8, 4, dtype=torch.bfloat16), torch.randn(4, 2, dtype=torch.bfloat16)
    bias, scale_b, device = torch.randn(2), torch.randn(2).abs(), torch.device("cpu")
    exact, rows = a.float() @ b.float() * scale_b, torch.randn(8).abs()
    for scale in (rows, rows[:1].view(())):
        of_rows = scale.view(-1, 1)
        state.repeats.clear()
        extras = Extras((bias, None), ("relu", None), scale, (scale_b, None))
        call = plain(a, [b, b[:, :1]])._replace(extras=extras)
        unfused.UnfusedGather.of(call, device, None, True)
        _, (first, second) = call.repeated()
        right = (exact * of_rows + bias).relu()
        torch.testing.assert_close(first.float(), torch.cat([right, right]), rtol=2e-2, atol=1e-2)
        right = a.float() @ b[:, :1].float() * of_rows
        torch.testing.assert_close(second.float(), torch.cat([right, right]), rtol=2e-2, atol=1e-2)
    extras = Extras((bias,), (None,), rows, (scale_b,))
    for kind, right in (
        (unfused.UnfusedSum, (exact * rows.view(-1, 1))[:4] + bias),
        (unfused.UnfusedAllReduce, 2 * exact * rows.view(-1, 1) + bias),
    ):
        state.repeats.clear()
        call = plain(a, b)._replace(extras=extras._replace(scale_a=rows.view(-1, 1)))
        kind.of(call, device, None, True)
        torch.testing.assert_close(call.repeated().float(), right, rtol=2e-2, atol=2e-2)


def test_shards_of_8_bits_are_gathered_as_bytes(state, monkeypatch):
    """Not all of NCCL's versions know these dtypes."""
    seen = []
    state.group = SimpleNamespace(_allgather_base=lambda into, x, options: seen.extend((into.dtype, x.dtype)))
    monkeypatch.setattr(native, "product", lambda op, a, b, **how: a)
    call = plain(A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn))
    unfused.UnfusedGather.of(call, torch.device("cpu"), None, True)
    _, (out,) = call.repeated()
    assert (out.shape, out.dtype) == ((16, 4), torch.float8_e4m3fn)
    assert seen == [torch.uint8] * 2


EXTRAS = {"bias": B[0], "activation": "relu", "scale_a": torch.ones(8, 1), "scale_b": torch.ones(1, 2)}


def given(**extras):
    named = tuple(extras.get(name) for name in EXTRAS)
    return plain_call("all_gather_matmul", None, A, B, 0, None, "auto", extras=named)


def test_what_a_call_has_beside_its_operands_is_in_its_key(state):
    calls = [plain(A, B, 0, None, "auto"), *(given(**{name: EXTRAS[name]}) for name in EXTRAS)]
    calls += [given(**EXTRAS), given(bias=B[0].float()), given(bias=B[0], activation="gelu"), given(scale_a=B[0])]
    assert len({call.key for call in calls}) == len(calls)
    again = given(**{name: x if type(x) is str else x.clone() for name, x in EXTRAS.items()})
    assert again.key == given(**EXTRAS).key
    assert given(activation="none").key == given().key
    assert again.extras.scale_a.equal(EXTRAS["scale_a"])


def test_extras_of_many_products_are_numbered_in_parts(state, monkeypatch):
    asked = []

    def number(*tensors):
        assert 2 <= len(tensors) <= 5
        asked.append(len(tensors))
        return numbered(*tensors)

    monkeypatch.setattr(native._loaded, "extension", SimpleNamespace(number_layouts=number))
    bs, row = [B] * 4, B[0]
    call = plain_call(
        "all_gather_matmul", None, A, bs, 0, None, extras=([row] * 4, None, A[:, :1], [row, None, row, None])
    )
    assert asked == [5, 5, 2]
    other = plain_call(
        "all_gather_matmul", None, A, bs, 0, None, extras=([row] * 4, None, A[:, :1], [row, row, None, None])
    )
    assert call.key != other.key, "another product has the scale"
    monkeypatch.setattr(native._loaded, "extension", SimpleNamespace(number_layouts=lambda *x: int(len(x) != 2)))
    assert plain_call("all_gather_matmul", None, A, [B, B], 0, None, extras=(None, None, A, None)) is None


@pytest.mark.parametrize(
    "extras",
    [
        {"bias": [1]}, {"bias": [B[0], B[0]]}, {"bias": 1.0}, {"activation": ["relu", "relu"]}, {"activation": 1},
        {"scale_a": 0.5}, {"bias": B[0].clone().requires_grad_()}, {"scale_a": GRADIENT}, {"scale_b": {"a": B}},
    ],
    ids=str,
)  # fmt: skip
def test_extras_that_take_the_usual_way(state, extras):
    assert given(**extras) is None


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True), ({"transport": "symmetric memory"}, False), ({"a": A.t()}, False), ({"a": A.view(2, 4, 4)}, False),
        ({"dim": 1}, False), ({"a": A[:0]}, False), ({"b": B[:, :0]}, False), ({"world": 1}, False),
        ({"backend": "gloo"}, False), ({"capture": 1}, False),
    ],
    ids=str,
)  # fmt: skip
def test_which_unfused_calls_can_be_repeated(state, change, may):
    with contextlib.suppress(KeyError):
        state.world = change["world"]
    state.backend = lambda kind: change.get("backend", "nccl")
    state.capture = lambda x: change.get("capture", 0)
    call = PlainCall(state, (), change.get("a", A), (change.get("b", B),), change.get("dim", 0), None)
    assert unfused.can_repeat(SimpleNamespace(transport=change.get("transport", "collective")), call) == may


@pytest.fixture
def one_rank():
    """A real group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_is_known_once_it_has_a_state(one_rank):
    assert group_state.known_state(None) is group_state.known_state(one_rank) is None
    made = group_state.state_of("op", None)
    assert group_state.known_state(None) is group_state.known_state(one_rank) is made
    assert group_state.known_state("group") is None
    dist.destroy_process_group()
    try:
        assert group_state.known_state(None) is group_state.known_state(one_rank) is None, "the usual way raises"
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_default_deadline_is_the_groups_present_timeout(one_rank):
    made = group_state.state_of("op", None)
    for seconds in (100.0, 250.0):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), one_rank)
        assert made.timeout("cpu") == seconds


@pytest.mark.parametrize("shape", [(8, 32), (2, 3, 5), (0, 4), (1, 1, 7), [4, 6]])
@pytest.mark.parametrize("has_function", [True, False])
def test_fresh_results_are_those_of_torch(monkeypatch, shape, has_function):
    if not has_function:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    make, like = repeats.fresh(torch.device("cpu"), shape, torch.float16), torch.empty(shape, dtype=torch.float16)
    first, second = make(), make()
    assert (first.shape, first.stride(), first.dtype) == (like.shape, like.stride(), like.dtype)
    assert first.data_ptr() != second.data_ptr() or not first.numel()
    assert not first.is_inference()
    with torch.inference_mode():
        assert make().is_inference()
