"""Jobs of ranks with torchtitan."""

from __future__ import annotations

import logging
import tempfile
from unittest import mock

import torch
from jobs import raised

import tilestream.distributed as tsd

OVERRIDE = "tilestream.integrations.torchtitan.async_tp"


def overridden(world: int, tp: int):
    """The metrics of torchtitan's debug model, as its trainer makes them, on the CPU."""
    from torchtitan.components import metrics
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    parallel_dims.device_type = "cpu"
    metrics.build_device_memory_monitor = lambda: mock.Mock(device_name="cpu")  # torchtitan asks CUDA
    config = llama3_debugmodel()
    config.override.imports.append(OVERRIDE)
    (line,) = apply_overrides(config.override, config)
    assert OVERRIDE in line
    dims = parallel_dims.ParallelDims(dp_replicate=1, dp_shard=world // tp, cp=1, tp=tp, pp=1, ep=1, world_size=world)
    dims.build_mesh()
    return dims, config.metrics.build(parallel_dims=dims, dump_folder=tempfile.gettempdir())


def overlaps(rank, world):
    """From torchtitan's metrics to their end, the tensor-parallel group's fused ops run here, and are logged."""
    dims, metrics = overridden(world, world)
    group = dims.get_dense_tp_mesh().get_group()
    torch.manual_seed(0)
    shards, b = torch.randn(world, 6, 16), torch.randn(16, 8)

    def call():
        return torch.ops.symm_mem.fused_all_gather_matmul(shards[rank], [b], 0, group.group_name)

    assert torch._inductor.config._micro_pipeline_tp
    _, (out,) = call()
    assert torch.allclose(out, shards.flatten(0, 1) @ b, atol=1e-4)
    assert raised(lambda: tsd.async_tp(group)).startswith("ValueError: async_tp: group")
    said: list[str] = []
    logger = logging.getLogger("tilestream.integrations.torchtitan")
    logger.addHandler(handler := logging.Handler())
    logger.setLevel(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())
    metrics.close()
    assert len(said) == 1, said
    assert said[0].startswith("async_tp: fused_all_gather_matmul"), said
    assert not torch._inductor.config._micro_pipeline_tp
    assert "NotImplementedError" in raised(call)
    return True


def has_nothing_to_overlap(rank, world):
    """Without tensor parallelism it says so, and trains on."""
    said: list[str] = []
    logger = logging.getLogger("tilestream.integrations.torchtitan")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    _, metrics = overridden(world, 1)
    assert said == ["async_tp: parallelism.tensor_parallel_degree is 1, so there is nothing to overlap"], said
    assert not torch._inductor.config._micro_pipeline_tp
    metrics.close()
    return True
