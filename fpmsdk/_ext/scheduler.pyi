from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpmsdk._ext.pages import KvCache, PrefixKeys
from fpmsdk._ext.speculation import DraftAcceptance

class Status(IntEnum):
    PENDING = 0
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    COMPLETED = 4
    REJECTED = 5
    HELD = 6
    RESERVED = 7
    CANCELED = 8
    FAILED = 9

class Role(IntEnum):
    AGGREGATED = 0
    PREFILL = 1
    DECODE = 2

class Refusal(IntEnum):
    ACCEPTED = 0
    MODEL_LENGTH = 1
    KV_CAPACITY = 2
    UNCHUNKED_PROMPT = 3
    KV_GROWTH = 4

class Requests:
    @property
    def count(self) -> int: ...
    def __init__(
        self, prompt_tokens: ArrayLike, output_tokens: ArrayLike, priority: ArrayLike | None = None
    ) -> None: ...
    def column(self, name: str) -> NDArray[np.int64] | NDArray[np.int8]: ...
    def of(self, name: str, slots: NDArray[np.int64] | slice) -> NDArray[np.int64] | NDArray[np.int8]: ...

class Scheduler:
    @property
    def requests(self) -> Requests: ...
    @property
    def kv(self) -> KvCache: ...
    def __init__(
        self,
        requests: Requests,
        scheduler_rules: str,
        *,
        num_gpu_blocks: int,
        block_size: int,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_chunked_prefill: bool = True,
        preemption_mode: str = "lifo",
        scheduling_policy: str = "fcfs",
        keys: PrefixKeys | None = None,
        kv_cache: KvCache | None = None,
        drafts: DraftAcceptance | None = None,
        role: Role = ...,
        never_evicts: bool = False,
        logs_residency: bool = False,
        prefill_schedule_interval: int = 1,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        vllm_version: Sequence[int] = (0, 32),
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
    ) -> None: ...
    def enqueue(self, request: int) -> bool: ...
    def take_over(self, slots: NDArray[np.int64], rows: Mapping[str, NDArray[Any]], count: int) -> None: ...
    def give_up(self, slots: NDArray[np.int64]) -> None: ...
    def withdraw(self, request: int) -> bool: ...
    def taken_kv_events(self) -> list[tuple[int, int]]: ...
    def refusals(self) -> NDArray[np.int8]: ...
    def warm_prefix_cache(self) -> None: ...
    def has_unfinished(self) -> bool: ...
    def running_requests(self) -> list[int]: ...
    def schedule_pass(self, wave_step: int = 0) -> dict[str, Any]: ...
    def complete_pass(self) -> tuple[list[int], list[int]]: ...
