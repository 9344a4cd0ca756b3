"""Calls that the extension launches: found by key, filled in, refused; the driver records, and launches nothing."""

from __future__ import annotations

import gc
import os
import random
import resource
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from stand_ins import (
    CPU_INDEX,
    TICKETS,
    Attention,
    AttentionLaunch,
    Grouped,
    Launch,
    Matmul,
    Merge,
    attention_call,
    call,
    grouped_call,
    merge_call,
    observed,
    remember,
    tried,
)

from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch import launcher, native
from tilestream.launch.cache import launch_cache
from tilestream.launch.native import Unfit, recipe_of
from tilestream.launch.observe import Call, Observation, observation, observe
from tilestream.ops.operands import refuse_overlap
from tilestream.runtime import extension as library_of

#: Bytes in front of the parameters: grid, block, shared memory; stream; attributes.
HEAD, ATTRIBUTE = 28 + 8 + 4, 72
COUNTS = (TICKETS, 8, 4, 16, 0)


def full(**more) -> Matmul:
    """A call with every operand."""
    return call(
        bias=torch.zeros(32, dtype=torch.bfloat16), residual=torch.zeros(16, 32, dtype=torch.bfloat16),
        scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 32), alpha=0.5, beta=0.25,
    )._replace(**more)  # fmt: skip


def parameters(launched: bytes) -> bytes:
    return launched[HEAD + ATTRIBUTE :]


