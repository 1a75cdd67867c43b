"""Directories of an offline model hub cache: which repository and which full revision they hold.

Source: onboarding.md section 3.5.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")


class Snapshot(NamedTuple):
    """A repository (`organisation/name`) at a full, immutable revision."""

    repository: str
    revision: str


def snapshot_of(path: str | os.PathLike[str]) -> Snapshot | None:
    """What a directory of a hub cache holds; None for any other directory, and for one of a branch.

    Parameters: `path`, an absolute, normalised directory.

    >>> snapshot_of("/hub/models--org--model/snapshots/" + "a" * 40)
    Snapshot(repository='org/model', revision='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')
    >>> snapshot_of("/hub/models--org--model/snapshots/main") is None
    True
    """
    place = os.fspath(path)
    found = _SNAPSHOT.search(place)
    if found is None or not os.path.isabs(place) or os.path.normpath(place) != place:
        return None
    owner, separator, name = found[1].partition("--")
    return Snapshot(f"{owner}/{name}" if separator else owner, found[2])


def is_selected_model(path: str, model: str, model_revision: str) -> bool:
    """Whether an observed model path is the selected model: literally, or as its snapshot at that very revision.

    >>> place = "/hub/models--org--model/snapshots/" + "a" * 40
    >>> is_selected_model(place, "org/model", "a" * 40), is_selected_model(place, "org/model", "a" * 7)
    (True, False)
    """
    return path == model or snapshot_of(path) == (model, model_revision)
