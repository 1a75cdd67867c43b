"""What the process of a simulation takes of the machine, and what it may take.

Source: predict-recommend.md section 11.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from fpmsdk.prediction.config import Resources
from fpmsdk.replay.trace import Trace

_GB = 10**9  # memory_limit_gb and reserve_memory_gb are decimal, as the other sizes of a configuration
# Measured: 640 bytes a request, 3,700 where every one is reported. A block identity is in the trace and in the caches.
_BYTES_PER_REQUEST, _BYTES_PER_BLOCK = 4096, 32
_CGROUP = Path("/sys/fs/cgroup")


class MemoryPlan(Struct, frozen=True):
    """Memory that a replay is expected to need beyond what the process has, and what it may take, in bytes.

    `limit_bytes` is None where the system does not tell what is available.
    """

    num_requests: int
    needed_bytes: int
    available_bytes: int | None
    limit_bytes: int | None

    @property
    def refusal(self) -> str | None:
        """Why the replay should not begin; None when it may."""
        if self.limit_bytes is None or self.needed_bytes <= self.limit_bytes:
            return None
        return (
            f"a replay of {self.num_requests} requests needs about {self.needed_bytes / _GB:.2f} GB of memory and may "
            f"take {self.limit_bytes / _GB:.2f} GB; simulate fewer requests, or raise "
            "execution.resources.memory_limit_gb"
        )

    def document(self) -> dict[str, Any]:
        """The plan by field, and the reason of a refusal."""
        return structs.asdict(self) | {"reason": self.refusal}


def memory_plan(trace: Trace, limits: Resources) -> MemoryPlan:
    """The memory of a replay held against the limits of a configuration.

    >>> plan = memory_plan(Trace.synthetic(1000, 64, 8), Resources(memory_limit_gb=0.001))
    >>> plan.needed_bytes, plan.refusal.partition(" of memory")[0]
    (4096000, 'a replay of 1000 requests needs about 0.00 GB')
    """
    needed = len(trace) * _BYTES_PER_REQUEST + len(trace.hash_ids) * _BYTES_PER_BLOCK
    available = available_bytes()
    if limits.memory_limit_gb != "auto":
        return MemoryPlan(len(trace), needed, available, int(limits.memory_limit_gb * _GB))
    if available is None:
        return MemoryPlan(len(trace), needed, None, None)
    reserve = max(limits.reserve_memory_gb * _GB, limits.reserve_memory_fraction * available)
    limit = max(0, int(min(limits.available_memory_fraction * available, available - reserve)))
    return MemoryPlan(len(trace), needed, available, limit)


def available_bytes() -> int | None:
    """Memory that a process may still take, of the machine and of its control group; None where that is not told."""
    found = [size for size in (_available_of_machine(), _available_of_group()) if size is not None]
    return min(found, default=None)


def _available_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _available_of_group() -> int | None:
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))


def peak_rss_bytes() -> int | None:
    """Largest resident memory that this process had; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
