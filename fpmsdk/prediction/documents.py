r"""Configuration files: read once, with the line of every value, so that a fault names file and line.

Source: predict-recommend.md sections 2.1, 12 and 15.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from msgspec import Struct, field
from pydantic import BaseModel, ValidationError

from fpmsdk.errors import OnboardError
from fpmsdk.files import UnfitFileError, read_regular
from fpmsdk.prediction.faults import reason_of
from fpmsdk.prediction.local_paths import absolute_paths
from fpmsdk.prediction.overrides import apply_overrides
from fpmsdk.prediction.suggestions import accepted_names, closest

MAX_CONFIG_BYTES = 16 * 2**20
# Sections of a search, which a prediction does not take.
SEARCH_SECTIONS = ("optimization", "optimizer")

# Fields of the format that this simulation has nothing for.
_UNSUPPORTED = frozenset(("afd", "encoder", "host_offload", "g3_offload", "kvcr", "state_cache", "prefix_match_unit"))

Place = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


class SourceDocument(Struct, frozen=True):
    """A configuration as plain values, and where it came from.

    Attributes
    ----------
    document: the mapping of sections, with local paths made absolute.
    where: the file, as messages name it.
    lines: line of every value of the file by its place.
    overridden: places that `--set` has given.
    """

    document: dict[str, Any]
    where: str = "configuration"
    lines: Mapping[Place, int] = field(default_factory=dict)
    overridden: tuple[Place, ...] = ()

    def checked(self, model: type[Model]) -> Model:
        """The configuration as a model.

        Raises
        ------
        OnboardError: one line for every faulty field, with file, line, what was found and what is accepted.
        """
        try:
            return model.model_validate(self.document)
        except ValidationError as error:
            reasons: dict[str, list[str]] = {}
            for fault in error.errors(include_url=False):
                subject, reason = self._described(model, fault)
                reasons.setdefault(subject, []).append(reason)
            # A value that fits none of several forms has a reason for each.
            lines = (f"{subject}{' or '.join(dict.fromkeys(found))}" for subject, found in reasons.items())
            raise OnboardError("\n".join(lines), self.where) from None

    def fault(self, place: Place, reason: str) -> OnboardError:
        """The error of a value: file and line, its dotted path, and why."""
        return OnboardError(f"{self._position(place)}: {_dotted(place)}: {reason}", self.where)

    def _described(self, model: type[BaseModel], fault: Any) -> tuple[str, str]:
        """File, line and field of a fault, and what is wrong with it."""
        kind = fault["type"]
        place, found = self._located(fault["loc"], is_absent=kind == "missing")
        reason = reason_of(fault, found)
        if kind == "extra_forbidden":
            names = accepted_names(model, fault["loc"][:-1])
            reason = f"unknown field{closest(str(place[-1]), names)}; accepted are {', '.join(names)}"
            if place[-1] in _UNSUPPORTED:
                reason = "is not supported; leave it out"
            elif place in {(section,) for section in SEARCH_SECTIONS}:
                reason = "belongs to a search; run `fpmsdk recommend`, or leave the section out"
        name = _dotted(place)
        # A rule between sections begins with the field that it is about.
        position = self._position(place or tuple(reason.partition(" ")[0].rstrip(":").split(".")))
        return (f"{position}: {name}: " if name else f"{position}: "), reason

    def _located(self, location: Sequence[str | int], *, is_absent: bool) -> tuple[Place, Any]:
        """The place in the document that a location of pydantic, which has the tags of unions too, is."""
        place: list[str | int] = []
        value: Any = self.document
        for i, part in enumerate(location):
            if isinstance(value, Mapping) and (part in value or (is_absent and i == len(location) - 1)):
                place.append(part)
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                place.append(part)
                value = value[part]
        return tuple(place), value

    def _position(self, place: Place) -> str:
        for given in self.overridden:
            is_new = given[: len(place)] == place and place not in self.lines
            if place[: len(given)] == given or (is_new and place):
                return "--set"
        for length in range(len(place), 0, -1):
            if place[:length] in self.lines:
                return f"{self.where}:{self.lines[place[:length]]}"
        return self.where


def read_document(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = (), *, forbidden: Sequence[str] = ()
) -> SourceDocument:
    r"""The configuration that a YAML file or a mapping holds, with overrides applied.

    Parameters
    ----------
    source: a YAML file of at most 16 MiB, or its content as a mapping. Relative paths in a file are below its folder
        (`cwd:` before one: below the working directory), those in a mapping below the working directory.
    overrides: `PATH=YAML` each, applied in order.
    forbidden: sections that no override may touch.

    Raises
    ------
    OnboardError: no YAML mapping, a key that is given twice or is no text, a faulty override.
    OSError: the file cannot be read.

    Source: predict-recommend.md sections 1.1 and 2.1.

    >>> read_document({"engine": {"model": "org/m"}}, ["engine.hardware=h200_sxm"]).document["engine"]["hardware"]
    'h200_sxm'
    """
    if isinstance(source, Mapping):
        where, base = "configuration", Path.cwd()
        lines: dict[Place, int] = {}
        document = copy.deepcopy(dict(source))
    else:
        where = os.fspath(source)
        base = Path(where).absolute().parent
        document, lines = _read(where)
    document = apply_overrides(document, overrides, forbidden=forbidden)
    overridden = tuple(tuple(item.partition("=")[0].strip().split(".")) for item in overrides)
    return SourceDocument(absolute_paths(document, base, where), where, lines, overridden)


def _read(where: str) -> tuple[dict[str, Any], dict[Place, int]]:
    try:
        content = read_regular(where, limit_bytes=MAX_CONFIG_BYTES)
        node = yaml.compose(content.decode(), Loader=_LOADER)
    except FileNotFoundError:
        raise OnboardError(f"{where}: no such file; name a YAML configuration with --config", where) from None
    except UnicodeDecodeError as fault:
        raise OnboardError(f"{where}: not UTF-8 at byte {fault.start}", where) from None
    except UnfitFileError as fault:
        raise OnboardError(f"{where}: {fault}", where) from None
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark
        position = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise OnboardError(f"{where}{position}: broken YAML: {fault.problem or fault.context}", where) from None
    except (yaml.YAMLError, RecursionError) as fault:
        raise OnboardError(f"{where}: broken YAML: {' '.join(str(fault).split())}", where) from None
    if not isinstance(node, yaml.MappingNode):
        raise OnboardError(f"{where}: a configuration is a YAML mapping of sections", where)
    lines: dict[Place, int] = {}
    return _Plain(where, lines).mapping(node, ()), lines


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Plain:
    """Plain values of YAML nodes, and the line of each."""

    def __init__(self, where: str, lines: dict[Place, int]) -> None:
        self._where, self._lines = where, lines
        self._constructor = yaml.constructor.SafeConstructor()

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._constructor.flatten_mapping(node)  # merge keys
        for key_node, value_node in node.value:
            key = self._scalar(key_node, place)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str) or not key:
                raise self._error(key_node, f"keys must be text, found {key!r}; put it in quotes")
            if key in found and self._lines.get((*place, key)) != line:
                raise self._error(key_node, f"the key {key!r} is given twice; keep one")
            self._lines[(*place, key)] = line
            found[key] = self._value(value_node, (*place, key))
        return found

    def _value(self, node: yaml.Node, place: Place) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for i, item in enumerate(node.value):
                self._lines[(*place, i)] = item.start_mark.line + 1
                items.append(self._value(item, (*place, i)))
            return items
        return self._scalar(node, place)

    def _scalar(self, node: yaml.Node, place: Place) -> Any:
        value = self._constructor.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if value is None and node.tag != "tag:yaml.org,2002:null":
            raise self._error(node, "keys must be text")
        if not isinstance(value, str | int | float | None):
            raise self._error(node, f"{_dotted(place)} must be a number, text, true, false or null; put it in quotes")
        return value

    def _error(self, node: yaml.Node, reason: str) -> OnboardError:
        return OnboardError(f"{self._where}:{node.start_mark.line + 1}: {reason}", self._where)


def _dotted(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
