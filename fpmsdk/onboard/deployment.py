"""Where a collection runs: executor, image, mounts and CPUs, as part of a frozen campaign's identity.

Source: onboarding.md sections 1.2 and 2.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fpmsdk.documents.strict import StrictDocument

Executor = Literal["kubernetes", "slurm", "local", "fake"]

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_MAX_NAME = 253
# What an executor other than its own does not take.
_KUBERNETES_ONLY = ("namespace", "model_cache", "image_pull_secret")
_SLURM_ONLY = ("container_mount", "cpus_per_task", "cpu_bind")


def option(field: str) -> str:
    """The command-line option of a field.

    >>> option("cpus_per_task")
    '--cpus-per-task'
    """
    return "--" + field.replace("_", "-")


class CollectionDeployment(StrictDocument):
    """Deployment options of a collection. `dynamo_version` is a label and no part of the identity.

    `executor` is the one that launches engines: `kubernetes` and `slurm` on a cluster, `local` on this machine,
    `fake` writes synthetic evidence. `model_cache` is `NAME[:MOUNT[:SUBPATH]]` of a volume claim, `container_mount`
    entries are `SRC[:DST[:FLAGS]]`.

    Source: onboarding.md section 2.

    >>> CollectionDeployment(executor="slurm", image="registry/image:1").identity()
    {'executor': 'slurm', 'image': 'registry/image:1', 'container_mount': []}
    """

    executor: Executor = "kubernetes"
    dynamo_version: str | None = None
    image: Annotated[str, Field(pattern=r"^[^\s\x00]+$")] | None = None
    container_mount: list[str] = Field(default_factory=list)
    cpus_per_task: Annotated[int, Field(gt=0)] | None = None
    cpu_bind: Literal["cores", "none"] | None = None
    namespace: str | None = None
    model_cache: str | None = None
    transport: Literal["nvlink", "ib", "efa"] | None = None
    image_pull_secret: str | None = None

    @model_validator(mode="after")
    def _options_of_the_executor(self) -> CollectionDeployment:
        foreign = {
            "kubernetes": _SLURM_ONLY,
            "slurm": _KUBERNETES_ONLY,
            "local": (*_SLURM_ONLY, *_KUBERNETES_ONLY),
            "fake": (*_SLURM_ONLY, *_KUBERNETES_ONLY),
        }[self.executor]
        found = [option(name) for name in foreign if getattr(self, name)]
        if found:
            raise ValueError(f"--executor {self.executor} does not take {', '.join(found)}; leave them out")
        if self.executor == "slurm" and self.image is None:
            raise ValueError("--executor slurm needs --image, the container that the engine runs in")
        return self

    @field_validator("container_mount")
    @classmethod
    def _mounts(cls, mounts: list[str]) -> list[str]:
        for mount in mounts:
            if not mount.strip() or re.search(r"[\x00-\x1f\x7f,]", mount):
                raise ValueError(f"must be mounts without control characters and commas, found {mount!r}")
        return mounts

    @field_validator("dynamo_version")
    @classmethod
    def _label(cls, label: str | None) -> str | None:
        if label is not None and (not label.strip() or "\0" in label):
            raise ValueError(f"must be text other than blanks, without NUL, found {label!r}")
        return label

    @field_validator("namespace")
    @classmethod
    def _namespace(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(_LABEL, name):
            raise ValueError(f"must be a DNS label (lower-case letters, digits, dashes), found {name!r}")
        return name

    @field_validator("image_pull_secret")
    @classmethod
    def _secret(cls, name: str | None) -> str | None:
        if name is not None and not _is_subdomain(name):
            raise ValueError(f"must be a DNS subdomain of at most {_MAX_NAME} characters, found {name!r}")
        return name

    @field_validator("model_cache")
    @classmethod
    def _claim(cls, text: str | None) -> str | None:
        if text is None:
            return None
        name, *rest = text.split(":")
        if len(rest) > 2 or not _is_subdomain(name):
            raise ValueError(f"must be NAME[:MOUNT[:SUBPATH]] with the name of a volume claim, found {text!r}")
        if rest and rest[0] and not PurePosixPath(rest[0]).is_absolute():
            raise ValueError(f"MOUNT must be an absolute path in the container, found {rest[0]!r}")
        if re.search(r"[\x00\r\n]", text):
            raise ValueError(f"must not hold NUL or line breaks, found {text!r}")
        return text

    def document(self) -> dict[str, Any]:
        """The options as plain values, without what is unset."""
        return self.model_dump(mode="json", exclude_none=True)

    def identity(self) -> dict[str, Any]:
        """The part that preview, execution and resumption must agree in: all but the Dynamo label."""
        document = self.document()
        document.pop("dynamo_version", None)
        return document


def _is_subdomain(name: str) -> bool:
    return len(name) <= _MAX_NAME and re.fullmatch(_SUBDOMAIN, name) is not None
