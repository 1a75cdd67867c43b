import numpy as np
from numpy.typing import NDArray

class PrefixKeys:
    @property
    def block_size(self) -> int: ...
    def __init__(
        self,
        prompt_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        hash_offsets: NDArray[np.int64],
        hash_ids: NDArray[np.int64],
        trace_block_tokens: int,
        block_size: int,
    ) -> None: ...
    def key_of(self, request: int, block: int) -> int: ...

class BlockPool:
    @property
    def num_blocks(self) -> int: ...
    def __init__(self, num_blocks: int, publishes: bool) -> None: ...

class KvCache:
    @property
    def pool(self) -> BlockPool: ...
    @property
    def block_size(self) -> int: ...
    def __init__(self, num_requests: int, num_blocks: int, block_size: int, keys: PrefixKeys | None) -> None: ...
