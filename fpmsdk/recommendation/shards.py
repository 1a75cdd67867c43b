"""Parts of a sweep whose candidates are known beforehand, so that machines need nothing in common but the file.

Source: predict-recommend.md section 17 (plain shards).
"""

from __future__ import annotations

import re

from msgspec import Struct

from fpmsdk.errors import OnboardError


class Shard(Struct, frozen=True):
    """Part `number` of `count`, counted from 1: every `count`-th candidate in suggestion order.

    >>> [index for index in range(7) if Shard(2, 3).has(index)]
    [1, 4]
    """

    number: int = 1
    count: int = 1

    def has(self, index: int) -> bool:
        """Whether the candidate that was suggested as number `index`, counted from 0, belongs to this part."""
        return index % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """The part that an option `i/n` names.

    Raises
    ------
    OnboardError: no such part.

    >>> parse_shard("2/4")
    Shard(number=2, count=4)
    """
    found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise OnboardError(f"--shard: found {text!r}, accepted is i/n with 1 <= i <= n, such as 1/4", "--shard")
    return Shard(int(found[1]), int(found[2]))
