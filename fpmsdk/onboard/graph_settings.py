"""The graph settings that a campaign was reviewed with, and whether a cell was really measured with them.

Source: onboarding.md section 5 (readiness), collector.md sections 3.1 and 9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.launch_evidence import launch_flags
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.errors import CollectionError

_SIZES, _LARGEST = "cudagraph_capture_sizes", "max_cudagraph_capture_size"
# What the engine's own result file calls them.
_NATIVE_NAMES = {_SIZES: "capture_sizes", _LARGEST: "max_capture_size"}


def reviewed_graphs(options: Mapping[str, Any], phase: str) -> dict[str, Any]:
    """What the engine of a phase is told about its graphs; empty when that is left to the runtime.

    Explicit prefill captures hold for the prefill phase, and for both when the campaign has a serving role.

    >>> sampling = {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 2}
    >>> reviewed_graphs({"prefill_sampling": sampling}, "decode")
    {}
    >>> reviewed_graphs({"prefill_sampling": sampling, "cudagraph_mode": "FULL", "worker_type": "decode"}, "decode")
    {'cudagraph_mode': 'FULL', 'cudagraph_capture_sizes': [1, 2], 'max_cudagraph_capture_size': 2}
    """
    names = ("cudagraph_mode", _SIZES, _LARGEST)
    graphs = {name: options[name] for name in names if options.get(name) is not None}
    if _SIZES in graphs:
        graphs[_LARGEST] = max(graphs[_SIZES])
    sampling = options["prefill_sampling"]
    captures = sampling.get(_SIZES)
    if captures is not None and (phase == "prefill" or options.get("worker_type") is not None):
        graphs |= {_SIZES: list(captures), _LARGEST: sampling[_LARGEST]}
    return graphs


def graph_blockers(plan: CollectionPlan, cell: Cell, cell_dir: Path, execution: Mapping[str, Any]) -> list[str]:
    """Where launch, workers or the engine's results do not have the reviewed graph settings.

    A worker may choose another mode of its own accord, which importing its memory verifies; sizes may not differ.

    Parameters
    ----------
    execution: what `inspect_execution` says of the cell: `observed_workers`, `native_graph_config`.

    Raises
    ------
    CollectionError: the launch files do not say what was asked for.
    """
    expected = reviewed_graphs(plan.options, cell.workload_kind)
    if not expected or plan.options.get("enforce_eager"):
        return []
    blockers = []
    text = launch_flags(plan, cell_dir).get("--compilation-config", "{}")
    if _differing(expected, _parsed(str(text)), required=True):
        blockers.append("the saved launch does not have the reviewed explicit graph settings")
    sizes = {name: value for name, value in expected.items() if name in _NATIVE_NAMES}
    native = {_NATIVE_NAMES[name]: value for name, value in sizes.items()}
    reported = [("a worker", sizes, worker.get("graph_config")) for worker in execution["observed_workers"]]
    reported += [("the engine's result", native, rank["config"]) for rank in execution["native_graph_config"]]
    blockers += [
        f"{who} has other graph settings than reviewed: {', '.join(differing)}"
        for who, wanted, found in reported
        if (differing := _differing(wanted, found))
    ]
    return list(dict.fromkeys(blockers))


def _differing(expected: Mapping[str, Any], found: Any, *, required: bool = False) -> list[str]:
    """Names whose value differs; what `found` does not say differs only where it is required."""
    if not isinstance(found, Mapping):
        return list(expected) if required else []
    return [name for name, value in expected.items() if (required or name in found) and found.get(name) != value]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CollectionError(f"--compilation-config of the saved launch is no JSON: {text}") from None