def aligned_at(offset: int, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Zeros at so many bytes behind a multiple of 64."""
    count = torch.Size(shape).numel()
    room = torch.zeros(count + 128, dtype=dtype)
    first = (-room.data_ptr() % 64 + offset) // room.element_size()
    return room[first : first + count].view(shape)


def base_of(launched: bytes, launch: Launch | AttentionLaunch) -> int:
    """The launch's base: behind it come reset, rows, alpha, beta (or: reset, scale) and the scratch memories."""
    assert launch.needs[0]
    behind = 4 if isinstance(launch, Launch) else 2
    return struct.unpack_from("<q", launched, len(launched) - 16 - 4 * behind - 8)[0]


def ints(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def full_attention(**more) -> Attention:
    """A call with every operand, whether or not they fit together: Python would have refused it."""
    return attention_call(
        options=5, cu_seqlens_q=ints(3), cu_seqlens_k=ints(3), block_table=ints(4).view(2, 2), seqlens_k=ints(2),
        sinks=torch.zeros(4), scale_q=torch.ones(4), scale_k=torch.ones(2), scale_v=torch.ones(2), scale=0.25,
        softcap=30.0, left=4, right=0, max_seqlen_q=8, max_seqlen_k=8, workers=3, splits=2, limit=5,
    )._replace(**more)  # fmt: skip


def launch_of(driver: Any, x: Matmul | Attention | Merge | Grouped, **how) -> Launch | AttentionLaunch:
    if isinstance(x, Matmul):
        return Launch(driver, x, **how)
    return AttentionLaunch(driver, x, **{"lse": isinstance(x, Merge), **how})


def full_grouped(**more) -> Grouped:
    """A call with every operand."""
    return grouped_call(
        options=5, bias=torch.zeros(3, 32, dtype=torch.bfloat16), scale_a=torch.ones(16), scale_b=torch.ones(3, 32),
        workers=3, limit=5,
    )._replace(**more)  # fmt: skip


#: A call of each op, with every operand.
FULL = {"product": full, "attention": full_attention, "merge": merge_call, "grouped": full_grouped}


# What is launched -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True], ids=["rows first", "swap_ab"])
@pytest.mark.parametrize("needs", [(0, 0, 0, 0, 0), COUNTS], ids=["static", "counted"])
@pytest.mark.parametrize("made", [call, full], ids=["plain", "epilogue"])
def test_an_equal_call_gives_the_driver_what_python_gave_it(extension, driver, made, needs, swapped):
    first = made()
    launch = Launch(driver, first, needs, swapped)
    assert remember(extension, launch, first)
    other = made()._replace(alpha=first.alpha if first.alpha == 1 else 0.75)
    driver.forget()
    out = extension.try_matmul(*other)
    assert (out.shape, out.dtype, out.stride()) == ((16, 32), torch.bfloat16, (32, 1))
    launch._base = 0
    words = extension._words.get(extension._place(CPU_INDEX, 0))
    if needs[0]:
        launch._words = [words[2], words[1], words[0]]
    launch.issue(other, out)
    native_launch, python_launch = driver.launches()
    assert native_launch == python_launch


def test_a_factor_in_the_call_is_a_factor_in_the_launch(extension, driver):
    x = full()
    remember(extension, Launch(driver, x), x)
    extension.try_matmul(*x._replace(alpha=-3.0, beta=8.0))
    end = parameters(driver.launches()[-1])
    assert struct.unpack_from("<2f", end, len(end) - 24) == (-3.0, 8.0)


def test_the_launch_is_on_the_current_stream_with_the_attributes_of_the_kernel(extension, driver):
    x = call()
    remember(extension, Launch(driver, x), x)
    driver.thread(stream=0x77)
    extension.try_matmul(*x)
    launched = driver.launches()[-1]
    assert struct.unpack_from("<7IQI", launched) == (7, 1, 1, 384, 1, 1, 1000, 0x77, 1)
    assert struct.unpack_from("<II", launched, HEAD) == (6, 0), "programmatic stream serialization"


@pytest.mark.parametrize(
    ("made", "lse"),
    [(full, None), (full_grouped, None), (attention_call, None), (attention_call, torch.zeros(2, 4, 8))],
    ids=["product", "grouped", "attention", "log-sum-exp too"],
)  # fmt: skip
def test_an_output_that_is_given_is_written(extension, driver, made, lse):
    x = made()
    out = x.results[0]
    remember(extension, launch_of(driver, x, **{} if lse is None else {"lse": True}), x, out, lse)
    assert tried(extension, x) == (None, None), "another call: its output is fresh"
    other = torch.zeros_like(out)
    driver.forget()
    launched, sums = tried(extension, x, other)
    assert launched is True
    assert (sums is None) is (lse is None)
    assert struct.pack("<Q", other.data_ptr()) in driver.launches()[0]


def test_an_output_of_other_strides_is_another_call(extension, driver):
    x = full()
    remember(extension, Launch(driver, x), x, torch.zeros(16, 32, dtype=torch.bfloat16))
    assert extension.try_matmul_out(torch.zeros(16, 64, dtype=torch.bfloat16)[:, :32], *x) is False


# What a key holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "other"),
    [
        *[(full, other) for other in (
            {"op": 1}, {"options": 1}, {"workers": 5}, {"limit": 5}, {"alpha": 1.0}, {"beta": 0.0}, {"bias": None},
            {"residual": None}, {"scale_a": None}, {"scale_b": None},
            {"a": torch.zeros(8, 64, dtype=torch.bfloat16)}, {"a": torch.zeros(16, 64, dtype=torch.float16)},
            {"a": torch.zeros(1, 16, 64, dtype=torch.bfloat16)}, {"a": torch.zeros(64, 16, dtype=torch.bfloat16).T},
            {"a": aligned_at(2, 16, 64)}, {"b": torch.zeros(32, 64, dtype=torch.bfloat16).T},
            {"b": aligned_at(8, 64, 32)}, {"bias": aligned_at(2, 32)}, {"scale_a": torch.ones(1)},
        )],
        *[(full_attention, other) for other in (
            *[{name: None} for name in full_attention().tensors if name not in "qkv"],
            {"q": torch.zeros(2, 8, 4, 16)}, {"k": torch.zeros(2, 9, 2, 16)}, {"options": 4}, {"scale": 0.5},
            {"softcap": 20.0}, {"left": -1}, {"right": -1}, {"max_seqlen_q": 9}, {"max_seqlen_k": -1}, {"workers": 0},
            {"splits": 0}, {"limit": 0}, {"sinks": torch.zeros(4, dtype=torch.bfloat16)},
            {"block_table": ints(8)[::2].view(2, 2)}, {"cu_seqlens_q": ints(4)},
            {"v": torch.zeros(2, 8, 4, 16, dtype=torch.bfloat16)[:, :, ::2]},
        )],
        *[(full_grouped, other) for other in (
            {"options": 1}, {"workers": 0}, {"limit": 0}, {"bias": None}, {"scale_a": None}, {"scale_b": None},
            {"scale_a": torch.ones(16, 1)}, {"scale_b": torch.ones(3, 1, 32)}, {"offsets": ints(4)},
            {"offsets": ints(6)[::2]}, {"bias": aligned_at(2, 3, 32)}, {"a": aligned_at(2, 16, 64)},
            {"a": torch.zeros(64, 16, dtype=torch.bfloat16).T}, {"a": torch.zeros(17, 64, dtype=torch.bfloat16)},
            {"b": torch.zeros(3, 32, 64, dtype=torch.bfloat16).mT}, {"b": torch.zeros(64, 32, dtype=torch.bfloat16)},
            {"b": torch.zeros(3, 64, 32, dtype=torch.float16)},
        )],
        *[(merge_call, other) for other in (
            {"layout": 1}, {"o_a": torch.zeros(2, 8, 4, 16)}, {"lse_a": torch.zeros(2, 4, 8, dtype=torch.bfloat16)},
            {"o_b": torch.zeros(2, 8, 4, 8, dtype=torch.bfloat16)}, {"lse_b": torch.zeros(2, 8, 4).transpose(1, 2)},
            {"o_a": torch.zeros(2, 4, 8, 16, dtype=torch.bfloat16).transpose(1, 2)},
            {"o_b": torch.zeros(1025, dtype=torch.bfloat16)[1:].view(2, 8, 4, 16)},
        )],
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else given.__name__,
)  # fmt: skip
def test_what_could_change_the_launch_is_in_its_key(extension, driver, made, other):
    x = made()
    assert remember(extension, launch_of(driver, x), x)
    launched = len(driver.launches())
    assert tried(extension, x._replace(**other)) == (None, None)
    assert tried(extension, x)[0] is not None
    assert len(driver.launches()) == launched + 1


def test_ops_are_not_taken_for_each_other(extension, driver):
    """Of the same tensors: attention of q, k and v has no fourth, and another number of its op than a merge."""
    for x in (call(), attention_call(), merge_call(), grouped_call()):
        remember(extension, launch_of(driver, x), x)
    assert len(extension) == 4


def test_an_equal_grouped_call_gives_the_driver_what_python_gave_it(extension, driver):
    first, other = full_grouped(), full_grouped()
    launch = launch_of(driver, first)
    assert remember(extension, launch, first)
    driver.forget()
    out = extension.try_grouped(*other)
    assert (out.shape, out.dtype, out.stride()) == ((16, 32), torch.bfloat16, (32, 1))
    launch.issue(other, out)
    native_launch, python_launch = driver.launches()
    assert native_launch == python_launch


def test_addresses_and_factors_are_not_in_the_key(extension, driver):
    x = full()
    remember(extension, Launch(driver, x), x)
    assert extension.try_matmul(*full(alpha=0.125, beta=2.0)) is not None
    assert extension.try_matmul(*x._replace(a=aligned_at(16, 16, 64))) is not None


def test_a_recipe_is_for_its_context_and_its_device(extension, driver):
    x = call()
    remember(extension, Launch(driver, x), x)
    for there in ({"context": 2}, {"device": 3, "context": 4}, {"context": None}):
        driver.thread(**there)
        assert extension.try_matmul(*x) is None, there
    driver.thread()
    assert extension.try_matmul(*x) is not None


def test_contexts_keep_words_of_their_own(extension, driver):
    """The default stream has one handle in every context."""
    cpu, words = torch.device("cpu"), extension._words
    words.clear()
    for context, sizes in ((1, (16, 2, 4, 0)), (2, (64, 8, 16, 0)), (3, (16, 2, 4, 0))):
        driver.thread(context=context)
        extension._give_words(cpu, 0, sizes)
    held = [[x.numel() for x in made][:3] for made in words.values()]
    assert held == [[16, 2, 4], [64, 8, 16], [16, 2, 4]], "none was replaced, and each has its own"
    driver.thread()


def test_words_come_from_no_pool_of_the_calling_thread(extension, driver, monkeypatch):
    """Neither those of a stream's first launch nor those that replace them: all are made by `outliving`."""
    made = []

    def recorded(device, make):
        made.extend(make())
        return tuple(made[-5:])

    monkeypatch.setattr(native, "outliving", recorded)
    for sizes in ((16, 2, 4, 8), (64, 8, 16, 32)):
        extension._give_words(torch.device("cpu"), 0, sizes)
        (held,) = extension._words.values()
        assert [one.numel() for one in held] == [*sizes, sizes[-1]]
        assert all(any(one is x for x in made) for one in held)


def test_a_call_of_too_many_dimensions_is_never_found(extension, driver):
    many = torch.zeros(*[1] * 60, 64, dtype=torch.bfloat16)
    x = call()
    launch = Launch(driver, x)
    flat = x._replace(a=many, b=torch.zeros(*[1] * 60, 64, 32, dtype=torch.bfloat16))
    assert not remember(extension, launch, flat, torch.zeros(16, 32, dtype=torch.bfloat16))
    assert extension.try_matmul(*flat) is None


# What has no recipe ---------------------------------------------------------------------------------------------------


def test_a_launch_that_differs_from_call_to_call_has_no_recipe(extension, driver):
    x = call()
    launch = Launch(driver, x, extra={"table": 0x5000})
    assert not remember(extension, launch, x)
    assert launch in extension._unfit
    assert extension.try_matmul(*x) is None


@pytest.mark.parametrize(
    ("made", "operand"),
    [*[(made, name) for made in FULL.values() for name in made().tensors], (merge_call, "out"), (merge_call, "lse")],
)
def test_an_operand_that_was_copied_first_has_no_recipe(extension, driver, made, operand):
    x = made()
    launch, elsewhere = launch_of(driver, x), torch.zeros(64, 64, dtype=torch.bfloat16)
    assert not remember(extension, launch, x, **{operand: elsewhere.data_ptr()})
    assert remember(extension, launch, x), "an equal launch whose operands were not copied has one"


def test_a_factor_that_was_changed_has_no_recipe(extension, driver):
    x = full()
    seen, made = observed(Launch(driver, x), x._replace(alpha=2.0))
    with pytest.raises(Unfit, match=r"alpha is 2\.0, and the caller's is 0\.5"):
        recipe_of(seen, made._replace(factors=(0.5, 0.25)))


@pytest.mark.parametrize(("launches", "kernels"), [(0, 0), (1, 0), (1, 2), (2, 2)])
def test_a_recipe_is_of_one_launch_of_known_kernels(launches, kernels):
    seen = Observation()
    seen.launches, seen.issued = [object()] * launches, [None] * kernels
    with pytest.raises(Unfit, match=f"{launches} launches of {kernels} kernels"):
        recipe_of(seen, Call({}, (1.0, 1.0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: [99, *made[1:]], "another version"),
        (lambda made: made[:-1], "ends too early"),
        (lambda made: [*made, 0], "too long"),
        (lambda made: [*made[:6], 0, *made[7:]], "no kernel"),
        (lambda made: [*made[:6], 9, *made[7:]], "count is out of range"),
        (lambda made: [*made[:15], 9, *made[16:]], "count is out of range"),
        (lambda made: [*made[:-4], 16, *made[-3:]], "larger than 8 bytes"),
        (lambda made: [*made[:-4], 8, 8, 9, 0], "kind of parameter is unknown"),
        (lambda made: [*made[:-4], 2, 8, 1, 0, 0], "another size than its kind"),
        (lambda made: [*made[:-4], 8, 8, 1, 99, 0], "count is out of range"),
        (lambda made: [*made[:-4], 0, 8, 0, 0], "no size"),
        (lambda made: [*made[:-4], 8, 8, 2], "needs none"),
        (lambda made: [*made[:-4], 8, 8, 1, len(native.OPERANDS), 0], "needs none"),
    ],
)
def test_a_recipe_is_checked(extension, driver, change, message):
    x = call()
    made = recipe_of(*observed(Launch(driver, x), x))
    with pytest.raises((ValueError, RuntimeError), match=message):
        extension.remember_matmul(change(made), x.results[0], False, *x)
    assert len(extension) == 0


def test_a_driver_of_hip_takes_no_tensor_maps_and_no_attributes(extension, driver, libraries):
    x = call()
    made, out = recipe_of(*observed(Launch(driver, x), x)), x.results[0]
    assert extension.remember_matmul(made, out, False, *x)
    cuda, hip = str(libraries[1]), str(libraries[2])
    assert extension._library.tilestream_open(hip.encode(), hip.encode()) is None
    try:
        (on_hip := type(driver)(libraries[2])).thread()
        with pytest.raises((ValueError, RuntimeError), match="a tensor map, which the driver does not have"):
            extension.remember_matmul(made, out, False, *x)
        y = attention_call()
        assert remember(extension, AttentionLaunch(driver, y), y)  # a programmatic launch
        assert extension.try_attention(*y) == (None, None)
        assert not on_hip.launches()
    finally:
        assert extension._library.tilestream_open(cuda.encode(), cuda.encode()) is None


def test_a_block_observes_its_own_thread_only():
    with observe() as outer:
        other = []
        thread = threading.Thread(target=lambda: other.append(observation()))
        thread.start()
        thread.join()
        with observe() as inner:
            assert observation() is inner
        assert observation() is outer
    assert other == [None]
    assert observation() is None


# Workspaces -----------------------------------------------------------------------------------------------------------


def test_bases_rise_by_the_tickets_of_each_launch(extension, driver):
    x = call()
    launch = Launch(driver, x, COUNTS)
    remember(extension, launch, x)
    driver.forget()
    for _ in range(3):
        extension.try_matmul(*x)
    assert [base_of(one, launch) for one in driver.launches()] == [0, TICKETS, 2 * TICKETS]


def test_a_launch_that_fails_takes_no_tickets(extension, driver):
    x = call()
    launch = Launch(driver, x, COUNTS)
    remember(extension, launch, x)
    driver.forget()
    states = ({"launch": 700}, {"encode": 1}, {"capturing": True})
    calls = [x._replace(a=x.a.clone(), b=x.b.clone()) for _ in states]  # at addresses whose maps nothing remembers
    for state, other in zip(states, calls, strict=True):
        driver.state(**state)
        assert extension.try_matmul(*other) is None, state
    driver.state()
    extension.try_matmul(*x)
    assert [base_of(one, launch) for one in driver.launches()] == [0]


def test_a_tensor_map_is_of_the_address_of_its_call(extension, driver):
    x = call()
    room = torch.zeros(200, 16, 64, dtype=torch.bfloat16)
    out = torch.zeros(16, 32, dtype=torch.bfloat16)
    remember(extension, Launch(driver, x), x, out)
    driver.forget()
    for i in [*range(200), *range(0, 200, 7), *range(199, 0, -1)]:
        assert extension.try_matmul_out(out, *x._replace(a=room[i]))
    by_address = dict(zip(range(200), driver.launches(), strict=False))
    assert len(set(by_address.values())) == 200
    again = [by_address[i] for i in [*range(200), *range(0, 200, 7), *range(199, 0, -1)]]
    assert driver.launches() == again


def test_a_static_launch_is_captured(extension, driver):
    x = call()
    remember(extension, Launch(driver, x), x)
    driver.state(capturing=True)
    assert extension.try_matmul(*x) is not None


def test_each_stream_has_words_of_its_own(extension, driver):
    x = call()
    launch = Launch(driver, x, COUNTS)
    remember(extension, launch, x)
    driver.thread(stream=24)  # no other test's: the library keeps words
    assert extension.try_matmul(*x) is None, "a stream without words"
    remember(extension, launch, x, stream=24)
    driver.forget()
    for stream in (0, 24, 24, 0):
        driver.thread(stream=stream)
        extension.try_matmul(*x)
    assert [base_of(one, launch) for one in driver.launches()] == [0, 0, TICKETS, TICKETS]
    places = {place: [one.data_ptr() for one in words] for place, words in extension._words.items()}
    assert len({address for addresses in places.values() for address in addresses if address}) == 6


def test_words_grow_and_larger_ones_serve_smaller_launches(extension, driver):
    small, large = call(), call(m=48)
    launches = {x: Launch(driver, x, needs) for x, needs in ((small, COUNTS), (large, (5, 8, 400, 16, 0)))}
    for x, launch in launches.items():
        remember(extension, launch, x)
    assert [one.numel() for one in extension._words[extension._place(CPU_INDEX, 0)]] == [8, 400, 16, 0, 0]
    driver.forget()
    assert extension.try_matmul(*small) is not None
    assert extension.try_matmul(*large) is not None
    assert [base_of(one, launch) for one, launch in zip(driver.launches(), launches.values(), strict=True)] == [0, 11]
    kept = extension._words[extension._place(CPU_INDEX, 0)]
    remember(extension, launches[small], small)
    assert extension._words[extension._place(CPU_INDEX, 0)] is kept


def test_words_are_kept_for_the_streams_that_launched_last(extension, driver):
    """Endless streams of others: words are freed from 65 streams on, those that were used longest ago first."""
    x = call()
    launch, counters = Launch(driver, x, COUNTS), []
    driver.thread(stream=0)
    remember(extension, launch, x)
    count = 5 * native.MOST_STREAMS
    for stream in range(8, 8 * count, 8):
        driver.thread(stream=stream)
        remember(extension, launch, x, stream=stream)
        assert extension.try_matmul(*x) is not None
        assert len(extension._words) <= native.MOST_STREAMS
        counters.append(weakref.ref(extension._words[extension._place(CPU_INDEX, stream)][0]))
        driver.thread(stream=8)  # stays in use
        assert extension.try_matmul(*x) is not None
    assert sum(one() is not None for one in counters) < native.MOST_STREAMS, "the others are freed"
    streams = {place[1] for place in extension._words}
    assert streams == {0, 8, *range(8 * (count - native.MOST_STREAMS + 2), 8 * count, 8)}
    driver.thread(stream=16)
    assert extension.try_matmul(*x) is None, "its words were freed"
    remember(extension, launch, x, stream=16)
    driver.forget()
    assert extension.try_matmul(*x) is not None
    assert base_of(driver.launches()[0], launch) == 0, "fresh words"


def test_no_words_are_taken_from_a_stream_that_is_launched_on(extension, driver):
    """The thread is in the driver, which makes it wait: no other stream waits for it, and its words stay."""
    x = call()
    launch = Launch(driver, x, COUNTS)
    driver.thread(stream=8)
    remember(extension, launch, x, stream=8)

    def work() -> None:
        driver.thread(stream=8)
        done.append(extension.try_matmul(*x) is not None)

    done, thread = [], threading.Thread(target=work)
    driver.library.fake_block(1)
    thread.start()
    while driver.library.fake_blocked() == 0:
        time.sleep(0.001)
    place, taken = (native.ctypes.c_int64 * 3)(), set()
    while extension._library.tilestream_take_workspace(place):
        taken.add(place[1])
    driver.library.fake_block(0)
    thread.join()
    assert done == [True]
    assert 8 not in taken
    assert extension._library.tilestream_take_workspace(place)
    assert list(place) == [CPU_INDEX, 8, 1]
    driver.thread(stream=8)
    assert extension.try_matmul(*x) is None, "no words are left"


def test_threads_on_one_stream_go_on_while_words_are_taken(extension, driver):
    """Each launch counts from a base of its own, or is Python's; streams come and go beside it."""
    x, threads, each = call(), 4, 150
    launch, failed = Launch(driver, x, COUNTS), []
    driver.thread(stream=8)
    remember(extension, launch, x, stream=8)
    driver.forget()

    def work() -> None:
        driver.thread(stream=8)
        for _ in range(each):
            if extension.try_matmul(*x) is None:
                extension._give_words(torch.device("cpu"), 8, COUNTS[1:])

    def others() -> None:
        try:
            for stream in range(16, 16 + 8 * 4 * native.MOST_STREAMS, 8):
                driver.thread(stream=stream)
                extension._give_words(torch.device("cpu"), stream, COUNTS[1:])
        except Exception as error:
            failed.append(error)

    running = [*(threading.Thread(target=work) for _ in range(threads)), threading.Thread(target=others)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed
    launched = [(parameters(one)[: -16 - 4 * 4 - 8], base_of(one, launch)) for one in driver.launches()]
    bases: dict[int, list[int]] = {}
    for one, base in launched:
        bases.setdefault(struct.unpack_from("<Q", one, len(one) - 8)[0], []).append(base)
    for counters, found in bases.items():
        runs = [found[i] for i in range(1, len(found)) if found[i] not in (0, found[i - 1] + TICKETS)]
        assert not runs, f"words at {counters:#x} counted from {found}"


# Overlap --------------------------------------------------------------------------------------------------------------


@st.composite
def placed(draw, columns=8):
    """Where four rows of eight columns lie in a buffer: in which rows of it, at which element."""
    row = draw(st.sampled_from([columns, columns + 8, 2 * columns, 3 * columns]))
    return draw(st.sampled_from([(row, 1), (1, row), (2 * row, 2), (row, 0)])), 8 * draw(st.integers(0, 24))


@given(written=placed(), read=placed(), bias=st.integers(0, 24))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_overlap_goes_to_python_where_python_refuses_it(extension, driver, written, read, bias):
    def call_in(output, others):
        out = output.as_strided((4, 8), *written)
        return out, call(
            4, 8, residual=others.as_strided((4, 8), *read), bias=others[8 * bias : 8 * bias + 8], beta=0.5
        )

    out, x = call_in(torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16))
    assert remember(extension, Launch(driver, x), x, out)
    assert extension.try_matmul_out(out, *x) is True
    shared = torch.zeros(1024, dtype=torch.bfloat16)
    out, x = call_in(shared, shared)
    if torch._debug_has_internal_overlap(out) != 1:  # which has no recipe: Python refuses the first such call
        refused = _refuses(GemmOperands(x.a, x.b, out, Epilogue(residual=x.residual, bias=x.bias)))
        assert extension.try_matmul_out(out, *x) is not refused


def _refuses(operands: GemmOperands) -> bool:
    try:
        refuse_overlap(operands)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("made", "operand"), [(made, name) for made in (full, full_attention) for name in made().tensors]
)
def test_an_output_that_overlaps_any_operand_goes_to_python(extension, driver, made, operand):
    x = made()
    out, given_ = x.results[0], x.tensors[operand]
    remember(extension, launch_of(driver, x), x, out)
    assert tried(extension, x, out) == (True, None)
    room = torch.zeros(16384, dtype=torch.uint8)
    start, size = -room.data_ptr() % 64, out.numel() * out.element_size()
    shared = room[start : start + given_.numel() * given_.element_size()].view(given_.dtype).view(given_.shape)
    first = start + 16 * (made is full)  # where the residual itself lies, the output may lie
    behind, apart = (room[at : at + size].view(out.dtype).view(out.shape) for at in (first, start + 8192))
    assert tried(extension, x._replace(**{operand: shared}), behind) == (False, None)
    assert tried(extension, x._replace(**{operand: shared}), apart) == (True, None)


def test_the_residual_may_be_the_output(extension, driver):
    x, out = full(), torch.zeros(16, 32, dtype=torch.bfloat16)
    remember(extension, Launch(driver, x), x, out)
    assert extension.try_matmul_out(out, *x._replace(residual=out)) is True


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True], ids=["one kernel", "a list first"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["output", "log-sum-exp too"])
def test_an_equal_call_of_attention_gives_the_driver_what_python_gave_it(extension, driver, with_lse, listed):
    first, lse = full_attention(), torch.zeros(2, 4, 8) if with_lse else None
    launch = AttentionLaunch(driver, first, with_lse, listed)
    assert remember(extension, launch, first, None, lse)
    other = full_attention()
    driver.forget()
    out, sums = extension.try_attention(*other)
    assert (out.shape, out.dtype, out.stride()) == (first.q.shape, torch.bfloat16, first.q.stride())
    assert (sums is None) is (lse is None)
    assert sums is None or (sums.shape, sums.dtype) == (lse.shape, torch.float32)
    launch._base = 0
    if listed:
        words = extension._words[extension._place(CPU_INDEX, 0)]
        launch._words = [words[0], words[3], words[4]]
    launch.issue(other, out, sums)
    launches = driver.launches()
    assert len(launches) == 2 * (1 + listed)
    assert launches[: 1 + listed] == launches[1 + listed :]


