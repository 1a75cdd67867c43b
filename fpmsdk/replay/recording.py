"""Durations of recorded passes as the timing of a replay: the same run again, or a measured one.

Source: engine-and-replay.md section 5.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from fpmsdk._ext.recorded import RecordedTiming
from fpmsdk.errors import ConfigError, MetricsError
from fpmsdk.metrics import decode_frame
from fpmsdk.replay.stream import PRICED_COLUMNS, read_table

if TYPE_CHECKING:
    import pyarrow


class RecordedPasses:
    """How long each pass of each rank took; give it to `replay_trace` as `timing`.

    Every pass of a rank takes the next duration that was recorded for it, as it is: speed-up ratios of the launch
    are not applied again. A replay that has more or fewer passes ends in a `ReplayError`, and with a stream that was
    exported by a replay also one in which a pass does other work than the recorded one.

    Source: engine-and-replay.md section 5.8.

    Example
    -------
    >>> from fpmsdk import Trace, replay_trace
    >>> trace = Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3])
    >>> first = replay_trace(trace, timing={"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0})
    >>> again = replay_trace(trace, timing=RecordedPasses.from_stream(first.fpm_stream))
    >>> again.requests.equals(first.requests)
    True
    """

    def __init__(
        self,
        offsets: ArrayLike,
        prefill_ms: ArrayLike,
        decode_ms: ArrayLike,
        composed: ArrayLike,
        work: ArrayLike | None,
    ) -> None:
        self._columns = (offsets, prefill_ms, decode_ms, composed, work)

    @classmethod
    def from_stream(cls, stream: pyarrow.Table | str | Path, pool: str | None = None) -> RecordedPasses:
        """Take the passes of a stream that a replay exported, as a table or a `.parquet` or `.arrow` file.

        Parameters
        ----------
        stream: `ReplayReport.fpm_stream`.
        pool: `prefill` or `decode` of a disaggregated replay; None when all passes are of one pool.

        Raises
        ------
        ConfigError: no such file form, no such pool, or columns are missing.

        Source: engine-and-replay.md section 5.8.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0], [8], [3]), timing=timing)
        >>> passes = RecordedPasses.from_stream(report.fpm_stream)
        >>> replay_trace(Trace.from_arrays([0.0], [8], [3]), timing=passes).summary["duration_ms"]
        12.0
        """
        table = read_table(stream) if isinstance(stream, str | Path) else stream
        needed = ("pool", "worker_id", "dp_rank", "prefill_ms", "decode_ms", "composed", *PRICED_COLUMNS)
        missing = [name for name in needed if name not in table.column_names]
        if missing:
            raise ConfigError(f"the stream has no column {missing[0]}; give one that a replay exported")
        columns = {name: table[name].to_numpy() for name in needed}
        pools = sorted(set(columns["pool"].tolist()))
        if pool is None and len(pools) > 1:
            raise ConfigError(f"the stream has passes of the pools {', '.join(pools)}; say which with pool=", "pool")
        if pool is not None and pool not in pools:
            raise ConfigError(f"the stream has no passes of pool {pool!r}; it has {', '.join(pools)}", "pool")
        if pool is not None:
            chosen = columns["pool"] == pool
            columns = {name: column[chosen] for name, column in columns.items()}
        dp_size = int(columns["dp_rank"].max(initial=0)) + 1
        rank = columns["worker_id"].astype(np.int64) * dp_size + columns["dp_rank"].astype(np.int64)
        num_ranks = int(rank.max(initial=-1)) + 1
        work = np.stack([columns[name] for name in PRICED_COLUMNS], axis=1)
        # A rank that priced nothing asks for no duration.
        priced = (work[:, 0] > 0) | (work[:, 3] > 0)
        order = np.flatnonzero(priced)[np.argsort(rank[priced], kind="stable")]
        offsets = np.searchsorted(rank[order], np.arange(num_ranks + 1))
        prefill_ms, decode_ms, composed = (columns[name][order] for name in ("prefill_ms", "decode_ms", "composed"))
        return cls(offsets, prefill_ms, decode_ms, composed, work[order])

    @classmethod
    def from_frames(cls, frames: Iterable[bytes]) -> RecordedPasses:
        """Take the wall times of telemetry as it was on the wire, of an engine or of a replay.

        Workers are taken in the order of their ids, shorter ones first. Heartbeats, without a wall time or without
        work, are no passes.

        Raises
        ------
        FrameDecodeError: names the frame.
        MetricsError: there is no pass.

        >>> from fpmsdk.metrics import ForwardPassMetrics, ScheduledRequestMetrics, encode_frame
        >>> work = ScheduledRequestMetrics(num_prefill_requests=1, sum_prefill_tokens=8)
        >>> frame = encode_frame(ForwardPassMetrics(wall_time=0.0625, scheduled_requests=work))
        >>> from fpmsdk import Trace, replay_trace
        >>> timing = RecordedPasses.from_frames([frame])
        >>> replay_trace(Trace.from_arrays([0.0], [8], [1]), timing=timing).summary["mean_ttft_ms"]
        62.5
        """
        by_rank: dict[tuple[int, str, int], list[float]] = {}
        for frame in frames:
            metrics = decode_frame(frame)
            scheduled = metrics.scheduled_requests
            if metrics.wall_time <= 0.0:
                continue
            key = (len(metrics.worker_id), metrics.worker_id, metrics.dp_rank)
            durations = by_rank.setdefault(key, [])
            if scheduled.num_prefill_requests + scheduled.num_decode_requests > 0:
                durations.append(metrics.wall_time * 1e3)
        if not by_rank:
            raise MetricsError("the telemetry has no pass; give frames of an engine at work")
        return cls.from_durations([by_rank[key] for key in sorted(by_rank)])

    @classmethod
    def from_durations(cls, durations_ms: Sequence[Sequence[float]]) -> RecordedPasses:
        """Take durations in ms, a sequence per rank in the order of its passes.

        Raises
        ------
        ConfigError: a duration is negative or not finite.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = RecordedPasses.from_durations([[9.5, 0.5]])
        >>> replay_trace(Trace.from_arrays([0.0], [8], [2]), timing=timing).summary["duration_ms"]
        10.0
        """
        flat = np.array([duration for rank in durations_ms for duration in rank], np.float64)
        if not (np.isfinite(flat) & (flat >= 0)).all():
            raise ConfigError("durations of recorded passes must be finite ms of at least 0")
        offsets = np.concatenate([[0], np.cumsum([len(rank) for rank in durations_ms])])
        return cls(offsets, np.zeros(len(flat)), flat, np.zeros(len(flat)), None)

    def timing_model(self) -> RecordedTiming:
        """What prices one replay, from the first pass on.

        >>> timing = RecordedPasses.from_durations([[9.5, 0.5]])
        >>> timing.timing_model() is timing.timing_model()
        False
        """
        return RecordedTiming(*self._columns)
