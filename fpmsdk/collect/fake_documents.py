"""Blocks of a fake engine's result files that describe the engine and not a point.

Source: collector.md sections 5.1 and 7.3.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.collect.fake_launch import FakeLaunch
from fpmsdk.collect.measurement_records import EXECUTION_CONTRACT
from fpmsdk.collect.paths import rank_path

GIANT_KV_TOKENS = 1_000_000
GIANT_KV_REPEATS = 3


def measurement_protocol(launch: FakeLaunch) -> dict[str, Any]:
    """`measurement_protocol`: how samples are taken and what is recorded of them."""
    return {
        "schema_version": 1,
        "content_identity": "coordinate_rank_slot_v1",
        "content_seed": "fake",
        "synthetic_content": "random",
        "synthetic_pool_tag": "",
        "prompt_hash_encoding": "uint32_le",
        "independent_repetitions": 1,
        "timing_metric": "scheduler_wall_time",
        "input_evidence_scope": "injected_prompt_token_ids",
        "unobserved": [],
        "preparation": {
            "warmup_iterations": int(launch.flags.get("--benchmark-warmup-iterations", 5)),
            "prefill_real_seed": launch.switch("DYN_BENCH_PREFILL_REAL_SEED", "off"),
            "decode_real_kv_warmup": launch.switch("DYN_BENCH_KV_WARMUP", "on"),
            "giant_kv_threshold": GIANT_KV_TOKENS,
            "giant_kv_repeats": GIANT_KV_REPEATS,
        },
        "execution_evidence": dict(EXECUTION_CONTRACT),
    }


def benchmark_config(launch: FakeLaunch, rank: int) -> dict[str, Any]:
    """`config`: what the benchmark was asked for."""
    samples = launch.samples
    return {
        "mode": launch.phase,
        "randomize_kda_state": False,
        "hybrid_live_state": False,
        "warmup_iterations": int(launch.flags.get("--benchmark-warmup-iterations", 5)),
        "output_path": rank_path(str(launch.output), rank),
        "timeout": int(launch.flags.get("--benchmark-timeout", 900)),
        "prefill_max_new_token_samples": samples.prefill_new_tokens,
        "prefill_max_kv_read_token_samples": samples.prefill_kv_tokens,
        "decode_max_kv_read_token_samples": samples.decode_kv_tokens,
        "decode_max_batch_size_samples": samples.decode_batches,
        "prefix_max_batch_size_samples": samples.prefix_batches,
        "max_batch_size": None,
        "collect_imbalanced": False,
    }


def graph_settings(launch: FakeLaunch) -> dict[str, Any]:
    """`cudagraph`: captured graphs by phase."""
    prefill, decode = launch.limits.captures, launch.limits.decode_captures
    sizes = sorted({*prefill, *decode})
    return {
        "mode": launch.cudagraph_mode,
        "prefill_mode": launch.mode_of("prefill") if prefill else "NONE",
        "decode_mode": launch.mode_of("decode") if decode else "NONE",
        "max_capture_size": sizes[-1] if sizes else 0,
        "capture_sizes": sizes,
        "prefill_capture_sizes": list(prefill),
        "decode_capture_sizes": list(decode),
    }


def engine_block(launch: FakeLaunch, rank: int) -> dict[str, Any]:
    """`engine`: what the engine resolved."""
    config = launch.config.get("text_config") or launch.config
    graphs = graph_settings(launch)
    topology = launch.topology
    return {
        "model": {
            "dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            "model_type": config.get("model_type") or launch.config.get("model_type"),
            "architectures": launch.config.get("architectures") or config.get("architectures"),
            "model": launch.model,
        },
        "parallel": {
            "data_parallel_size": topology.dp,
            "data_parallel_rank": rank,
            "tensor_parallel_size": topology.tp,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "enable_expert_parallel": "--enable-expert-parallel" in launch.flags,
            "enable_eplb": "--enable-eplb" in launch.flags,
        },
        "kv_cache": {
            "cache_dtype": launch.flags.get("--kv-cache-dtype", "auto"),
            "block_size": launch.limits.block_size,
            "enable_prefix_caching": launch.prefix_caching,
            "groups": [
                {
                    "type": "FullAttentionSpec",
                    "dtype": "bfloat16",
                    "head_size": 128,
                    "num_kv_heads": 8,
                    "block_size": launch.limits.block_size,
                    "sliding_window": None,
                    "attention_chunk_size": None,
                    "non_causal": False,
                }
            ],
        },
        "scheduler": {
            "max_num_batched_tokens": launch.limits.max_num_batched_tokens,
            "max_num_seqs": launch.limits.max_num_seqs,
            "async_scheduling": is_async(launch),
        },
        "attention": {"backend_resolved": "FLASH_ATTN"},
        "quantization": {"method": None},
        "speculative": None,
        "graph": {"cudagraph_mode": graphs["mode"], "cudagraph_capture_sizes": graphs["capture_sizes"]},
        "versions": {"vllm": launch.version},
        "resolved": None,
        "resolution": "fake",
    }


def is_async(launch: FakeLaunch) -> bool:
    """Whether passes are scheduled while the former one runs; the engine does so unless it is told not to."""
    return launch.faults.is_async or "--no-async-scheduling" not in launch.flags
