"""The validated result of one attempt of one cell: every measured point, with what each rank took for it.

Rank files are read one after another, and what is kept of each is small. Source: collector.md sections 5.1 and 5.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.collect.faults import is_close, mapping, require, seconds, sequence, whole
from fpmsdk.collect.provenance import check_provenance
from fpmsdk.collect.rank_file import RankFile, check_sample, decoded, digest_of, only_sample, rank_files, read_rank_file
from fpmsdk.collect.token_streams import same_input
from fpmsdk.errors import CollectionError

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan


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


def validate_native(
    plan: CollectionPlan | None, cell: Cell, raw_root: str | Path, *, attempt_id: str | None = None
) -> NativeCollection:
    """Check every rank file of an attempt against its cell and against each other.

    Parameters
    ----------
    plan: the plan that the attempt must be of; None accepts any.
    cell: the cell that was to be measured.
    raw_root: the folder of the attempt, with one folder a unit.
    attempt_id: the attempt it must be of; None accepts any.

    Returns
    -------
    The points by benchmark id. What is in memory at a time is one rank file and a few numbers a point and rank.

    Raises
    ------
    CollectionError: the first rule that is broken, naming file and field.

    Source: collector.md section 5.3.
    """
    root = Path(raw_root)
    files = rank_files(root)
    if not files:
        raise CollectionError(f"{root}: the engine wrote no results for {cell.cell_id}; run the attempt again")
    provenance = check_provenance(
        cell, root, files, plan_sha256=None if plan is None else plan.sha256, attempt_id=attempt_id
    )
    first = read_rank_file(files[0], cell)
    groups = _read_groups(first, cell.topology.dp)
    wall_s = np.empty((len(first.points), cell.topology.dp))
    timings: dict[int, RankTiming] = {}
    engines: dict[int, dict[str, Any] | None] = {}
    paths: dict[int, str] = {}
    for path in files:
        rank = first if path == files[0] else read_rank_file(path, cell)
        require(rank.rank not in timings, f"{path}: dp.rank", rank.rank, "a rank that no other file has")
        if rank is not first:
            _check_same(rank, first, groups)
        require(rank.rank < cell.topology.dp, f"{path}: dp.rank", rank.rank, f"a rank below {cell.topology.dp}")
        for at, digest in enumerate(rank.sample_digests):
            require(
                digest == groups.sample_digests[at][rank.rank],
                f"{path}: iteration group of benchmark id {at + 1}",
                f"another sample of rank {rank.rank}",
                "the sample that the rank itself reports",
            )
        wall_s[:, rank.rank] = rank.wall_s
        timings[rank.rank] = RankTiming(rank.rank, rank.elapsed_s, rank.measured_s)
        engines[rank.rank], paths[rank.rank] = rank.engine, rank.path
    ranks = range(cell.topology.dp)
    if missing := [rank for rank in ranks if rank not in timings]:
        raise CollectionError(
            f"{root}: results of ranks {missing} are missing, found {sorted(timings)}; run the attempt again"
        )
    for timing in timings.values():
        require(
            is_close(timing.measured_s, groups.measured_s),
            f"{paths[timing.rank]}: timing.measured_iteration_seconds",
            timing.measured_s,
            f"{groups.measured_s}, the sum of its iterations",
        )
    return NativeCollection(
        phase=cell.workload_kind,
        points=first.points,
        regimes=first.regimes,
        coordinates=_coordinates(first.points),
        rank_wall_s=wall_s,
        timings=tuple(timings[rank] for rank in ranks),
        backend_version=provenance.backend_version,
        attempt_id=provenance.attempt_id,
        run_id=first.run_id,
        grid_digest=first.grid_digest,
        kvwarm=first.kvwarm,
        input_provenance=first.input_provenance,
        engines=tuple(engines[rank] for rank in ranks),
        files=tuple(paths[rank] for rank in ranks),
    )


def _coordinates(points: Sequence[dict[str, Any]]) -> NDArray[np.int64]:
    names = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")
    return np.array([[point[name] for point in points] for name in names], np.int64)


class _Groups(NamedTuple):
    """What the iteration groups, which all ranks share, say: digest of each sample by point and rank, and the total."""

    sha256: bytes
    digest: bytes
    sample_digests: list[list[bytes]]
    measured_s: float


def _read_groups(first: RankFile, dp: int) -> _Groups:
    where = f"{first.path}: iteration_groups"
    groups = sequence(decoded(first.groups, where), where)
    points = first.points
    require(len(groups) == len(points), where, f"{len(groups)} groups", f"{len(points)} groups, one a point")
    ranks = list(range(dp))
    digests: list[list[bytes] | None] = [None] * len(points)
    walls = [0.0] * len(points)
    for at, entry in enumerate(groups):
        place = f"{where}[{at}]"
        group = mapping(entry, place)
        number = whole(group.get("benchmark_id"), f"{place}.benchmark_id", 1)
        is_open = number <= len(points) and digests[number - 1] is None
        require(is_open, f"{place}.benchmark_id", number, f"an id from 1 to {len(points)} that no other group has")
        point = points[number - 1]
        require(group.get("point") == point, f"{place}.point", group.get("point"), f"{point}, as in the results")
        found = group.get("expected_dp_ranks")
        require(found == ranks, f"{place}.expected_dp_ranks", found, str(ranks))
        require(group.get("complete") is True, f"{place}.complete", group.get("complete"), "true")
        results = [mapping(one, f"{place}.rank_results") for one in sequence(group.get("rank_results"), place)]
        found = [one.get("dp_rank") for one in results]
        require(found == ranks, f"{place}.rank_results", f"ranks {found}", f"ranks {ranks}")
        samples = [only_sample(one, f"{place}.rank_results[{rank}]") for rank, one in enumerate(results)]
        slowest = max(
            check_sample(one, point, rank, f"{place}.rank_results[{rank}]") for rank, one in enumerate(samples)
        )
        wall_s = seconds(group.get("wall_time"), f"{place}.wall_time")
        require(is_close(wall_s, slowest), f"{place}.wall_time", wall_s, f"{slowest}, of its slowest rank")
        digests[number - 1] = [digest_of(one) for one in samples]
        walls[number - 1] = wall_s
    # Added one by one in the order of the ids, as the engine does: the sum is compared closely.
    return _Groups(
        hashlib.sha256(first.groups).digest(),
        digest_of(groups),
        [one for one in digests if one is not None],
        sum(walls),
    )


def _check_same(rank: RankFile, first: RankFile, groups: _Groups) -> None:
    """Raise unless what all ranks must agree on is the same in two of their files."""
    compared = {
        "run_id": (rank.run_id, first.run_id),
        "grid_digest": (rank.grid_digest, first.grid_digest),
        "kvwarm": (_promise(rank.kvwarm), _promise(first.kvwarm)),
        "kv_seed_regime": (rank.regimes, first.regimes),
        "points": (rank.points, first.points),
    }
    for name, (found, accepted) in compared.items():
        require(found == accepted, f"{rank.path}: {name}", found, f"the same as in {first.path}, {str(accepted)[:120]}")
    require(
        same_input(rank.input_provenance, first.input_provenance),
        f"{rank.path}: input_provenance",
        rank.input_provenance,
        f"the same as in {first.path}",
    )
    # Equal bytes need no second parse; otherwise only the order of keys or rows may differ in spelling.
    if hashlib.sha256(rank.groups).digest() != groups.sha256:
        require(
            digest_of(decoded(rank.groups, f"{rank.path}: iteration_groups")) == groups.digest,
            f"{rank.path}: iteration_groups",
            "other groups",
            f"the same as in {first.path}",
        )


def _promise(kvwarm: dict[str, Any] | None) -> tuple[Any, ...] | None:
    return None if kvwarm is None else tuple(kvwarm.get(name) for name in ("enabled", "warm_eligible", "skip_reason"))
