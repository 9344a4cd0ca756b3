"""The calls of benchmarks/invariance, made on the CPU: each form is accepted, and its rows have equal bits."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks.core import compiling
from benchmarks.core.session import Session
from benchmarks.invariance import cost, pairs
from benchmarks.run import options

import tilestream as ts
from tilestream_tools.sweep.clock import WallClock


class Held:
    """A neighbour without a GPU; ``says``: what it raises when it is left."""

    units, says, taken = 132, "", []

    @contextlib.contextmanager
    def taking(self, count):
        assert 0 < count < self.units
        self.taken.append(count)
        yield self.units - count
        if self.says:
            raise RuntimeError(self.says)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """The GPU is the CPU, extents are small, and a graph is a call."""
    for name in ("randn", "rand", "zeros", "ones", "full", "empty", "tensor", "randperm"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *x, made=made, device="cpu", **how: made(*x, **how))
    uniform = ts.Arrival.uniform
    monkeypatch.setattr(ts.Arrival, "uniform", lambda rows, count, device: uniform(rows, count))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(pairs, "captured", lambda call: call())
    monkeypatch.setattr(pairs, "neighbour", lambda: Held())
    small = {"MOST_ROWS": 40, "MOST_K": 64, "COLUMNS": (16, 48), "KEYS": (17, 30), "OTHER_KEYS": 9}
    for name, value in small.items():
        monkeypatch.setattr(pairs, name, value)


@pytest.mark.parametrize("how", sorted(set(pairs.CALLS)))
def test_each_form_of_a_product_is_accepted(how, monkeypatch):
    monkeypatch.setattr(pairs, "CALLS", (how,))
    forms = list(itertools.product(pairs.DTYPES, sorted(set(pairs.EPILOGUES)), sorted(set(pairs.LAYOUTS))))
    for number, (dtype, epilogue, layout) in enumerate(forms):
        monkeypatch.setattr(pairs, "DTYPES", {dtype: 1})
        monkeypatch.setattr(pairs, "EPILOGUES", (epilogue,))
        monkeypatch.setattr(pairs, "LAYOUTS", (layout,))
        found = pairs.compare(number, 1, attention=0.0, calls=2)
        assert found.pairs == 1
        assert not found.differing
        assert not found.refused
        assert f"call {how}" in found.seen


@pytest.mark.parametrize("way", pairs.WAYS)
def test_each_form_of_attention_is_accepted(way, monkeypatch):
    monkeypatch.setattr(pairs, "WAYS", (way,))
    seen = set()
    for seed in range(12):
        found = pairs.compare(seed, 1, attention=1.0, calls=2)
        assert found.pairs == 1
        assert not found.differing
        assert not found.refused
        seen |= {kind for kind in found.seen if kind.startswith(("columns", "window"))}
    assert seen == {"columns 64", "columns 128", "window True", "window False"}


@pytest.mark.parametrize("attention", [0.0, 1.0])
def test_calls_are_made_beside_a_neighbour(attention, monkeypatch):
    """The call before it is the same, so that nothing is loaded then; what was not held counts for nothing."""
    monkeypatch.setattr(pairs, "CALLS", ("neighbour",))
    monkeypatch.setattr(pairs, "WAYS", ("neighbour",))
    monkeypatch.setattr(Held, "taken", [])
    calls, name = [], "attention" if attention else "matmul"
    made = getattr(ts, name)
    monkeypatch.setattr(pairs, "EPILOGUES", ("none",))
    monkeypatch.setattr(ts, name, lambda *x, **how: calls.append(len(Held.taken)) or made(*x, **how))
    found = pairs.compare(0, 1, attention=attention, calls=2)
    assert found.pairs >= 1
    assert not found.differing
    assert len(Held.taken) == 2
    assert len(set(Held.taken)) == 2, "of other numbers of SMs"
    assert calls == [0, 0, 1, 1, 1, 2]
    monkeypatch.setattr(Held, "says", "the neighbour left after its deadline of 30 s")
    found = pairs.compare(0, 1, 0.3, attention=attention, calls=2)
    assert found.pairs == 0
    assert found.refused
    assert all("the neighbour left" in text for text in found.refused)
    monkeypatch.setattr(Held, "says", "an illegal memory access")
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        pairs.compare(0, 1, attention=attention, calls=2)


def test_a_difference_is_found(monkeypatch):
    """Of the second call a number is another."""
    made, product = itertools.count(), pairs.product

    def other(*given):
        rows, count = product(*given)
        rows.view(-1)[:1] += next(made) > 0
        return rows, count

    monkeypatch.setattr(pairs, "product", other)
    monkeypatch.setattr(pairs, "DTYPES", {("float32", True): 1})
    found = pairs.compare(0, 1, attention=0.0, calls=2)
    assert len(found.differing) == 1


class Started:
    """A process of a section, which is a call: its last words are those of `share`."""

    returncode, late = 0, False

    def __init__(self, words, stdout=None):
        tool = words.index("invariance") + 1
        {"_pairs": pairs.share, "_cost": cost.share}[words[tool]](words[tool + 1 :])

    def wait(self, seconds=None):
        if self.late and seconds is not None:
            raise subprocess.TimeoutExpired("a process", seconds)

    def poll(self):
        return None if self.late else 0

    def kill(self):
        pass


@pytest.mark.parametrize("late", [False, True])
def test_the_sections_write_their_records(late, results, monkeypatch):
    """Also where a process does not end in time."""
    for one in (pairs, compiling):
        processes = SimpleNamespace(Popen=Started, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(one, "subprocess", processes)
    monkeypatch.setattr(Started, "late", late)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(cost, "GpuClock", WallClock)
    monkeypatch.setattr(cost, "cases", lambda: [("product", (5, 16, 32)), ("attention", (1, 3, 9))])
    for name in ("plan", "attention_plan"):
        made = getattr(ts, name)
        monkeypatch.setattr(ts, name, lambda *x, device, made=made, **how: made(*x, **how))
    monkeypatch.setenv("PAIRS", "2")
    monkeypatch.setattr(pairs, "CALLS_OF_SHARE", 2)
    session = Session(options("invariance", "pairs,cost", str(results), "--seconds", "60"))
    session.begin(1.0)
    pairs.pairs(session)
    cost.cost(session)
    found, costs = (session.record(one.RECORD) for one in (pairs, cost))
    assert session.bad == 0
    assert found.data["failures"] == 2 * late * ["a process did not end in time"]
    assert found.rows[0]["what"] == "all"
    assert found.rows[0]["pairs"] >= 2
    assert [row["what"] for row in costs.rows] == ["product", "attention"]
    assert all(set(row["ratios"]) >= {"free", "invariant"} for row in costs.rows)
    assert all(row["plan"].startswith("cpu") and row["expected"] for row in costs.rows)


@pytest.mark.parametrize(("kind", "shape"), [("product", (5, 16, 32)), ("attention", (2, 3, 40))])
def test_what_the_promise_costs_is_of_calls_that_are_accepted(kind, shape):
    made = {name: call() for name, call in cost.calls_of(kind, shape).items()}
    assert {"free", "invariant"} <= set(made)
    for one in made.values():
        torch.testing.assert_close(one, made["free"])
    assert ts.plan(5, 16, 32, dtype="bfloat16", layout="nt", invariant=True).promise


def test_a_peer_that_raises_leaves_its_row_to_the_others():
    def fails():
        raise TypeError("takes from 4 to 5 arguments")

    calls = {"cublas": int, "free": int, "invariant": int, "peer": fails}
    left, refused = cost.without_refusals(calls)
    assert [*left] == ["cublas", "free", "invariant"]
    assert refused == {"peer": "TypeError: takes from 4 to 5 arguments"}


def test_peers_are_those_that_are_installed(monkeypatch, tmp_path):
    """Files as the peers have them: a package, and a folder of vLLM that imports what is not there."""
    assert not cost.peers()
    text = "def matmul_persistent(a, b, bias=None):\n    return a @ b\n"
    imports = (
        "import vllm.envs as envs\nfrom vllm.model_executor.determinism.batch_invariant_configs import of\n"
        "from vllm.platforms import current_platform\nfrom vllm.triton_utils import tl, triton\n"
        "from vllm.utils.mem_utils import get_max_shared_memory_bytes\nfrom vllm.utils.nccl import pin_nccl_env\n"
        "from vllm.utils.platform_utils import num_compute_units\n"
        "from vllm.utils.torch_utils import is_torch_equal_or_newer\n"
        "assert current_platform.is_cuda_alike() and not current_platform.is_xpu()\n"
        "@triton.jit\ndef kernel(x):\n    tl.store(x, 1)\n"
    )
    files = {
        "batch_invariant_ops/__init__.py": "", "batch_invariant_ops/batch_invariant_ops.py": text,
        "vllm/model_executor/determinism/__init__.py": "",
        "vllm/model_executor/determinism/batch_invariant.py": imports + text,
        "vllm/model_executor/determinism/batch_invariant_configs.py":
            "from vllm.platforms.interface import DeviceCapability\nof = DeviceCapability\n",
        "sgemm_bi.py":  # its engine of raw addresses, as its version 0.1.2 has it
            "class Engine:\n    def __init__(self, device): pass\n"
            "    def forward(self, ptrs, dims, dtype, stream, tensor_cores=False):\n"
            "        assert len(ptrs) == 4 and dims == (3, 8, 5) and dtype == 'bfloat16'\n"
            "        calls.append(dims)\ncalls = []\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    found = cost.peers()
    assert sorted(found) == ["batch_invariant_ops", "sgemm-bi", "vllm"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    assert found.pop("sgemm-bi")(x, w).shape == (3, 5)
    for peer in found.values():
        torch.testing.assert_close(peer(x, w), x @ w.t())
    assert "vllm.envs" not in sys.modules
    for name in [one for one in sys.modules if one.partition(".")[0] in ("vllm", "batch_invariant_ops", "sgemm_bi")]:
        del sys.modules[name]  # later tests ask whether the engine is there
