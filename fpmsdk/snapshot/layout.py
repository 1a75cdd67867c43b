"""Declared layout of estimator state: every array that tuning changes, in one ordered list per estimator.

Compiled code mutates the arrays, equality tests and the snapshot codec read them in declared order, and a digest
of the declaration is committed per layout version, so that a field cannot change meaning unnoticed.
Source: architecture decision 3; fpm-model.md section 7.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpmsdk.errors import StateLayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]


class StateField(NamedTuple):
    """One array of an estimator's state.

    Parameters
    ----------
    name: key of the array.
    dtype: numpy type code, for example ``"f8"``.
    shape: per axis a fixed length, the name of a dimension, or ``"name+1"``.
    minimum, maximum: inclusive bounds of every element; None leaves that side open.
    finite: whether NaN and infinities are refused (float fields only).
    doc: what the elements mean, with their unit.

    Source: fpm-model.md section 7.

    Example
    -------
    >>> field = StateField("offsets", "i8", ("rows+1", 2), "first entry of each row", minimum=0)
    >>> field.lengths({"rows": 3})
    (4, 2)
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    finite: bool = True

    def lengths(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the array for given dimensions.

        >>> StateField("ratio", "f8", ("rows",), "observed / native").lengths({"rows": 3})
        (3,)
        """
        return tuple(
            axis if isinstance(axis, int) else dims[axis.removesuffix("+1")] + axis.endswith("+1")
            for axis in self.shape
        )


@lru_cache(maxsize=64)
def _shapes(
    fields: tuple[StateField, ...], dims: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    # Models of one kind begin with the same dimensions.
    return tuple((item.name, item.lengths(dict(dims)), item.dtype) for item in fields)


class StateLayout(NamedTuple):
    """The ordered fields of one estimator's state.

    Source: fpm-model.md section 7.

    Example
    -------
    >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native"),))
    >>> arrays = layout.allocate(rows=2)
    >>> arrays["ratio"].shape
    (2,)
    >>> layout.grow(arrays, rows=3)["ratio"].shape
    (3,)
    """

    name: str
    version: int
    fields: tuple[StateField, ...]

    def allocate(self, **dims: int) -> "Arrays":
        """Zeroed arrays for the given dimensions.

        >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native", minimum=0),))
        >>> layout.allocate(rows=2)
        {'ratio': array([0., 0.])}
        """
        return {name: np.zeros(shape, dtype) for name, shape, dtype in _shapes(self.fields, tuple(dims.items()))}

    def grow(self, arrays: "Arrays", **dims: int) -> "Arrays":
        """Copies with longer dimensions; every old element keeps its index and no dimension shrinks.

        >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native", minimum=0),))
        >>> layout.grow({"ratio": np.array([1.5])}, rows=2)
        {'ratio': array([1.5, 0. ])}
        """
        old = self.dims(arrays)
        new = old | {name: max(length, old[name]) for name, length in dims.items()}
        grown = self.allocate(**new)
        for name, array in arrays.items():
            grown[name][tuple(slice(length) for length in array.shape)] = array
        return grown

    def dims(self, arrays: "Arrays") -> dict[str, int]:
        """The dimensions that given arrays have, read off the first field that shows each.

        >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native", minimum=0),))
        >>> layout.dims(layout.allocate(rows=2))
        {'rows': 2}
        """
        found: dict[str, int] = {}
        for item in self.fields:
            for axis, length in zip(item.shape, arrays[item.name].shape, strict=True):
                if isinstance(axis, str):
                    found.setdefault(axis.removesuffix("+1"), length - axis.endswith("+1"))
        return found

    def check(self, arrays: "Arrays") -> None:
        """Raise `StateLayoutError` for the first array that does not fit the declaration.

        >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native", minimum=0),))
        >>> layout.check({"ratio": np.array([-1.0])})
        Traceback (most recent call last):
            ...
        fpmsdk.errors.StateLayoutError: state of example, field ratio: expected at least 0, found -1.0
        """
        if list(arrays) != [item.name for item in self.fields]:
            raise StateLayoutError(
                f"state of {self.name}: expected fields {[item.name for item in self.fields]}, found {list(arrays)}"
            )
        dims = self.dims(arrays)
        for item in self.fields:
            self._check_field(item, arrays[item.name], dims)

    def _check_field(self, item: StateField, array: "NDArray[Any]", dims: Mapping[str, int]) -> None:
        where = f"state of {self.name}, field {item.name}"
        if array.dtype != np.dtype(item.dtype) or array.shape != item.lengths(dims):
            raise StateLayoutError(
                f"{where}: expected {np.dtype(item.dtype)} with shape {item.lengths(dims)}, "
                f"found {array.dtype} with shape {array.shape}"
            )
        if item.finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise StateLayoutError(f"{where}: expected finite numbers, found NaN or infinity")
        if item.minimum is not None and (array < item.minimum).any():
            raise StateLayoutError(f"{where}: expected at least {item.minimum}, found {array.min()}")
        if item.maximum is not None and (array > item.maximum).any():
            raise StateLayoutError(f"{where}: expected at most {item.maximum}, found {array.max()}")

    def digest(self) -> str:
        """SHA-256 of the declaration; changes whenever a field is added, moved, renamed or retyped.

        >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native", minimum=0),))
        >>> layout.digest() == layout._replace(version=2).digest()
        False
        """
        import hashlib

        text = "\n".join(
            repr((item.name, item.dtype, item.shape, item.minimum, item.maximum, item.finite)) for item in self.fields
        )
        return hashlib.sha256(f"{self.name} {self.version}\n{text}".encode()).hexdigest()
