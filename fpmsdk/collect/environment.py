"""The environment of a cell, and the shell files that set it and start the engine.

Source: collector.md section 3.2.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.command import BENCHMARK_TIMEOUT_S, NODE_RANK_WORD
from fpmsdk.collect.deployment_inputs import SECTION, WARM_UP, with_warm_up
from fpmsdk.collect.paths import BENCHMARK, RESULTS, WORK
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.errors import OnboardError

READINESS = "FPM_READINESS_TIMEOUT_SECONDS"
FINALIZATION = "FPM_FINALIZATION_TIMEOUT_SECONDS"
BARRIER = "FPM_COMPLETION_BARRIER_TIMEOUT_SECONDS"
OUTPUT = "DYN_FPM_BENCHMARK_OUTPUT_PATH"
RUN_ID = "FPM_RUN_ID"
RESULT_SCHEMA_VERSION = 2
# The engine ends by itself before whoever waits for it gives up.
_WAIT_MARGIN_S = 600
CONTRACT = (
    "FPM_NODE_COUNT",
    "FPM_DATA_PARALLEL_SIZE",
    "FPM_LOCAL_DATA_PARALLEL_SIZE",
    "FPM_BENCHMARK_MODE",
    "FPM_BENCHMARK_OUTPUT_PATH",
    "FPM_WAIT_TIMEOUT_SECONDS",
    "FPM_RESULT_SCHEMA_VERSION",
    "FPM_NODE_RANK",
    "FPM_MASTER_ADDR",
)
_OBSERVATION = (
    "AISIMULATE_RUNTIME_CONTEXT",
    "AISIMULATE_RUNTIME_INSTRUMENTATION",
    "AISIMULATE_RUNTIME_OBSERVATION_DIR",
)
# What the launcher needs before the engine starts.
_STARTUP = (*WARM_UP, READINESS, FINALIZATION, "PYTHONPATH", *_OBSERVATION)


def cell_environment(plan: CollectionPlan, cell: Cell, deployment: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a cell in the order in which they are set: those of the deployment first.

    Raises
    ------
    OnboardError: a variable with two values, one that the launch contract owns, or a readiness timeout out of range.
    """
    declared = list((deployment.get(SECTION) or {}).get("extra_env") or ())
    policy = cell.backend_policy["generator_overrides"].get(SECTION) or {}
    declared += policy.get("extra_env") or ()
    owned = {OUTPUT: f"{RESULTS}/{BENCHMARK}", RUN_ID: cell.cell_id}
    if plan.runtime_observation is not None:
        places = (f"{WORK}/runtime-probe-context.json", f"{WORK}/runtime-instrumentation/manifest.json", RESULTS)
        owned |= dict(zip(_OBSERVATION, places, strict=True))
    found: dict[str, Any] = {}
    for name, value in [*((entry["name"], entry.get("value")) for entry in declared), *owned.items()]:
        if name in CONTRACT:
            raise OnboardError(f"extra_env: {name} is set by the launch files; remove it", "extra_env")
        if found.setdefault(name, value) != value:
            raise OnboardError(f"extra_env: {name} has two values, {found[name]!r} and {value!r}", "extra_env")
    readiness = str(found.setdefault(READINESS, "900"))
    if not re.fullmatch("[1-9][0-9]{0,3}", readiness) or int(readiness) > 3600:
        raise OnboardError(f"extra_env: {READINESS}: expected 1 to 3600 seconds, found {readiness!r}", "extra_env")
    entries = [{"name": name, "value": value} for name, value in found.items()]
    resolved = with_warm_up({SECTION: {"extra_env": entries}})
    return {entry["name"]: entry["value"] for entry in resolved[SECTION]["extra_env"]}


def startup_script(environment: Mapping[str, Any]) -> str:
    """`collector-runtime-env.sh`: the part of the environment that the launcher itself reads.

    Raises
    ------
    OnboardError: one of these variables is no literal string.
    """
    lines = ["# What the launcher of the cell reads; the engine's own settings are in run.sh."]
    for name, value in environment.items():
        if name in _STARTUP:
            if not isinstance(value, str):
                raise OnboardError(f"extra_env: {name}: expected a literal string, found {value!r}", "extra_env")
            lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join(lines) + "\n"


