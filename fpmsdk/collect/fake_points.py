"""What a fake engine measures in a launch, and what the cache of every point holds.

Source: collector.md sections 5.2 and 11.1.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.collect.fake_launch import FakeLaunch
from fpmsdk.collect.grid import Point, decode_points, prefill_points
from fpmsdk.collect.kvwarm import DENSE_SKIP
from fpmsdk.errors import OnboardError


def warms_kv(launch: FakeLaunch) -> bool:
    """Whether decode reads real cache contents."""
    return launch.phase == "decode" and skip_reason(launch) is None


def skip_reason(launch: FakeLaunch) -> str | None:
    """Why decode reads synthetic cache contents; None when it reads real ones."""
    if not launch.switch("DYN_BENCH_KV_WARMUP", "on"):
        return "flag_off"
    if not launch.is_moe:
        return DENSE_SKIP
    return None if launch.prefix_caching else "prefix_caching_disabled"


def kv_regime(launch: FakeLaunch, point: Point) -> str | None:
    """What the cache of a point is seeded with; None from an engine too old to say."""
    if launch.faults.legacy:
        return None
    if point.point_type == "decode":
        reason = skip_reason(launch)
        return "legacy" if reason == "flag_off" else "fake_fallback" if reason else "real_kv"
    if "prefill_real_seed" in point.reasons:
        return "real_prefix"
    if not point.total_kv_read_tokens:
        return "not_applicable"
    return "real_prefix" if launch.switch("DYN_BENCH_PREFILL_REAL_SEED", "off") else "fake_prefix"


def measured_points(launch: FakeLaunch) -> list[Point]:
    """The points of a launch in the order in which they run: those that were asked for, else the engine's grid."""
    if launch.points is not None:
        return [_explicit(launch.phase, entry) for entry in launch.points[launch.phase]]
    if launch.phase == "decode":
        return decode_points(launch.limits, launch.samples, warm_kv=warms_kv(launch))
    if launch.phase != "prefill":
        raise OnboardError(f"fake engine: --benchmark-mode: use prefill or decode, found {launch.phase!r}")
    points = prefill_points(launch.limits, launch.samples, prefix_caching=launch.prefix_caching)
    if launch.faults.duplicate_seeds:
        bare = [point for point in points if not point.total_kv_read_tokens]
        points += [
            Point("prefill", point.batch_size, point.total_prefill_tokens, 0, (*point.reasons, "prefill_real_seed"))
            for point in bare
        ]
    return points


def _explicit(phase: str, entry: dict[str, Any]) -> Point:
    rows = entry.get("rows")
    return Point(
        phase,
        entry["batch_size"],
        entry.get("total_prefill_tokens", 0),
        entry["total_kv_read_tokens"],
        ("explicit",),
        entry.get("partition"),
        None if rows is None else tuple((new, kv) for new, kv in rows),
    )


def warmup_records(iterations: int, replicas: list[Point]) -> list[dict[str, Any]]:
    """Warm-ups before the sweep: the global iterations, then one of every eager shape."""
    records = []
    begin = 0
    for kind, point, count in [("global", None, iterations), *(("eager_shape", point, 1) for point in replicas)]:
        if count == 0:
            continue
        shape = None if point is None else {"batch_size": point.batch_size, "tokens": point.tokens}
        records.append(
            {
                "kind": kind,
                "requested_shape": shape,
                "status": "completed",
                "forward_index_start": begin,
                "forward_index_end": begin + count,
                "observed_forward_count": count,
                "completed_points_before": 0,
                "first_scheduled_requests": None,
                "last_scheduled_requests": None,
                "validation": {"status": "not_performed"},
            }
        )
        begin += count
    return records