def test_tickets_are_taken_once_a_launch_of_several_kernels(extension, driver):
    x = full_attention()
    launch = AttentionLaunch(driver, x, listed=True)
    remember(extension, launch, x)
    driver.forget()
    for _ in range(3):
        extension.try_attention(*x)
    assert [base_of(one, launch) for one in driver.launches()[1::2]] == [0, 11, 22]


def test_a_kernel_that_is_refused_behind_another_takes_its_tickets(extension, driver):
    """What a kernel counted before the refusal is not counted from again."""
    x = full_attention()
    launch = AttentionLaunch(driver, x, listed=True)
    remember(extension, launch, x)
    driver.forget()
    driver.library.fake_refuse_after(1)
    assert extension.try_attention(*x) == (None, None)
    driver.library.fake_refuse_after(-1)
    extension.try_attention(*x)
    assert base_of(driver.launches()[-1], launch) == TICKETS


def test_a_launch_with_a_list_is_not_captured(extension, driver):
    x = full_attention()
    remember(extension, AttentionLaunch(driver, x, listed=True), x)
    driver.state(capturing=True)
    assert extension.try_attention(*x) == (None, None)


# The merge of two attentions ------------------------------------------------------------------------------------------


def test_an_equal_merge_gives_the_driver_what_python_gave_it(extension, driver):
    first, other = merge_call(), merge_call()
    launch = AttentionLaunch(driver, first, lse=True)
    assert remember(extension, launch, first)
    driver.forget()
    out, lse = extension.try_merge_attention(*other)
    for made, like in ((out, first.o_a), (lse, first.lse_a)):
        assert (made.shape, made.dtype, made.stride()) == (like.shape, like.dtype, like.stride())
    launch.issue(other, out, lse)
    launches = driver.launches()
    assert len(launches) == 2
    assert launches[0] == launches[1]
    assert not {one.data_ptr() for one in (out, lse)} & {one.data_ptr() for one in other.tensors.values()}


