"""`fpmsdk onboard validate-collection`: is a collection good enough to be relied on?"""

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import INTERRUPTED, progress


def validate_collection(
    config: Annotated[
        Path, typer.Option("-c", "--config", help="The request that was collected, from before any finalisation.")
    ],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Its plan directory.")],
    validation_output_dir: Annotated[
        Path, typer.Option("--validation-output-dir", help="Where the assessment goes: fresh, or the one to resume.")
    ],
    policy: Annotated[
        Path | None, typer.Option("--policy", help="Policy, JSON or YAML; what it leaves out has defaults.")
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="Launch the repetitions with the deployment of the collection.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the assessment there, under its policy.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Launch failed samples again; needs --execute and --resume.")
    ] = False,
    repeatability_dir: Annotated[
        Path | None,
        typer.Option("--repeatability-dir", help="Judge an earlier repetition; without --execute and --resume."),
    ] = None,
) -> None:
    """Assess a published collection: its points, its execution, its repeatability and its interpolation.

    Nothing is launched without --execute, and the collection is never changed. Exits with 0 when every gate passed, or
    when a mere look found nothing that failed; with 1 when a gate failed or is incomplete; with 2 for rejected input.
    Serving accuracy is not assessed.
    """
    from fpmsdk.onboard.validate_collection import REPORT_FILE, CollectionValidation, exit_code
    from fpmsdk.onboard.validate_collection import validate_collection as validate

    validation = CollectionValidation(
        config=config,
        folder=output_dir,
        output=validation_output_dir,
        policy=policy,
        execute=execute,
        resume=resume,
        retry_failed=retry_failed,
        repeats=repeatability_dir,
    )
    try:
        with progress("assessing the collection"):
            report = validate(validation)
    except KeyboardInterrupt:
        typer.echo("interrupted; every launch is kept, go on with --resume", err=True)
        raise typer.Exit(INTERRUPTED) from None
    for name, gate in report["gates"].items():
        typer.echo(f"  {name}: {gate['status']}")
    typer.echo(
        f"Collection validation: {report['status']}; serving accuracy: not assessed. Saved "
        f"{validation_output_dir / REPORT_FILE}"
    )
    raise typer.Exit(exit_code(validation, report))
