"""From the stores of an estimator to the bytes of `state.bin` and back. Which stores there are is told by its registry.

Source: snapshot.md sections 3 and 4.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fpmsdk._ext.snapshot_codec import LayoutCodec, decode, encode
from fpmsdk.errors import StateSnapshotError
from fpmsdk.snapshot.layout import StateLayout

# Raised with every change of what `StateRegistry.digest` covers.
STATE_LAYOUT_VERSION = 2
STATE_ENCODING = "positional-little-endian"


class StatePart(NamedTuple):
    """The saved arrays of one store, or of one part of a store that has several layouts.

    Those of a live store are its own, some of them as `SlotRows`: encode them before it learns more.
    """

    store: str
    layout: StateLayout
    arrays: dict[str, Any]

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"{self.store} ({self.layout.name})"


class StateRegistry:
    """Every store and every layout that a state may hold; their codes never change within a layout version.

    Parameters
    ----------
    stores: names of stores; the code of each is its place.
    layouts: layout by code.

    Example
    -------
    >>> from fpmsdk.snapshot.layout import StateField
    >>> layout = StateLayout("example", 1, (StateField("ratio", "f8", ("rows",), "observed / native"),))
    >>> registry = StateRegistry(("prefill",), {1: layout})
    >>> content = registry.encode([StatePart("prefill", layout, layout.allocate(rows=1))])
    >>> len(content), registry.decode(content)[0].name
    (26, 'prefill (example)')
    """

    def __init__(self, stores: Sequence[str], layouts: Mapping[int, StateLayout]) -> None:
        self.stores = tuple(stores)
        self.layouts = dict(layouts)
        self._codes = {layout.name: code for code, layout in layouts.items()}
        self._codecs = {code: LayoutCodec(layout) for code, layout in layouts.items()}

    def encode(self, parts: Iterable[StatePart], encoded: Callable[[memoryview], object] | None = None) -> memoryview:
        """The bytes of a state: a copy, all that is left to do while nothing may change.

        Parameters
        ----------
        encoded: called with each run of bytes that will not change any more, in their order.
        """
        return encode(
            [
                (self.stores.index(part.store), code, self._codecs[code], part.arrays)
                for part in parts
                for code in (self._codes[part.layout.name],)
            ],
            encoded,
        )

    def decode(self, content: bytes | memoryview) -> list[StatePart]:
        """The parts of a state.

        Raises
        ------
        StateSnapshotError: the bytes are not exactly a sequence of known parts with values in their declared bounds.
        """
        parts = []
        for store, layout, arrays in decode(content, self._codecs):
            if store >= len(self.stores):
                raise StateSnapshotError(f"expected a store code below {len(self.stores)}, found {store}")
            parts.append(StatePart(self.stores[store], self.layouts[layout], arrays))
        return parts

    def digest(self) -> str:
        """SHA-256 of the codes and declarations of this layout version."""
        lines = [f"{STATE_ENCODING} {STATE_LAYOUT_VERSION}", *self.stores]
        lines += [f"{code} {layout.digest()}" for code, layout in self.layouts.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
