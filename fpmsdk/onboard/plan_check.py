"""Whether a plan folder still is what its request makes of it, byte for byte; digests that it states are never trusted.

Source: onboarding.md section 5 (check_plan, create_plan).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import parse_document, read_document
from fpmsdk.documents.evidence import refuse_links
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import DRAFT_PREFIX
from fpmsdk.onboard.collector_command import ARTIFACT_FOLDER, CHECKPOINT_FOLDER, DATA_FOLDER
from fpmsdk.onboard.finalized import verify_finalized_data
from fpmsdk.onboard.plan_documents import (
    EVALUATION_KEYS,
    PLAN_FILE,
    PLAN_SCHEMA,
    REQUEST_FILE,
    evaluation_files,
    plan_documents,
)
from fpmsdk.onboard.request import SupportRequest, load_request, request_id, validation_id

LOCK_FILE = ".support.lock"
_ANOTHER_FOLDER = "choose a new output directory"


def plan_folder(path: str | Path) -> Path:
    """The place of a plan folder: absolute, without links.

    >>> plan_folder("/campaign/../campaign/collection").as_posix()
    '/campaign/collection'
    """
    return Path(path).expanduser().resolve()


def is_empty(folder: Path) -> bool:
    """Whether nothing but the lock and drafts of killed processes are in a plan folder, or it does not exist."""
    return not folder.is_dir() or all(
        place.name == LOCK_FILE or place.name.startswith(DRAFT_PREFIX) for place in folder.iterdir()
    )


def check_plan(request: SupportRequest, folder: Path) -> None:
    """Verify that a folder holds the plan of a request, before anything in it is used or added.

    Parameters
    ----------
    request: as it is asked for now; its example workload may differ from the saved one.
    folder: as `plan_folder` gives it.

    Raises
    ------
    OnboardError: no plan of this request, or a generated file is missing or differs; names it.
    EvidenceError: a link, or finalised data that changed.
    """
    _refuse_links(folder)
    plan = _saved_plan(folder)
    _require_identity(request, plan, folder)
    saved = _saved_request(folder)
    if (request_id(saved), validation_id(saved)) != (plan["request_id"], plan.get("validation_id")):
        raise OnboardError(
            f"{folder / REQUEST_FILE}: is not the request that {PLAN_FILE} was made of; restore it, or complete an "
            "interrupted refresh with `fpmsdk onboard plan --overwrite`",
            str(folder / REQUEST_FILE),
        )
    for path, content in plan_documents(saved, folder).items():
        _require_bytes(folder / path, [content])
    verify_finalized_data(saved, folder)


def check_rewritable(request: SupportRequest, folder: Path) -> None:
    """Verify that a plan of a request may be completed or refreshed in a folder that is not empty.

    Besides an intact plan of the same collection these are the states that a killed `plan` leaves: a first write
    without `support-plan.json`, and a refresh of which some evaluation files are those of the new request.

    Parameters and errors as `check_plan`.
    """
    _refuse_links(folder)
    documents = plan_documents(request, folder)
    if not (folder / PLAN_FILE).exists():
        if _saved_request(folder) != request:
            raise OnboardError(
                f"{folder / REQUEST_FILE}: differs from the requested plan, and {PLAN_FILE} is missing; "
                f"{_ANOTHER_FOLDER}",
                str(folder / REQUEST_FILE),
            )
        for path, content in documents.items():
            if (folder / path).exists():
                _require_bytes(folder / path, [content])
        return
    plan = _saved_plan(folder)
    _require_identity(request, plan, folder)
    saved = _saved_request(folder)
    if request_id(saved) != plan["request_id"]:
        raise OnboardError(
            f"{folder / REQUEST_FILE}: was modified: it is another collection than {PLAN_FILE}; {_ANOTHER_FOLDER}",
            str(folder / REQUEST_FILE),
        )
    evaluation = evaluation_files(request)
    for path, content in plan_documents(saved, folder).items():
        place = folder / path
        if path == PLAN_FILE:
            # The last file of a refresh: it may still tell of an earlier example, but of no other collection.
            if _without_example(plan) != _without_example(parse_document(content, place)):
                raise _modified(place)
        elif place.exists():
            _require_bytes(place, [content, documents[path]] if path in evaluation else [content])
    verify_finalized_data(saved, folder)


def _refuse_links(folder: Path) -> None:
    for path in (PLAN_FILE, REQUEST_FILE, "systems", "predict", "recommend"):
        _refuse_link(folder / path)
    for path in (DATA_FOLDER, CHECKPOINT_FOLDER, ARTIFACT_FOLDER):
        _refuse_link(folder / path)
        if (folder / path).exists():
            refuse_links(folder / path)


def _refuse_link(place: Path) -> None:
    if place.is_symlink():
        raise EvidenceError(f"{place}: a plan may not hold symbolic links; use the file or folder itself", str(place))


def _saved_plan(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    try:
        plan = read_document(path)
    except FileNotFoundError:
        raise OnboardError(f"{path}: there is no plan; run `fpmsdk onboard plan` first", str(path)) from None
    if not isinstance(plan, dict) or plan.get("schema_version") != PLAN_SCHEMA:
        found = plan.get("schema_version") if isinstance(plan, dict) else None
        raise OnboardError(
            f"{path}: schema_version must be {PLAN_SCHEMA!r}, found {found!r}; older plans took collection bounds from "
            "example traffic, so plan again in a new output directory",
            str(path),
        )
    return plan


def _require_identity(request: SupportRequest, plan: dict[str, Any], folder: Path) -> None:
    if plan.get("request_id") != request_id(request):
        raise OnboardError(
            f"{folder}: holds the plan of another request identity, {plan.get('request_id')}; this request is "
            f"{request_id(request)}; {_ANOTHER_FOLDER}",
            str(folder),
        )


def _saved_request(folder: Path) -> SupportRequest:
    path = folder / REQUEST_FILE
    try:
        return load_request(path)
    except (OnboardError, OSError) as fault:
        raise OnboardError(f"the saved request was modified or cannot be read: {fault}", str(path)) from None


def _without_example(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key not in EVALUATION_KEYS}


def _require_bytes(place: Path, accepted: list[bytes]) -> None:
    _refuse_link(place)
    if not place.is_file():
        raise OnboardError(f"{place}: this generated file is missing; {_ANOTHER_FOLDER}", str(place))
    if place.read_bytes() not in accepted:
        raise _modified(place)


def _modified(place: Path) -> OnboardError:
    return OnboardError(
        f"{place}: this generated file was modified, or the folder was moved (plans hold absolute paths); "
        f"{_ANOTHER_FOLDER}",
        str(place),
    )
