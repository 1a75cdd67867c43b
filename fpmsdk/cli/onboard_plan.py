"""`fpmsdk onboard plan`: the plan folder of a request. Source: onboarding.md sections 1.2 and 5."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fpmsdk.cli.console import show


class PlanFormat(StrEnum):
    """How the result is printed."""

    table = "table"
    json = "json"


RequestOption = Annotated[Path, typer.Option("-c", "--config", help="The request, a YAML or JSON file.")]
PlanFolderOption = Annotated[Path, typer.Option("--output-dir", help="The plan folder.")]
DEFAULT_FOLDER = Path("./aisimulate-support")


def plan(
    config: RequestOption,
    output_dir: PlanFolderOption = DEFAULT_FOLDER,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Refresh or complete the plan of the same collection.")
    ] = False,
    format: Annotated[PlanFormat, typer.Option("--format", help="How the result is printed.")] = PlanFormat.table,
) -> None:
    """Plan a collection: its folder, the configurations that use it, and the collector's command. Starts nothing."""
    from fpmsdk.onboard.plan import create_plan
    from fpmsdk.onboard.plan_check import plan_folder
    from fpmsdk.onboard.plan_summary import plan_summary
    from fpmsdk.onboard.request import load_request

    request = load_request(config)
    document = create_plan(request, output_dir, overwrite=overwrite)
    summary: dict[str, Any] = plan_summary(request, plan_folder(output_dir), document)
    show(summary, format is PlanFormat.json, *(f"{name}: {value}" for name, value in summary.items()))
