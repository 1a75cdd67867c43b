"""Typed access to the fields of a checkpoint's configuration, collecting what is wrong with them.

Knows no field by name; the readers of a model's shape do.
"""

from collections.abc import Mapping
from typing import Any

# Beyond all models, and small enough that products of sizes stay numbers that compiled code can hold.
LARGEST_COUNT = 2**31 - 1


class Fields:
    """Typed access to the fields of one object that collects faults instead of raising."""

    def __init__(self, values: Mapping[str, Any], prefix: str, faults: list[str]) -> None:
        self.values = values
        self.prefix = prefix
        self.faults = faults

    def fault(self, field: str, reason: str) -> None:
        """Record what is wrong with a field."""
        self.faults.append(f"{self.prefix}{field} {reason}")

    def count(self, *spellings: str, required: bool = True, least: int = 1, most: int = LARGEST_COUNT) -> int:
        """The first spelling that has a value, an integer from `least` to `most`; 0 when there is none."""
        given = [name for name in spellings if self.values.get(name) is not None]
        if not given:
            if required:
                null = [name for name in spellings if name in self.values]
                self.fault(null[0] if null else " or ".join(spellings), "is null" if null else "is missing")
            return 0
        value = self.values[given[0]]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fault(given[0], f"must be an integer not below {least}, found {value!r}")
            return 0
        if value > most:
            self.fault(given[0], f"must not exceed {most}, found {value}")
            return 0
        return value

    def agree(self, *spellings: str) -> None:
        """Record a contradiction when spellings of the same field have different values."""
        given = {name: self.values[name] for name in spellings if self.values.get(name) is not None}
        if len(set(map(str, given.values()))) > 1:
            self.fault(" and ".join(given), f"contradict each other: {', '.join(map(str, given.values()))}")

    def mapping(self, field: str) -> dict[str, Any]:
        """An optional object; null counts as absent."""
        value = self.values.get(field)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fault(field, f"must be an object, found {type(value).__name__}")
            return {}
        return value

    def layers(self, field: str, values: tuple[Any, ...], length: int) -> list[Any]:
        """A list with one of `values` for every layer, empty when it is not that."""
        listed = self.values.get(field)
        if not isinstance(listed, list) or len(listed) != length or any(item not in values for item in listed):
            accepted = " or ".join(map(repr, values))
            self.fault(field, f"must list {accepted} for each of the {length} layers, found {listed!r}")
            return []
        return listed