def test_a_merge_may_be_of_one_attention_with_itself(extension, driver):
    x = merge_call()
    same = x._replace(o_b=x.o_a, lse_b=x.lse_a)
    assert remember(extension, AttentionLaunch(driver, same, lse=True), same)
    driver.forget()
    assert extension.try_merge_attention(*x)[0] is not None
    assert struct.pack("<Q", x.o_b.data_ptr()) in driver.launches()[0]


def test_a_merge_is_captured_and_what_the_driver_refuses_is_pythons(extension, driver):
    x = merge_call()
    remember(extension, AttentionLaunch(driver, x, lse=True), x)
    driver.state(capturing=True)
    assert extension.try_merge_attention(*x)[0] is not None
    driver.state(launch=700)
    assert extension.try_merge_attention(*x) == (None, None)


# Threads, bounds, life ------------------------------------------------------------------------------------------------


def test_threads_share_recipes_and_no_base_is_given_twice(extension, driver):
    x, count, each = call(), 8, 200
    launch = Launch(driver, x, COUNTS)
    remember(extension, launch, x)
    driver.forget()
    failed = []

    def work() -> None:
        driver.thread()
        failed.extend(i for i in range(each) if extension.try_matmul(*x) is None)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [base_of(one, launch) for one in driver.launches()] == [i * TICKETS for i in range(count * each)]


