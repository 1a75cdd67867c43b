"""One scheduler rank that somebody else drives pass by pass: no clock, no workers, no arrivals of its own.

Not the replay; see `fpmsdk.replay.stepped`. Source: engine-and-replay.md section 6, steppable seam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fpmsdk._ext.pricing import price_pass
from fpmsdk._ext.scheduler import Requests
from fpmsdk.errors import KvForwardTooLargeError, ReplayError, TraceError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.options import check_number
from fpmsdk.replay.portions import lone_request
from fpmsdk.replay.rejections import rejection_reasons
from fpmsdk.replay.system import planned_system

_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A pass that has started.

    Attributes
    ----------
    start_ms, end_ms: when it runs; a group of ranks ends with its slowest one.
    tokens: scheduled tokens by request, in running order.
    admissions: reused tokens of the requests that were admitted.
    preempted: requests that lost their place.
    fpm: what telemetry says of the pass (`num_prefill_requests` and so on), and the state of the rank.
    """

    start_ms: float
    end_ms: float
    tokens: dict[str, int]
    admissions: dict[str, int]
    preempted: list[str]
    fpm: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """What a pass brought.

    Attributes
    ----------
    end_ms: when.
    tokens: how many came out of each request, in order.
    completed, rejected: requests that are over.
    kv_events: (key, +1) of every block that can be found from now on, (key, -1) of every one that cannot any more.
    """

    end_ms: float
    tokens: dict[str, int]
    completed: list[str]
    rejected: list[str]
    kv_events: list[tuple[int, int]]


