"""A deployment to predict at once: the recorded engine, its measured passes, and the configuration that names them."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from fpmsdk.files import whole_file
from fpmsdk.sample.forward import forward_config

_CONFIGURATION = """\
# A small Qwen3 on a two-core CPU, served by vLLM: every pass is priced by measurements of this engine.
traffic:
  source: {{type: synthetic, input_tokens: 128, output_tokens: 32}}
  load: {{type: concurrency, concurrency: 4}}
  stop: {{requests: 40}}
engine:
  model: qwen3-small-random
  hardware: {system}
  backend_version: {backend_version}
  systems_paths: [systems]
  fpm_profile: profile.json
  estimation_mode: fpm_interpolation
  estimator_config:
    fpm_interpolation: {{method: direct, collect_coverage: true, fpm_parquet_path: fpm_forward_perf.parquet}}
  context_length: 2048
  workers:
    aggregated:
      kv_cache: {{block_size: 16, capacity: {{type: fixed, blocks: 400}}}}
evaluation:
  sla: {{ttft_ms: 60, itl_ms: 6}}
"""
_MEMORY = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")


def write_quickstart(folder: str | PathLike[str]) -> Path:
    """Write a configuration and all that it names.

    Parameters
    ----------
    folder: an empty directory.

    Returns
    -------
    Path of `predict.yaml`.

    Raises
    ------
    OSError: the folder cannot be written.

    >>> import tempfile
    >>> from fpmsdk.prediction.config import read_config
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_config(write_quickstart(folder)).engine.hardware
    'cpu-2-cores'
    """
    place = Path(folder)
    timing = forward_config(place)
    profile = timing["fpm_profile"]
    # The cache is given in blocks, so that no figure of memory is read.
    profile["deployments"][0]["resources"].update(dict.fromkeys(_MEMORY, 0))
    with whole_file(place / "profile.json") as file:
        file.write((json.dumps(profile, indent=2) + "\n").encode())
    with whole_file(place / "predict.yaml") as file:
        file.write(_CONFIGURATION.format_map(timing).encode())
    return place / "predict.yaml"
