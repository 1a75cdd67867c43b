"""What a prediction is made of: memory, the time of its passes, and the evidence behind them.

Source: predict-recommend.md section 9.3.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from fpmsdk.errors import OnboardError
from fpmsdk.prediction.deployment import SizedRole
from fpmsdk.prediction.simulate import Prepared, Simulation
from fpmsdk.replay.estimates import pass_estimates
from fpmsdk.replay.report import ReplayReport

SECTIONS = ("summary", "memory", "time", "energy", "source")
# Sections for which a replay has to keep its passes.
OF_PASSES = frozenset(("time", "source"))
_POOLS = {"aggregated": "agg", "prefill": "prefill", "decode": "decode"}
_PHASES = ("prefill", "decode", "mixed")
_NO_SOL = "the estimate of a whole pass has no roofline beside it"


def checked_sections(names: Collection[str]) -> frozenset[str]:
    """The sections that are wanted, `all` for each of them.

    Raises
    ------
    OnboardError: there is no such section.

    >>> sorted(checked_sections(["time", "memory"])), len(checked_sections(["all"]))
    (['memory', 'time'], 5)
    """
    wanted = frozenset(SECTIONS if "all" in names else names)
    if unknown := sorted(wanted - set(SECTIONS)):
        raise OnboardError(
            f"details: there is no section {unknown[0]!r}; accepted are {', '.join(SECTIONS)} and all", "details"
        )
    return wanted


def details_of(prepared: Prepared, result: Simulation, wanted: Collection[str]) -> dict[str, Any]:
    """The sections of a prediction that ended, and why others of those wanted are left out.

    Parameters
    ----------
    result: of a replay that kept its passes, where a section of `OF_PASSES` is wanted.
    wanted: as `checked_sections` returns them.

    Returns
    -------
    `schema_version`, `sections` and `skipped` with a reason for each. Times are sums over the passes of all ranks of a
    role, in ms; sizes are bytes of one rank.

    Source: predict-recommend.md section 9.3.
    """
    assert result.report is not None and result.replay is not None
    sections: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    figures = {name: value for name, value in result.report.items() if isinstance(value, int | float | None)}
    if "summary" in wanted:
        sections["summary"] = figures
    if "memory" in wanted:
        estimates = {name: dict(role.memory) for name, role in prepared.roles.items() if role.memory is not None}
        if estimates:
            sections["memory"] = {"scope": "one rank, before the engine's own adjustments", "roles": estimates}
        else:
            skipped["memory"] = "the blocks of every role are given, so no memory was estimated"
    if OF_PASSES & set(wanted):
        phases = [phase for name, role in prepared.roles.items() for phase in _phases(name, role, result.replay)]
        if "time" in wanted:
            latency = {name: value for name, value in figures.items() if name.endswith("_ms")}
            sections["time"] = {"latency": latency, "phases": phases}
        if "source" in wanted:
            sections["source"] = [
                {"role": phase["role"], "phase": phase["name"], "operations": list(map(_source, phase["operations"]))}
                for phase in phases
            ]
    if "energy" in wanted:
        skipped["energy"] = "unsupported: neither tables of whole passes nor formulas have energy"
    return {"schema_version": "1.0", "sections": sections, "skipped": skipped}


def _phases(name: str, role: SizedRole, replay: ReplayReport) -> list[dict[str, Any]]:
    """Passes of one role by what they computed; one forward of both kinds is a phase of its own."""
    passes, pool = replay.pass_columns, _POOLS[name]
    mine, composed = passes["pool"] == pool, passes["composed"] == 1
    estimates = {} if role.model is None or not mine.any() else pass_estimates(replay, role.model, pool=pool)
    alone = mine & ~composed
    spent_ms = {
        "prefill": passes["prefill_ms"][alone],
        "decode": passes["decode_ms"][alone],
        "mixed": (passes["prefill_ms"] + passes["decode_ms"])[mine & composed],
    }
    source = role.timing["type"] if role.model is None else role.model.diagnostics()["source"]
    prefix = "fpm" if role.model is not None else source
    phases = []
    for phase in _PHASES:
        rows = estimates.get(f"fpm_{phase}", [])
        latency_ms = float(np.sum(spent_ms[phase]))
        if not rows and latency_ms == 0.0:
            continue
        operation: dict[str, Any] = {
            "name": f"{prefix}_{phase}",
            "latency_ms": latency_ms,
            "source": source,
            "fallbacks": [],
            "sol": None,
            "sol_reason": _NO_SOL,
            "latency_to_sol_ratio": None,
        }
        if role.model is not None:
            operation["fpm_estimates"] = rows
        phases.append({"role": name, "name": phase, "latency_ms": latency_ms, "sol": None, "operations": [operation]})
    return phases


def _source(operation: dict[str, Any]) -> dict[str, Any]:
    return {name: operation[name] for name in ("name", "source", "fallbacks", "fpm_estimates") if name in operation}
