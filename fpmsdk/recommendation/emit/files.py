"""What `--emit` writes for a concrete deployment, and under which names.

Source: predict-recommend.md section 10.3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.render import gpus_per_node
from fpmsdk.errors import OnboardError
from fpmsdk.files import whole_file
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.documents import read_document
from fpmsdk.recommendation.emit.kubernetes import deploy_manifest
from fpmsdk.recommendation.emit.shell import serve_script, slurm_script
from fpmsdk.recommendation.emit.workers import ServingWorker, serving_workers
from fpmsdk.version import __version__

FILE_OF = {"vllm-cmd": "serve.sh", "k8s": "deploy.yaml", "slurm": "job.sbatch"}
_LONGEST_NAME = 40
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)+(\.?(rc|post)[0-9]+)?")


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds of `--emit`, each once, in the order of `FILE_OF`.

    Raises
    ------
    OnboardError: an unknown kind, or none.

    >>> parse_kinds("k8s,vllm-cmd")
    ('vllm-cmd', 'k8s')
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in FILE_OF]
    if unknown or not asked:
        raise OnboardError(f"--emit: found {text!r}, accepted are {', '.join(FILE_OF)}, separated by commas", "--emit")
    return tuple(kind for kind in FILE_OF if kind in asked)


def emit(
    document: Mapping[str, Any],
    kinds: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    image: str | None = None,
    node_gpus: int | None = None,
) -> tuple[Path, ...]:
    """Write the files that start a deployment.

    Parameters
    ----------
    document: concrete configuration of a prediction, validated, with absolute paths.
    kinds: some of `FILE_OF`.
    folder: where to; it is made where it is missing, and files of these names are replaced.
    image: container image with vLLM. None takes the image that vLLM publishes for the version in `k8s`, and no
        container in `slurm`.
    node_gpus: GPUs of a node; None for what the systems data say of `engine.hardware`.

    Returns
    -------
    The files, in the order of `kinds`.

    Raises
    ------
    OnboardError: no vLLM deployment, a worker larger than a node, or no image can be named; nothing was written.
    ConfigError: the profile has no such deployment; nothing was written.
    OSError: a file cannot be written.

    Source: predict-recommend.md section 10.3.

    >>> import tempfile
    >>> document = {"engine": {"model": "org/m", "hardware": "h200_sxm", "backend_version": "0.27.0"}}
    >>> [path.name for path in emit(document, ["vllm-cmd", "k8s"], tempfile.mkdtemp())]
    ['serve.sh', 'deploy.yaml']
    """
    config = read_document(document).checked(PredictConfig)
    workers = serving_workers(config)
    texts = {kind: _text(kind, config, workers, image, node_gpus) for kind in kinds}
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for kind, text in texts.items():
        path = place / FILE_OF[kind]
        with whole_file(path) as file:
            file.write(text.encode())
        if kind != "k8s":
            path.chmod(0o755)
    return tuple(place / FILE_OF[kind] for kind in texts)


def emit_ranked(
    documents: Sequence[Mapping[str, Any]], kinds: Sequence[str], folder: str | os.PathLike[str], **options: Any
) -> None:
    """Write the files of every recommendation, the first below `0001`, each beside its configuration.

    Parameters
    ----------
    documents: concrete configurations, best first.
    kinds, options: as `emit` takes them.
    folder: that of the recommendations.

    Raises as `emit`.
    """
    for rank, document in enumerate(documents, start=1):
        emit(document, kinds, Path(folder) / f"{rank:04d}", **options)


def require_image(kinds: Sequence[str], backend_version: str | None, image: str | None) -> None:
    """Refuse, before anything is searched, files that could name no container image.

    Raises
    ------
    OnboardError: `k8s` is asked for, no image is named, and the version is no release of vLLM.

    >>> require_image(["k8s"], "9.9.9-vec", "registry/vllm:lab")
    """
    if "k8s" in kinds and image is None:
        _published_image(backend_version)


def _text(
    kind: str,
    config: PredictConfig,
    workers: Sequence[ServingWorker],
    image: str | None,
    node_gpus: int | None,
) -> str:
    engine, about = config.engine, _about(config, workers)
    systems = sorted({worker.hardware for worker in workers})
    if kind != "k8s" and len(systems) > 1:
        raise OnboardError(
            f"--emit {kind}: one machine or job has GPUs of one system, and the workers need {' and '.join(systems)}; "
            "use k8s",
            "--emit",
        )
    if kind == "vllm-cmd":
        return serve_script(workers, about)
    name = _name(engine.model)
    roots = None if engine.systems_paths in (None, "default") else engine.systems_paths
    gpus = node_gpus or min(gpus_per_node(worker.hardware, roots) for worker in workers)
    if kind == "slurm":
        return slurm_script(workers, about, name=name, gpus_per_node=gpus, image=image)
    found = image or _published_image(engine.backend_version)
    return deploy_manifest(workers, about, name=name, gpus_per_node=gpus, image=found)


def _about(config: PredictConfig, workers: Sequence[ServingWorker]) -> list[str]:
    engine = config.engine
    version = "" if engine.backend_version is None else f" {engine.backend_version}"
    of = " and ".join(f"{worker.replicas} x {worker.role} on {worker.gpus} {worker.hardware}" for worker in workers)
    return [
        f"Serves {engine.model} with vLLM{version}: {of}.",
        f"Written by fpmsdk {__version__} from the configuration of a prediction.",
    ]


def _published_image(version: str | None) -> str:
    if version is None or not _RELEASE.fullmatch(version):
        raise OnboardError(
            f"--emit k8s: engine.backend_version {version!r} is no release of vLLM, so that its image is not known; "
            "name one with --image",
            "--image",
        )
    return f"vllm/vllm-openai:v{version}"


def _name(model: str) -> str:
    """A DNS label for a model.

    >>> _name("/models/Org_Model-3.1B"), _name("org/.")
    ('org-model-3-1b', 'model')
    """
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:_LONGEST_NAME].rstrip("-") or "model"
