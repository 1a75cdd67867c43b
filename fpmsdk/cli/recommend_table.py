"""What `fpmsdk recommend` prints: the ranking with what tells its members apart, and why the others are not in it.

Source: predict-recommend.md sections 10.4 and 14.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from fpmsdk.recommendation.ledger import config_path
from fpmsdk.recommendation.progress import duration
from fpmsdk.recommendation.ranking import flat_config
from fpmsdk.recommendation.reasons import distinct_reasons

if TYPE_CHECKING:
    from fpmsdk.recommendation import Recommendation
    from fpmsdk.recommendation.candidate import Candidate

# The table ends here; the files have all.
_LONGEST = 20
_WIDE = 200
_FIGURES = (
    ("TTFT ms", "mean_ttft_ms"),
    ("ITL ms", "mean_itl_ms"),
    ("tok/s", "output_throughput_tok_s"),
    ("tok/s/user", "mean_output_token_throughput_per_user"),
)
_SIZES = {
    "tensor": "tp",
    "pipeline": "pp",
    "attention_data": "dp",
    "moe_tensor": "etp",
    "moe_expert": "ep",
}


def show_recommendation(found: Recommendation, *, as_json: bool) -> None:
    """Print a result: on stdout the ranking, on stderr what became of the rest."""
    from fpmsdk.cli.console import print_result

    entries = found.result.recommended
    if as_json:
        ranking = [
            {
                "rank": rank,
                "score": entry.candidate.score,
                "objectives": entry.candidate.objectives,
                "used_gpus": entry.candidate.outcome.used_gpus,
                "config_path": None if found.output_dir is None else str(found.output_dir / config_path(rank)),
            }
            for rank, entry in enumerate(entries, start=1)
        ]
        print_result(json.dumps(ranking, sort_keys=True, separators=(",", ":")))
    elif entries:
        print_result(_ranking(found))
    for reason in distinct_reasons(found.result.candidates):
        typer.echo(reason.line(), err=True)
    if (folded := sum(len(entry.folded) for entry in entries)) > 0:
        typer.echo(f"Folded {folded} whose configuration is that of another", err=True)
    typer.echo(_summary(found), err=True)


def _summary(found: Recommendation) -> str:
    counts = found.ledger["counts"]
    total = len(found.result.candidates)
    others = [
        f"{counts[status]} {status.replace('_', ' ')}"
        for status in ("infeasible", "unsupported", "uncovered", "timed_out", "failed", "resource_limited")
        if counts[status]
    ]
    text = ", ".join([f"{counts['feasible']} of {total} candidates feasible", *others])
    ended = {"time_budget": "; the time budget is used up, --resume goes on", "stopped": "; stopped as asked"}
    saved = "" if found.output_dir is None else f"; saved in {found.output_dir}"
    return f"{text}{ended.get(found.end, '')}{saved}"


def _ranking(found: Recommendation) -> str:
    import io

    from rich.console import Console
    from rich.table import Table

    entries = found.result.recommended
    candidates = [entry.candidate for entry in entries[:_LONGEST]]
    varying = _varying([entry.candidate for entry in entries])
    has_bounds = any("goodput_request_throughput_rps" in each.outcome.metrics for each in candidates)
    table = Table(box=None, pad_edge=False)
    table.add_column("#", justify="right")
    for name in ("score", "GPUs"):
        table.add_column(name, justify="right")
    table.add_column("layout", overflow="fold")
    for path in varying:
        table.add_column(_short(path, varying), justify="right", overflow="fold")
    for name, _ in _FIGURES:
        table.add_column(name, justify="right")
    if has_bounds:
        table.add_column("in SLA", justify="right")
    for rank, candidate in enumerate(candidates, start=1):
        metrics, knobs = candidate.outcome.metrics, flat_config(candidate)
        cells = [str(rank), f"{candidate.score:,.6g}", str(candidate.outcome.used_gpus), _layout(candidate)]
        cells += [str(knobs.get(path, "-")) for path in varying]
        cells += [_figure(metrics.get(figure)) for _, figure in _FIGURES]
        if has_bounds:
            cells.append(_share(metrics))
        table.add_row(*cells)
    # Rows that somebody reads from a file or a pipe are not folded.
    screen = Console()
    width = screen.width if screen.is_terminal else _WIDE
    page = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    page.print(table)
    if len(entries) > _LONGEST:
        page.print(f"and {len(entries) - _LONGEST} more")
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _varying(candidates: Iterable[Candidate]) -> list[str]:
    """Knobs, without the parallel sizes, in which the candidates differ."""
    values: dict[str, set[Any]] = {}
    for candidate in candidates:
        for path, value in candidate.sample.knobs:
            values.setdefault(path, set()).add(value)
    return [path for path, found in values.items() if len(found) > 1]


def _short(path: str, paths: Iterable[str]) -> str:
    """The last name of a path, with the role where another path ends with the same one."""
    parts = path.split(".")
    alone = sum(other.endswith(f".{parts[-1]}") for other in paths) == 1
    return parts[-1] if alone or len(parts) < 3 else f"{parts[2]} {parts[-1]}"


def _layout(candidate: Candidate) -> str:
    """The workers of each role, as `2 x tp4`; prefill and decode with a plus between them.

    A size of 1 is left out, unless nothing else is left.
    """
    workers: Mapping[str, Any] = candidate.document.get("engine", {}).get("workers", {})
    roles = [role for role in workers if workers[role].get("parallelism")]
    parts = []
    for role in roles:
        text = _sizes(workers[role]["parallelism"])
        parts.append(text if len(roles) == 1 else f"{role} {text}")
    return " + ".join(parts)


def _sizes(sizes: Mapping[str, Any]) -> str:
    named = [f"{short}{sizes[name]}" for name, short in _SIZES.items() if sizes.get(name, 1) > 1]
    return f"{sizes.get('replicas', 1)} x {' '.join(named) or 'tp1'}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _share(metrics: Mapping[str, Any]) -> str:
    goodput, rate = metrics.get("goodput_request_throughput_rps"), metrics.get("request_throughput_rps")
    return "-" if goodput is None or not rate else f"{100 * goodput / rate:.0f}%"


def show_dry_run(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what a search would do."""
    if as_json:
        typer.echo(json.dumps(document, sort_keys=True, separators=(",", ":")))
        return
    for branch in document["branches"]:
        knobs = ", ".join(f"{path} ({_count(count)})" for path, count in branch["knobs"].items())
        typer.echo(
            f"{branch['mode']}: {_count(branch['candidates'])} candidates: {branch['arms']} layouts"
            + (f", {knobs}" if knobs else "")
        )
    for rejected in document["rejected"]:
        arm = rejected["arm"]
        where = f"{arm['mode']} {arm['backend']} {arm['role']} {_sizes(arm)}"
        nearest = f"; nearest: {rejected['nearest']}" if rejected["nearest"] else ""
        typer.echo(f"left out: {where}: {rejected['rule']}{nearest}")
    expected = document["expected_seconds"]
    typer.echo(
        f"algorithm {document['algorithm']} ({document['implementation']}): {_count(document['planned'])} candidates, "
        f"about {'unknown' if expected is None else duration(expected)} "
        f"({document['seconds_each'] * 1e3:.2f} ms each)"
    )


def _count(count: int | None) -> str:
    return "any number of" if count is None else f"{count:,}"
