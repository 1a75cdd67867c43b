"""Replay a trace that is too long for the memory: requests come and go, and a summary stays.

The same simulation as `fpmsdk.replay.run`, with equal results; here is only what keeps the memory small.
Source: engine-and-replay.md sections 4 to 6.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Requests
from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError, EmptyResultError, ReplayInterrupted, TraceError
from fpmsdk.files import whole_file
from fpmsdk.launch.config import EngineLaunchConfig
from fpmsdk.replay.coverage import coverage_roles, replay_coverage
from fpmsdk.replay.fold import Fold
from fpmsdk.replay.interrupts import CtrlC
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.portions import Portion
from fpmsdk.replay.report import summary_table
from fpmsdk.replay.run import check_dp_ranks, check_load, load_options, outcome_columns, sped_up, was_interrupted
from fpmsdk.replay.system import System, planned_system
from fpmsdk.replay.totals import provision
from fpmsdk.replay.trace_stream import TraceStream

if TYPE_CHECKING:
    from rich.table import Table

# Memory is bounded by these and by what is under way.
_FIRST_SLOTS = 4096
_ENDED_AT_ONCE = 2048
_FEW_KEYS = 16_384


class StreamReport:
    """The summary of a replay of which no single request is kept.

    Attributes
    ----------
    summary: as of a `ReplayReport`, equal to the bit.
    options: the settings that the figures depend on.
    partial: whether the replay was interrupted.
    fpm_query_coverage: how measured tables covered the replay, None when that was not collected.

    Example
    -------
    >>> report = replay_stream(TraceStream.synthetic(3, 8, 2))
    >>> report.summary["completed_requests"], report.partial
    (3, False)
    """

    def __init__(
        self,
        summary: dict[str, Any],
        options: dict[str, Any],
        *,
        partial: bool,
        fpm_query_coverage: Mapping[str, Any] | None,
    ) -> None:
        self.summary = summary
        self.options = options
        self.partial = partial
        self.fpm_query_coverage = fpm_query_coverage

    def to_json(self) -> str:
        """The report as one JSON object: `options`, `partial`, `summary`, and `fpm_query_coverage` when collected.

        >>> import json
        >>> json.loads(replay_stream(TraceStream.synthetic(3, 8, 2)).to_json())["summary"]["num_requests"]
        3
        """
        document: dict[str, Any] = {"options": self.options, "partial": self.partial, "summary": self.summary}
        if self.fpm_query_coverage is not None:
            document["fpm_query_coverage"] = self.fpm_query_coverage
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()

    def write_json(self, path: str | Path) -> None:
        """Write `to_json` to a file, whole or not at all.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "report.json"
        >>> replay_stream(TraceStream.synthetic(3, 8, 2)).write_json(file)
        >>> file.read_text()[:1]
        '{'
        """
        text = self.to_json() + "\n"
        with whole_file(path) as file:
            file.write(text.encode())

    def table(self) -> Table:
        """The main figures for a terminal.

        >>> replay_stream(TraceStream.synthetic(3, 8, 2)).table().title
        '3 of 3 requests completed'
        """
        return summary_table(self.summary, self.partial)


def replay_stream(
    stream: TraceStream,
    *,
    requests_path: str | Path | None = None,
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
    arrival_speedup_ratio: float = 1.0,
    concurrency: int | None = None,
    max_sim_time_ms: float | None = None,
    sla: Sla | Mapping[str, float | None] | None = None,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    long_prefill_token_threshold: int = 0,
    long_prefill_token_threshold_adaptive: bool = False,
    vllm_version: str = "0.32",
    watermark: float = 0.0,
    scheduler_reserve_full_isl: bool = True,
    exact_itl: bool = False,
) -> StreamReport:
    """Serve a stream of requests as `replay_trace` serves a trace, and keep the summary.

    In memory are the requests under way, those that wait included, and what the workers have cached; latencies and
    token gaps are on disk until the figures are made.

    Parameters
    ----------
    stream: the requests.
    requests_path: a Parquet file for a row per request, with the columns of `ReplayReport.requests`, in the order in
        which the requests ended; None for none. It is whole or not there.
    Everything else: as `replay_trace` takes it.

    Raises
    ------
    What `replay_trace` raises; ConfigError also for an engine under vLLM rules without chunked prefill whose prompts
    share blocks: what it refuses depends on the whole trace. `report` of ReplayInterrupted is a `StreamReport`.

    >>> stream = TraceStream.synthetic(100_000, 8, 3, arrival_interval_ms=20.0)
    >>> launch = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}}}
    >>> replay_stream(stream, launch=launch).summary["p99_e2e_latency_ms"]
    12.0
    """
    if not isinstance(stream, TraceStream):
        raise TraceError(f"stream is {shown(stream)}; give a TraceStream, as TraceStream.read(path) returns")
    check_load(stream.has_delays, arrival_speedup_ratio, concurrency, max_sim_time_ms)
    system = planned_system(
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
        sla=sla,
        scheduling_policy=scheduling_policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
        vllm_version=vllm_version,
        watermark=watermark,
        scheduler_reserve_full_isl=scheduler_reserve_full_isl,
    )
    _check_refusals_are_known(stream, system)
    slots = np.zeros(_FIRST_SLOTS, np.int64)
    requests = Requests(slots + 1, slots)
    recorder = Recorder(_FIRST_SLOTS, False, keeps_events=False)
    with ExitStack() as stack:
        fold = stack.enter_context(Fold(system.sla, exact_itl))
        sink = None if requests_path is None else stack.enter_context(_request_rows(requests_path))
        ctrl_c = CtrlC(lambda: replay.interruptible)
        supply = _Supply(stream, system, requests, recorder, arrival_speedup_ratio, fold, sink, ctrl_c.look)
        pools = [plan.build_rolling(stream.block_tokens, _FEW_KEYS, requests, recorder) for plan in system.plans]
        replay = Replay(
            requests,
            recorder,
            pools[-1],
            None if system.prefill is None else pools[0],
            **system.transfer,
            arrival_ms=np.zeros(_FIRST_SLOTS),
            next_turn=slots - 1,
            delay_ms=np.zeros(_FIRST_SLOTS),
            concurrency=min(concurrency or 0, stream.num_requests),
            max_sim_time_ms=math.inf if max_sim_time_ms is None else max_sim_time_ms,
            request_ids=supply.names,
            supply=supply,
            ended_at_once=_ENDED_AT_ONCE,
        )

        def run() -> None:
            with ctrl_c:
                replay.run()

        started = time.perf_counter()
        interrupted = was_interrupted(run, supply.names, system.timings)
        wall_time_ms = (time.perf_counter() - started) * 1e3
        stopped = f"interrupted at {replay.now_ms:,.1f} ms of simulated time"
        if not fold.totals.completed:
            if interrupted:
                raise ReplayInterrupted(f"{stopped}, before any request completed")
            raise EmptyResultError(fold.why_empty())
        roles = coverage_roles(*system.timings)
        report = StreamReport(
            {
                **fold.totals.volume(wall_time_ms),
                **provision(replay.now_ms, **system.provision),
                **(fold.totals.goodput() if system.sla is not None else {}),
                **fold.distributions(),
                "kv_eviction_policy": "lru",
                "committed_prefill_tokens": recorder.committed_prefill_tokens,
                "composed_passes": sum(plan.pricer.num_composed for plan in system.plans),
                "mixed_passes_priced_separately": sum(plan.pricer.num_fallback for plan in system.plans),
            },
            {**system.options} | load_options(arrival_speedup_ratio, concurrency, max_sim_time_ms, exact_itl),
            partial=interrupted,
            fpm_query_coverage=replay_coverage(roles, completed=True) if roles else None,
        )
    if interrupted:
        raise ReplayInterrupted(stopped, report)
    system.check_recordings_used()
    return report


def _check_refusals_are_known(stream: TraceStream, system: System) -> None:
    engine = system.plans[0].launch.engine
    if (
        system.scheduler_rules == "vllm"
        and stream.has_blocks
        and engine.enable_prefix_caching
        and not engine.enable_chunked_prefill
    ):
        raise ConfigError(
            "without engine.enable_chunked_prefill what vLLM refuses depends on the prefixes that the whole trace "
            "shares; replay a Trace with replay_trace",
            "launch.engine.enable_chunked_prefill",
        )


class _Rows(Protocol):
    def write(self, columns: Mapping[str, NDArray[Any]]) -> None: ...


class _Supply:
    """Hands the requests of a stream to a replay, and what became of them to a fold.

    Parameters
    ----------
    rows: where every request is written, too; None for nowhere.
    counted: called when what came out until then is counted.
    """

    def __init__(
        self,
        stream: TraceStream,
        system: System,
        requests: Requests,
        recorder: Recorder,
        speedup: float,
        fold: Fold,
        rows: _Rows | None,
        counted: Callable[[], None],
    ) -> None:
        self.counted = counted
        self._portions = stream.portions()
        self._system = system
        self._requests, self._recorder = requests, recorder
        self._speedup = speedup
        self._fold, self._rows = fold, rows
        self._placing: Portion | None = None
        # Of each index, what the replay does not know of its request.
        self.names: list[str] = [""] * requests.count
        self._sessions: list[str | None] = [None] * requests.count
        self._turns = np.zeros(requests.count, np.int64)
        self._asked = np.zeros(requests.count, np.int64)

    def next_requests(self) -> Mapping[str, Any] | None:
        """The columns of the next portion, None after the last."""
        portion = next(self._portions, None)
        if portion is None:
            return None
        for plan in self._system.plans:
            check_dp_ranks(portion.request_ids, plan.launch, portion.dp_rank, portion.prefill_dp_rank)
        self._placing = portion
        return portion.columns(sped_up(portion.arrival_ms, self._speedup), sped_up(portion.delay_ms, self._speedup))

    def placed(self, slots: NDArray[np.int64]) -> None:
        """The indices of the requests of the last portion."""
        portion = self._placing
        assert portion is not None
        more = self._requests.count - len(self.names)
        if more > 0:
            self.names += [""] * more
            self._sessions += [None] * more
            self._turns, self._asked = (
                np.append(column, np.zeros(more, np.int64)) for column in (self._turns, self._asked)
            )
        for slot, name, session in zip(
            slots.tolist(), portion.request_ids.tolist(), portion.session_ids.tolist(), strict=True
        ):
            self.names[slot], self._sessions[slot] = name, session
        self._turns[slots] = portion.turn_index
        self._asked[slots] = portion.output_tokens
        self._placing = None

    def ended(self, slots: NDArray[np.int64]) -> None:
        """These requests are over, or the run is."""
        system = self._system
        columns = {
            "request_id": np.array([self.names[slot] for slot in slots.tolist()], object),
            "session_id": np.array([self._sessions[slot] for slot in slots.tolist()], object),
            "turn_index": self._turns[slots],
            "prompt_tokens": self._requests.of("prompt_tokens", slots),
            "requested_output_tokens": self._asked[slots],
            **outcome_columns(self._requests, self._recorder, system.plans, system.scheduler_rules, slots),
        }
        self._fold.add(columns)
        if self._rows is not None:
            self._rows.write(columns)

    def gaps(self, rows: NDArray[np.void]) -> None:
        """Gaps between tokens, and how many waited so long."""
        self._fold.add_gaps(rows["gap_ms"], rows["count"])


@contextmanager
def _request_rows(path: str | Path) -> Iterator[_Rows]:
    """A Parquet file of request rows, written as they come."""
    from fpmsdk.replay.request_rows import RequestRows

    with whole_file(path) as file:
        rows = RequestRows(file)
        yield rows
        rows.close()
