"""What a search passes around: the point of a candidate, what became of it, and the two together with its score.

All of it is frozen and goes through JSON unchanged, so that it may come from another process, machine or run.
Source: predict-recommend.md sections 6.5, 7 and 10.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct, field, structs

from fpmsdk.documents.canonical import digest

KnobValue: TypeAlias = "int | float | str | bool"

FEASIBLE, INFEASIBLE, UNSUPPORTED, TIMED_OUT = "feasible", "infeasible", "unsupported", "timed_out"
FAILED, RESOURCE_LIMITED, UNCOVERED = "failed", "resource_limited", "uncovered"

# Every status, with the categories of reasons that it may have.
STATUSES: Mapping[str, tuple[str, ...]] = {
    FEASIBLE: (),
    INFEASIBLE: ("gpu_budget", "kv_capacity", "sla_constraint", "load_constraint", "no_samples"),
    UNSUPPORTED: ("backend_topology",),
    TIMED_OUT: ("runtime_timeout",),
    FAILED: ("candidate_materialization", "replay_runtime", "runner_contract", "invalid_metrics", "unknown"),
    RESOURCE_LIMITED: ("resource_limit",),
    UNCOVERED: ("fpm_uncovered",),
}


class Sample(Struct, frozen=True):
    """A point of the search space.

    mode: of deployment, which is also the branch.
    backend: that serves.
    arm: number of the parallel configuration in its branch, counted from 0.
    knobs: value of every other knob, by dotted path in the configuration of a prediction, sorted by path.

    >>> sample = Sample("aggregated", "vllm", 0, (("traffic.load.concurrency", 4),))
    >>> Sample.from_json(sample.to_json()) == sample
    True
    """

    mode: str
    backend: str
    arm: int
    knobs: tuple[tuple[str, KnobValue], ...] = ()

    def fingerprint(self, parallelism: Mapping[str, Mapping[str, int]]) -> str:
        """Identity of the candidate, which is the same in another run whose branch numbers its arms otherwise.

        Parameters
        ----------
        parallelism: sizes of the arm by role.

        Returns
        -------
        SHA-256 of the canonical JSON, as 64 hexadecimal digits.

        >>> sizes = {"aggregated": {"tensor": 2}}
        >>> first, second = Sample("aggregated", "vllm", 0), Sample("aggregated", "vllm", 7)
        >>> first.fingerprint(sizes) == second.fingerprint(sizes) != first.fingerprint({"aggregated": {"tensor": 1}})
        True
        """
        return digest(
            {
                "mode": self.mode,
                "backend": self.backend,
                "parallelism": {role: dict(sizes) for role, sizes in parallelism.items()},
                "knobs": dict(self.knobs),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The sample as a JSON object."""
        return {"mode": self.mode, "backend": self.backend, "arm": self.arm, "knobs": dict(self.knobs)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sample:
        """The sample that a JSON object holds."""
        return cls(value["mode"], value["backend"], value["arm"], tuple(sorted(value["knobs"].items())))


class Outcome(Struct, frozen=True):
    """What became of a candidate.

    status: one of `STATUSES`.
    reason_category: one of those of the status; None for a feasible one.
    reason: one line; None for a feasible one.
    metrics: figures of the report by name; empty where nothing was simulated to the end.
    used_gpus: of all workers.
    kv_load: how a load relative to the cache was resolved: `concurrency`, `capacity_requests`, `capacity_tokens`.
    coverage: what the tables covered, as in `fpm-coverage.json`; None where nothing was counted.
    provenance: data that priced the passes, by role.

    >>> outcome = Outcome("infeasible", "kv_capacity", "no request fits")
    >>> Outcome.from_json(outcome.to_json()) == outcome
    True
    """

    status: str
    reason_category: str | None = None
    reason: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    used_gpus: int = 0
    kv_load: dict[str, Any] | None = None
    coverage: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: found {self.status!r}, accepted are {', '.join(STATUSES)}")
        accepted = STATUSES[self.status] or (None,)
        if self.reason_category not in accepted:
            raise ValueError(
                f"reason_category of status {self.status}: found {self.reason_category!r}, accepted are "
                f"{', '.join(map(str, accepted))}"
            )

    def to_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return structs.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        """The outcome that a JSON object holds."""
        return cls(**value)


class Candidate(Struct, frozen=True):
    """A candidate that was evaluated.

    candidate_id: `candidate-000001` for the first that was suggested.
    sample: its point.
    document: its concrete configuration of a prediction.
    outcome: what became of it.
    score: what it is ranked by, more is better; None unless it is feasible.
    objectives: values by name, as they are and not negated, of a search for more than one; None otherwise.

    >>> Candidate("candidate-000001", Sample("aggregated", "vllm", 0), {}, Outcome("feasible"), 1.5).score
    1.5
    """

    candidate_id: str
    sample: Sample
    document: dict[str, Any]
    outcome: Outcome
    score: float | None = None
    objectives: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The candidate as a JSON object."""
        return structs.asdict(self) | {"sample": self.sample.to_json(), "outcome": self.outcome.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Candidate:
        """The candidate that a JSON object holds."""
        parts = {"sample": Sample.from_json(value["sample"]), "outcome": Outcome.from_json(value["outcome"])}
        return cls(**{**value, **parts})


def candidate_id(index: int) -> str:
    """Name of the candidate that was suggested as number `index`, counted from 0.

    >>> candidate_id(11)
    'candidate-000012'
    """
    return f"candidate-{index + 1:06d}"
