"""The campaigns that measure what a search misses: a list of points and a command of the collector for each cell.

A published cell never changes, and a campaign measures a cell as a whole: its list holds the points that the table has
as well, and it is published beside the table, into a systems root of its own, which then comes first.
Source: predict-recommend.md section 5.4; collector.md sections 1.1, 1.5 and 6.4.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fpmsdk.collect.points import PHASES, read_points
from fpmsdk.collect.topology import Topology
from fpmsdk.config.systems import ENVIRONMENT
from fpmsdk.documents.canonical import digest, pretty_bytes
from fpmsdk.errors import OnboardError
from fpmsdk.files import whole_file
from fpmsdk.recommendation.missing import Missing, MissingOfCell
from fpmsdk.recommendation.plan_files import FOLDER, PLAN

SYSTEMS = "systems"
SCHEMA_NAME = "fpmsdk_missing_points"
COLLECTOR = ("python", "-m", "fpmsdk.collect")
_STAND_IN = "nearest measured batch; times of these replays are made up and nothing is ranked by them"
_LEAST_PASS_TOKENS = 2

Entry = dict[str, Any]


def write_collect_plan(missing: Missing, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the campaigns that measure missing points.

    Parameters
    ----------
    missing: as `missing_points` found it.
    folder: an existing directory, into which `missing-points.json` and the folder `missing-points` come.

    Returns
    -------
    The content of `missing-points.json`: per campaign its `command` (for a shell in `folder`; None where
    `not_collected` says why such a cell cannot be collected), its `points_file`, the `missing` points with
    `occurrences`, and the `systems_paths` under which a prediction finds the result.

    Raises
    ------
    OSError: a file cannot be written.

    Source: predict-recommend.md section 5.4.
    """
    place = Path(folder)
    # What a plan collects has a folder of its own: the next plan neither continues nor adds to it.
    collected = f"{FOLDER}/collected-{digest([_named(cell) for cell in missing.cells])[:12]}"
    campaigns = [_campaign(cell, f"{number:04d}", collected) for number, cell in enumerate(missing.cells, 1)]
    document = {
        "schema_name": SCHEMA_NAME,
        "schema_version": 1,
        "stand_in": _STAND_IN,
        "replays_stopped": dict(missing.stopped),
        "campaigns": campaigns,
    }
    if campaigns:
        (place / FOLDER).mkdir(exist_ok=True)
    for campaign, cell in zip(campaigns, missing.cells, strict=True):
        _write(place / campaign["points_file"], pretty_bytes(_points(cell)))
        read_points(place / campaign["points_file"])  # what the collector is going to read
        if campaign["profile_file"] is not None:
            _write(place / campaign["profile_file"], pretty_bytes(cell.config["fpm_profile"]))
        _write_system(cell, place / collected / SYSTEMS)
    _write(place / PLAN, pretty_bytes(document))
    return document


def _named(cell: MissingOfCell) -> list[Any]:
    return [cell.table_path, cell.cell.model_path, dict(cell.cell.identity), sorted(map(list, cell.points))]


def _campaign(cell: MissingOfCell, name: str, collected: str) -> dict[str, Any]:
    config = cell.config
    campaign = {
        "model": config["model"],
        "system": config["system"],
        "backend": config["backend"],
        "backend_version": config["backend_version"],
        "cell_identity": dict(cell.cell.identity),
        "table": cell.table_path,
        "candidate_ids": list(cell.candidate_ids),
        "missing": [point._asdict() | {"occurrences": occurrences} for point, occurrences in cell.points.most_common()],
        "measured_before": len(cell.cell.prefill) + len(cell.cell.decode),
        "points_file": f"{FOLDER}/{name}.json",
        "profile_file": None if config["fpm_profile"] is None else f"{FOLDER}/{name}-profile.json",
        "systems_paths": [f"{collected}/{SYSTEMS}", *config["systems_paths"]],
    }
    try:
        command = _command(cell, campaign, f"{collected}/{name}")
    except OnboardError as fault:
        return campaign | {"command": None, "not_collected": str(fault)}
    return campaign | {"command": shlex.join(command), "not_collected": None}


