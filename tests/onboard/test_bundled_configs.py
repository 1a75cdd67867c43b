"""Every `config.json` of the two public data packages gives the draft, or the refusal, that the peer gives.

The first test runs where `FPMSDK_TEST_SYSTEMS_013` and `FPMSDK_TEST_SYSTEMS_012` name the systems roots of the
packages; their configurations are beside them.
"""

import hashlib
import os
from pathlib import Path

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.draft import derive_profile
from fpmsdk.onboard.intake import load_model_config
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.suggest import suggest_topologies
from tests.onboard.models import BFLOAT16, IDENTITY, write_config
from tests.vectors import load_vectors

# Facts by SHA-256 of a configuration and its sidecar: refused or read, and the drafts of three topologies.
PEER = load_vectors("onboarding_configs_peer")
FIELDS = (
    "gemm_quant_mode",
    "moe_quant_mode",
    "fmha_quant_mode",
    "kv_cache_dtype",
    "comm_quant_mode",
    "architecture",
    "context_length",
    "num_experts",
    "cache_layout",
    "cache_groups",
    "kv_bytes_per_token",
    "weights_bytes",
    "activations_bytes",
    "runtime_overhead_bytes",
    "comm_overhead_bytes",
)
# What nothing in those files establishes.
STATED = {"fmha_quant_mode": "bfloat16"}
BLOCKS = {"cache_block_sizes": {"full_attention": 16, "sliding_attention": 16}}


def facts(draft):
    known = {name: draft.resolved[name] for name in FIELDS if name in draft.resolved}
    state = {"missing": sorted(draft.missing), "pending": bool(draft.pending_runtime)}
    return state | {"profile": draft.profile is not None} | known


def attempt(call):
    try:
        return call()
    except OnboardError as fault:
        assert str(fault)
        return {"refused": True}


def asked(kind, context, tensor):
    return SupportRequest.model_validate(
        {
            "identity": IDENTITY | {"model_kind": kind},
            "search": {"tensor_parallel": tensor, "context_length": context},
            "collection": {"prefill_cudagraph_policy": "runtime", "gpu_memory_utilization": 0.9},
        }
    )


def suggested(config, kind, context, stated):
    found = suggest_topologies(config, asked(kind, context, 1), stated)
    return {
        "candidates": [
            [
                candidate.family,
                candidate.required_gpus,
                candidate.status,
                candidate.known_required_bytes,
                candidate.estimated_required_bytes,
                sorted(candidate.missing),
                bool(candidate.pending_runtime),
            ]
            for candidate in found.candidates
        ],
        "rejected": [
            [item.family, item.required_gpus, item.known_required_bytes] for item in found.rejected_candidates
        ],
        "default": None if found.default is None else [found.default.family, found.default.required_gpus],
    }


def examined(folder):
    """What is found of one configuration, in the form of the recorded facts."""
    config = load_model_config(folder / "config.json")
    plain = derive_profile(config)
    kind = "moe" if plain.resolved.get("num_experts") else "dense"
    stated = STATED | ({} if "kv_cache_dtype" in plain.resolved else {"kv_cache_dtype": "bfloat16"})
    context = min(plain.resolved.get("context_length", 4096), 8192)
    found = {
        "suggestions": config.suggestions,
        "decoder": config.decoder_architecture,
        "runtime_layout": list(config.runtime_layout),
        "plain": facts(plain),
        "suggest": attempt(lambda: suggested(config, kind, context, stated)),
    }
    for name, tensor, more in (("tp1", 1, {}), ("tp2", 2, {}), ("tp8", 8, {}), ("tp2blocks", 2, BLOCKS)):
        request = asked(kind, context, tensor)
        found[name] = attempt(lambda request=request, more=more: facts(derive_profile(config, request, stated | more)))
    return found


@pytest.mark.peer_data
@pytest.mark.parametrize("release", ["013", "012"])
def test_every_bundled_config_gives_the_draft_of_the_peer(release, tmp_path, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", os.environ["FPMSDK_TEST_SYSTEMS_013"])
    bundle = Path(os.environ[f"FPMSDK_TEST_SYSTEMS_{release}"]).with_name("model_configs")
    seen = 0
    for path in sorted(bundle.glob("*_config.json")):
        if path.name.endswith(("_hf_quant_config.json", "_preprocessor_config.json")):
            continue
        folder = tmp_path / path.name
        folder.mkdir()
        content = path.read_bytes()
        (folder / "config.json").write_bytes(content)
        sidecar = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
        if sidecar.exists():
            (folder / "hf_quant_config.json").write_bytes(sidecar.read_bytes())
            content += sidecar.read_bytes()
        recorded = dict(PEER[hashlib.sha256(content).hexdigest()])
        name = recorded.pop("name")
        assert attempt(lambda folder=folder: examined(folder)) == recorded, name
        seen += 1
    assert seen >= 85


# Geometry of four recorded configurations, from which the facts follow without the files.
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "name", "kind"),
    [(QWEN3_32B, "Qwen--Qwen3-32B", "dense"), (MIXTRAL_8X7B, "mistralai--Mixtral-8x7B-v0.1", "moe")],
)
def test_the_recorded_facts_follow_from_the_geometry(config, name, kind, tmp_path, systems):
    recorded = next(entry for entry in PEER.values() if entry["name"] == name)
    path = write_config(tmp_path, config)
    for tensor in (1, 2, 8):
        draft = derive_profile(load_model_config(path), asked(kind, 8192, tensor), BFLOAT16)
        assert facts(draft) == recorded[f"tp{tensor}"]
    assert suggested(load_model_config(path), kind, 8192, BFLOAT16) == recorded["suggest"]


@pytest.mark.parametrize(
    ("config", "kind", "family", "required"),
    [(QWEN3_32B, "dense", "tp", 81496418304), (MIXTRAL_8X7B, "moe", "pure_tp", 102935175168)],
)
def test_the_defaults_of_the_specification(config, kind, family, required, tmp_path, systems):
    read = load_model_config(write_config(tmp_path, config))
    found = suggest_topologies(read, asked(kind, config["max_position_embeddings"], 1), BFLOAT16).default
    assert (found.family, found.required_gpus, found.estimated_required_bytes) == (family, 1, required)