def test_calls_go_on_while_recipes_are_forgotten_and_kept(extension, driver):
    x = call()
    launch, stop, found = Launch(driver, x), threading.Event(), []

    def work() -> None:
        driver.thread()
        while not stop.is_set():
            found.append(extension.try_matmul(*x) is not None)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(200):
        remember(extension, launch, x)
        extension.clear()
    stop.set()
    thread.join()
    assert found


def test_the_table_is_bounded(extension, driver):
    extension.set_capacity(4)
    calls = [call(m=m) for m in range(8, 20)]
    for x in calls:
        assert remember(extension, Launch(driver, x), x)
        assert extension.try_matmul(*x) is not None
        assert 1 <= len(extension) <= 4
    remember(extension, Launch(driver, calls[-1]), calls[-1])
    assert len(extension) == 4, "what is there already takes no room"


@pytest.mark.parametrize("cleared", ["extension", "launch_cache"])
def test_clearing_forgets_all(extension, driver, cleared):
    x = call()
    remember(extension, Launch(driver, x), x)
    assert len(extension) == 1
    (extension if cleared == "extension" else launch_cache).clear()
    assert len(extension) == 0
    assert extension.try_matmul(*x) is None


def test_a_recipe_that_was_made_before_a_clearing_is_not_kept(extension, driver):
    """What decides the launch may have changed between it and `remember`, in another thread."""
    x = call()
    launch, result = Launch(driver, x), torch.zeros(16, 32, dtype=torch.bfloat16)
    with observe() as seen:
        launch.issue(x, result)
        seen.launches.append(launch)
    operands = {"a": x.a, "b": x.b, "out": result, "bias": None, "residual": None, "scale_a": None, "scale_b": None}
    launch_cache.clear()
    assert not extension.remember(seen, Call(operands, (1.0, 1.0)), 0, False, tuple(x))
    assert extension.try_matmul(*x) is None
    assert remember(extension, launch, x), "the next call's is"
    assert extension.try_matmul(*x) is not None


