"""Sessions whose configurations are probed: inputs, launches and evidence of the small model."""

import json

from fpmsdk.onboard.checkpoint import checkpoint_path, load_checkpoint
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from fpmsdk.onboard.launch import resolve_launch
from tests.collect.observed import CONFIG, REVISION, write_bundle, write_observations, write_systems

INPUTS = {
    "model": "org/model",
    "model_revision": REVISION,
    "model_kind": "dense",
    "gpu": "h200_sxm",
    "interconnect": "nvswitch",
    "framework_version": "0.27.0",
    "tensor_parallel": 1,
    "attention_data_parallel": 1,
    "moe_tensor_parallel": 1,
    "moe_expert_parallel": 1,
    "context_length": 128,
    "max_num_tokens": 64,
    "max_batch_size": 4,
    "precision": {
        "gemm_quant_mode": "bfloat16",
        "moe_quant_mode": "bfloat16",
        "fmha_quant_mode": "bfloat16",
        "kv_cache_dtype": "bfloat16",
    },
    "model_config": "model/config.json",
    "collection_deployment": {"executor": "fake", "image": "registry/engine:1"},
}
EXAMPLE = {
    "workload": {"input_tokens": 16, "output_tokens": 4},
    "collection": {"prefill_cudagraph_policy": "runtime"},
}


class Session:
    """A session in a folder, with the files of its model and of the observers of its engine."""

    def __init__(self, folder, configurations, inputs=None, config=None):
        self.folder = folder
        self.path = checkpoint_path(folder / "session.json")
        self.bundle = write_bundle(folder / "bundle")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
        self.systems = write_systems(folder / "systems")
        self.save({"inputs": {**INPUTS, **(inputs or {})}, "configurations": configurations})

    @property
    def state(self):
        return load_checkpoint(self.path)

    def save(self, patch=None, accept=()):
        revision = self.state.revision if self.path.exists() else None
        return save_checkpoint(self.path, patch=patch, expected_revision=revision, accept=accept)[0]

    def launches(self):
        return {label: resolve_launch(self.state, label, self.path).facts for label in self.state.configurations}

    def observed(self, **options):
        """Evidence of every configuration's launch; the path of its index."""
        return write_observations(self.folder / "probe", self.bundle, self.launches(), **options)

    def draft(self, label):
        return self.state.configurations[label].draft_request
