"""Where things are in a campaign, and what the engine's result files are called.

Source: collector.md sections 0 and 3.3.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fpmsdk.errors import OnboardError

RESULTS = "/results"
WORK = "/tmp/fpm-bench"
BENCHMARK = "benchmark.json"
PROVENANCE = "collector-provenance.json"
PLAN = "collection-plan.json"
INPUTS = "generator-overrides.json"
RUN_MANIFEST = "run-manifest.json"


def campaign_root(artifact_root: Path, plan_sha256: str, *, smoke: bool) -> Path:
    """The folder of a campaign; smoke runs have one of their own below it.

    >>> campaign_root(Path("/a"), "0123456789abcdef0123", smoke=True).as_posix()
    '/a/0123456789abcdef/smoke'
    """
    root = artifact_root / plan_sha256[:16]
    return root / "smoke" if smoke else root


def checkpoint_path(checkpoint_dir: Path, *, smoke: bool) -> Path:
    """The checkpoint of a campaign."""
    return checkpoint_dir / ("fpm_forward_smoke.json" if smoke else "fpm_forward.json")


def rank_path(path: str, dp_rank: int) -> str:
    """The result file of a data-parallel rank.

    >>> rank_path("/results/benchmark.json", 3)
    '/results/benchmark_dp3.json'
    """
    if dp_rank == 0:
        return path
    place = PurePosixPath(path)
    return str(place.with_name(f"{place.stem}_dp{dp_rank}{place.suffix}"))


def check_output_path(path: str) -> str:
    """The path of the result file of rank 0, inside a unit.

    Raises
    ------
    OnboardError: not an absolute path below `/results`, or a name that other files of a unit have.

    Example
    -------
    >>> check_output_path("/results/benchmark.json")
    '/results/benchmark.json'
    """
    place = PurePosixPath(path)
    name = place.name
    # Compared as text: a path object hides "." steps.
    if (
        not place.is_absolute()
        or any(step in (".", "..") for step in path.split("/"))
        or PurePosixPath(RESULTS) not in place.parents
        or not (name.startswith("benchmark") and name.endswith(".json"))
        or place.stem.endswith("_merged")
    ):
        raise OnboardError(
            f"benchmark output: expected {RESULTS}/benchmark*.json without '.' and '..' and not *_merged, "
            f"found {path!r}",
            "benchmark_output_path",
        )
    return path


def ranks_of_node(node: int, *, data_parallel: int, nodes: int) -> range:
    """Data-parallel ranks that a node hosts.

    >>> list(ranks_of_node(1, data_parallel=8, nodes=2))
    [4, 5, 6, 7]
    """
    local = max(1, data_parallel // nodes)
    return range(node * local, min((node + 1) * local, data_parallel)) if data_parallel > 1 else range(1)