def test_no_tensor_of_a_caller_is_kept(extension, driver):
    x, out = full(), torch.zeros(16, 32, dtype=torch.bfloat16)
    remember(extension, Launch(driver, x), x, out)
    result = extension.try_matmul(*x)
    extension.try_matmul_out(out, *x)
    storages = [weakref.ref(one.untyped_storage()) for one in (x.a, x.b, x.bias, x.residual, out)]
    tensors = [weakref.ref(one) for one in (x.a, x.b, x.bias, x.residual, out)]
    del x, out, result, storages
    gc.collect()
    assert [one() for one in tensors] == [None] * 5


def test_memory_does_not_grow_with_calls(extension, driver):
    x = call()
    remember(extension, Launch(driver, x), x)
    out = torch.zeros(16, 32, dtype=torch.bfloat16)
    remember(extension, Launch(driver, x), x, out)
    driver.state(records=False)

    def calls(count: int) -> int:
        for _ in range(count):
            extension.try_matmul(*x)
            extension.try_matmul_out(out, *x)
            extension.try_matmul(*x._replace(workers=9))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = calls(2000)
    assert calls(4000) - before < 2048, "kilobytes"


def test_a_fresh_thread_has_no_context_until_python_binds_one(extension, driver, monkeypatch):
    x, found = call(), []
    launch = Launch(driver, x)
    remember(extension, launch, x)
    monkeypatch.setattr(launcher, "bind_context", driver.thread)

    def work() -> None:
        found.append(extension.try_matmul(*x))
        launch.issue(x, *x.results)
        found.append(extension.try_matmul(*x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [one is not None for one in found] == [False, True]


def resident() -> int:
    """Kilobytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.parametrize("calls", [10**5, pytest.param(10**6, marks=pytest.mark.slow)])
def test_threads_with_changing_shapes_fill_no_memory(extension, driver, calls):
    """Most calls are of a few shapes; each other one is new, and makes a full table begin anew."""
    few, many, threads, capacity = 24, 200, 8, 32
    shapes = [call(m=8 + i) for i in range(few + many)]
    launches = [Launch(driver, x) for x in shapes]
    extension.set_capacity(capacity)
    driver.state(records=False)
    native, sizes, failed = [0] * threads, [], []

    def work(number: int, count: int) -> None:
        driver.thread()
        draw = random.Random(number)
        try:
            for i in range(count):
                at = draw.randrange(few) if i % 50 else few + draw.randrange(many)
                if extension.try_matmul(*shapes[at]) is not None:
                    native[number] += 1
                else:
                    remember(extension, launches[at], shapes[at])
                    sizes.append(len(extension))
        except Exception as error:
            failed.append(error)

    def run(count: int) -> int:
        made = [threading.Thread(target=work, args=(i, count // threads)) for i in range(threads)]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
        gc.collect()
        return resident()

    before = run(calls // 5)
    grown = run(calls) - before
    assert not failed
    assert sum(native) > calls // 2
    assert max(sizes) <= capacity
    if not os.environ.get("TILESTREAM_TEST_SANITIZER"):  # which holds freed memory back
        assert grown < 4096, "kilobytes"


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "also"),
    [
        ("at_exit", ["refused", "refused"]), ("threads_at_exit", []), ("blocked_at_exit", ["returned"]), ("forked", []),
        ("without_driver", []),
    ],
)  # fmt: skip
def test_an_end_of_a_process(libraries, scenario, also):
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "ends.py", *libraries[:2], scenario],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["well", *also], "")


# Loading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "ours", "message"),
    [("libnone.so.9", None, "no driver"), (None, "libnone.so.9", "no GPU build"), ("libc.so.6", None, "is missing")],
)
def test_a_driver_that_is_missing_is_named(loaded, libraries, cuda, ours, message):
    fake = str(libraries[1])
    why = loaded._library.tilestream_open((cuda or fake).encode(), (ours or fake).encode())
    assert message in why.decode()
    assert loaded._library.tilestream_open(fake.encode(), fake.encode()) is None


def test_why_there_is_no_extension_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv(library_of.HIP_ENVIRONMENT, raising=False)  # the GPU tests set it

    def why(**environment: str) -> str:
        native.load.cache_clear()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return native.why_not()

    try:
        assert why(TILESTREAM_NATIVE="0") == "TILESTREAM_NATIVE=0"
        missing = tmp_path / "none.so"
        assert why(TILESTREAM_NATIVE=str(missing)).startswith(f"{missing} is not there: `python -m")
        assert native.extension() is None
        there = tmp_path / "there.so"
        there.touch()
        monkeypatch.setattr(library_of.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
        assert why(TILESTREAM_NATIVE=str(there)) == "this torch is built without CUDA"
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert why() == "it has not run on an AMD GPU yet: TILESTREAM_NATIVE_HIP=1 switches it on"
        (tmp_path / "torch" / "lib").mkdir(parents=True)
        (tmp_path / "torch" / "lib" / "libtorch_hip.so").touch()
        monkeypatch.setattr(library_of, "hip_library", lambda: "libamdhip64.so")
        opened = []
        monkeypatch.setattr(native, "Extension", lambda *given: opened.append(given))
        why(TILESTREAM_NATIVE_HIP="1")
        assert opened == [(there, "libamdhip64.so", str(tmp_path / "torch" / "lib" / "libtorch_hip.so"))]
    finally:
        native.load.cache_clear()


# Real kernels ---------------------------------------------------------------------------------------------------------

REAL = ["hopper, static", "hopper, realigned", "portable, dynamic"]
MORE = [
    "hopper, stream-K, epilogue",
    "hopper, realigned, stream-K, epilogue",
    "hopper, few rows",
    "portable, stream-K, epilogue",
]
ATTENTION = ["hopper, attention, packed, lse", "hopper, attention, split", "portable, attention, paged"]
MORE_ATTENTION = ["hopper, attention", "portable, attention, packed"]
MERGE = ["merge, dense", "merge, packed", "merge, heads first"]
AMD = ["portable, dynamic", "cdna, dynamic", "cdna, attention, packed, lse", *MERGE[:1]]
MORE_AMD = [
    "portable, stream-K, epilogue", "cdna, stream-K, epilogue", "cdna, attention", "portable, attention, paged",
    "portable, attention, packed",
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("sm_90a", REAL), ("sm_90a", ATTENTION), ("sm_90a", MERGE), ("gfx942", AMD),
        *[
            pytest.param(target, names, marks=pytest.mark.slow)
            for target, names in (("sm_90a", MORE), ("sm_90a", MORE_ATTENTION), ("gfx942", MORE_AMD))
        ],
    ],
    ids=["plain", "attention of several kernels", "merge", "AMD", "with an epilogue", "attention", "more of AMD"],
)  # fmt: skip
def test_a_real_kernel_is_given_what_python_gives_it(libraries, target, names):
    """On AMD, also what Triton's own launcher gives it."""
    library, cuda, hip = libraries
    if target == "gfx942" and not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs Python's headers: Triton builds its launcher")
    done = subprocess.run(
        [
            sys.executable, Path(__file__).parent / "real_kernels.py", target, library,
            hip if target == "gfx942" else cuda, *names,
        ],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.endswith(" equal")]
    assert [line.rsplit(" ", 2)[0] for line in told] == names
