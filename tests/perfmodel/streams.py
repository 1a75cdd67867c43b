"""Streams of iterations with known latencies, as columns."""

import numpy as np
import pyarrow as pa

from fpmsdk import ForwardPassPerfModel, FpmBatch


def regression_model(worker_type="decode", min_observations=5, **fit):
    return ForwardPassPerfModel.best_available(
        {
            "model": "m",
            "system": "s",
            "backend": "vllm",
            "worker_type": worker_type,
            "estimation_mode": "fpm_regression",
            "estimator_config": {"fpm_regression": {"min_observations": min_observations, "fit": fit}},
        }
    )


def decode_batch(requests, kv_tokens, latency_ms=0.0):
    """One iteration of one rank for each element."""
    requests, kv_tokens, latency_ms = np.broadcast_arrays(requests, kv_tokens, latency_ms)
    return FpmBatch.from_arrow(
        pa.table(
            {
                "num_decode_requests": requests.astype(np.uint32),
                "sum_decode_kv_tokens": kv_tokens.astype(np.uint32),
                "wall_time_s": latency_ms / 1000.0,
            }
        )
    )


def random_work(count, seed=0):
    """Requests and KV tokens of decode steps that vary independently of each other."""
    numbers = np.random.default_rng(seed)
    requests = numbers.integers(1, 65, count)
    return requests, requests * numbers.integers(16, 4096, count)


def latency_ms(requests, kv_tokens):
    """What an engine without noise takes."""
    return 4.0 + 0.125 * requests + 0.0003 * kv_tokens
