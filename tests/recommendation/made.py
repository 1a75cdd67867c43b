"""Candidates made by hand."""

from fpmsdk.recommendation.candidate import Candidate, Outcome, Sample, candidate_id

REPORT = {
    "completed_requests": 4,
    "num_ttft_samples": 4,
    "num_tpot_samples": 4,
    "num_e2e_latency_samples": 4,
    "mean_ttft_ms": 20.0,
    "mean_tpot_ms": 5.0,
    "mean_e2e_latency_ms": 100.0,
    "mean_output_token_throughput_per_user": 200.0,
    "output_throughput_tok_s": 600.0,
    "goodput_output_throughput_tok_s": 300.0,
    "goodput_request_throughput_rps": 8.0,
    "duration_ms": 1800.0,
    "gpu_hours": 0.001,  # two GPUs for 1.8 s
}


def made(index, *, knobs=(), tensor=1, gpus=1, score=None, objectives=None, metrics=REPORT, **outcome):
    sizes = {"replicas": 1, "tensor": tensor, "pipeline": 1, "attention_data": 1, "moe_tensor": 1, "moe_expert": 1}
    document = {
        "traffic": {"source": {"type": "synthetic"}, "load": {"type": "concurrency", "concurrency": 1}},
        "engine": {
            "mode": "aggregated",
            "model": "org/model",
            "hardware": "h200_sxm",
            "backend": "vllm",
            "workers": {"aggregated": {"parallelism": sizes}},
        },
    }
    status = {"status": "feasible", **outcome}
    return Candidate(
        candidate_id(index),
        Sample("aggregated", "vllm", 0, tuple(sorted(knobs))),
        document,
        Outcome(**status, metrics=dict(metrics), used_gpus=gpus),
        score,
        objectives,
    )


def pair(index, first, second, **more):
    return made(index, score=first, objectives={"throughput_per_gpu": first, "throughput_per_user": second}, **more)
