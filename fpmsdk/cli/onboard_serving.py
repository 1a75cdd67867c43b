"""`fpmsdk onboard validate-serving`: prepare, run or assess a serving run, and qualify an onboarding."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fpmsdk.cli.console import NEGATIVE_RESULT
from fpmsdk.errors import OnboardError


def validate_serving(
    action: Annotated[
        Literal["prepare", "run", "assess"], typer.Option("--action", help="Which part of the validation.")
    ],
    validation_output_dir: Annotated[
        Path | None, typer.Option("--validation-output-dir", help="Fresh directory of prepare or assess.")
    ] = None,
    collection_report: Annotated[
        Path | None, typer.Option("--collection-report", help="collection-validation.json; assessed anew.")
    ] = None,
    replay_report: Annotated[
        Path | None, typer.Option("--replay-report", help="validation.json of validate-fpm; assessed anew.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="Policy file; otherwise that of the collection report.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Prepared recipe.json, for run and assess.")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="HTTP(S) address of the server.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Tokenizer directory of the pinned checkpoint.")
    ] = None,
    aiperf_python: Annotated[
        Path | None, typer.Option("--aiperf-python", help="Python of the environment with the benchmark.")
    ] = None,
    execution_evidence: Annotated[
        Path | None, typer.Option("--execution-evidence", help="What was observed of the server.")
    ] = None,
    forward_evidence: Annotated[
        Path | None, typer.Option("--forward-evidence", help="Forward passes that were timed in serving.")
    ] = None,
) -> None:
    """Compare a serving run with its prediction. Nothing but --action run sends traffic.

    prepare exits with 0 when the recipe is ready, assess when collection, replay and serving pass; otherwise with 1.
    """
    from fpmsdk.onboard import serving

    if action == "run":
        serving.run(recipe, aiperf_python)
        return
    if validation_output_dir is None or collection_report is None or replay_report is None:
        raise OnboardError(
            f"--action {action}: needs --validation-output-dir, --collection-report and --replay-report", "--action"
        )
    asked = serving.ServingValidation(
        output=validation_output_dir.expanduser().absolute(),
        collection_report=collection_report.expanduser().absolute(),
        replay_report=replay_report.expanduser().absolute(),
        policy=policy,
        recipe=None if recipe is None else recipe.expanduser().absolute(),
        execution_evidence=execution_evidence,
        forward_evidence=forward_evidence,
        endpoint=endpoint,
        tokenizer=tokenizer,
        benchmark_python=aiperf_python,
    )
    combined = (serving.prepare if action == "prepare" else serving.assess)(asked)
    for name, gate in combined["gates"].items():
        for issue in _issues(gate):
            typer.echo(f"  {name}: {issue}", err=True)
    typer.echo(
        f"Onboarding validation: {combined['status']}; accuracy: {combined['accuracy']}. "
        f"Saved {asked.output / serving.REPORT_FILE}"
    )
    ready = combined["status"] == "passed" if action == "assess" else _is_ready(combined)
    raise typer.Exit(0 if ready else NEGATIVE_RESULT)


def _issues(gate: dict[str, Any]) -> list[str]:
    return [*gate.get("issues", []), *gate.get("failures", []), *gate.get("missing_evidence", [])]


def _is_ready(combined: dict[str, Any]) -> bool:
    from fpmsdk.documents.canonical import read_document

    return "recipe" in combined and bool(read_document(combined["recipe"]["path"])["status"] == "ready")
