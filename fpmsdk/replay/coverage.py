"""What a replay says about the measured tables behind its timings, also when it stopped at a missing one.

Takes the counters of the models that priced the passes; counting itself is theirs.
Source: fpm-interpolation.md section 8.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.files import whole_file

FILE_NAME = "fpm-coverage.json"
COUNTING_UNIT = "native_lookup_resolutions"
_OUTCOMES = ("measured", "interpolated", "unsupported")


def replay_coverage(
    roles: Sequence[tuple[str, Mapping[str, Any]]], *, completed: bool, error: str | None = None
) -> dict[str, Any]:
    """The coverage object of one replay.

    Parameters
    ----------
    roles: worker type and counters (`ForwardPassPerfModel.fpm_query_coverage`) of each model.
    completed: whether the replay finished with completed requests.
    error: why it did not.

    Example
    -------
    >>> counters = {"queries": {"measured": 2, "interpolated": 1, "unsupported": 0}}
    >>> replay_coverage([("decode", counters)], completed=True)["status"]
    'covered'
    """
    queries = {outcome: sum(counters["queries"][outcome] for _, counters in roles) for outcome in _OUTCOMES}
    answered = queries["measured"] + queries["interpolated"]
    covered = completed and error is None and answered > 0 and queries["unsupported"] == 0
    document = {
        "schema_version": 1,
        "counting_unit": COUNTING_UNIT,
        "queries": queries,
        "replay_completed": completed,
        "accuracy": "not_assessed",
        "status": "covered" if covered else "incomplete",
        "roles": [{"worker_type": worker_type, "coverage": dict(counters)} for worker_type, counters in roles],
    }
    return document if error is None else document | {"error": error}


def coverage_roles(*timings: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Worker type and counters of each model that prices a replay and collects some."""
    roles = []
    for timing in timings:
        counters = getattr(timing, "fpm_query_coverage", None)
        found = counters() if callable(counters) else None
        if found is not None:
            roles.append((timing.deployment_topology()["worker_type"], found))
    return roles


@contextlib.contextmanager
def coverage_on_failure(*timings: Any) -> Iterator[None]:
    """Give an exception of a replay the coverage object, as JSON text in its attribute `fpm_query_coverage`."""
    try:
        yield
    except Exception as error:
        # What the tables covered must not hide what went wrong.
        with contextlib.suppress(Exception):
            if roles := coverage_roles(*timings):
                document = replay_coverage(roles, completed=False, error=str(error))
                error.fpm_query_coverage = json.dumps(document)  # type: ignore[attr-defined]
        raise


def write_coverage(folder: str | os.PathLike[str], coverage: Mapping[str, Any] | str | None) -> Path | None:
    """Write `fpm-coverage.json` into a folder in one step; None removes the file of an earlier run.

    Parameters
    ----------
    coverage: the object, or its JSON text as an exception carries it.
    """
    path = Path(folder) / FILE_NAME
    if coverage is None:
        path.unlink(missing_ok=True)
        return None
    document = json.loads(coverage) if isinstance(coverage, str) else coverage
    with whole_file(path) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())
    return path
