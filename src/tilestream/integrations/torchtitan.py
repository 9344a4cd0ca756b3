"""torchtitan's override: its tensor-parallel collectives overlap with the matmuls beside them.

--compile.enable --override.imports tilestream.integrations.torchtitan.async_tp
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import derive, override

from tilestream.distributed import async_tp as open_async_tp

logger = logging.getLogger(__name__)


class AsyncTPMetrics(MetricsProcessor):
    """torchtitan's metrics, which it makes before it compiles the model and closes after the last step.

    In between the tensor-parallel group's fused ops run here (`tilestream.distributed.async_tp`). `close` logs each of
    them, and what torch's compiler left unfused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, *, parallel_dims: Any, **options: Any) -> None:
        super().__init__(config, parallel_dims=parallel_dims, **options)
        self._handle = None
        if parallel_dims.tp_enabled:
            self._handle = open_async_tp(parallel_dims.get_dense_tp_mesh().get_group())
        else:
            logger.warning("async_tp: parallelism.tensor_parallel_degree is 1, so there is nothing to overlap")

    def close(self) -> None:
        """Give the group back to torch."""
        if self._handle is not None:
            for site in self._handle.report():
                logger.info("async_tp: %s", site)
            self._handle.close()
        super().close()


@override(target=MetricsProcessor.Config, exact=True, description="async TP on tilestream's kernels")
def async_tp(config: MetricsProcessor.Config) -> AsyncTPMetrics.Config:
    """What the run's metrics become. torchtitan finds it by its name in ``override.imports``."""
    made: AsyncTPMetrics.Config = derive(config, AsyncTPMetrics.Config)
    return made
