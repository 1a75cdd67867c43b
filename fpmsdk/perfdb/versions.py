"""Queryable version slots: which backend version a request for `current`, `next` or a literal means.

Decides on names; whether tables exist is found out when they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fpmsdk.errors import PerfDataCorruptError, UnlistedVersionError
from fpmsdk.perfdb.documents import as_mapping

if TYPE_CHECKING:
    from packaging.version import Version

QUERY_VERSIONS = "query_versions.yaml"
ALIASES = ("current", "previous", "next")
ALLOW_VARIABLE = "AIC_ALLOW_UNLISTED_VERSIONS"


class ResolvedVersion(NamedTuple):
    """A literal version, None when nothing was requested and nothing governs the system.

    `tolerate_dirless` says that the system need not have a directory of that version: its rows come from
    earlier ones.

    Source: op-level.md section 1.2.

    >>> resolved = ResolvedVersion("0.25.0", tolerate_dirless=True)
    >>> resolved.version
    '0.25.0'
    """

    version: str | None
    tolerate_dirless: bool


class Slots:
    """The queryable versions of one system and backend.

    Parameters: `find_next`, finds the version after `current`, or None; called on first use, because that
    means looking through every system.
    """

    def __init__(self, current: str, previous: str | None, find_next: Callable[[], str | None]) -> None:
        self.current, self.previous = current, previous
        self._find_next = find_next

    @cached_property
    def next(self) -> str | None:
        """The version after `current`, or None."""
        return self._find_next()

    def listed(self) -> dict[str, str]:
        """Return the slots that exist, by alias."""
        slots = {"current": self.current, "previous": self.previous, "next": self.next}
        return {alias: version for alias, version in slots.items() if version is not None}


def parse_version(text: str) -> Version | None:
    """Return the PEP 440 version, or None when the text is not one."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        return None


def newest_first(versions: Iterable[str]) -> list[str]:
    """Sort parseable versions from newest to oldest, then the others in reverse order of their text.

    >>> newest_first(["1.3.0rc9", "dev", "1.3.0rc10", "1.3.0"])
    ['1.3.0', '1.3.0rc10', '1.3.0rc9', 'dev']
    """
    parsed = [(parse_version(text), text) for text in versions]
    ordered = sorted(((version, text) for version, text in parsed if version is not None), reverse=True)
    return [text for _, text in ordered] + sorted((text for version, text in parsed if version is None), reverse=True)


class SlotEntry(NamedTuple):
    """What the slots file authors for one system and backend."""

    current: str
    previous: str | None
    is_override: bool


def slot_entry(document: Mapping[Any, Any], system: str, backend: str, path: str) -> SlotEntry | None:
    """Return the authored slots of a system and backend, or None when there are none."""
    override = as_mapping(as_mapping(document.get("overrides"), "overrides", path).get(system), system, path).get(
        backend
    )
    entry = override if override is not None else as_mapping(document.get("defaults"), "defaults", path).get(backend)
    entry = as_mapping(entry, backend, path)
    for slot in ("current", "previous"):
        if not isinstance(entry.get(slot, ""), str | None):
            # A number has lost its form: 0.30 reads as 0.3.
            raise PerfDataCorruptError(f"{path}: {slot} of {backend} must be text; put {entry[slot]!r} in quotes", path)
    if not entry.get("current"):
        return None
    return SlotEntry(entry["current"], entry.get("previous") or None, override is not None)


def overriding_systems(document: Mapping[Any, Any], backend: str, path: str) -> frozenset[str]:
    """Return the systems with slots of their own for a backend."""
    overrides = as_mapping(document.get("overrides"), "overrides", path)
    return frozenset(system for system, entry in overrides.items() if as_mapping(entry, system, path).get(backend))


def newer_than(current: str, candidates: Iterable[str]) -> str | None:
    """Return the highest candidate strictly newer than `current`, or None.

    >>> newer_than("0.24.0", ["0.22.0", "0.25.0", "0.31.0", "dev"])
    '0.31.0'
    """
    floor = parse_version(current)
    if floor is None:
        return None
    newer = [text for text in candidates if (version := parse_version(text)) is not None and version > floor]
    return newest_first(newer)[0] if newer else None


def choose(
    requested: str | None,
    slots: Slots | None,
    present: Container[str],
    where: str,
    *,
    allow_unlisted: bool,
) -> ResolvedVersion:
    """Map a requested version or alias onto the slots.

    Parameters: `requested`, a literal version, an alias, or None for the default; `slots`, None when nothing
    governs the system; `present`, the versions the system has directories of; `where`, backend and system, for
    messages.
    Raises: `UnlistedVersionError`.
    Source: op-level.md section 1.2.
    """
    if slots is None:
        if requested in ALIASES:
            raise UnlistedVersionError(
                f"no queryable versions are defined for {where}, so {requested!r} has no meaning; name a version"
            )
        return ResolvedVersion(requested, False)
    requested = requested or "current"
    version: str | None = getattr(slots, requested) if requested in ALIASES else requested
    if version is None:
        raise UnlistedVersionError(f"{where} has no {requested!r} version; accepted: {_accepted(slots)}")
    if version in (slots.current, slots.previous):
        return ResolvedVersion(version, False)
    if version == slots.next:
        return ResolvedVersion(version, version not in present)
    if allow_unlisted or _allowed_by_environment():
        return ResolvedVersion(version, False)
    raise UnlistedVersionError(
        f"version {version!r} of {where} is not queryable; accepted: {_accepted(slots)}. "
        f"Set {ALLOW_VARIABLE}=1 to query it nevertheless"
    )


def _accepted(slots: Slots) -> str:
    return ", ".join(f"{alias} = {version}" for alias, version in slots.listed().items())


def _allowed_by_environment() -> bool:
    return os.environ.get(ALLOW_VARIABLE, "").lower() in ("1", "true", "yes")
