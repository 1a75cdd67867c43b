"""Measured requests of a serving run beside the predicted ones: latencies, throughput, and when each was sent.

Source: onboarding.md section 8.5 (assess).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fpmsdk.onboard.serving_findings import Findings
from fpmsdk.onboard.serving_play import idle_gap_s

_NS_PER_S, _NS_PER_MS = 1e9, 1e6


def matched_samples(
    measured: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, Any]],
    play: Mapping[str, Any],
    input_lengths: Sequence[int],
    findings: Findings,
) -> list[dict[str, Any]]:
    """One sample for every request that both sides completed with the same tokens, by turn.

    Parameters
    ----------
    measured: records of the benchmark (`profile_export.jsonl`).
    predicted: `per_request` records of the prediction.
    play: the served play.
    input_lengths: tokens of every prompt as the server tokenises it.
    """
    turns = len(play["requests"])
    by_turn: dict[int, Mapping[str, Any]] = {}
    for record in predicted:
        own = _predicted_turn(record)
        if own in by_turn or own not in range(turns):
            findings.failures.append(f"the prediction repeats or does not know request {record.get('request_id')!r}")
        by_turn[own] = record
    samples: dict[int, dict[str, Any]] = {}
    for record in measured:
        metadata = record.get("metadata") or {}
        turn = metadata.get("turn_index")
        if metadata.get("conversation_id") != play["id"] or type(turn) is not int or turn not in by_turn:
            findings.failures.append(f"a measured record is of no request of the play: turn {turn!r}")
        elif turn in samples:
            findings.failures.append(f"request {turn} was measured twice")
        elif _is_profiled(record, metadata, by_turn[turn], turn, findings):
            with findings.unavailable(f"request {turn}"):
                expected = (input_lengths[turn], play["requests"][turn]["out"])
                sample = _sample(turn, record, metadata, by_turn[turn], expected, findings)
                if sample is not None:
                    samples[turn] = sample | {"source_trace_input_tokens": play["requests"][turn]["in"]}
    return [samples[turn] for turn in sorted(samples)]


def latency_metric(samples: Sequence[Mapping[str, Any]], name: str, limit: float) -> dict[str, Any]:
    """The 95th percentile (linear) of a relative error over the samples that have it, against its limit.

    >>> latency_metric([{"ttft_relative_error": 0.1}, {"ttft_relative_error": 0.3}], "ttft", 0.2)["status"]
    'failed'
    """
    errors = sorted(
        sample[f"{name}_relative_error"] for sample in samples if sample.get(f"{name}_relative_error") is not None
    )
    if not errors:
        return {"status": "incomplete", "sample_count": 0, "issue": f"no sample has a {name}"}
    p95 = linear_quantile(errors, 0.95)
    return {
        "status": "passed" if p95 <= limit else "failed",
        "sample_count": len(errors),
        "p95_relative_error": p95,
        "max_relative_error": errors[-1],
        "threshold": limit,
    }


def linear_quantile(ordered: Sequence[float], quantile: float) -> float:
    """A quantile of sorted values, linear between neighbours.

    >>> round(linear_quantile([0.0, 0.1, 0.2, 0.3], 0.95), 12)
    0.285
    """
    place = (len(ordered) - 1) * quantile
    below = math.floor(place)
    above = ordered[min(below + 1, len(ordered) - 1)]
    return ordered[below] + (above - ordered[below]) * (place - below)


def throughput_metric(samples: Sequence[Mapping[str, Any]], num_requests: int, limit: float) -> dict[str, Any]:
    """Output tokens from the first dispatch to the last response, measured and predicted; needs every request."""
    if not samples or len(samples) != num_requests:
        return {"status": "incomplete", "issue": f"{len(samples)} of {num_requests} requests can be compared"}
    tokens = sum(sample["output_tokens"] for sample in samples)
    starts, ends = ([sample[name] for sample in samples] for name in ("request_start_ns", "request_end_ns"))
    measured = tokens / ((max(ends) - min(starts)) / _NS_PER_S)
    starts, ends = (
        [sample[name] for sample in samples] for name in ("simulated_arrival_ms", "simulated_last_token_ms")
    )
    predicted = tokens / ((max(ends) - min(starts)) / 1e3)
    error = relative_error(predicted, measured)
    return {
        "status": "passed" if error <= limit else "failed",
        "unit": "tokens/second",
        "measured": measured,
        "predicted": predicted,
        "relative_error": error,
        "threshold": limit,
    }


def check_dispatch(
    samples: Sequence[dict[str, Any]],
    play: Mapping[str, Any],
    max_delay_ms: float,
    max_delay_fraction: float,
    findings: Findings,
) -> None:
    """Add to every sample but the first when it was due and how far off it was sent; too far is a contradiction.

    Due is the recorded time on the clock of the first dispatch, or the recorded gap after the previous response,
    whichever is later.
    """
    for previous, sample in pairwise(samples):
        row, before = (play["requests"][one["turn_index"]] for one in (sample, previous))
        gap_s = idle_gap_s(before, row)
        since_first_s = row["t"] - play["requests"][0]["t"]
        not_before_ns = samples[0]["request_start_ns"] + round(since_first_s * _NS_PER_S)
        due_ns = max(not_before_ns, previous["request_end_ns"] + round(gap_s * _NS_PER_S))
        off_ms = (sample["request_start_ns"] - due_ns) / _NS_PER_MS
        sample["load_timing"] = {
            "not_before_ns": not_before_ns,
            "completion_gap_ms": gap_s * 1e3,
            "expected_ready_ns": due_ns,
            "dispatch_error_ms": off_ms,
        }
        bound_ms = max(max_delay_ms, gap_s * 1e3 * max_delay_fraction)
        if abs(off_ms) > bound_ms:
            findings.failures.append(
                f"request {sample['turn_index']} was sent {off_ms:.3f} ms off its time, more than {bound_ms:.3f} ms: "
                "look at the load policy and the lag of the benchmark client"
            )


def relative_error(predicted: float, measured: float) -> float:
    """|predicted - measured| / measured.

    Raises
    ------
    ValueError: nothing positive was measured.
    """
    if measured <= 0:
        raise ValueError(f"a relative error needs a positive measured value, found {measured}")
    return abs(predicted - measured) / measured


def _predicted_turn(record: Mapping[str, Any]) -> int:
    last = str(record.get("request_id", "")).rpartition(":")[2]
    return int(last) if last.isdecimal() else -1


def _is_profiled(
    record: Mapping[str, Any], metadata: Mapping[str, Any], predicted: Mapping[str, Any], turn: int, findings: Findings
) -> bool:
    found = {
        "error": record.get("error"),
        "was_cancelled": metadata.get("was_cancelled"),
        "benchmark_phase": metadata.get("benchmark_phase"),
        "predicted status": predicted.get("terminal_status"),
    }
    expected = {
        "error": None,
        "was_cancelled": False,
        "benchmark_phase": "profiling",
        "predicted status": "completed",
    }
    findings.expect(expected, found, f"request {turn}")
    return found == expected


def _sample(
    turn: int,
    record: Mapping[str, Any],
    metadata: Mapping[str, Any],
    predicted: Mapping[str, Any],
    expected: tuple[int, int],
    findings: Findings,
) -> dict[str, Any] | None:
    tokens = tuple(_metric(record, f"{side}_sequence_length", "tokens") for side in ("input", "output"))
    lengths = tuple(predicted.get(f"{side}_length") for side in ("input", "output", "requested_output"))
    if tokens != expected or lengths != (*expected, expected[1]):
        findings.failures.append(
            f"request {turn}: input and output tokens: tokenisation and play say {expected}, the server {tokens}, the "
            f"prediction {lengths[:2]} of {lengths[2]} asked for"
        )
        return None
    start_ns, end_ns = metadata["request_start_ns"], metadata["request_end_ns"]
    if type(start_ns) is not int or type(end_ns) is not int or not 0 <= start_ns < end_ns:
        raise ValueError(f"timestamps must be ordered whole nanoseconds, found {start_ns!r} and {end_ns!r}")
    arrival_ms, last_ms = _positive(predicted["arrival_time_ms"], zero=True), _positive(predicted["last_token_ms"])
    if last_ms <= arrival_ms:
        raise ValueError(f"the predicted request ends at {last_ms} ms, before it arrives at {arrival_ms} ms")
    sample = {
        "turn_index": turn,
        "prediction_request_id": predicted["request_id"],
        "serving_request_id": metadata.get("x_request_id"),
        "input_tokens": expected[0],
        "output_tokens": expected[1],
        "request_start_ns": start_ns,
        "request_end_ns": end_ns,
        "simulated_arrival_ms": arrival_ms,
        "simulated_last_token_ms": last_ms,
        **_pair("ttft", _metric(record, "time_to_first_token", "ms"), _positive(predicted["ttft_ms"])),
        "measured_tpot_ms": None,
        "predicted_tpot_ms": None,
        "tpot_relative_error": None,
    }
    if expected[1] > 1:  # of a single token there is no time between tokens
        sample |= _pair("tpot", _metric(record, "inter_token_latency", "ms"), _positive(predicted["itl_ms"]))
    return sample


def _pair(name: str, measured_ms: float, predicted_ms: float) -> dict[str, float]:
    return {
        f"measured_{name}_ms": measured_ms,
        f"predicted_{name}_ms": predicted_ms,
        f"{name}_relative_error": relative_error(predicted_ms, measured_ms),
    }


def _metric(record: Mapping[str, Any], name: str, unit: str) -> float:
    metric = (record.get("metrics") or {}).get(name)
    if not isinstance(metric, Mapping) or metric.get("unit") != unit:
        raise ValueError(f"{name} is missing or not in {unit}")
    return _positive(metric.get("value"), zero=True)


def _positive(value: Any, *, zero: bool = False) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"expected a finite {'non-negative' if zero else 'positive'} number, found {value!r}")
    return float(value)
