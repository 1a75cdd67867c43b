"""A measured run of a real engine, pass by pass: does the simulated scheduler decide the same, and what would other
pass times have made of it?

Not a replay: the decisions are driven by the recorded step ends. Source: engine-and-replay.md section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.pricing import PassPricer, TimingModel, price_pass
from fpmsdk._ext.scheduler import Requests, Scheduler
from fpmsdk.errors import TraceError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.formats.recorded import RecordedRun
from fpmsdk.replay.latency import RequestLatencies

if TYPE_CHECKING:
    from fpmsdk.metrics import FpmBatch

Float64 = NDArray[np.float64]

# An engine loop sees a request this much after the end of the step before, at most.
LOOP_MS = 3.0

# Telemetry columns, and what a simulated pass calls them.
_COUNTS = {
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
_VARIANCES = {
    "var_prefill_length": "var_prefill_length",
    "var_decode_kv_tokens": "var_decode_kv_tokens",
    "queued_var_prefill_length": "var_queued_prefill_length",
    "queued_var_decode_kv_tokens": "var_queued_decode_kv_tokens",
}
# The engine sums floats in another order.
_VARIANCE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSchedule:
    """The passes of a simulated rank that got each request, and ended each step, when the engine did.

    Attributes
    ----------
    passes: what each pass was, as `Scheduler.schedule_pass` returns it.
    start_ms: float64[n], the end of the pass before, on an idle engine the planned arrival.
    end_ms: float64[n], as recorded.
    differences: what is not as recorded, in words: the composition of a pass, or the time of a token.
    tokens: output tokens whose time is as recorded.
    """

    passes: Sequence[dict[str, Any]]
    start_ms: Float64
    end_ms: Float64
    differences: Sequence[str]
    tokens: int


def measured_schedule(run: RecordedRun, batch: FpmBatch, launch: EngineLaunchConfig) -> MeasuredSchedule:
    """Drive the scheduler with the recorded step ends and compare every pass and every token.

    Parameters
    ----------
    run: with token times and the moments at which the engine got the requests.
    batch: the telemetry of the run, one rank; rows without wall time are heartbeats and left out.
    launch: the engine.

    Raises
    ------
    TraceError: the run was not measured.
    """
    if len(run.token_ms) == 0 or np.isnan(run.added_ms).any():
        raise TraceError(
            "the run has no token_times or no added times; only a measured run can be driven", field="added"
        )
    batch = batch.take(np.flatnonzero(batch.wall_time_s > 0))
    engine = launch.engine
    scheduler = Scheduler(
        Requests(run.trace.prompt_tokens, run.trace.output_tokens),
        "vllm",
        num_gpu_blocks=engine.num_gpu_blocks,
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        enable_chunked_prefill=engine.enable_chunked_prefill,
    )
    # All tokens of a step come out at once, so the times at which tokens came out are the ends of the steps with any.
    step_ends = iter(np.unique(run.token_ms).tolist())
    generated = np.zeros(len(run.trace), np.int64)
    passes: list[dict[str, Any]] = []
    starts: list[float] = []
    ends: list[float] = []
    differences: list[str] = []
    arrived, now, right = 0, 0.0, 0
    for wall_time_s in batch.wall_time_s.tolist():
        start = now
        if not scheduler.has_unfinished():
            if arrived == len(run.trace):
                break
            start, now = float(run.trace.arrival_ms[arrived]), max(now, float(run.added_ms[arrived]))
        while arrived < len(run.trace) and run.added_ms[arrived] <= now + LOOP_MS:
            scheduler.enqueue(arrived)
            arrived += 1
        passes.append(scheduler.schedule_pass())
        emitted = scheduler.complete_pass()[0]
        # A step without tokens ended when its telemetry says.
        now = next(step_ends, now) if emitted else now + wall_time_s * 1e3
        starts.append(start)
        ends.append(now)
        recorded_ms = run.token_ms[run.token_offsets[emitted] + generated[emitted]]
        right += int(np.count_nonzero(recorded_ms == now))
        for request, at_ms in zip(emitted, recorded_ms.tolist(), strict=True):
            if at_ms != now:
                differences.append(
                    f"token {generated[request]} of request {run.trace.request_ids[request]}: recorded at {at_ms} ms, "
                    f"pass {len(passes) - 1} ends at {now} ms"
                )
        generated[emitted] += 1
    differences += _composition_differences(passes, batch)
    if scheduler.has_unfinished() or arrived < len(run.trace):
        differences.append(f"after the {len(batch)} recorded passes the simulated engine is not done")
    return MeasuredSchedule(passes, np.array(starts), np.array(ends), differences, right)


def _composition_differences(passes: Sequence[dict[str, Any]], batch: FpmBatch) -> list[str]:
    differences = []
    if len(passes) != len(batch):
        differences.append(f"{len(batch)} passes recorded, {len(passes)} simulated")
    for column, name in (_COUNTS | _VARIANCES).items():
        recorded = getattr(batch, column)[: len(passes)].astype(np.float64)
        simulated = np.array([one[name] for one in passes], np.float64)
        tolerance = _VARIANCE_TOLERANCE * np.maximum(recorded, 1.0) if column in _VARIANCES else 0.0
        differences += [
            f"pass {index} {column}: recorded {recorded[index]:g}, simulated {simulated[index]:g}"
            for index in np.flatnonzero(np.abs(recorded - simulated) > tolerance)
        ]
    return differences


def latencies_of_prices(
    run: RecordedRun, schedule: MeasuredSchedule, timing: TimingModel
) -> tuple[RequestLatencies, float]:
    """What users would have seen had each recorded pass taken what a timing model says, the schedule unchanged.

    Time is stretched pass by pass: a request arrives in the same part of the same pass, and idle time stays. So a
    latency holds the errors of the passes that the request saw, and of no others.

    Returns
    -------
    The latencies from the planned arrivals, and the sum of all prices in ms.
    """
    pricer = PassPricer(timing, True, 1.0, 1.0)
    price_ms = np.zeros(len(schedule.passes))
    for number, one in enumerate(schedule.passes):
        work = {name: value for name, value in one["work"].items() if name != "rank"}
        prefill_ms, decode_ms, _ = price_pass(pricer, **work)
        price_ms[number] = prefill_ms + decode_ms
    edges = np.ravel([schedule.start_ms, schedule.end_ms], "F")
    idle_ms = schedule.start_ms - np.append(0.0, schedule.end_ms[:-1])
    stretched = np.cumsum(np.ravel([idle_ms, price_ms], "F"))

    def at(times_ms: Float64) -> Float64:
        moved: Float64 = np.interp(times_ms, np.append(0.0, edges), np.append(0.0, stretched))
        return moved

    first = run.token_offsets[:-1]
    last = run.token_offsets[1:] - 1
    token_ms = at(run.token_ms)
    latencies = RequestLatencies.of(
        at(run.trace.arrival_ms),
        token_ms[first],
        token_ms[np.minimum(first + 1, last)],
        token_ms[last],
        np.diff(run.token_offsets),
    )
    return latencies, float(price_ms.sum())
