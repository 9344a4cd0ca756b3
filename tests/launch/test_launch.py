"""What a launch hands on, where no GPU is needed to see it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

launch = pytest.importorskip("tilestream.launch.launch", exc_type=ImportError)
native = pytest.importorskip("tilestream.launch.native", exc_type=ImportError)
launcher = pytest.importorskip("tilestream.launch.launcher", exc_type=ImportError)


@pytest.mark.parametrize("captured", [False, True])
def test_words_are_asked_for_with_the_launchs_lists_and_floats(captured, monkeypatch):
    asked, issued = [], []

    class One(launch.Launch):
        def _issue(self, stream, x, words, awaited, probe):
            issued.append(words)

    def words_of(*given):
        asked.append(given)
        return "words"

    plan, device = SimpleNamespace(schedule="schedule", block=(16, 32)), SimpleNamespace(type="cuda", index=3)
    space = SimpleNamespace(lock=contextlib.nullcontext(), open=lambda *given: words_of(device, *given))
    monkeypatch.setattr(launch, "captured_words", words_of)
    monkeypatch.setattr(launch, "device_workspace", lambda device, stream: space)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    One(plan, counts=True, listed=5, floats=70)([SimpleNamespace(device=device)])
    assert asked == [(device, "schedule", (16, 32), 5, 70)]
    assert issued == ["words"]


def test_clearing_tells_the_allocator_of_the_streams_of_a_tables_own_device():
    class Table:
        def __init__(self, device: int) -> None:
            self.device, self.streams = device, []

        def record_stream(self, stream: object) -> None:
            self.streams.append(stream)

    tables, readers = [Table(0), Table(1)], [SimpleNamespace(device=0), SimpleNamespace(device=1)]
    extension = SimpleNamespace(
        _library=SimpleNamespace(tilestream_clear=lambda: None), _lock=contextlib.nullcontext(),
        _tables_before=dict(enumerate(tables)), _tables={}, _readers=dict(enumerate(readers)), _keeps_tables=False,
    )  # fmt: skip
    native.Extension.clear(extension)
    assert [table.streams for table in tables] == [[readers[0]], [readers[1]]]
    assert extension._tables_before == {}


@pytest.mark.parametrize("places", [native.OPERANDS, native.WORDS], ids=["addresses", "words"])
def test_a_kernel_with_more_varying_arguments_than_places_has_no_recipe(places):
    kind = "Q" if places is native.OPERANDS else "i"

    def recipe(count: int):
        varying = [launcher._Parameter(f"x{i}", kind, launcher.VARIES) for i in range(count)]
        return native.recipe_of_kernel(SimpleNamespace(parameters=varying, head=list), range(count))

    _, found, given = recipe(len(places))
    assert [number for _, number in found.values()] == list(given.values()) == list(range(len(places)))
    with pytest.raises(native.Unfit, match=f"x{len(places)} is no address .* or there are more than {len(places)}"):
        recipe(len(places) + 1)
