"""`fpmsdk onboard probe-runtime`: observe the cache of an engine before its geometry is known."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fpmsdk.cli.console import INTERRUPTED, NEGATIVE_RESULT
from fpmsdk.cli.deployment_options import (
    BindOption,
    CacheOption,
    CpusOption,
    DynamoOption,
    ExecutorOption,
    ImageOption,
    MountOption,
    NamespaceOption,
    SecretOption,
    TransportOption,
    given_deployment,
)
from fpmsdk.cli.onboard_import import CheckpointOption, ConfigurationOption
from fpmsdk.documents.canonical import pretty_bytes


def probe_runtime(
    *,
    checkpoint: CheckpointOption,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="The folder of this probe, fresh or resumed.")],
    configuration: ConfigurationOption = None,
    instrumentation: Annotated[
        Path | None, typer.Option(metavar="MANIFEST", help="Manifest of the observers for the engine's version.")
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Launch the engines; a preview otherwise.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the probe in the folder.")] = False,
    executor: ExecutorOption = None,
    image: ImageOption = None,
    container_mount: MountOption = None,
    cpus_per_task: CpusOption = None,
    cpu_bind: BindOption = None,
    namespace: NamespaceOption = None,
    model_cache: CacheOption = None,
    transport: TransportOption = None,
    image_pull_secret: SecretOption = None,
    dynamo_version: DynamoOption = None,
) -> None:
    """Preview or run the runtime probes of a session, as one JSON object.

    Exits with 1 unless every selected configuration was previewed or completed, with 130 when it was interrupted.
    """
    from fpmsdk.collect.executors import executor_factory
    from fpmsdk.onboard.checkpoint import checkpoint_path
    from fpmsdk.onboard.probe import probe_runtime
    from fpmsdk.onboard.version_detect import detect_versions

    options = given_deployment(
        executor=executor,
        image=image,
        container_mount=container_mount,
        cpus_per_task=cpus_per_task,
        cpu_bind=cpu_bind,
        namespace=namespace,
        model_cache=model_cache,
        transport=transport,
        image_pull_secret=image_pull_secret,
        dynamo_version=dynamo_version,
    )
    try:
        result = probe_runtime(
            checkpoint_path(checkpoint),
            output_dir,
            configurations=configuration,
            instrumentation=instrumentation,
            deployment=None if options is None else options.model_dump(mode="json", exclude_unset=True),
            executors=executor_factory if execute else None,
            detect_version=lambda where: detect_versions(where).backend_version,
            resume=resume,
        )
        for configuration_report in result["configurations"].values():
            _warn_of_graphs(configuration_report.get("launch"))
    except KeyboardInterrupt:
        typer.echo("interrupted; what ran was cleaned up; pass --resume to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(pretty_bytes(result).decode(), nl=False)
    if result["status"] not in ("preview", "completed"):
        raise typer.Exit(NEGATIVE_RESULT)


def _warn_of_graphs(launch: dict[str, Any] | None) -> None:
    from fpmsdk.onboard.graph_advisory import graph_advisory

    if launch is not None:
        policy = launch["collection"]["prefill_cudagraph_policy"]
        if (advisory := graph_advisory(launch.get("worker_type"), policy)) is not None:
            typer.echo(advisory, err=True)
