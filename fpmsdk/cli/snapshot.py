"""`fpmsdk snapshot`: save a tuned model, look at a saved one, check it, compare two."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fpmsdk.cli.console import NEGATIVE_RESULT, JsonOption, number, reports_errors, show
from fpmsdk.cli.inputs import AttentionDpOption, ConfigOption, WorkerTypeOption, tuned_model

SnapshotArgument = Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="The directory of a saved model.")]

snapshot = typer.Typer(name="snapshot", help="Saved models: save, inspect, verify, diff.", no_args_is_help=True)


def save(
    target: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="The directory to write; it must not exist.")],
    frames: Annotated[list[Path], typer.Argument(help="Telemetry to tune on: .bin or .jsonl, possibly with .gz.")],
    *,
    config: ConfigOption = None,
    worker_type: WorkerTypeOption = None,
    attention_dp: AttentionDpOption = None,
    include_perf_db: Annotated[
        bool, typer.Option("--include-perf-db", help="Copy the performance data of a native model into it.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Tune a model on recorded telemetry and save what it learned."""
    model = tuned_model(frames, config, worker_type, attention_dp)
    pinned = model.save_state_snapshot(target, include_perf_db=include_perf_db)
    retained = model.diagnostics()["retained_observations"]
    line = f"saved {retained:,} observations in {target}; restore with its config.json, or with state_snapshot="
    show({"config": pinned, "retained_observations": retained}, json, line)


def inspect(directory: SnapshotArgument, *, json: JsonOption = False) -> None:
    """Say what a saved model is, without building it."""
    from fpmsdk import inspect_state_snapshot

    told = inspect_state_snapshot(directory)
    show(told, json, *_described(told))


def verify(directory: SnapshotArgument, *, json: JsonOption = False) -> None:
    """Restore a saved model with every check, and say whether it can answer.

    Exits with 2 when a check fails, with 1 when the model is sound but not ready.
    """
    from fpmsdk import ForwardPassPerfModel

    model = ForwardPassPerfModel.best_available(state_snapshot=directory)
    readiness = model.readiness_report()
    state = "ready" if readiness["ready"] else "not ready"
    show({"verified": True, "readiness": readiness}, json, f"{directory}: restored, every check holds; {state}")
    if not readiness["ready"]:
        raise typer.Exit(NEGATIVE_RESULT)


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A saved model.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another one.")],
    *,
    json: JsonOption = False,
) -> None:
    """Say which stores of two saved models differ, and by how much. Exits with 1 when any does."""
    from fpmsdk.perfmodel.state_diff import diff_snapshots

    found = diff_snapshots(before, after)
    show(found, json, *_differences(found))
    if not found["equal"]:
        raise typer.Exit(NEGATIVE_RESULT)


def _described(told: dict[str, Any]) -> list[Table | str]:
    topology, readiness, producer = told["topology"], told["readiness"], told["producer"]
    size = sum(file["size"] for file in told["files"])
    lines: list[Table | str] = [
        f"{told['kind']} of {topology['model']} on {topology['system']}, {topology['backend']} "
        f"{topology['worker_type']}, tp {topology['tp']}",
        f"written by fpmsdk {producer['fpmsdk_version']}, schema {told['schema_version']}, "
        f"state layout {told['state_layout_version']}; {len(told['files'])} files, {size:,} bytes",
        f"manifest SHA-256 {told['manifest_sha256']}",
    ]
    correction = readiness["correction"] or {"stores": []}
    table = Table()
    for name in ("store", "ready", "observations", "why not"):
        table.add_column(name, justify="right" if name == "observations" else "left")
    for store in (*readiness["stores"], *correction["stores"]):
        table.add_row(
            store.get("store") or store["workload_kind"],
            "yes" if store["ready"] else "no",
            f"{store['retained_observations']:,}",
            store["reason"] or "",
        )
    return [*lines, table] if table.row_count else lines


def _differences(found: dict[str, Any]) -> list[Table | str]:
    if found["equal"]:
        return ["the states are equal, byte for byte"]
    lines: list[Table | str] = []
    if found["identity"] is not None:
        lines.append(f"two models: {found['identity']}")
    table = Table()
    for name in ("store", "rows", "field", "changed", "largest change"):
        table.add_column(name, justify="left" if name in ("store", "field") else "right", no_wrap=name != "store")
    for store in found["stores"]:
        rows = " > ".join("-" if count is None else f"{count:,}" for count in store["rows"])
        name = f"{store['store']} ({store['layout']})"
        if not store["changed"]:
            table.add_row(name, rows, "unchanged", "", "")
        elif not store["fields"]:
            table.add_row(name, rows, f"only {store['only']}", "", "")
        for place, field in enumerate(store["fields"]):
            changed = field["changed_elements"]
            table.add_row(
                *((name, rows) if place == 0 else ("", "")),
                field["field"],
                "all" if changed is None else f"{changed:,} of {field['elements'][0]:,}",
                number(field["largest_change"], 6),
            )
    return [*lines, table]


for command in (save, inspect, verify, diff):
    snapshot.command()(reports_errors(command))
