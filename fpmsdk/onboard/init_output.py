"""What `onboard init` writes: one request file, or a directory with a request and a profile for each configuration.

Source: onboarding.md sections 1.1 and 1.3.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.parallel_configs import check_distinct
from fpmsdk.onboard.request import SupportRequest, request_id
from fpmsdk.onboard.request_sections import TOPOLOGY_FIELDS

INDEX = "onboarding.json"
INDEX_SCHEMA = "aisimulate-onboarding/v1"


def plan_command(request_file: Path, output_dir: Path | None = None) -> str:
    """The shell command that plans a request.

    >>> plan_command(Path("my request.yaml"))
    "fpmsdk onboard plan --config 'my request.yaml'"
    """
    words = ["fpmsdk", "onboard", "plan", "--config", str(request_file)]
    return shlex.join(words if output_dir is None else [*words, "--output-dir", str(output_dir)])


def request_target(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The absolute path of a request file that may be written, checked before anything is asked.

    Raises
    ------
    OnboardError: it is there without `overwrite`, is a link or no file, or its directory cannot be written.
    """
    target = Path(path).expanduser().absolute()
    if target.is_symlink():
        raise OnboardError(f"--output {target}: a symbolic link is not written to; remove it", "--output")
    if target.exists() and not target.is_file():
        raise OnboardError(f"--output {target}: must be a file", "--output")
    if target.exists() and not overwrite:
        raise OnboardError(f"--output {target}: exists; pass --overwrite to replace it", "--output")
    _check_writable(target, "--output")
    return target


def _check_writable(target: Path, option: str) -> None:
    parent = target.parent
    while not parent.exists() and not parent.is_symlink():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OnboardError(f"{option} {target}: {parent} is no directory that can be written", option)


def write_request(request: SupportRequest, path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Write a request whole or not at all; without `overwrite` only where nothing is.

    Raises
    ------
    OnboardError: as `request_target`, or its scheduler limits do not resolve.
    OSError: it cannot be written.
    """
    request.scheduler_limits()
    content = request.yaml_bytes()
    target = request_target(path, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".fpmsdk-{os.urandom(8).hex()}")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(draft, target)
        else:
            os.link(draft, target)  # fails when somebody was faster
    except FileExistsError:
        raise OnboardError(f"--output {target}: exists; pass --overwrite to replace it", "--output") from None
    finally:
        draft.unlink(missing_ok=True)
    return target


def directory_target(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a directory to fill: new or empty, without links on the way.

    Raises
    ------
    OnboardError: it is not.
    """
    if not os.fspath(path):
        raise OnboardError("--output-dir must be a path, found nothing", "--output-dir")
    target = Path(path).expanduser().absolute()
    for place in (target, *target.parents):
        if place.is_symlink():
            raise OnboardError(f"--output-dir {target}: {place} is a symbolic link; name its target", "--output-dir")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OnboardError(f"--output-dir {target}: must be new or empty; nothing is replaced", "--output-dir")
    _check_writable(target, "--output-dir")
    return target


def directory_name(request: SupportRequest) -> str:
    """The directory of a configuration, by role and topology."""
    tensor, data, moe_tensor, expert = request.topology_sizes()
    role = "" if request.worker_type is None else f"{request.worker_type}-"
    return f"{role}tp{tensor}-dp{data}-moe-tp{moe_tensor}-moe-ep{expert}"


def write_directory(requests: Sequence[SupportRequest], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Write all configurations with their index, or nothing.

    Parameters
    ----------
    requests: complete ones, each with its profile.

    Returns
    -------
    The index.

    Raises
    ------
    OnboardError: two of one role and topology, limits that do not resolve, or as `directory_target`.
    OSError: they cannot be written.
    """
    check_distinct(requests)
    for request in requests:
        request.scheduler_limits()
    root = directory_target(path)
    root.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        staged = Path(scratch) / "staged"
        for request in requests:
            final = root / directory_name(request)
            entries.append(_index_entry(request, final))
            folder = staged / final.name
            write_request(request, folder / "request.yaml", overwrite=False)
            assert request.fpm_profile is not None
            profile = request.fpm_profile.model_dump_json(indent=2) + "\n"
            (folder / "fpm-profile.json").write_text(profile, encoding="utf-8")
        index = {"schema_version": INDEX_SCHEMA, "configurations": entries}
        (staged / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        directory_target(root)
        staged.rename(root)  # never replaces a directory that holds something
    return index


def _index_entry(request: SupportRequest, final: Path) -> dict[str, Any]:
    role = {} if request.worker_type is None else {"worker_type": request.worker_type}
    return {
        **role,
        "topology": dict(zip(TOPOLOGY_FIELDS, request.topology_sizes(), strict=True)),
        "collection_gpus_required": request.worker_gpus,
        "request_id": request_id(request),
        "request": str(final / "request.yaml"),
        "fpm_profile": str(final / "fpm-profile.json"),
        "collection_dir": str(final / "collection"),
        "plan_command": plan_command(final / "request.yaml", final / "collection"),
    }
