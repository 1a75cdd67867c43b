"""One observation: whose launch it is of, what was observed, and the file it is written to.

Source: collector.md section 8.5.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .cache import Unresolved
from .settings import resolved_config

SCHEMA = "aisimulate-runtime-observation/v1"
CONTEXT = "AISIMULATE_RUNTIME_CONTEXT"
MANIFEST = "AISIMULATE_RUNTIME_INSTRUMENTATION"
FOLDER = "AISIMULATE_RUNTIME_OBSERVATION_DIR"
_BOUND = ("attempt_id", "configuration", "phase", "bundle_sha256", "launch")


def runtime() -> dict[str, Any]:
    """`runtime` of the manifest that these observers are frozen with."""
    found: dict[str, Any] = json.loads(Path(os.environ[MANIFEST]).read_text(encoding="utf-8"))["runtime"]
    return found


def launch_context() -> dict[str, Any]:
    """What this engine was told of its launch."""
    found: dict[str, Any] = json.loads(Path(os.environ[CONTEXT]).read_text(encoding="utf-8"))
    return found


def write_record(
    kind: str,
    ranks: Mapping[str, int],
    vllm_config: Any,
    observe: Callable[[Unresolved], dict[str, Any]],
) -> Path:
    """Write an observation of this process. A fault of the observer is told in the record and never raised.

    Parameters
    ----------
    kind: `worker` or `scheduler`.
    ranks: `dp_rank` and, of a worker, `tp_rank` and `pp_rank`.
    vllm_config: the settings of the engine.
    observe: what is particular to the kind; gets a collector of what cannot be told.

    Raises
    ------
    FileExistsError: this rank was observed already.
    OSError: the file cannot be written.
    """
    unresolved = Unresolved()
    record: dict[str, Any] = {
        "schema_version": SCHEMA,
        "kind": kind,
        "dp_rank": None,
        "tp_rank": None,
        "pp_rank": None,
        **ranks,
    }
    try:
        record |= _origin(vllm_config)
        record |= observe(unresolved)
    except Exception as fault:  # the engine goes on, whatever an observer stumbles over
        unresolved.add(kind, f"{type(fault).__name__}: {fault}")
    record["unresolved_fields"] = unresolved.fields
    if unresolved.reasons:
        record["error"] = "; ".join(unresolved.reasons)
    name = "-".join(f"{axis.removesuffix('_rank')}{rank}" for axis, rank in ranks.items())
    target = Path(os.environ[FOLDER], f"runtime-observation-{kind}-{name}.json")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(record, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    try:
        os.link(draft, target)  # unlike a rename it does not replace another record
    finally:
        draft.unlink()
    return target


def _origin(vllm_config: Any) -> dict[str, Any]:
    from fpm_runtime_instrumentation import observed_binding

    context, known = launch_context(), runtime()
    config = loaded_model_config(vllm_config.model_config)
    sidecar = Path(config["path"]).with_name("hf_quant_config.json")
    sources = {sidecar.name: _sha256(sidecar)} if sidecar.is_file() else {}
    return {
        **{name: context[name] for name in _BOUND},
        "identity": context["launch"]["identity"],
        "runtime": {**known, "image": context["launch"]["deployment"]["image"]},
        "source_identity": known,
        "loaded_model_config": config,
        "model_config_sha256": config["sha256"],
        "model_config_source_files": sources,
        "resolved_config": resolved_config(vllm_config),
        "instrumentation_binding": observed_binding(),
    }


def loaded_model_config(model: Any) -> dict[str, str]:
    """Path and digest of the `config.json` that the engine loaded: of a local folder, or of a commit in the hub cache.

    Parameters
    ----------
    model: the engine's `ModelConfig`.

    Raises
    ------
    RuntimeError: no such file, or another configuration file lies beside it.
    """
    if os.path.isdir(model.model):
        folder = Path(model.model)
    else:
        from huggingface_hub import try_to_load_from_cache

        commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
        found = try_to_load_from_cache(model.model, "config.json", revision=commit)
        if not isinstance(found, str):
            raise RuntimeError(f"config.json of {model.model} at {commit} is not in the hub cache")
        folder = Path(found).parent
    path = folder / "config.json"
    if not path.is_file() or (folder / "params.json").exists():
        raise RuntimeError(f"{folder}: expected config.json and no params.json beside it; which one was loaded is open")
    return {"path": str(path), "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
