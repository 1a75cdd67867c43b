"""The scheduler of an observed engine: Dynamo's, which also writes the pool it has once it is constructed.

Source: collector.md sections 8.2 and 8.3.
"""

from __future__ import annotations

from typing import Any

from .cache import Unresolved, scheduler_cache
from .records import runtime, write_record
from .sources import require_engine

# Before anything of the engine is subclassed: a changed engine is not observed.
require_engine(runtime())

from dynamo.vllm.instrumented_scheduler import InstrumentedScheduler  # noqa: E402


class ObservedInstrumentedScheduler(InstrumentedScheduler):  # type: ignore[misc]  # Dynamo ships no types
    """Dynamo's scheduler; it schedules as ever. Parameters are those of the engine's own scheduler."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        write_record("scheduler", {"dp_rank": data_parallel_rank(self.vllm_config)}, self.vllm_config, self._observed)

    def _observed(self, unresolved: Unresolved) -> dict[str, Any]:
        return {
            "lifecycle": {"measurement": "scheduler_initialized", "cache_initialized": True},
            "attention_backend": None,
            "cache": scheduler_cache(self, unresolved),
        }


def data_parallel_rank(vllm_config: Any) -> int:
    """The data-parallel rank of the engine that a configuration is of."""
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if rank is None else rank)
