"""The options that say where a collection or a probe runs, shared by their commands.

Source: onboarding.md section 1.2 (deployment options).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fpmsdk.onboard.deployment import CollectionDeployment

_PANEL = "Where it runs"


class ExecutorName(StrEnum):
    """Who launches the engines."""

    kubernetes = "kubernetes"
    slurm = "slurm"
    local = "local"
    fake = "fake"


class BindName(StrEnum):
    """How a Slurm task is bound to its CPUs."""

    cores = "cores"
    none = "none"


class TransportName(StrEnum):
    """What connects GPUs."""

    nvlink = "nvlink"
    ib = "ib"
    efa = "efa"


def _option(name: str, text: str, **settings: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel=_PANEL, **settings)


ExecutorOption = Annotated[
    ExecutorName | None,
    _option(
        "--executor",
        "Who launches the engines; kubernetes unless a plan was resolved with another one. local is this machine, "
        "fake writes synthetic evidence.",
    ),
]
ImageOption = Annotated[
    str | None, _option("--image", "Container image of the engine; slurm needs it. Prefer an immutable digest.")
]
MountOption = Annotated[
    list[str] | None,
    _option("--container-mount", "Mount of the Slurm container; repeatable.", metavar="SRC[:DST[:FLAGS]]"),
]
CpusOption = Annotated[int | None, _option("--cpus-per-task", "CPUs of each node's task in Slurm; new campaigns: 16.")]
BindOption = Annotated[
    BindName | None, _option("--cpu-bind", "Binding of each node's task in Slurm; new campaigns: cores.")
]
NamespaceOption = Annotated[str | None, _option("--namespace", "Kubernetes namespace.")]
CacheOption = Annotated[
    str | None,
    _option("--model-cache", "Kubernetes volume claim with the model.", metavar="NAME[:MOUNT[:SUBPATH]]"),
]
DynamoOption = Annotated[
    str | None, _option("--dynamo-version", "Release label of the runtime; recorded, selects nothing.")
]
TransportOption = Annotated[TransportName | None, _option("--transport", "What connects GPUs.")]
SecretOption = Annotated[str | None, _option("--image-pull-secret", "Kubernetes secret for pulling the image.")]


def given_deployment(**options: Any) -> CollectionDeployment | None:
    """The deployment that options describe; None when none of them was given.

    Parameters
    ----------
    options: by field of `CollectionDeployment`; None and an empty list are options that were not given.

    Raises
    ------
    OnboardError: options that do not go together, one line each.
    """
    from fpmsdk.documents.strict import checked
    from fpmsdk.onboard.deployment import CollectionDeployment

    given = {
        name: str(value) if isinstance(value, StrEnum) else value
        for name, value in options.items()
        if value is not None and value != []
    }
    return checked(CollectionDeployment, given, "deployment options") if given else None
