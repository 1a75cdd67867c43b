"""The worker of an observed engine: the platform's own, which also writes what it allocated once it is warm.

Source: collector.md sections 8.2 and 8.3, vllm-facts.md sections 4.1, 4.3 and 4.4.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import Unresolved, worker_cache
from .records import launch_context, runtime, write_record
from .settings import class_name, compilation
from .sources import is_pinned_class, require_engine

# Before anything of the engine is subclassed: a changed engine is not observed.
require_engine(runtime())

from vllm.platforms import current_platform  # noqa: E402

if TYPE_CHECKING:
    NativeWorker: Any
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as NativeWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as NativeWorker


class ObservedWorker(NativeWorker):  # type: ignore[misc]  # vLLM's classes are known in its environment alone
    """The engine's worker; it works as ever. Parameters are those of the engine's own worker."""

    _initial_compilation: dict[str, Any] | None = None
    _budget_bytes: int | None = None
    _cache_initialized = False

    def determine_available_memory(self) -> int:
        """The engine's own budget for the cache, in bytes, unchanged."""
        self._initial_compilation = compilation(self.vllm_config.compilation_config)
        self._budget_bytes = super().determine_available_memory()
        return self._budget_bytes

    def initialize_from_config(self, *arguments: Any, **options: Any) -> Any:
        """Allocate the cache as the engine does."""
        result = super().initialize_from_config(*arguments, **options)
        self._cache_initialized = True
        return result

    def compile_or_warm_up_model(self, *arguments: Any, **options: Any) -> Any:
        """Warm up as the engine does, then write the observation of this rank."""
        result = super().compile_or_warm_up_model(*arguments, **options)
        parallel = self.vllm_config.parallel_config
        rank = getattr(parallel, "data_parallel_index", None)
        tensor = parallel.tensor_parallel_size
        ranks = {
            "dp_rank": int(parallel.data_parallel_rank if rank is None else rank),
            "tp_rank": self.rank % tensor,
            "pp_rank": self.rank // tensor % parallel.pipeline_parallel_size,
        }
        write_record("worker", ranks, self.vllm_config, self._observed)
        return result

    def _observed(self, unresolved: Unresolved) -> dict[str, Any]:
        from vllm.model_executor.offloader.base import get_offloader

        runner = self.model_runner
        if self._budget_bytes is None:
            unresolved.add("cache.available_cache_bytes", "the engine did not profile its memory")
        if getattr(runner, "shared_kv_cache_layers", None):
            unresolved.add("cache.layer_tensors", "layers that use the cache of another layer are not supported")
        kernels = getattr(runner, "_kernel_block_sizes", None) or runner.kernel_block_sizes
        backends = sorted(self._backends(unresolved))
        return {
            "lifecycle": {
                "measurement": "after_warmup",
                "cache_initialized": self._cache_initialized,
                "warmup_completed": True,
                # Captures are a part of the warm-up that has returned; an engine without graphs captures nothing in it.
                "capture_completed": True,
            },
            "hardware": self._hardware(),
            "attention_backend": backends[0] if len(backends) == 1 else None,
            "attention_backends": backends,
            "effective_offloader": class_name(type(get_offloader())),
            "initial_compilation_config": self._initial_compilation,
            "cache": worker_cache(
                runner.kv_cache_config,
                self.vllm_config.compilation_config.static_forward_context,
                list(kernels),
                self._budget_bytes or 0,
                unresolved,
            ),
        }

    def _backends(self, unresolved: Unresolved) -> set[str]:
        known, names = runtime(), set()
        for group in self.model_runner.attn_groups:
            for part in group:
                names.add(part.backend.get_name())
                if not is_pinned_class(part.backend, known):
                    unresolved.add("attention_backends", f"{class_name(part.backend)} was not read for these observers")
        return names

    def _hardware(self) -> dict[str, Any]:
        # The name that the launch gave it; whether the device is one is compared by whoever reads the record.
        system = launch_context()["launch"]["identity"]["gpu"]
        if current_platform.is_cpu():
            from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

            node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
            told = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
            name = told[1].strip() if told else platform.machine()
            return {
                "gpu": system,
                "device_type": "cpu",
                "sm": None,
                "device_name": name,
                "total_memory_bytes": int(node.total_memory),
            }
        import torch

        found = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": system,
            "device_type": "cuda",
            "sm": 10 * found.major + found.minor,
            "device_name": found.name,
            "total_memory_bytes": int(found.total_memory),
        }
