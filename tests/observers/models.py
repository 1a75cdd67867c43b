"""Small models with made-up weights, and what their caches must come to on a CPU, counted by hand.

A block of 128 tokens (the default on a CPU) of one layer: 128 tokens * 2 heads * (32 + 32) * 2 bytes = 32,768 bytes.
"""

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}

MODELS = {
    # Two layers of full attention: one group, two pages a block.
    "dense": {
        "config": {
            **_COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "hidden_act": "silu",
            "sliding_window": None,
            "use_sliding_window": False,
        },
        "role": "aggregated",
        "groups": 1,
        "page_size_bytes": 65_536,
    },
    # Sliding and full layers in turn: two groups of two layers, which alias each other.
    "hybrid": {
        "config": {
            **_COMMON,
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 64,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        "role": "prefill",
        "groups": 2,
        "page_size_bytes": 65_536,
    },
    # States of convolutions beside attention: what such a cache needs for a request is not established.
    "states": {
        "config": {
            **_COMMON,
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "full_attn_idxs": [2],
            "hidden_act": "silu",
            # 0.31 has kernels for this width alone.
            "conv_L_cache": 4,
            "conv_bias": False,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 1,
            "block_norm_eps": 1e-05,
            "norm_eps": 1e-05,
            "num_heads": 2,
            "block_use_swiglu": True,
            "block_use_xavier_init": True,
            "use_pos_enc": True,
        },
        "role": "prefill",
        "groups": None,
        "page_size_bytes": None,
        "told": "caches of MambaSpec are not supported",
    },
}
