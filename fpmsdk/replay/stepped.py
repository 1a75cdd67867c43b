"""A replay that somebody else drives: submit and cancel requests, settle one moment after the other.

The same simulation as `fpmsdk.replay.run`; a request that is over is forgotten once its end was told.
Source: engine-and-replay.md section 6, steppable seam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Happening, Replay
from fpmsdk._ext.scheduler import Requests, Role
from fpmsdk.errors import KvForwardTooLargeError, ReplayError, TraceError
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.options import check_number
from fpmsdk.replay.portions import lone_request
from fpmsdk.replay.run import check_dp_ranks, outcome_columns
from fpmsdk.replay.system import planned_system

_FIRST_SLOTS = 64
_POOLS = {Role.AGGREGATED: "agg", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_KINDS: Mapping[int, str] = {kind: kind.name.lower() for kind in Happening}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes
    ----------
    kind: `arrived`; `admitted`, with the reused `tokens`; `emitted`, with the `tokens` that came out; `preempted`;
        `source_held`, `destination_reserved` (with the `tokens` to transfer), `destination_activated` and
        `source_released` of a prompt on its way to a decode worker; `ended`, with the `outcome`.
    request_id: whose it is.
    at_ms: the simulated time.
    tokens: as the kind says, else 0.
    outcome: of an end, the columns of `ReplayReport.requests` without latencies; `status` is `completed`, `rejected` or
        `canceled`.
    """

    kind: str
    request_id: str
    at_ms: float
    tokens: int = 0
    outcome: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one moment brought.

    Attributes
    ----------
    at_ms: the moment.
    events: what happened to requests, in order; then admissions and preemptions of the passes that started.
    passes: of each pass of a rank that ended, the fields of `ReplayReport.passes`.
    """

    at_ms: float
    events: list[Event]
    passes: list[dict[str, Any]]


class SteppedReplay:
    """Simulated workers that somebody else drives.

    Parameters
    ----------
    block_tokens: prompt tokens that one hash id stands for.
    Everything else: as `replay_trace` takes it.

    Raises what `replay_trace` raises for its options.

    Example
    -------
    >>> replay = SteppedReplay(timing={"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0})
    >>> replay.submit("a", prompt_tokens=8, output_tokens=2)
    >>> while not replay.drained:
    ...     step = replay.step()
    ...     print(step.at_ms, [event.kind for event in step.events])
    0.0 ['arrived', 'admitted']
    10.0 ['emitted']
    11.0 ['emitted', 'ended']
    """

    def __init__(
        self,
        *,
        block_tokens: int = 512,
        launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
        timing: Any = None,
        scheduler_rules: Literal["vllm", "simulator"] = "vllm",
        mixed_pass_pricing: Literal["composed", "separate"] = "composed",
        num_workers: int = 1,
        placement: Literal["round_robin", "kv_aware"] = "round_robin",
        prefill_launch: EngineLaunchConfig | Mapping[str, Any] | None = None,
        prefill_timing: Any = None,
        num_prefill_workers: int = 1,
        handoff_latency_ms: float = 0.0,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        vllm_version: str = "0.32",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
    ) -> None:
        self._system = planned_system(
            launch=launch,
            timing=timing,
            scheduler_rules=scheduler_rules,
            mixed_pass_pricing=mixed_pass_pricing,
            num_workers=num_workers,
            placement=placement,
            prefill_launch=prefill_launch,
            prefill_timing=prefill_timing,
            num_prefill_workers=num_prefill_workers,
            handoff_latency_ms=handoff_latency_ms,
            sla=None,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
            vllm_version=vllm_version,
            watermark=watermark,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
        )
        self._block_tokens = block_tokens
        slots = np.zeros(_FIRST_SLOTS, np.int64)
        self._requests = Requests(slots + 1, slots)
        self._recorder = Recorder(_FIRST_SLOTS, True)
        # Every pass tells of every request.
        pools = [
            structs.replace(plan, pass_by_pass=True).build_rolling(
                block_tokens, _FIRST_SLOTS, self._requests, self._recorder
            )
            for plan in self._system.plans
        ]
        self._names: list[str] = [""] * _FIRST_SLOTS
        self._slots: dict[str, int] = {}
        self._asked = [0] * _FIRST_SLOTS
        self._outcomes: dict[int, dict[str, Any]] = {}
        self._replay = Replay(
            self._requests,
            self._recorder,
            pools[-1],
            None if self._system.prefill is None else pools[0],
            **self._system.transfer,
            arrival_ms=np.zeros(_FIRST_SLOTS),
            next_turn=slots - 1,
            delay_ms=np.zeros(_FIRST_SLOTS),
            request_ids=self._names,
            supply=_Ends(self._outcome, self._outcomes),
        )
        self._replay.listen()

    @property
    def now_ms(self) -> float:
        """The moment that was settled last.

        >>> SteppedReplay().now_ms
        0.0
        """
        return self._replay.now_ms

    @property
    def next_event_ms(self) -> float | None:
        """When something happens next, None when nothing does.

        >>> replay = SteppedReplay()
        >>> replay.submit("a", 8, 1, at_ms=5.0)
        >>> replay.next_event_ms
        5.0
        """
        following = self._replay.next_event_ms()
        return None if following == math.inf else following

    @property
    def drained(self) -> bool:
        """Whether every request that was submitted has ended.

        >>> SteppedReplay().drained
        True
        """
        return not self._slots

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        at_ms: float | None = None,
        priority: int = 0,
        dp_rank: int = -1,
        prefill_dp_rank: int | None = None,
        hash_ids: Sequence[int] = (),
    ) -> None:
        """Let a request arrive.

        Parameters
        ----------
        request_id: unlike those of all requests that have not ended.
        prompt_tokens, output_tokens, priority, dp_rank, prefill_dp_rank, hash_ids: as `Trace.from_arrays` takes them.
        at_ms: when; None is now, and so is a time that has passed.

        Raises
        ------
        TraceError: a value is out of range, or the name is taken.
        ConfigError: there is no such attention-DP rank, or the time is no number.

        >>> replay = SteppedReplay(block_tokens=4)
        >>> replay.submit("a", 8, 1, hash_ids=[41, 8])
        >>> [event.kind for event in replay.step().events]
        ['arrived', 'admitted']
        """
        if at_ms is not None:
            check_number("at_ms", at_ms, 0.0)
        portion = lone_request(
            request_id, prompt_tokens, output_tokens, priority, dp_rank, prefill_dp_rank, hash_ids, self._block_tokens
        )
        if request_id in self._slots:
            raise TraceError(f"request {request_id!r} is already active; give another name", field="request_id")
        for plan in self._system.plans:
            check_dp_ranks(portion.request_ids, plan.launch, portion.dp_rank, portion.prefill_dp_rank)
        columns = portion.columns(portion.arrival_ms, portion.delay_ms)
        (slot,) = self._replay.submit(columns, self.now_ms if at_ms is None else at_ms).tolist()
        more = self._requests.count - len(self._names)
        self._names += [""] * more
        self._asked += [0] * more
        self._names[slot] = request_id
        self._slots[request_id] = slot
        self._asked[slot] = output_tokens

    def cancel(self, request_id: str) -> None:
        """Take a request out; a pass or a transfer that holds it ends first, and it may complete in that.

        The next step tells of the end. Raises TraceError when no request of this name is active.

        >>> replay = SteppedReplay()
        >>> replay.submit("a", 8, 1)
        >>> replay.cancel("a")
        >>> [event.outcome["status"] for event in replay.step().events]
        ['canceled']
        """
        slot = self._slots.get(request_id)
        if slot is None:
            raise TraceError(f"request {request_id!r} is not active; it ended, or never was", field="request_id")
        self._replay.cancel(slot)

    def step(self) -> Step:
        """Settle the next moment at which something happens; nothing happens when none is left.

        Raises
        ------
        RequestNeverFitsError: a request waits for what never happens; cancel it.
        ReplayError: one forward needs more than a whole grouped KV cache has.
        TimingError: the timing model answered with an unusable latency.

        >>> SteppedReplay().step()
        Step(at_ms=0.0, events=[], passes=[])
        """
        try:
            happenings = self._replay.step()
        except KvForwardTooLargeError as fault:
            raise ReplayError(fault.describe(repr(self._names[fault.request]))) from fault
        now_ms = self.now_ms
        events = []
        for kind, slot, tokens in happenings:
            outcome = None
            if kind == Happening.ENDED:
                # A prefill worker may hold its prompt still; then nobody has taken the outcome yet.
                outcome = self._outcomes.pop(slot, None) or self._outcome(slot)
                del self._slots[self._names[slot]]
            events.append(Event(_KINDS[kind], self._names[slot], now_ms, tokens, outcome))
        self._outcomes.clear()
        events += [
            Event("admitted", self._names[int(row["request"])], now_ms, int(row["reused_tokens"]))
            for row in self._recorder.admissions.taken()
        ]
        events += [
            Event("preempted", self._names[int(row["request"])], now_ms) for row in self._recorder.preemptions.taken()
        ]
        passes = self._recorder.passes.taken()
        return Step(now_ms, events, [_pass_of(row) for row in passes])

    def _outcome(self, slot: int) -> dict[str, Any]:
        chosen = np.array([slot])
        columns = outcome_columns(
            self._requests, self._recorder, self._system.plans, self._system.scheduler_rules, chosen
        )
        return {
            "request_id": self._names[slot],
            "prompt_tokens": int(self._requests.of("prompt_tokens", chosen)[0]),
            "requested_output_tokens": self._asked[slot],
            **{name: _plain(values[0]) for name, values in columns.items()},
        }


class _Ends:
    """What `Replay` asks of its supply: no request comes by itself, and those that ended leave their outcomes."""

    def __init__(self, outcome: Callable[[int], dict[str, Any]], outcomes: dict[int, dict[str, Any]]) -> None:
        self._outcome, self._outcomes = outcome, outcomes

    def next_requests(self) -> None:
        """No more."""

    def placed(self, slots: NDArray[np.int64]) -> None:
        """Never told, as none comes by itself."""

    def ended(self, slots: NDArray[np.int64]) -> None:
        """These requests are over, and their indices will stand for others."""
        for slot in slots.tolist():
            self._outcomes[slot] = self._outcome(slot)

    def gaps(self, rows: NDArray[np.void]) -> None:
        """Gaps between tokens are of no interest here."""

    def counted(self) -> None:
        """Never told: somebody else makes the steps."""


def _plain(value: Any) -> Any:
    """A number of Python; None for a time that never was."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def _pass_of(row: np.void) -> dict[str, Any]:
    fields = {name: _plain(row[name]) for name in row.dtype.names or ()}
    return {"pool": _POOLS[Role(fields.pop("role"))], **fields}
