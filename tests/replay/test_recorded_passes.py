"""Fed with the arrivals and step ends of a recorded run, the rank schedules every pass of the real engine."""

import gzip
import json
from importlib.resources import files

import numpy as np

from fpmsdk import FpmBatch, sample
from fpmsdk._ext.scheduler import Requests, Scheduler

# The engine loop saw a request this much after the step before, at most.
LOOP_SECONDS = 0.003

# Telemetry columns, and what a pass of the rank calls them.
COUNTS = {
    "num_prefill_requests": "num_prefill_requests",
    "sum_prefill_tokens": "sum_prefill_tokens",
    "sum_prefill_kv_tokens": "sum_prefill_kv_tokens",
    "num_decode_requests": "num_decode_requests",
    "sum_decode_kv_tokens": "sum_decode_kv_tokens",
    "queued_num_prefill_requests": "num_queued_prefill",
    "queued_sum_prefill_tokens": "sum_queued_prefill_tokens",
    "queued_num_decode_requests": "num_queued_decode",
    "queued_sum_decode_kv_tokens": "sum_queued_decode_kv_tokens",
}
VARIANCES = {
    "var_prefill_length": "var_prefill_length",
    "var_decode_kv_tokens": "var_decode_kv_tokens",
    "queued_var_prefill_length": "var_queued_prefill_length",
    "queued_var_decode_kv_tokens": "var_queued_decode_kv_tokens",
}


def simulated_passes(run, wall_time_s):
    """The passes of a rank that gets each request and ends each step when the engine did."""
    requests, engine = run["requests"], run["engine"]
    scheduler = Scheduler(
        Requests([request["prompt"] for request in requests], [request["output"] for request in requests]),
        "vllm",
        num_gpu_blocks=engine["num_gpu_blocks_override"],
        block_size=engine["block_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
    )
    emitted = np.zeros(len(requests), int)
    arrived, now = 0, 0.0
    for seconds in wall_time_s:
        if not scheduler.has_unfinished():
            now = max(now, requests[arrived]["added"])
        while arrived < len(requests) and requests[arrived]["added"] <= now + LOOP_SECONDS:
            scheduler.enqueue(arrived)
            arrived += 1
        yield scheduler.schedule_pass()
        tokens, _ = scheduler.complete_pass()
        # All tokens of a step come out at once; a step without tokens is as long as its telemetry says.
        ends = {requests[request]["token_times"][emitted[request]] for request in tokens}
        emitted[tokens] += 1
        assert len(ends) <= 1
        now = ends.pop() if ends else now + seconds


def test_every_recorded_pass_is_reproduced():
    run = json.loads(gzip.decompress((files(sample) / "requests_eval.json.gz").read_bytes()))
    batch = FpmBatch.from_frames(sample.eval_frames())
    batch = batch.take(np.flatnonzero(batch.wall_time_s > 0))  # heartbeats are no passes
    decided = list(simulated_passes(run, batch.wall_time_s))
    assert len(decided) == 9327
    for column, name in COUNTS.items():
        assert getattr(batch, column).tolist() == [one_pass[name] for one_pass in decided], column
    for column, name in VARIANCES.items():
        np.testing.assert_allclose([one_pass[name] for one_pass in decided], getattr(batch, column), atol=1e-6)
    assert sum(len(one_pass["preempted"]) for one_pass in decided) > 0
