"""What a knob of a search may be: listed values, or a range of integers or of numbers.

Source: predict-recommend.md sections 2.1 and 8.2.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct

from fpmsdk.errors import OnboardError

KnobValue: TypeAlias = "int | float | str"

INTEGER, NUMBER, TEXT = "an integer", "a number", "text"
_FORMS = "{choices: [...]} or {range: {min, max, step, scale}}"
_RANGE_FIELDS = ("min", "max", "step", "scale")


class Choices(Struct, frozen=True):
    """Listed values.

    values: distinct, at least one, in the order of the file.

    Source: predict-recommend.md section 2.1.

    >>> domain = Choices((256, 512))
    >>> domain.count, domain.at(1), domain.lowest, domain.highest
    (2, 512, 256, 512)
    """

    values: tuple[KnobValue, ...]
    logarithmic: ClassVar[bool] = False

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.values)

    def at(self, index: int) -> KnobValue:
        """The value with a number from 0 below `count`."""
        return self.values[index]

    def draw(self, rng: random.Random) -> KnobValue:
        """A value by chance, each as likely as any other."""
        return self.values[rng.randrange(len(self.values))]

    @property
    def lowest(self) -> Any:
        """The smallest value."""
        return min(self.values)

    @property
    def highest(self) -> Any:
        """The largest value."""
        return max(self.values)

    def extremes(self) -> tuple[KnobValue, ...]:
        """Values between which nothing new can be wrong: all of them, as they need not be ordered."""
        return self.values


class IntegerRange(Struct, frozen=True):
    """Integers from `min` to at most `max`, `step` apart; with `logarithmic` all of them, small ones drawn more often.

    Source: predict-recommend.md section 2.1.

    >>> domain = IntegerRange(64, 200, 64)
    >>> [domain.at(index) for index in range(domain.count)], domain.highest
    ([64, 128, 192], 192)
    """

    min: int
    max: int
    step: int = 1
    logarithmic: bool = False

    @property
    def count(self) -> int:
        """How many values there are."""
        return (self.max - self.min) // self.step + 1

    def at(self, index: int) -> int:
        """The value with a number from 0 below `count`."""
        return self.min + index * self.step

    def draw(self, rng: random.Random) -> int:
        """A value by chance; with `logarithmic` its logarithm is about uniform."""
        if not self.logarithmic:
            return self.at(rng.randrange(self.count))
        # Each integer n stands for the numbers from n up to n + 1.
        drawn = math.floor(math.exp(rng.uniform(math.log(self.min), math.log(self.max + 1))))
        return min(max(drawn, self.min), self.max)

    @property
    def lowest(self) -> int:
        """The smallest value."""
        return self.min

    @property
    def highest(self) -> int:
        """The largest value that a step reaches."""
        return self.at(self.count - 1)

    def extremes(self) -> tuple[int, ...]:
        """The smallest and the largest value."""
        return tuple(dict.fromkeys((self.lowest, self.highest)))


class FloatRange(Struct, frozen=True):
    """Numbers from `min` to at most `max`, `step` apart, or any of them without a step.

    Steps are taken in decimals, so that 0.1, 0.2, 0.3 are written as they are read.

    Source: predict-recommend.md section 2.1.

    >>> domain = FloatRange(0.1, 0.3, 0.1)
    >>> domain.count, domain.at(2), FloatRange(0.5, 0.9).count
    (3, 0.3, None)
    """

    min: float
    max: float
    step: float | None = None
    logarithmic: bool = False

    @property
    def count(self) -> int | None:
        """How many values there are; None where they cannot be counted."""
        if self.step is None:
            return 1 if self.min == self.max else None
        return int((_exact(self.max) - _exact(self.min)) / _exact(self.step)) + 1

    def at(self, index: int) -> float:
        """The value with a number from 0 below `count`."""
        return self.min if self.step is None else float(_exact(self.min) + index * _exact(self.step))

    def draw(self, rng: random.Random) -> float:
        """A value by chance; with `logarithmic` its logarithm is uniform."""
        if (count := self.count) is not None:
            return self.at(rng.randrange(count))
        if not self.logarithmic:
            return rng.uniform(self.min, self.max)
        drawn = math.exp(rng.uniform(math.log(self.min), math.log(self.max)))
        return min(max(drawn, self.min), self.max)

    @property
    def lowest(self) -> float:
        """The smallest value."""
        return self.min

    @property
    def highest(self) -> float:
        """The largest value that a step reaches."""
        return self.max if (count := self.count) is None else self.at(count - 1)

    def extremes(self) -> tuple[float, ...]:
        """The smallest and the largest value."""
        return tuple(dict.fromkeys((self.lowest, self.highest)))


Domain: TypeAlias = Choices | IntegerRange | FloatRange


def parse_domain(value: Any, path: str, kind: str) -> Domain:
    """The domain that a field holds.

    Parameters
    ----------
    value: as read: one value, `{choices: [...]}` or `{range: {min, max, step, scale}}`.
    path: of the field, for messages.
    kind: `INTEGER`, `NUMBER` or `TEXT`.

    Raises
    ------
    OnboardError: another form; the values repeat, are not of the kind, or a range is empty or lacks its step.

    Source: predict-recommend.md section 2.1.

    >>> parse_domain({"range": {"min": 1, "max": 4, "step": 1}}, "knob", INTEGER).count
    4
    >>> parse_domain({"range": {"min": 1, "max": 4}}, "knob", INTEGER)
    Traceback (most recent call last):
        ...
    fpmsdk.errors.OnboardError: knob.range: a linear range of integers needs a step; add step: 1
    """
    if not isinstance(value, Mapping):
        return Choices((_value(value, path, kind),))
    if set(value) == {"choices"}:
        return _choices(value["choices"], f"{path}.choices", kind)
    if set(value) == {"range"}:
        return _range(value["range"], f"{path}.range", kind)
    raise _fault(path, f"found {value!r}, accepted are {kind}, {_FORMS}")


def _choices(values: Any, path: str, kind: str) -> Choices:
    if not isinstance(values, list) or not values:
        raise _fault(path, f"found {values!r}, accepted is a list of at least one value")
    found = tuple(_value(item, f"{path}[{place}]", kind) for place, item in enumerate(values))
    for place, item in enumerate(found):
        if item in found[:place]:
            raise _fault(f"{path}[{place}]", f"{item!r} is listed twice; leave one out")
    return Choices(found)


def _range(fields: Any, path: str, kind: str) -> IntegerRange | FloatRange:
    if kind == TEXT:
        raise _fault(path, "a range is one of numbers; give choices")
    if not isinstance(fields, Mapping):
        raise _fault(path, f"found {fields!r}, accepted is a mapping of {', '.join(_RANGE_FIELDS)}")
    if unknown := sorted(set(fields) - set(_RANGE_FIELDS), key=str):
        raise _fault(f"{path}.{unknown[0]}", f"unknown field; known are {', '.join(_RANGE_FIELDS)}")
    for name in ("min", "max"):
        if fields.get(name) is None:
            raise _fault(f"{path}.{name}", "missing; a range needs min and max")
    scale = fields.get("scale", "linear")
    if scale not in ("linear", "log"):
        raise _fault(f"{path}.scale", f"found {scale!r}, accepted are linear and log")
    low, high = (_value(fields[name], f"{path}.{name}", kind) for name in ("min", "max"))
    step = None if fields.get("step") is None else _value(fields["step"], f"{path}.step", kind)
    assert not isinstance(low, str) and not isinstance(high, str) and not isinstance(step, str)
    if low > high:
        raise _fault(path, f"min {low} is above max {high}")
    if step is not None and step <= 0:
        raise _fault(f"{path}.step", f"found {step}, accepted is a step above 0")
    if scale == "log" and low <= 0:
        raise _fault(f"{path}.min", f"found {low}, accepted on a log scale is a min above 0")
    if scale == "log" and step is not None:
        raise _fault(f"{path}.step", "a log scale has no step; leave it out")
    if kind == NUMBER:
        return FloatRange(low, high, step, scale == "log")
    if scale == "linear" and step is None:
        raise _fault(path, "a linear range of integers needs a step; add step: 1")
    return IntegerRange(int(low), int(high), 1 if step is None else int(step), scale == "log")


def _value(value: Any, path: str, kind: str) -> KnobValue:
    if kind == TEXT:
        if isinstance(value, str) and value:
            return value
        raise _fault(path, f"found {value!r}, accepted is text")
    if type(value) is int:
        return value if kind == INTEGER else float(value)
    if kind == NUMBER and isinstance(value, float) and math.isfinite(value):
        return value
    quotes = "; remove the quotes" if isinstance(value, str) and _is_number(value) else ""
    raise _fault(path, f"found {value!r}, accepted is {kind}{quotes}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _exact(value: float) -> Fraction:
    return Fraction(repr(float(value)))


def _fault(path: str, what: str) -> OnboardError:
    return OnboardError(f"{path}: {what}", path)
