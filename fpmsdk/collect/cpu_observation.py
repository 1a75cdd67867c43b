"""One snapshot of the CPUs that the threads of a process may run on, as an observer wrote it.

Source: collector.md section 4.4 (observation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.collect.faults import fault, mapping, require, sequence, text, whole

CPU_GLOB = "fpm-cpu-*.json"
CPU_SCHEMA = "aisimulate_fpm_cpu_affinity"
# When the observer of each kind of process looked.
MEASUREMENTS = {
    "launcher": "before_engine_start",
    "worker": "after_warmup",
    "scheduler": "scheduler_initialized",
}
STATUSES = ("observed", "partial", "unavailable")


def check_snapshot(record: Mapping[str, Any]) -> None:
    """Check that a snapshot is complete where it says so, and consistent.

    Raises
    ------
    CollectionError: names the field.

    Source: collector.md section 4.4.
    """
    text(str(record.get("hostname") or "").strip(), "hostname")
    for name in ("pid", "observer_thread_id"):
        whole(record.get(name), name, 1)
    status = record.get("status")
    require(status in STATUSES, "status", status, ", ".join(STATUSES))
    allowed = _numbers(record, "main_thread_allowed_cpus", minimum=0, may_be_empty=status == "unavailable")
    before = _numbers(record, "thread_ids_before", minimum=1, may_be_empty=True)
    after = _numbers(record, "thread_ids_after", minimum=1, may_be_empty=True)
    masks = {}
    for at, entry in enumerate(sequence(record.get("threads"), "threads")):
        thread = mapping(entry, f"threads[{at}]")
        thread_id = whole(thread.get("tid"), f"threads[{at}].tid", 1)
        is_listed = thread_id in before and thread_id not in masks
        require(is_listed, f"threads[{at}].tid", thread_id, "a thread that was listed before, once")
        masks[thread_id] = _numbers(thread, "allowed_cpus", minimum=0)
    for at, message in enumerate(sequence(record.get("errors"), "errors")):
        text(message, f"errors[{at}]")
    for at, entry in enumerate(sequence(record.get("thread_errors"), "thread_errors")):
        failed = mapping(entry, f"thread_errors[{at}]")
        require(failed.get("tid") in before, f"thread_errors[{at}].tid", failed.get("tid"), "a listed thread")
        text(failed.get("error"), f"thread_errors[{at}].error")
    is_complete = (
        before == after
        and set(masks) == set(before)
        and masks.get(record["pid"]) == allowed
        and record["observer_thread_id"] in masks
        and not record["errors"]
        and not record["thread_errors"]
    )
    require(status != "observed" or is_complete, "status", status, "no complete snapshot while masks are missing")


def _numbers(record: Mapping[str, Any], name: str, *, minimum: int, may_be_empty: bool = False) -> list[int]:
    values = record.get(name)
    if (
        not isinstance(values, list)
        or (not values and not may_be_empty)
        or any(type(value) is not int or value < minimum for value in values)
        or values != sorted(set(values))
    ):
        raise fault(name, values, f"increasing integers from {minimum} on")
    return values
