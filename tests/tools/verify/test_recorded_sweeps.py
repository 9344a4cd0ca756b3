"""The sweeps are as wide as recorded: a model that merges or forbids too much finds no violation either.

`recorded_sweeps.json` has the configurations of each level, as a digest, and of some of each model how many states
are explored. Where a change is meant, make the file anew and say in the commit what moved:

    cd tests; PYTHONPATH=../src:tools/verify python -m test_recorded_sweeps
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from unittest import mock

import pytest

from tilestream_tools import verify

RECORD = Path(__file__).with_name("recorded_sweeps.json")
#: Of a model's quick level every so manieth configuration is explored, at most so many: small ones come first.
EXPLORED = {
    "workers": (40, 20), "ring": (1, 4), "product": (1, 2), "shared": (1, 13), "attention": (1, 1), "gather": (3, 6),
    "publish": (1, 8), "sums": (1, 8), "copies": (6, 9), "reduce": (1, 6), "replay": (1, 17), "dispatch": (1, 8),
    "experts": (1, 8), "sources": (3, 8), "cluster": (1, 8),
    "pair": (1, 3),
}  # fmt: skip


def text_of(value: object) -> str:
    """A configuration's fields, sets in order."""
    if is_dataclass(value):
        return text_of([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text_of, value))})"
    return text_of(sorted(value)) if isinstance(value, set | frozenset) else getattr(value, "__name__", str(value))


def swept(model: str, level: verify.Level) -> str:
    """How many configurations a level has, and a digest of them."""
    found = sorted(map(text_of, verify.configurations(model, level)))
    return f"{len(found)} configurations, {hashlib.sha1(repr(found).encode()).hexdigest()[:8]}"


def explored(model: str) -> dict[str, int]:
    """States by configuration."""
    step, most = EXPLORED[model]
    every = list(verify.configurations(model, "quick"))
    cases = every[::step][:most] + [one for one in every if getattr(one, "brought", False)][:1]
    with mock.patch("tilestream_tools.verify.report.configurations", return_value=cases):
        return {one.configuration: one.states for one in verify.run("quick", models=[model]).results}


def levels_of(model: str) -> dict[str, object]:
    return {level: swept(model, level) for level in ("quick", "full")}


def record_of(model: str) -> dict[str, object]:
    return levels_of(model) | {"states": explored(model)}


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", verify.MODELS)
def test_a_models_sweeps_have_the_recorded_configurations(model, recorded):
    assert levels_of(model).items() <= recorded[model].items()
    assert recorded[model].keys() == {"quick", "full", "states"}


@pytest.mark.parametrize("model", verify.MODELS)
def test_a_models_sweep_is_as_recorded(model, recorded):
    assert record_of(model) == recorded[model]


if __name__ == "__main__":
    RECORD.write_text(
        json.dumps({model: record_of(model) for model in verify.MODELS}, indent=1) + "\n", encoding="utf-8"
    )