def _command(cell: MissingOfCell, campaign: Mapping[str, Any], work: str) -> Sequence[str]:
    config, identity = cell.config, cell.cell.identity
    topology = _topology(identity)
    strategy = topology.strategy(is_moe=topology.moe_tp * topology.moe_ep > 1)
    points = _points(cell)
    deployment = _measured_deployment(config, topology)
    role = None if deployment is None else deployment.get("worker_type")
    phases = [phase for phase in PHASES if points[phase]]
    if role is None and len(phases) == 1:
        role = phases[0]
    tokens, sequences = _limits(points, deployment)
    words = [
        *(
            "env",
            f"{ENVIRONMENT[0]}={campaign['systems_paths'][0]}",
        ),  # where the collector looks for the memory of the system
        *COLLECTOR,
        *("--backend", config["backend"]),
        *("--model-path", config["model"]),
        *("--gpu", config["system"]),
        *("--fpm-backend-version", config["backend_version"]),
        *("--fpm-max-gpus", str(topology.gpus)),
        *("--fpm-gpu-counts", str(topology.gpus)),
        *("--fpm-parallel-presets", "auto" if strategy == "single" else strategy),
        *("--fpm-max-num-batched-tokens", str(tokens)),
        *("--fpm-max-num-seqs", str(sequences)),
        *("--fpm-weight-quantizations", identity["gemm_quant_mode"]),
        *("--fpm-kv-cache-dtypes", identity["kv_cache_dtype"]),
        *("--fpm-benchmark-points-file", campaign["points_file"]),
        *("--checkpoint-dir", f"{work}-checkpoint"),
        *("--fpm-artifact-root", f"{work}-artifacts"),
        *("--fpm-database-root", f"{campaign['systems_paths'][0]}/data"),
    ]
    if identity["moe_backend"] != "auto":
        words += ["--fpm-moe-backend", identity["moe_backend"]]
    if role is not None:
        words += ["--fpm-worker-type", role]
    profile = campaign["profile_file"]
    return words if profile is None else [*words, "--fpm-model-profile", profile]


def _topology(identity: Mapping[str, str]) -> Topology:
    topology = Topology(**{axis: int(identity[axis]) for axis in Topology._fields})
    if topology.pp * topology.cp > 1:
        raise OnboardError(f"topology: {topology.document()}: pp and cp above 1 are not collected", "topology")
    return topology


def _measured_deployment(config: Mapping[str, Any], topology: Topology) -> Mapping[str, Any] | None:
    """The deployment of the profile that has the layout and, where it names one, the role of the model."""
    for deployment in (config["fpm_profile"] or {}).get("deployments", ()):
        sizes = tuple(deployment.get(axis, 1) for axis in Topology._fields)
        fits = deployment.get("worker_type") in (None, config["worker_type"])
        if fits and deployment["system"] == config["system"] and sizes == tuple(topology):
            found: Mapping[str, Any] = deployment
            return found
    return None


def _limits(points: Mapping[str, Any], deployment: Mapping[str, Any] | None) -> tuple[int, int]:
    """Tokens and sequences of a pass: those of the profile, else the largest of the points."""
    if deployment is not None:
        return deployment["resources"]["max_num_tokens"], deployment["resources"]["max_batch_size"]
    entries = [entry for phase in PHASES for entry in points[phase]]
    sequences = max(entry["batch_size"] for entry in entries)
    tokens = max(entry.get("total_prefill_tokens", 0) for entry in entries)
    return max(tokens, sequences, _LEAST_PASS_TOKENS), sequences


def _points(cell: MissingOfCell) -> dict[str, Any]:
    """The manifest of points: those of the table and the missing ones, ascending."""
    wanted: dict[str, set[tuple[int, int, int]]] = {phase: set() for phase in PHASES}
    for phase, measured in zip(PHASES, (cell.cell.prefill, cell.cell.decode), strict=True):
        rows = zip(measured.batch.tolist(), measured.tokens.tolist(), measured.kv.tolist(), strict=True)
        wanted[phase].update((int(batch), int(tokens), int(kv)) for batch, tokens, kv in rows)
    for phase, batch, tokens, kv in cell.points:
        wanted[phase].add((batch, tokens, kv))
    entries = {phase: [_entry(phase, *point) for point in sorted(points)] for phase, points in wanted.items()}
    uneven = any("rows" in entry for entry in entries["prefill"])
    return {"schema_version": 3 if uneven else 1, **entries}


def _entry(phase: str, batch: int, tokens: int, kv: int) -> Entry:
    entry: Entry = {"batch_size": batch, "total_kv_read_tokens": kv}
    if phase == "decode":
        return entry
    entry["total_prefill_tokens"] = tokens
    if 0 < kv < batch:
        # Fewer cached tokens than requests: the engine has to be told who has them.
        each, longer = divmod(tokens, batch)
        entry["rows"] = [[each + (row < longer), int(row < kv)] for row in range(batch)]
    return entry


def _write_system(cell: MissingOfCell, root: Path) -> None:
    """The description of the GPU system in the new systems root, whose data lie where the collector publishes."""
    system = cell.config["system"]
    (root / "data").mkdir(parents=True, exist_ok=True)
    hardware = yaml.safe_load(Path(cell.config["systems_paths"][0], f"{system}.yaml").read_bytes())
    text = yaml.safe_dump(hardware | {"data_dir": f"data/{system}"}, sort_keys=False)
    _write(root / f"{system}.yaml", text.encode())


def _write(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)
