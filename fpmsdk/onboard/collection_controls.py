"""Controls of a collection that a review may change: how long it may take, and which synthetic content it runs.

Source: onboarding.md section 6.5 (allowed changes).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.deployment_inputs import SECTION
from fpmsdk.errors import OnboardError

_TIMEOUT = "--benchmark-timeout"
_CONTENT = ("random", "sharegpt", "sharegpt_chain", "zeros")
_MOST = {
    "DYN_FORWARDPASS_METRIC_PORT": 65535,
    "FPM_RESULT_WAIT_TIMEOUT_SECONDS": 43200,
    "FPM_FINALIZATION_TIMEOUT_SECONDS": 3600,
}
_COUNTS = ("DYN_BENCH_GIANT_KV_THRESHOLD", "DYN_BENCH_GIANT_KV_REPEATS")
CONTROLS = frozenset((*_MOST, *_COUNTS, "DYN_BENCH_CONTENT_SEED", "DYN_BENCH_PREFILL_CONTENT", "DYN_BENCH_POOL_TAG"))


def collection_controls(
    cells: Sequence[Cell], deployment: Mapping[str, Any]
) -> tuple[tuple[Cell, ...], dict[str, Any], list[dict[str, Any]]]:
    """Cells and deployment inputs without their reviewable controls, and the controls as changes.

    Raises
    ------
    OnboardError: a control is repeated, malformed or out of range; names it.
    """
    kept: list[Cell] = []
    changes: list[dict[str, Any]] = []
    for cell in cells:
        policy, timeout = _without_timeout(cell)
        kept.append(replace(cell, backend_policy=policy))
        if timeout:
            changes.append(
                {
                    "field": f"/collection_controls/{cell.workload_kind}/benchmark_timeout",
                    "accepted": [],
                    "collection": timeout,
                }
            )
    inputs = copy.deepcopy(dict(deployment))
    section = inputs.get(SECTION, {})
    environment = section.get("extra_env", [])
    if not isinstance(environment, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in environment
    ):
        raise OnboardError(f"{SECTION}.extra_env: expected a list of {{name, value}}", f"{SECTION}.extra_env")
    controls = [entry for entry in environment if entry["name"] in CONTROLS]
    names = [entry["name"] for entry in controls]
    for entry in controls:
        _check_control(entry, names)
        changes.append(
            {
                "field": f"/collection_controls/environment/{entry['name']}",
                "accepted": {"missing": True},
                "collection": entry["value"],
            }
        )
    if "extra_env" in section:
        section["extra_env"] = [entry for entry in environment if entry["name"] not in CONTROLS]
    return tuple(kept), inputs, changes


def _without_timeout(cell: Cell) -> tuple[dict[str, Any], list[str]]:
    policy = copy.deepcopy(dict(cell.backend_policy))
    overrides = policy["generator_overrides"]
    worker = (overrides.get("params") or {}).get("agg") or {}
    words = worker.get("extra_cli_args", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise OnboardError(f"{cell.cell_id}: extra_cli_args: expected a list of words", "extra_cli_args")
    places = [place for place, word in enumerate(words) if word.split("=")[0] == _TIMEOUT]
    if len(places) > 1:
        raise OnboardError(f"{cell.cell_id}: {_TIMEOUT} is given twice; keep one", _TIMEOUT)
    if not places:
        return policy, []
    width = 1 if "=" in words[places[0]] else 2
    timeout = words[places[0] : places[0] + width]
    value = timeout[-1].split("=")[-1]
    if not re.fullmatch("[1-9][0-9]*", value):
        raise OnboardError(f"{cell.cell_id}: {_TIMEOUT}: expected whole seconds, found {value!r}", _TIMEOUT)
    rest = words[: places[0]] + words[places[0] + width :]
    # What only held the control goes with it.
    policy["generator_overrides"] = _pruned(overrides, rest)
    return policy, timeout


def _pruned(overrides: dict[str, Any], words: list[str]) -> dict[str, Any]:
    overrides["params"]["agg"]["extra_cli_args"] = words
    if not words:
        del overrides["params"]["agg"]["extra_cli_args"]
        if not overrides["params"]["agg"]:
            del overrides["params"]["agg"]
        if not overrides["params"]:
            del overrides["params"]
    return overrides


def _check_control(entry: Mapping[str, Any], names: Sequence[str]) -> None:
    name, value = entry["name"], entry.get("value")
    where = f"{SECTION}.extra_env: {name}"

    def refused(accepted: str) -> OnboardError:
        return OnboardError(f"{where}: expected {accepted}, found {value!r}", where)

    if names.count(name) > 1 or set(entry) != {"name", "value"}:
        raise refused("one entry {name, value}")
    if not isinstance(value, str) or any(ord(char) < 32 for char in value):
        raise refused("a literal string")
    if name == "DYN_BENCH_PREFILL_CONTENT" and value not in _CONTENT:
        raise refused(f"one of {', '.join(_CONTENT)}")
    if name in _COUNTS and not re.fullmatch("0|[1-9][0-9]*", value):
        raise refused("an integer of at least 0")
    if name in _MOST:
        most = _MOST[name]
        if not re.fullmatch("[1-9][0-9]*", value) or len(value) > len(str(most)) or int(value) > most:
            raise refused(f"an integer from 1 to {most}")