def contract_script(plan: CollectionPlan, cell: Cell, environment: Mapping[str, Any], num_nodes: int) -> str:
    """`fpm_env.sh`: exactly the variables of the launch contract, with the rank of the node found out."""
    topology = cell.topology
    values = {
        "FPM_NODE_COUNT": num_nodes,
        "FPM_DATA_PARALLEL_SIZE": topology.dp,
        "FPM_LOCAL_DATA_PARALLEL_SIZE": max(1, topology.dp // num_nodes),
        "FPM_BENCHMARK_MODE": cell.workload_kind,
        "FPM_BENCHMARK_OUTPUT_PATH": f"{RESULTS}/{BENCHMARK}",
        "FPM_WAIT_TIMEOUT_SECONDS": BENCHMARK_TIMEOUT_S + _WAIT_MARGIN_S,
        "FPM_RESULT_SCHEMA_VERSION": RESULT_SCHEMA_VERSION,
    }
    if BARRIER in environment:
        values[BARRIER] = environment[BARRIER]
    exports = "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in values.items())
    return f"#!/usr/bin/env bash\n# Facts of plan {plan.sha256[:16]}; sourced, never executed.\n{exports}\n{_DISCOVERY}"


_DISCOVERY = """
# Rank and leader: given, else of a LeaderWorkerSet, else of a Grove clique. Half an answer is a fault.
_rank="${FPM_NODE_RANK:-${LWS_WORKER_INDEX:-${GROVE_PCLQ_POD_INDEX:-}}}"
_leader="${FPM_MASTER_ADDR:-${LWS_LEADER_ADDRESS:-}}"
if [[ -z "$_leader" && -n "${GROVE_PCLQ_NAME:-}" && -n "${GROVE_HEADLESS_SERVICE:-}" ]]; then
  _leader="${GROVE_PCLQ_NAME}-0.${GROVE_HEADLESS_SERVICE}"
fi
if [[ "$FPM_NODE_COUNT" == 1 && -z "$_rank$_leader${GROVE_PCLQ_NAME:-}${GROVE_HEADLESS_SERVICE:-}" ]]; then
  _rank=0
  _leader=127.0.0.1
fi
if [[ -z "$_rank" || -z "$_leader" ]]; then
  echo "fpm_env.sh: rank or leader of this node is unknown; set FPM_NODE_RANK and FPM_MASTER_ADDR" >&2
  exit 2
fi
if ! [[ "$_rank" =~ ^[0-9]+$ ]] || (( 10#$_rank >= FPM_NODE_COUNT )); then
  echo "fpm_env.sh: node rank $_rank is none of $FPM_NODE_COUNT" >&2
  exit 2
fi
export FPM_NODE_RANK="$_rank" FPM_MASTER_ADDR="$_leader"
"""


def run_script(command: Sequence[str], environment: Mapping[str, Any]) -> str:
    """`run.sh`: sets the environment and becomes the engine, in a process group of its own.

    The command stands on one line as a literal, so that evidence can read it without running anything.
    """
    exports = "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in environment.items())
    words = " ".join(shlex.quote(word) for word in command)
    return f"""#!/usr/bin/env bash
set -Eeuo pipefail
source "$(dirname "${{BASH_SOURCE[0]}}")/fpm_env.sh"
{exports}
export DYN_FPM_WORKER_ID="${{DYN_FPM_WORKER_ID:-${{FPM_RUN_ID}}-node${{FPM_NODE_RANK}}}}"
engine_command=({words})
for index in "${{!engine_command[@]}}"; do
  engine_command[index]="${{engine_command[index]//{NODE_RANK_WORD}/$FPM_NODE_RANK}}"
done
{_MULTI_NODE}"""


_MULTI_NODE = """if (( FPM_NODE_COUNT > 1 && FPM_DATA_PARALLEL_SIZE > 1 )); then
  engine_command+=(--data-parallel-size-local "$FPM_LOCAL_DATA_PARALLEL_SIZE")
  engine_command+=(--data-parallel-start-rank "$(( FPM_NODE_RANK * FPM_LOCAL_DATA_PARALLEL_SIZE ))")
  engine_command+=(--data-parallel-address "$FPM_MASTER_ADDR" --data-parallel-rpc-port 29510 --data-parallel-hybrid-lb)
elif (( FPM_NODE_COUNT > 1 )); then
  engine_command+=(--nnodes "$FPM_NODE_COUNT" --node-rank "$FPM_NODE_RANK")
  engine_command+=(--master-addr "$FPM_MASTER_ADDR" --master-port 29500)
  (( FPM_NODE_RANK == 0 )) || engine_command+=(--headless)
fi
# One process group, so that the engine and all its workers can be ended together.
exec setsid "${engine_command[@]}"
"""
