"""Launching the CDNA kernel: who gets it, and what it is launched with."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language")

from tilestream.core.gpu_specs import named
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.kernels.cdna.gemm import gemm
from tilestream.launch.cdna.launch import GemmLaunch
from tilestream.launch.portable.launch import GemmLaunch as PortableLaunch
from tilestream.ops.gpu import How, _make
from tilestream.plan import plan
from tilestream.runtime.device_workspace import Words

NAMES = gemm.arg_names


def made(m=256, n=256, k=512, **more):
    return plan(m, n, k, dtype="bfloat16", device=named("mi300x"), layout="nt", backend="cdna", **more)


def operands(m=256, n=256, k=512):
    dtype = torch.bfloat16
    return torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype).t(), torch.zeros(m, n, dtype=dtype)


class Recorder:
    """Stands for the kernel: compiled at the first launch, launched directly from then on."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*filled, **options):
            self.launches.append((grid, filled, options))
            return SimpleNamespace(
                run=lambda x, y, z, stream, function, metadata, *rest: self.launches.append(((x, y, z), rest[3:], {})),
                function=0, packed_metadata=(),
            )  # fmt: skip

        return launch


def test_a_plan_of_the_backend_is_launched_by_it():
    a, b, out = operands()
    launch = _make(GemmOperands(a, b, out, Epilogue()), How(), made())
    assert type(launch) is GemmLaunch
    portable = plan(256, 256, 512, dtype="bfloat16", device=named("mi300x"), layout="nt")
    assert type(_make(GemmOperands(a, b, out, Epilogue()), How(), portable)) is PortableLaunch


def test_operands_that_are_no_vectors_are_refused_before_the_launch():
    a, b, out = operands()
    wide = torch.zeros(256, 520, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a of strides \(520, 1\): .* no multiple of 16; take backend='portable'"):
        _make(GemmOperands(wide[:, :512], b, out, Epilogue()), How(), made())
    assert _make(GemmOperands(a, b, out, Epilogue()), How(), made())


def test_what_it_is_launched_with(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(GemmLaunch, "kernel", recorder)
    a, b, out = operands()
    chosen = made(schedule="dynamic", tile=(128, 128))
    bias = torch.zeros(256, dtype=torch.bfloat16)
    launch = _make(GemmOperands(a, b, out, Epilogue(bias=bias)), How(), chosen)
    words = Words(torch.zeros(64, dtype=torch.int64), None, None, 7, 0)
    for _ in range(2):
        launch.issue(0, GemmOperands(a, b, out, Epilogue(bias=bias)), words, None, None)
    (grid, filled, options), (again, direct, _) = recorder.launches
    assert grid == again == (chosen.workers, 1, 1)
    assert options == {"num_warps": 4, "waves_per_eu": 2}
    given = dict(zip(NAMES, filled, strict=True))
    config = given["C"]
    given |= dataclasses.asdict(config)
    assert given["x"] is a
    assert given["y"] is b
    assert given["counters"] is words.counters
    assert (given["base"], given["stride_x"], given["stride_y"], given["rows"], given["k"]) == (7, 512, 512, 256, 512)
    assert (config.X.K_MAJOR, config.Y.K_MAJOR, given["DIRECT"], given["STAGES"]) == (True, True, False, 2)
    assert (given["BIAS"], given["VECTOR_C"], given["ROW_CHUNKS"], given["EVEN_K"]) == ("columns", 4, "none", True)
    # From the second launch on: addresses, and nothing else changed.
    assert direct[:3] == (a.data_ptr(), b.data_ptr(), out.data_ptr())
    assert [x for x in direct if isinstance(x, torch.Tensor)] == []
    assert len(direct) == len(filled)


def test_an_output_at_an_odd_address_is_stored_an_element_at_a_time(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(GemmLaunch, "kernel", recorder)
    a, b, _ = operands()
    out = torch.zeros(256 * 256 + 1, dtype=torch.bfloat16)[1:].view(256, 256)
    launch = _make(GemmOperands(a, b, out, Epilogue()), How(), made())
    launch.issue(0, GemmOperands(a, b, out, Epilogue()), Words(torch.zeros(64), None, None, 0, 0), None, None)
    assert dict(zip(NAMES, recorder.launches[0][1], strict=True))["C"].VECTOR_C == 1


def test_what_lies_too_far_apart_goes_through_registers():
    from tilestream.launch.cdna.arguments import Arguments
    from tilestream.launch.gemm_arguments import Layout

    chosen = made(variant="direct", tile=(128, 128))
    near = Arguments(chosen, Layout((0, 512, 1), (0, 1, 512), (0, 256, 1)))
    assert near.direct
    assert near.tile.stages == 3
    far = Arguments(chosen, Layout((0, 2**24, 1), (0, 1, 512), (0, 2**24, 1)))
    assert (far.direct, far.x.far, far.y.far) == (False, True, False)
    assert far.config.OFFSETS_64BIT
    # gfx942 cannot read across: an operand that is not K-major is transposed on the way, through registers.
    across = Arguments(chosen, Layout((0, 1, 256), (0, 1, 512), (0, 256, 1)))
    assert (across.direct, across.x.turned) == (False, True)