class SteppedRank:
    """A rank of an aggregated worker.

    Parameters
    ----------
    block_tokens: prompt tokens that one hash id stands for.
    Everything else: as `replay_trace` takes it.

    Example
    -------
    >>> rank = SteppedRank(timing={"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0})
    >>> rank.submit("a", prompt_tokens=8, output_tokens=1)
    >>> running = rank.execute_pass(5.0)
    >>> running.end_ms, running.tokens, rank.complete_pass(running, running.end_ms).completed
    (15.0, {'a': 8}, ['a'])
    """

    def __init__(
        self,
        *,
        block_tokens: int = 512,
        launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
        timing: Any = None,
        scheduler_rules: Literal["vllm", "simulator"] = "vllm",
        mixed_pass_pricing: Literal["composed", "separate"] = "composed",
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        vllm_version: str = "0.32",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
    ) -> None:
        plan = planned_system(
            launch=launch,
            timing=timing,
            scheduler_rules=scheduler_rules,
            mixed_pass_pricing=mixed_pass_pricing,
            num_workers=1,
            placement="round_robin",
            prefill_launch=None,
            prefill_timing=None,
            num_prefill_workers=1,
            handoff_latency_ms=0.0,
            sla=None,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
            vllm_version=vllm_version,
            watermark=watermark,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
        ).main
        self._block_tokens = block_tokens
        self._pricer = plan.pricer
        self._reasons = rejection_reasons(plan.launch.engine, scheduler_rules)
        self._requests = Requests(np.ones(_FIRST_SLOTS, np.int64), np.zeros(_FIRST_SLOTS, np.int64))
        self._scheduler = plan.build_rank(block_tokens, self._requests)
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._pending: PendingPass | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs.

        >>> SteppedRank().has_work
        False
        """
        return self._scheduler.has_unfinished()

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        priority: int = 0,
        hash_ids: Sequence[int] = (),
    ) -> str | None:
        """Queue a request; return why the engine refuses it at once, None when it does not.

        Raises TraceError for a value out of range or a name that is taken, ReplayError within a pass.

        >>> SteppedRank(launch={"engine": {"max_model_len": 64}}).submit("a", 100, 1)
        'its prompt leaves no room below max_model_len = 64'
        """
        self._check_between_passes("submit")
        portion = lone_request(
            request_id, prompt_tokens, output_tokens, priority, -1, None, hash_ids, self._block_tokens
        )
        if request_id in self._slots:
            raise TraceError(f"request {request_id!r} is already active; give another name", field="request_id")
        count = self._requests.count
        if not self._free:
            self._free = list(range(2 * count - 1, count - 1, -1))
            count *= 2
        slot = self._free.pop()
        self._scheduler.take_over(np.array([slot]), portion.columns(portion.arrival_ms, portion.delay_ms), count)
        self._slots[request_id], self._names[slot] = slot, request_id
        if self._scheduler.enqueue(slot):
            return None
        reason: str = self._reasons[int(self._requests.of("refusal", np.array([slot]))[0])]
        self._forget([slot])
        return reason

    def cancel(self, request_id: str) -> None:
        """Take a request out. Raises TraceError when none of this name is active, ReplayError within a pass.

        >>> rank = SteppedRank()
        >>> rank.submit("a", 8, 1)
        >>> rank.cancel("a")
        >>> rank.has_work
        False
        """
        self._check_between_passes("cancel")
        if request_id not in self._slots:
            raise TraceError(f"request {request_id!r} is not active; it ended, or never was", field="request_id")
        slot = self._slots[request_id]
        self._scheduler.withdraw(slot)
        self._forget([slot])

    def execute_pass(self, now_ms: float, wave_step: int = 0) -> PendingPass:
        """Schedule and price the next pass.

        Parameters
        ----------
        now_ms: when it starts.
        wave_step: passes of the attention-DP group in this busy period, for its cadence.

        Raises
        ------
        ReplayError: the last pass has not been completed, or one forward needs more than a whole grouped KV cache has.
        TimingError: the timing model answered with an unusable latency.

        >>> rank = SteppedRank(timing={"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0})
        >>> rank.submit("a", 8, 1)
        >>> rank.execute_pass(2.0).end_ms
        12.0
        """
        check_number("now_ms", now_ms, 0.0)
        self._check_between_passes("execute_pass")
        try:
            decided = self._scheduler.schedule_pass(wave_step)
        except KvForwardTooLargeError as fault:
            raise ReplayError(fault.describe(repr(self._names[fault.request]))) from fault
        work = {name: value for name, value in decided.pop("work").items() if name != "rank"}
        prefill_ms, decode_ms, _ = price_pass(self._pricer, **work)
        decided.pop("rejected")
        self._pending = PendingPass(
            now_ms,
            # In this order: the last bit depends on it.
            (now_ms + prefill_ms) + decode_ms,
            {self._names[slot]: tokens for slot, tokens in decided.pop("tokens").items()},
            {self._names[slot]: reused for slot, reused in decided.pop("reused").items()},
            [self._names[slot] for slot in decided.pop("preempted")],
            decided,
        )
        return self._pending

    def complete_pass(self, pending: PendingPass, end_ms: float) -> PassOutputs:
        """End a pass: tokens come out, requests leave.

        Parameters
        ----------
        pending: the pass that has started last.
        end_ms: when it ends; not before it is done.

        Raises
        ------
        ReplayError: another pass is under way, or none, or it would end too early.

        >>> rank = SteppedRank()
        >>> rank.submit("a", 8, 1)
        >>> running = rank.execute_pass(0.0)
        >>> rank.complete_pass(running, running.end_ms).tokens
        {'a': 1}
        """
        if pending is not self._pending:
            raise ReplayError("complete_pass got a pass that is not under way; give what execute_pass returned last")
        if not end_ms >= pending.end_ms:
            raise ReplayError(f"end_ms is {end_ms}; the pass is not done before {pending.end_ms}")
        slots = np.array(sorted(self._names), np.int64)
        before = dict(zip(slots.tolist(), self._requests.of("generated_tokens", slots).tolist(), strict=True))
        emitted, finished = self._scheduler.complete_pass()
        after = dict(zip(slots.tolist(), self._requests.of("generated_tokens", slots).tolist(), strict=True))
        refused = self._requests.of("refusal", slots) != 0
        rejected = slots[refused].tolist()
        outputs = PassOutputs(
            end_ms,
            {self._names[slot]: after[slot] - before[slot] for slot in emitted},
            [self._names[slot] for slot in finished],
            [self._names[slot] for slot in rejected],
            self._scheduler.taken_kv_events(),
        )
        self._forget(finished + rejected)
        self._pending = None
        return outputs

    def _check_between_passes(self, what: str) -> None:
        if self._pending is not None:
            raise ReplayError(f"{what} within a pass; complete the pass first")

    def _forget(self, slots: list[int]) -> None:
        for slot in slots:
            del self._slots[self._names.pop(slot)]
        self._scheduler.give_up(np.array(slots, np.int64))
        self._free += slots
