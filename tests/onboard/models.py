"""Checkpoint configurations and described systems that tests write to disk."""

import json

# The two configurations of the specification's vectors.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LARGE = SMALL | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
}
MIXTRAL = SMALL | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
# Two layers with full attention and six with a window.
WINDOWED = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 2,
    "num_local_experts": 8,
    "torch_dtype": "bfloat16",
}
INKLING = {
    "architectures": ["InklingForConditionalGeneration"],
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "sliding_window_size": 512,
    "local_layer_ids": [0, 2],
    "use_sconv": True,
    "sconv_kernel_size": 4,
    "num_experts": 0,
    "dtype": "bfloat16",
}
BFLOAT16 = {"fmha_quant_mode": "bfloat16", "kv_cache_dtype": "bfloat16"}
IDENTITY = {
    "model": "org/model",
    "model_revision": "0" * 40,
    "model_kind": "dense",
    "framework_version": "0.27.0",
    "gpu": "h200_sxm",
    "interconnect": "nvswitch",
}

_SYSTEM = """data_dir: data/{name}
gpu: {{mem_bw: 4.0e+12, mem_capacity: {capacity}}}
node: {{num_gpus_per_node: {node}, intra_node_bw: {intra}, inter_node_bw: {inter}{rack}}}
misc:
  other_mem: 3758096384
  nccl_mem: {{1: 0, 2: 358612992, 4: 411041792, 8: 411041792}}
"""


def write_config(folder, config, sidecar=None):
    """Write a `config.json`, with its sidecar when there is one; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    if sidecar is not None:
        (folder / "hf_quant_config.json").write_text(sidecar if isinstance(sidecar, str) else json.dumps(sidecar))
    return path


def write_systems(root):
    """A systems root with the two systems of the vectors."""
    root.mkdir(parents=True, exist_ok=True)
    h200 = {"capacity": 151397597184, "node": 8, "intra": "4.5e+11", "inter": "5.0e+10", "rack": ""}
    gb200 = {
        "capacity": 198674743296,
        "node": 4,
        "intra": "9.0e+11",
        "inter": "9.0e+11",
        "rack": ", num_gpus_per_rack: 72",
    }
    for name, values in (("h200_sxm", h200), ("gb200", gb200)):
        (root / f"{name}.yaml").write_text(_SYSTEM.format(name=name, **values))
    return root
