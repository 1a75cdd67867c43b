"""The validated result of one attempt of one cell: every measured point, with what each rank took for it.

Source: collector.md sections 5.1 and 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class RankTiming(NamedTuple):
    """What one rank says of the whole sweep: wall time from start to end, and the sum of the measured iterations."""

    rank: int
    elapsed_s: float
    measured_s: float


@dataclass(frozen=True)
class NativeCollection:
    """All points of a sweep in the order of their benchmark ids; row `i` is the point with id `i + 1`.

    Attributes
    ----------
    phase: `prefill` or `decode`.
    points: the points as the engine described them, equal on all ranks.
    regimes: what the KV of each point was seeded with; None where the engine is too old to say.
    coordinates: int64[3, points]: batch size, total prefill tokens, total KV tokens read.
    rank_wall_s: float64[points, ranks]: seconds that each rank took.
    timings: one entry a rank, by rank.
    backend_version: version of the engine that ran, from the provenance of the attempt.
    attempt_id, run_id, grid_digest: identity of the attempt, of the launch, and of the grid it measured.
    kvwarm: what the engine says of its KV warm-up; None from engines before it.
    input_provenance: tokenised text behind the measurements; only cells with a config-bound identity have it.
    engines: the `engine` block of each rank file, by rank; None where there is none.
    files: the rank files, by rank.

    Source: collector.md section 5.3.
    """

    phase: str
    points: tuple[dict[str, Any], ...]
    regimes: tuple[str | None, ...]
    coordinates: NDArray[np.int64]
    rank_wall_s: NDArray[np.float64]
    timings: tuple[RankTiming, ...]
    backend_version: str
    attempt_id: str
    run_id: str
    grid_digest: str
    kvwarm: dict[str, Any] | None
    input_provenance: dict[str, Any] | None
    engines: tuple[dict[str, Any] | None, ...]
    files: tuple[str, ...]

    @property
    def num_points(self) -> int:
        """Number of measured points."""
        return len(self.points)

    @property
    def wall_s(self) -> NDArray[np.float64]:
        """Seconds of each point: those of its slowest rank."""
        slowest: NDArray[np.float64] = self.rank_wall_s.max(axis=1)
        return slowest

    @property
    def elapsed_s(self) -> float:
        """Seconds of the sweep on its slowest rank."""
        return max(timing.elapsed_s for timing in self.timings)

    @property
    def measured_s(self) -> float:
        """Seconds that the measured iterations took, on the rank that counted most."""
        return max(timing.measured_s for timing in self.timings)
