from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.pages import KvCache, PrefixKeys

class HybridCache(KvCache):
    def __init__(
        self,
        prompt_tokens: NDArray[np.int64],
        num_blocks: int,
        groups: Sequence[tuple[int, int | None]],
        keys: PrefixKeys | None,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        keeps_every_block: bool = False,
    ) -> None: ...
    def can_hold(self, tokens: int) -> bool: ...
    def holdings(self, request: int) -> list[list[int]]: ...
