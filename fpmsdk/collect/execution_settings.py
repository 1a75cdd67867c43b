"""What one worker says of its settings, held against the plan and the flags it was launched with.

Absent settings are missing evidence, contradictory ones are failures; both are collected, nothing is raised.
Source: collector.md section 7.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.launch_evidence import is_literal, requested_choice
from fpmsdk.collect.runtime_settings import (
    GRAPH_FIELDS,
    LaunchedSettings,
    cache_dtype,
    check_precision,
    check_revision,
    dtype_name,
    graph_settings,
)
from fpmsdk.errors import EvidenceError

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

Flags = Mapping[str, str | bool]

_NUMBER = (int, float)
_OPTIONAL_INT = (int, type(None))
_TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    "model_config": {
        "model": (str,),
        "revision": (str, type(None)),
        "dtype": (str,),
        "quantization": (str, type(None)),
        "max_model_len": (int,),
        "enforce_eager": (bool,),
    },
    "cache_config": {
        "cache_dtype": (str,),
        "gpu_memory_utilization": _NUMBER,
        "enable_prefix_caching": (bool,),
        "kv_cache_memory_bytes": _OPTIONAL_INT,
        "num_gpu_blocks_override": _OPTIONAL_INT,
    },
    "scheduler_config": {"max_num_batched_tokens": (int,), "max_num_seqs": (int,), "async_scheduling": (bool,)},
    "parallel_config": {
        "tensor_parallel_size": (int,),
        "pipeline_parallel_size": (int,),
        "data_parallel_size": (int,),
        "data_parallel_size_local": (int,),
        "data_parallel_external_lb": (bool,),
        "enable_expert_parallel": (bool,),
        "enable_eplb": (bool,),
        "decode_context_parallel_size": (int,),
        "prefill_context_parallel_size": (int,),
    },
    "kernel_config": {"moe_backend": (str,)},
}
_FLAGS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "--model": ("model_config", "model", str),
    "--max-model-len": ("model_config", "max_model_len", int),
    "--gpu-memory-utilization": ("cache_config", "gpu_memory_utilization", float),
    "--kv-cache-memory-bytes": ("cache_config", "kv_cache_memory_bytes", int),
    "--num-gpu-blocks-override": ("cache_config", "num_gpu_blocks_override", int),
    "--max-num-batched-tokens": ("scheduler_config", "max_num_batched_tokens", int),
    "--max-num-seqs": ("scheduler_config", "max_num_seqs", int),
    "--tensor-parallel-size": ("parallel_config", "tensor_parallel_size", int),
    "--pipeline-parallel-size": ("parallel_config", "pipeline_parallel_size", int),
    "--data-parallel-size": ("parallel_config", "data_parallel_size", int),
    "--decode-context-parallel-size": ("parallel_config", "decode_context_parallel_size", int),
    "--prefill-context-parallel-size": ("parallel_config", "prefill_context_parallel_size", int),
    "--moe-backend": ("kernel_config", "moe_backend", str),
}
# Values of flags that leave the choice to the engine.
_AUTOMATIC = {"--max-model-len": -1, "--moe-backend": "auto"}
_CHOICES = {
    "async-scheduling": ("scheduler_config", "async_scheduling"),
    "enable-prefix-caching": ("cache_config", "enable_prefix_caching"),
    "enforce-eager": ("model_config", "enforce_eager"),
}
_QUANTISATION_FIELDS = {
    "modelopt": {"type", "quant_method"},
    "modelopt_fp4": {"type", "quant_method"},
    "fp8": {"type", "activation_scheme", "weight_block_size"},
}
_COMMIT = re.compile("[0-9a-fA-F]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


class WorkerSettings:
    """Findings about the settings of one worker.

    Attributes
    ----------
    missing: what the worker or the launch files do not say.
    failures: what contradicts the plan, the launch or itself.
    """

    def __init__(self, plan: CollectionPlan, cell: Cell, observation: Mapping[str, Any], flags: Flags | None) -> None:
        self.plan, self.cell, self.observation, self.flags = plan, cell, observation, flags
        self.missing: list[str] = []
        self.failures: list[str] = []
        config = observation.get("resolved_config")
        if not isinstance(config, dict):
            self.missing.append("resolved_config is not reported")
        self.config: dict[str, Any] = config if isinstance(config, dict) else {}
        self.values = {section: self._typed(section, fields) for section, fields in _TYPES.items()}
        self._compare_plan()
        if flags is not None:
            self._compare_flags(flags)
        self._compare_revision()
        self._compare_precision()
        self._compare_graphs()

    def _typed(self, section: str, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
        # The reported settings of a section that are of the right kind.
        reported = self.config.get(section)
        if not isinstance(reported, dict):
            self.missing.append(f"{section} is not reported")
            return {}
        typed = {}
        for name, types in fields.items():
            value = reported.get(name)
            is_number = isinstance(value, int | float) and type(value) is not bool
            if name not in reported:
                self.missing.append(f"{section}.{name} is not reported")
            elif type(value) not in types or value == "":
                self.failures.append(f"{section}.{name}: unusable value {value!r}")
            elif is_number and not 0 < float(value) < math.inf:  # type: ignore[arg-type]
                self.failures.append(f"{section}.{name}: expected a positive finite number, found {value!r}")
            else:
                typed[name] = value
        return typed

    def _compare_plan(self) -> None:
        options, topology = self.plan.options, self.cell.topology
        cache, parallel = self.values["cache_config"], self.values["parallel_config"]
        if cache.get("gpu_memory_utilization", 1) > 1:
            self.failures.append("cache_config.gpu_memory_utilization exceeds 1")
        if parallel.get("data_parallel_size_local", 1) > parallel.get("data_parallel_size", 1):
            self.failures.append("parallel_config.data_parallel_size_local exceeds data_parallel_size")
        expected: dict[tuple[str, str], Any] = {
            ("model_config", "enforce_eager"): bool(options.get("enforce_eager", False)),
            ("parallel_config", "tensor_parallel_size"): topology.tp,
            ("parallel_config", "pipeline_parallel_size"): topology.pp,
            ("parallel_config", "data_parallel_size"): topology.dp,
            ("parallel_config", "decode_context_parallel_size"): topology.cp,
            ("parallel_config", "prefill_context_parallel_size"): 1,
            ("parallel_config", "enable_expert_parallel"): topology.moe_ep > 1,
            ("parallel_config", "enable_eplb"): bool(self.cell.backend_policy["aic_fields"].get("enable_eplb")),
        }
        if options.get("vllm_max_model_len", -1) > 0:
            expected["model_config", "max_model_len"] = options["vllm_max_model_len"]
        if options.get("gpu_memory_utilization") is not None:
            expected["cache_config", "gpu_memory_utilization"] = options["gpu_memory_utilization"]
        for (section, name), value in expected.items():
            self._compare(section, name, value, "planned")

    def _compare(self, section: str, name: str, expected: Any, source: str) -> None:
        values = self.values[section]
        if name in values and values[name] != expected:
            self.failures.append(f"{section}.{name}: {source} is {expected!r}, the worker has {values[name]!r}")

    def _compare_flags(self, flags: Flags) -> None:
        for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
            if f"--{name.replace('_', '-')}" not in flags:
                self._compare("cache_config", name, None, "launched")
        for flag, (section, name, kind) in _FLAGS.items():
            if flag in flags and name in self.values[section]:
                self._compare_flag(flag, flags[flag], section, name, kind)
        for flag, (section, name) in _CHOICES.items():
            choice = requested_choice(dict(flags), flag)
            if choice is not None:
                self._compare(section, name, choice, f"--{flag}")
        reported = {
            "--dtype": self.values["model_config"].get("dtype"),
            "--kv-cache-dtype": self.values["cache_config"].get("cache_dtype"),
        }
        for flag, value in reported.items():
            asked = flags.get(flag, "auto")
            if asked != "auto" and value is not None and dtype_name(value) != dtype_name(asked):
                self.failures.append(f"{flag}: launched is {asked!r}, the worker has {value!r}")
        if "--quantization" in flags:
            self._compare("model_config", "quantization", flags["--quantization"], "launched")

    def _compare_flag(self, flag: str, given: str | bool, section: str, name: str, kind: Callable[[str], Any]) -> None:
        if not isinstance(given, str) or not is_literal(given):
            self.missing.append(f"launch flag {flag} has no literal value")
            return
        try:
            value = kind(given)
        except ValueError:
            self.failures.append(f"launch flag {flag}: unusable value {given!r}")
            return
        if value == _AUTOMATIC.get(flag) or (flag == "--model" and self._is_snapshot_of(value)):
            return
        self._compare(section, name, value, f"launch flag {flag}")

    @property
    def revisions(self) -> set[Any]:
        """Revisions that the profile and the launch pin."""
        profile = self.plan.profile
        pinned = (None if profile is None else profile.model_revision, (self.flags or {}).get("--revision"))
        return {revision for revision in pinned if revision is not None}

    def _is_snapshot_of(self, repository: str) -> bool:
        # Offline, the engine names the folder of the cached snapshot; it counts as the repository only when the
        # pinned commit, the folder and the loaded configuration agree.
        reported = self.config["model_config"]
        path = PurePosixPath(reported["model"])
        if _REPOSITORY.fullmatch(repository) is None or "--" in repository or ".." in repository:
            return False
        if any(part.endswith((".", "-", ".git")) for part in repository.split("/")):
            return False
        is_normal = path.anchor == "/" and str(path) == reported["model"] and ".." not in path.parts
        folder = (f"models--{repository.replace('/', '--')}", "snapshots")
        loaded = reported.get("loaded_config_commit_hash")
        commits = {str(one).lower() for one in (path.name, loaded, *self.revisions)}
        return (
            is_normal
            and "\\" not in reported["model"]
            and "\x00" not in reported["model"]
            and path.parts[-3:-1] == folder
            and bool(self.revisions)
            and len(commits) == 1
            and _COMMIT.fullmatch(path.name) is not None
        )

    def _compare_revision(self) -> None:
        if not self.revisions:
            self.missing.append("no model revision is pinned")
        model = self.config.get("model_config")
        loaded = model.get("loaded_config_commit_hash") if isinstance(model, dict) else None
        commit = loaded.lower() if isinstance(loaded, str) and _COMMIT.fullmatch(loaded) else None
        if loaded is not None and commit is None:
            self.failures.append(f"model_config.loaded_config_commit_hash: no commit: {loaded!r}")
        for revision in sorted(map(str, self.revisions)):
            observed = self.values["model_config"].get("revision")
            is_pinned_commit = _COMMIT.fullmatch(revision) is not None
            if observed != revision and not (is_pinned_commit and commit == revision.lower()):
                if observed is None:
                    self.missing.append(f"model_config.revision: nothing shows that {revision} was loaded")
                else:
                    self.failures.append(f"model_config.revision: pinned is {revision}, the worker has {observed!r}")
            if is_pinned_commit and isinstance(model, dict):
                self._catch(check_revision, self.config, revision)

    def _compare_precision(self) -> None:
        model, cache = self.values["model_config"], self.values["cache_config"]
        if "dtype" in model and "cache_dtype" in cache:
            found = cache_dtype({"model_config": model, "cache_config": cache})
            if found != self.cell.kv_cache_dtype:
                self.failures.append(
                    f"cache precision: planned is {self.cell.kv_cache_dtype}, the worker has {found!r}"
                )
        if "quantization_config" not in self.config:
            self.missing.append("quantization_config is not reported")
            return
        if "quantization" not in model or "dtype" not in model:
            return
        method, quant = model["quantization"], self.config["quantization_config"]
        if method is not None and quant is None:
            self.failures.append(f"quantization {method!r} has no quantization_config")
        elif method is not None and (
            not isinstance(quant, dict) or not _QUANTISATION_FIELDS.get(method, {"type"}) <= quant.keys()
        ):
            self.missing.append(f"quantization_config of {method!r} is incomplete")
        elif method is not None and method not in _QUANTISATION_FIELDS:
            self.missing.append(f"quantization {method!r} is not audited")
        else:
            self._catch(check_precision, self.config, self._launched())

    def _launched(self) -> LaunchedSettings:
        dtypes, options = self.cell.resolved_dtypes, self.plan.options
        return LaunchedSettings(
            topology=self.cell.topology,
            max_model_len=options.get("vllm_max_model_len", -1),
            max_num_batched_tokens=options.get("max_num_batched_tokens") or 0,
            max_num_seqs=options.get("max_num_seqs") or 0,
            gpu_memory_utilization=options.get("gpu_memory_utilization") or 0.0,
            gemm_quant_mode=str(dtypes["gemm_quant_mode"]),
            moe_quant_mode=dtypes["moe_quant_mode"],
            kv_cache_dtype=self.cell.kv_cache_dtype,
        )

    def _compare_graphs(self) -> None:
        eager = self.values["model_config"].get("enforce_eager")
        tokens = self.values["scheduler_config"].get("max_num_batched_tokens")
        found = []
        for name, graphs in (
            ("graph_config", self.observation.get("graph_config")),
            ("compilation_config", self.config.get("compilation_config")),
        ):
            if not isinstance(graphs, dict) or not set(GRAPH_FIELDS) <= graphs.keys():
                self.missing.append(f"{name} is incomplete")
            elif eager is not None and tokens is not None:
                try:
                    found.append(graph_settings(graphs, eager=eager, tokens=tokens, allow_unused_captures=True))
                except EvidenceError as error:
                    self.failures.append(f"{name}: {error}")
        if len(found) == 2 and found[0] != found[1]:
            self.failures.append("graph_config and compilation_config differ")

    def _catch(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except EvidenceError as error:
            self.failures.append(str(error))
