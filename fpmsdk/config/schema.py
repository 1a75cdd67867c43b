"""Kinds of JSON values, records of named fields, and the one walker that reads and writes them.

Reading checks types, names and shapes and fills defaults; it knows no rule that relates two fields.
Every fault carries the dotted path of the value as it was written.
"""

import marshal
import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, ClassVar, NoReturn, Protocol

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
MAX_SHOWN = 200


class SchemaFault(Exception):
    """A value does not fit its kind; callers turn it into the public error of their document."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class Kind(Protocol):
    """What a value may be: `read` turns a JSON value into the stored one, `write` turns it back."""

    def read(self, value: Any, path: str) -> Any:
        """Return the stored form of `value`, or raise `SchemaFault`."""

    def write(self, value: Any) -> Any:
        """Return the JSON form of a stored value."""


def shown(value: Any) -> str:
    """A value for an error text: its `repr`, but never the thousand digits or characters of an absurd one.

    >>> shown(0.5), shown(10**400)
    ('0.5', 'an integer beyond 64 bits')
    """
    if isinstance(value, int) and abs(value) > U64_MAX:
        return "an integer beyond 64 bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def describe(value: Any) -> str:
    """Name a JSON value for an error text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "boolean true", False: "boolean false"}[value]
    if isinstance(value, int) and abs(value) > U64_MAX:
        return shown(value)
    for kind, name in ((int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return f"{name} {shown(value)}"
    if isinstance(value, (list, tuple)):
        return "an array"
    return "an object" if isinstance(value, Mapping) else f"a value of type {type(value).__name__}"


def _mismatch(path: str, accepted: str, value: Any) -> NoReturn:
    raise SchemaFault(path, f"expected {accepted}, found {describe(value)}")


def _one_of(names: Any) -> str:
    return "one of " + ", ".join(f"`{name}`" for name in names)


class _Scalar:
    """A kind whose stored form is its JSON form."""

    def write(self, value: Any) -> Any:
        return value


class Text(_Scalar):
    """Any string."""

    def read(self, value: Any, path: str) -> str:
        """Return a plain `str`, also for members of string enumerations."""
        if not isinstance(value, str):
            _mismatch(path, "a string", value)
        return str.__str__(value)


class Flag(_Scalar):
    """True or false; integers do not count."""

    def read(self, value: Any, path: str) -> bool:
        """Return the boolean."""
        if not isinstance(value, bool):
            _mismatch(path, "a boolean", value)
        return value


class Count(_Scalar):
    """An unsigned integer up to `maximum`; neither floats nor booleans count."""

    def __init__(self, maximum: int = U64_MAX) -> None:
        self.maximum = maximum

    def read(self, value: Any, path: str) -> int:
        """Return the integer."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= self.maximum:
            _mismatch(path, f"an integer in 0..={self.maximum}", value)
        return int(value)


class Number(_Scalar):
    """A number, finite unless the rules of its document say so themselves; integers are stored as floats."""

    def __init__(self, finite: bool = True) -> None:
        self.finite = finite

    def read(self, value: Any, path: str) -> float:
        """Return the float."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _mismatch(path, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if self.finite and not math.isfinite(number):
            _mismatch(path, "a finite number", value)
        return number


class Weight:
    """A number that may also be non-finite, which JSON carries as one of three exact strings."""

    NAMES: ClassVar = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

    def read(self, value: Any, path: str) -> float:
        """Return the float."""
        if isinstance(value, str) and value in self.NAMES:
            return self.NAMES[value]
        if isinstance(value, str):
            _mismatch(path, "a finite number or one of the strings NaN, Infinity, -Infinity", value)
        return Number().read(value, path)

    def write(self, value: float) -> float | str:
        """Return the number, or the string that stands for a non-finite one."""
        return value if math.isfinite(value) else weight_name(value)


def weight_name(value: float) -> str:
    """Return the string that carries a non-finite `value` through JSON."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class Choice(_Scalar):
    """One of a closed list of names; an alias is stored as the name it stands for."""

    def __init__(self, names: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> None:
        self.names = names
        self.aliases = aliases or {}

    def read(self, value: Any, path: str) -> str:
        """Return the canonical name."""
        if not isinstance(value, str):
            _mismatch(path, _one_of(self.names), value)
        name = self.aliases.get(value, value)
        if name not in self.names:
            raise SchemaFault(path, f"unknown name {value!r}, expected {_one_of((*self.names, *self.aliases))}")
        return str.__str__(name)


class Nullable:
    """Another kind, or null."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def read(self, value: Any, path: str) -> Any:
        """Return None for null, else what the inner kind returns."""
        return None if value is None else self.kind.read(value, path)

    def write(self, value: Any) -> Any:
        """Return None for None, else what the inner kind returns."""
        return None if value is None else self.kind.write(value)


class ListOf:
    """An array of one kind, of any length or of exactly `length`."""

    def __init__(self, item: Kind, length: int | None = None) -> None:
        self.item = item
        self.length = length

    def read(self, value: Any, path: str) -> list[Any]:
        """Return the list of stored items."""
        if not isinstance(value, (list, tuple)):
            _mismatch(path, "an array", value)
        if self.length is None:
            return [self.item.read(item, f"{path}[{index}]") for index, item in enumerate(value)]
        items = [self.item.read(item, f"{path}[{index}]") for index, item in enumerate(value[: self.length])]
        if len(value) != self.length:
            raise SchemaFault(path, f"expected exactly {self.length} items, found {len(value)}")
        return items

    def write(self, value: list[Any]) -> list[Any]:
        """Return the list of JSON items."""
        return [self.item.write(item) for item in value]


class Anything(_Scalar):
    """Any JSON value, copied."""

    def read(self, value: Any, path: str) -> Any:
        """Return a deep copy in plain dicts and lists."""
        if isinstance(value, Mapping):
            return {key: self.read(item, join(path, key)) for key, item in _items(value, path)}
        if isinstance(value, (list, tuple)):
            return [self.read(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, float):
            return Number().read(value, path)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        _mismatch(path, "a JSON value", value)


class FreeObject(_Scalar):
    """An object whose fields are somebody else's."""

    def read(self, value: Any, path: str) -> dict[str, Any]:
        """Return a deep copy of the object."""
        if not isinstance(value, Mapping):
            _mismatch(path, "an object", value)
        if not value:
            return {}
        import json  # few configurations have such an object

        copy: dict[str, Any]
        try:
            # The compiled codec copies what is plain JSON already; everything else is looked at value by value.
            copy = json.loads(json.dumps(value, allow_nan=False))
            if copy == value:
                return copy
        except (TypeError, ValueError, RecursionError):
            pass
        copy = Anything().read(value, path)
        return copy


_REQUIRED = object()


class Field:
    """One named field of a record.

    `default` is a JSON value read by the same kind; None leaves the field absent and is stored as None.
    `omit_default` keeps the field out of the output while it equals its default.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        default: Any = _REQUIRED,
        alias: str | None = None,
        omit_default: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.default = default
        self.alias = alias
        self.omit_default = omit_default
        # A default is read once; what a caller may change is copied from its encoded form.
        self._fixed = default is None or default is _REQUIRED or isinstance(default, (bool, int, float, str))
        stored = None if default is None or default is _REQUIRED else kind.read(default, name)
        self._default: Any = stored if self._fixed else marshal.dumps(stored)
        self._written_default = self.write(self.default_value()) if omit_default else None

    @property
    def is_plain(self) -> bool:
        """Whether the stored value is always written, and as it is."""
        kind = self.kind.kind if isinstance(self.kind, Nullable) else self.kind
        return isinstance(kind, _Scalar) and not self.omit_default

    @property
    def required(self) -> bool:
        """Whether a record without this field is a fault."""
        return self.default is _REQUIRED

    def default_value(self) -> Any:
        """Return a fresh stored default."""
        return self._default if self._fixed else marshal.loads(self._default)

    def is_omitted(self, written: Any) -> bool:
        """Whether the output leaves out this JSON form of the field's value."""
        return self.omit_default and written == self._written_default

    def write(self, value: Any) -> Any:
        """Return the JSON form of a stored value, None for one that is absent."""
        return None if value is None else self.kind.write(value)


class Record:
    """An object with known fields; unknown ones are faults unless `open`.

    Fields are visited in byte order of the keys as written, or in document order with `sort_keys=False`.
    Fields that are missing are reported after all that were given; they and a field given twice name the
    record itself.
    """

    def __init__(self, *fields: Field, sort_keys: bool = True, open: bool = False) -> None:
        self.fields = fields
        self.sort_keys = sort_keys
        self.open = open
        self._by_key = {key: item for item in fields for key in (item.name, item.alias) if key is not None}
        self._required = tuple(item.name for item in fields if item.required)
        # Most fields are scalars that are always written: those are copied without a call.
        self._written = tuple((item.name, None if item.is_plain else item) for item in fields)

    def read(self, value: Any, path: str = "") -> dict[str, Any]:
        """Return every field in table order, defaults filled in."""
        if not isinstance(value, Mapping):
            _mismatch(path, "an object", value)
        given: dict[str, Any] = {}
        items = _items(value, path)
        for key, item in sorted(items, key=itemgetter(0)) if self.sort_keys else items:
            known = self._by_key.get(key)
            if known is None:
                if self.open:
                    continue
                raise SchemaFault(join(path, key), f"unknown field `{key}`, expected {_one_of(self._by_key)}")
            if known.name in given:
                raise SchemaFault(path, f"duplicate field `{known.name}`")
            given[known.name] = known.kind.read(item, join(path, key))
        for name in self._required:
            if name not in given:
                raise SchemaFault(path, f"missing field `{name}`")
        return {
            known.name: given[known.name] if known.name in given else known.default_value() for known in self.fields
        }

    def write(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object in table order, fields to be omitted left out."""
        document: dict[str, Any] = {}
        for name, known in self._written:
            written = value[name]
            if known is not None:
                written = known.write(written)
                if known.is_omitted(written):
                    continue
            document[name] = written
        return document


class Tagged:
    """An object in which the field `tag` chooses the record of the other fields.

    A fault of the tag itself is at the tag; every fault of the other fields names the object.
    """

    def __init__(self, tag: str, variants: Mapping[str, Record]) -> None:
        self.tag = tag
        self.variants = variants

    def read(self, value: Any, path: str) -> dict[str, Any]:
        """Return the tag first, then the fields of its record."""
        if not isinstance(value, Mapping):
            _mismatch(path, "an object", value)
        if self.tag not in value:
            raise SchemaFault(path, f"missing field `{self.tag}`")
        name = Choice(tuple(self.variants)).read(value[self.tag], join(path, self.tag))
        rest = {key: item for key, item in value.items() if key != self.tag}
        try:
            return {self.tag: name, **self.variants[name].read(rest)}
        except SchemaFault as fault:
            raise SchemaFault(path, str(fault)) from None

    def write(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the tag first, then the fields of its record."""
        name = value[self.tag]
        return {self.tag: name, **self.variants[name].write(value)}


def _items(value: Mapping[Any, Any], path: str) -> list[tuple[str, Any]]:
    for key in value:
        if not isinstance(key, str):
            raise SchemaFault(path, f"expected field names to be strings, found {describe(key)}")
    return list(value.items())


def join(path: str, key: str) -> str:
    """Return the dotted path of `key` inside the object at `path`."""
    return f"{path}.{key}" if path else key
