"""A whole-forward model of the recorded engine: its pair with the files that a configuration names."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

# What direct lookups never read, but every systems root states.
_HARDWARE = """\
data_dir: data/cpu-2-cores
gpu: {mem_bw: 2.0e+10, bfloat16_tc_flops: 1.0e+11}
node: {num_gpus_per_node: 1, intra_node_bw: 1.0e+10, inter_node_bw: 1.0e+9}
misc: {nccl_mem: {1: 0}, other_mem: 0}
"""
_ARCHITECTURE = "Qwen3ForCausalLM"


def forward_config(folder: str | PathLike[str]) -> dict[str, Any]:
    """A configuration of strict lookups in the engine's self-benchmark.

    Parameters
    ----------
    folder: an empty directory, which receives a systems root, the checkpoint's `config.json` and a copy of the pair.

    Returns
    -------
    A configuration for `ForwardPassPerfModel.best_available`.

    Raises
    ------
    OSError: the folder cannot be written.

    >>> import tempfile
    >>> from fpmsdk import ForwardPassPerfModel
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
    ...     round(model.predict_decode_latency_total(1, 64), 3)
    5.221
    """
    import pyarrow.parquet as pq

    from fpmsdk.perfdb.forward_writer import publish_rows
    from fpmsdk.sample import forward_pair

    place = Path(folder).absolute()
    checkpoint = place / "qwen3-small-random"
    for directory in (checkpoint, place / "systems"):
        directory.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"architectures": [_ARCHITECTURE]}))
    (place / "systems" / "cpu-2-cores.yaml").write_text(_HARDWARE)
    # A profile's architecture is verified against its checkpoint, which is this folder's.
    rows = [row | {"model_path": str(checkpoint)} for row in pq.read_table(forward_pair()).to_pylist()]
    table = publish_rows(str(place / "fpm_forward_perf.parquet"), rows).path
    measured = rows[0]
    names = ("system", "backend", "backend_version", "tp", "dp", "moe_tp", "moe_ep")
    modes = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype")
    resources = {
        "cache_layout": "linear",
        "kv_bytes_per_token": 2048,
        "max_num_tokens": 512,
        "max_batch_size": 16,
        "provenance": "settings of the recorded engine; its memory was not measured",
    }
    profile = {
        "schema_version": 1,
        "model": str(checkpoint),
        "model_revision": "0" * 40,
        "architecture": _ARCHITECTURE,
        "context_length": 2048,
        "num_experts": 0,
        "provenance": "recorded",
        "deployments": [{name: measured[name] for name in (*names, *modes)} | {"resources": resources}],
    }
    return {
        "model": str(checkpoint),
        **{name: measured[name] for name in ("system", "backend", "backend_version")},
        "worker_type": "aggregated",
        "fpm_profile": profile,
        "estimation_mode": "fpm_interpolation",
        "systems_paths": [str(place / "systems")],
        "estimator_config": {"fpm_interpolation": {"method": "direct", "fpm_parquet_path": table}},
    }
