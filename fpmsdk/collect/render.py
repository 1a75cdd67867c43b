"""The launch files of a cell, rendered from the frozen plan and the deployment inputs alone.

Source: collector.md section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.command import engine_command
from fpmsdk.collect.deployment_inputs import SECTION
from fpmsdk.collect.environment import cell_environment, contract_script, run_script, startup_script
from fpmsdk.collect.executor import CellLaunch
from fpmsdk.collect.kubernetes_manifest import manifest_text
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.collect.points import FILE_NAME as POINTS_FILE
from fpmsdk.collect.points import points_bytes
from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.documents.canonical import write_document
from fpmsdk.errors import CollectionError, FpmSdkError, OnboardError
from fpmsdk.files import sha256, whole_file
from fpmsdk.perfdb.roots import open_root

MANIFEST = "k8s_deploy.yaml"
RUN_SCRIPT = "run.sh"
CONTRACT = "fpm_env.sh"
STARTUP = "collector-runtime-env.sh"
REQUEST = "generator-request.json"
LAUNCH_FILES = (MANIFEST, RUN_SCRIPT, CONTRACT, STARTUP)


def render_cell(
    plan: CollectionPlan, cell: Cell, folder: Path, deployment: Mapping[str, Any], *, smoke: bool = False
) -> CellLaunch:
    """Write the launch files of a cell into its folder.

    Parameters
    ----------
    folder: the cell's folder, which exists.
    deployment: checked deployment inputs.
    smoke: whether only a few points are measured.

    Returns
    -------
    What an executor is made for.

    Raises
    ------
    OnboardError: the inputs contradict the plan. OSError: a file cannot be written.
    """
    num_nodes, gpus_per_node = node_layout(plan, cell)
    environment = cell_environment(plan, cell, deployment)
    command = engine_command(plan, cell, deployment, smoke=smoke, num_nodes=num_nodes)
    launch = CellLaunch(plan, cell, folder, num_nodes, gpus_per_node)
    texts = {
        MANIFEST: manifest_text(launch, deployment),
        CONTRACT: contract_script(plan, cell, environment, num_nodes),
        RUN_SCRIPT: run_script(command, environment),
        STARTUP: startup_script(environment),
    }
    for name, text in texts.items():
        with whole_file(folder / name) as file:
            file.write(text.encode())
    (folder / RUN_SCRIPT).chmod(0o755)
    points = plan.benchmark_points
    if points is not None:
        content = points_bytes(points["payload"])
        if sha256(content) != points["sha256"]:
            raise OnboardError(
                "benchmark_points: payload and sha256 of the plan differ; plan again", "benchmark_points"
            )
        with whole_file(folder / POINTS_FILE) as file:
            file.write(content)
    write_document(
        folder / REQUEST,
        {
            "ServiceConfig": {
                "model_path": command[command.index("--model") + 1],
                "served_model_name": plan.model_path,
                "include_frontend": False,
            },
            "DynConfig": {"mode": "agg"},
            "WorkerConfig": {"agg_workers": 1, "agg_gpus_per_worker": cell.topology.gpus},
            "NodeConfig": {"num_nodes": num_nodes, "num_gpus_per_node": gpus_per_node},
            SECTION: {
                **(deployment.get(SECTION) or {}),
                "name_prefix": cell.cell_id,
                "extra_env": [{"name": name, "value": value} for name, value in environment.items()],
            },
            "params": {"agg": {"command": command}},
        },
    )
    return launch


def node_layout(plan: CollectionPlan, cell: Cell) -> tuple[int, int]:
    """Nodes of a cell, and GPUs of each, by the GPU system's nodes; one process on this machine is one node.

    Raises
    ------
    OnboardError: the GPUs do not divide over whole nodes.
    """
    gpus = cell.topology.gpus
    if plan.executor == "local":
        return 1, gpus
    per_node = gpus_per_node(plan.system)
    nodes = -(-gpus // per_node)
    if gpus % nodes:
        raise OnboardError(f"{cell.cell_id}: {gpus} GPUs do not divide over {nodes} nodes of {per_node}", "max_gpus")
    return nodes, gpus // nodes


def gpus_per_node(system: str, systems_paths: Sequence[str] | None = None) -> int:
    """GPUs of a node of a GPU system, 8 where no systems root describes it.

    Parameters
    ----------
    system: its name.
    systems_paths: roots to look in, the first that knows it counts; None for the default ones.

    >>> gpus_per_node("some_board", [])
    8
    """
    for place in resolve_systems_paths() if systems_paths is None else systems_paths:
        try:
            return open_root(place).spec(system).gpus_per_node
        except FpmSdkError:
            continue
    # Systems that nothing describes are taken as the usual board of eight.
    return 8


def require_launch_files(folder: Path) -> None:
    """Refuse to launch a cell whose files are not all there.

    Raises
    ------
    CollectionError: names the missing ones.
    """
    missing = [name for name in LAUNCH_FILES if not (folder / name).is_file()]
    if missing:
        raise CollectionError(f"{folder}: launch files are missing: {', '.join(missing)}")
