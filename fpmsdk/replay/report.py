"""What a replay says: a summary, a row per request and a row per pass, as Arrow, JSON or a printed table.

Only arranges columns that the replay has recorded; latency figures are defined in `fpmsdk.replay.latency`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import ConfigError, EmptyResultError
from fpmsdk.files import whole_file
from fpmsdk.replay.fold import latencies_of
from fpmsdk.replay.latency import Distribution, RequestLatencies, Sla, merged_stream
from fpmsdk.replay.totals import Totals, first_rejected, provision

if TYPE_CHECKING:
    import pyarrow
    from rich.table import Table

    from fpmsdk.replay.formats.recorded import RecordedRun

_WORKERS = ("worker", "prefill_worker")  # a negative one: the request came to none

Columns = Mapping[str, NDArray[Any]]

# Record keys of the JSON report and the columns they show (engine-and-replay.md sections 5.7 and 6).
_RECORD_KEYS = {
    "request_id": "request_id",
    "session_id": "session_id",
    "turn_index": "turn_index",
    "arrival_time_ms": "arrival_ms",
    "first_admit_ms": "first_admit_ms",
    "first_token_ms": "first_token_ms",
    "last_token_ms": "last_token_ms",
    "terminal_time_ms": "end_ms",
    "ttft_ms": "ttft_ms",
    "ttst_ms": "ttst_ms",
    "itl_ms": "itl_ms",
    "e2e_latency_ms": "e2e_latency_ms",
    "input_length": "prompt_tokens",
    "requested_output_length": "requested_output_tokens",
    "output_length": "output_tokens",
    "reused_input_tokens": "reused_tokens",
    "first_admission_reused_input_tokens": "first_reused_tokens",
    "admission_count": "num_admissions",
    "preemption_count": "num_preemptions",
    "decode_worker_idx": "worker",
    "prefill_worker_idx": "prefill_worker",
    "source_held_ms": "source_held_ms",
    "destination_reserved_ms": "destination_reserved_ms",
    "destination_activated_ms": "destination_activated_ms",
    "decode_admit_ms": "decode_admit_ms",
    "source_released_ms": "source_released_ms",
    "decode_reused_input_tokens": "decode_reused_tokens",
    "terminal_status": "status",
    "rejection_reason": "rejection_reason",
}


class ReplayReport:
    """The result of a replay in which at least one request completed.

    Parameters
    ----------
    requests: an array of length n per column: `request_id`, `session_id`, `rejection_reason` (str or None),
        `status` (str; `completed`, `rejected`, `failed` of a prompt that no decode worker can take, or `unfinished`),
        `turn_index`, `prompt_tokens`, `requested_output_tokens`, `output_tokens`, `reused_tokens`,
        `first_reused_tokens`, `num_admissions`, `num_preemptions`, `worker`, and in ms, NaN when absent, `arrival_ms`,
        `first_admit_ms`, `first_token_ms`, `second_token_ms`, `last_token_ms`, `end_ms`. Only requests that arrived. Of
        disaggregated serving also `prefill_worker`, `decode_reused_tokens` and the times of the transfer.
    admissions: `request` (row of `requests`), `at_ms` and `reused_tokens` of each admission, in order of time; of
        disaggregated serving also `pool`.
    passes: an array per column, one entry per pass; empty when passes were not recorded.
    preemptions: an array per column, one entry per preemption: the victim and what it held.
    gap_ms, gap_count: gaps between tokens in ms, each with the number of tokens that waited so long.
    committed_prefill_tokens: tokens scheduled for prefill; None when passes were not recorded.
    clock_ms: simulated time at which the replay ended.
    wall_time_ms: real time that it took.
    num_workers, gpus_per_worker: what ran from the first to the last simulated moment, aggregated or decode.
    num_prefill_workers, prefill_gpus_per_worker: the same of disaggregated prefill workers.
    options: the settings that the figures depend on; shown in the JSON report.
    sla: bounds for goodput.
    exact_itl: percentiles of token gaps exactly, not those of a sketch.
    fpm_query_coverage: how measured tables covered the replay, None when that was not collected.
    samples, sample_interval_ms: gauges of every rank at multiples of the interval; None for no samples.
    dp_sizes: attention-DP ranks per worker of each pool.
    partial: whether the replay was interrupted; requests of which it was not told the end are `unfinished`.

    Raises
    ------
    EmptyResultError: no request completed; says what became of them.

    Source: engine-and-replay.md sections 5.6, 5.7 and 6.

    >>> from fpmsdk import Trace, replay_trace
    >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
    >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
    >>> report.summary["mean_ttft_ms"], report.requests["ttft_ms"].to_pylist(), report.passes["end_ms"].to_pylist()
    (13.0, [10.0, 16.0], [10.0, 21.0, 22.0, 23.0])
    """

    def __init__(
        self,
        *,
        requests: Columns,
        admissions: Columns,
        passes: Columns,
        preemptions: Columns | None = None,
        gap_ms: NDArray[np.float64],
        gap_count: NDArray[np.int64],
        committed_prefill_tokens: int | None,
        clock_ms: float,
        wall_time_ms: float,
        num_workers: int = 1,
        gpus_per_worker: int = 1,
        num_prefill_workers: int = 0,
        prefill_gpus_per_worker: int = 0,
        options: Mapping[str, Any] | None = None,
        sla: Sla | None = None,
        exact_itl: bool = False,
        fpm_query_coverage: Mapping[str, Any] | None = None,
        samples: Columns | None = None,
        sample_interval_ms: float | None = None,
        dp_sizes: Mapping[str, int] | None = None,
        partial: bool = False,
        allow_empty: bool = False,
    ) -> None:
        self.fpm_query_coverage = fpm_query_coverage
        self.partial = partial
        self._samples = samples
        self._sample_interval_ms = sample_interval_ms
        self._dp_sizes = dict(dp_sizes or {"agg": 1})
        self.latencies = latencies_of(requests)
        self.request_columns = _with_latencies(requests, self.latencies)
        self.admission_columns = admissions
        self.pass_columns = passes
        self.preemption_columns: Columns = preemptions or {}
        self.options = dict(options or {})
        self._completed = requests["status"] == "completed"
        totals = Totals()
        totals.add(self.request_columns, self.latencies, sla)
        if not (totals.completed or allow_empty):
            raise EmptyResultError(totals.why_empty(first_rejected(self.request_columns)))
        self.summary: dict[str, Any] = {
            **totals.volume(wall_time_ms),
            **provision(clock_ms, num_workers, gpus_per_worker, num_prefill_workers, prefill_gpus_per_worker),
            **(totals.goodput() if sla is not None else {}),
            **self._distributions(gap_ms, gap_count, exact_itl),
            "kv_eviction_policy": "lru",
            "committed_prefill_tokens": committed_prefill_tokens,
        }

    @cached_property
    def requests(self) -> pyarrow.Table:
        """One row per request in trace order; times in ms, null where a request has none."""
        return _arrow(self.request_columns)

    @cached_property
    def admissions(self) -> pyarrow.Table:
        """One row per admission in order of time: `request_id`, `at_ms`, `reused_tokens`.

        A request that was preempted is admitted again and has as many rows as admissions. Of disaggregated serving
        `pool` tells where.
        """
        columns = dict(self.admission_columns)
        return _arrow({"request_id": self.request_columns["request_id"][columns.pop("request")], **columns})

    @cached_property
    def passes(self) -> pyarrow.Table:
        """One row per pass in the order in which passes started on the simulated clock."""
        return _arrow(self.pass_columns)

    @cached_property
    def preemptions(self) -> pyarrow.Table:
        """One row per preemption: the victim, the blocks that it really held, and the state of its rank."""
        return _arrow(self.preemption_columns)

    @cached_property
    def fpm_stream(self) -> pyarrow.Table:
        """The telemetry that the engines would have published (`fpmsdk.replay.stream.fpm_stream`).

        `FpmBatch.from_arrow` reads it, to tune a model; `RecordedPasses.from_stream` prices the same replay with it.
        Raises ConfigError when passes were not recorded.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> report.fpm_stream.select(["sum_prefill_tokens", "num_decode_requests"]).to_pydict()
        {'sum_prefill_tokens': [8, 8, 0, 0], 'num_decode_requests': [0, 1, 2, 1]}
        """
        from fpmsdk.replay.stream import fpm_stream

        if not len(self.pass_columns["worker"]):
            raise ConfigError("the replay has kept no passes; leave record_passes at True", "record_passes")
        return fpm_stream(self.pass_columns, self._dp_sizes)

    def fpm_frames(self) -> list[bytes]:
        """The same telemetry as the messages of the wire, in the order of publication.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> from fpmsdk.metrics import decode_frame
        >>> [decode_frame(frame).wall_time for frame in report.fpm_frames()]
        [0.01, 0.011, 0.001, 0.001]
        """
        from fpmsdk.replay.stream import stream_frames

        return list(stream_frames(self.fpm_stream))

    def write_fpm_stream(self, path: str | Path) -> None:
        """Write the telemetry, whole or not at all.

        `.parquet` and `.arrow` hold the table, `.bin` and `.bin.gz` the messages of the wire as
        `fpmsdk.metrics.read_frames` reads them. Raises ConfigError for another ending.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> import tempfile
        >>> from fpmsdk.metrics import read_frames
        >>> path = tempfile.mkdtemp() + "/frames.bin"
        >>> report.write_fpm_stream(path)
        >>> len(read_frames(path))
        4
        """
        from fpmsdk.metrics import write_frames
        from fpmsdk.replay.stream import stream_frames, write_table

        if str(path).endswith((".bin", ".bin.gz")):
            write_frames(path, stream_frames(self.fpm_stream))
        else:
            write_table(path, self.fpm_stream)

    @cached_property
    def series(self) -> pyarrow.Table:
        """One row per sample: traffic since the last one, gauges of every rank (`fpmsdk.replay.series`).

        Raises ConfigError when no samples were taken.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0], [8], [3]), timing=timing, sample_interval_ms=5.0)
        >>> report.series["sampled_at_ms"].to_pylist()
        [0.0, 5.0, 10.0, 12.0]
        """
        from fpmsdk.replay.series import telemetry_series

        if self._samples is None or self._sample_interval_ms is None:
            raise ConfigError("the replay took no samples; give it sample_interval_ms", "sample_interval_ms")
        engine = self.options.get("launch", {}).get("engine", {})
        has_byte_budget = "kv_cache_used_bytes" in self.pass_columns
        return telemetry_series(
            self._samples,
            self.request_columns,
            self._sample_interval_ms,
            self._dp_sizes,
            engine["kv_cache_capacity_bytes"] if has_byte_budget else None,
        )

    def write_series(self, path: str | Path) -> None:
        """Write the samples to a `.parquet`, `.arrow` or `.jsonl` file, whole or not at all.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0], [8], [3]), timing=timing, sample_interval_ms=5.0)
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/series.jsonl"
        >>> report.write_series(path)
        >>> Path(path).read_text().count("\\n")
        4
        """
        from fpmsdk.replay.series import write_series

        write_series(path, self.series)

    def to_json(self, *, per_request: bool = True) -> str:
        """The report as one JSON object: `options`, `partial`, `summary` and, unless not wanted, `per_request`.

        `fpm_query_coverage` is in it when it was collected.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> import json
        >>> [record["ttft_ms"] for record in json.loads(report.to_json())["per_request"]]
        [10.0, 16.0]
        """
        document: dict[str, Any] = {"options": self.options, "partial": self.partial, "summary": self.summary}
        if self.fpm_query_coverage is not None:
            document["fpm_query_coverage"] = self.fpm_query_coverage
        if per_request:
            columns = {key: self._values(name) for key, name in _RECORD_KEYS.items() if name in self.request_columns}
            columns["admission_history"] = self._admission_histories()
            document["per_request"] = [
                dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
            ]
        # msgspec writes NaN, an absent time, as null.
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()

    def _values(self, name: str) -> list[Any]:
        values: list[Any] = self.request_columns[name].tolist()
        return [None if value < 0 else value for value in values] if name in _WORKERS else values

    def write_json(self, path: str | Path, *, per_request: bool = True) -> None:
        """Write `to_json` to a file, whole or not at all (`fpmsdk.files.whole_file`).

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/report.json"
        >>> report.write_json(path, per_request=False)
        >>> Path(path).read_text() == report.to_json(per_request=False) + "\\n"
        True
        """
        text = self.to_json(per_request=per_request) + "\n"
        with whole_file(path) as file:
            file.write(text.encode())

    def write_html(self, path: str | Path, *, measured: RecordedRun | None = None, title: str = "Replay") -> None:
        """Write the report as one self-contained web page (`fpmsdk.replay.page`); needs `fpmsdk[report]`.

        With the measured run of the same requests it is drawn beside the replay.

        Raises MissingCapabilityError without the extra, OSError when the file cannot be written.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/report.html"
        >>> report.write_html(path, title="two requests")
        >>> "<title>two requests</title>" in Path(path).read_text()
        True
        """
        from fpmsdk.replay.page.write import write_page

        write_page(path, self, measured, title)

    def table(self) -> Table:
        """The main figures for a terminal.

        >>> from fpmsdk import Trace, replay_trace
        >>> timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
        >>> report = replay_trace(Trace.from_arrays([0.0, 5.0], [8, 8], [3, 3]), timing=timing)
        >>> report.table().title
        '2 of 2 requests completed'
        """
        return summary_table(self.summary, self.partial)

    def _admission_histories(self) -> list[list[dict[str, Any]]]:
        histories: list[list[dict[str, Any]]] = [[] for _ in self._completed]
        columns = self.admission_columns
        requests, times, reuses = (columns[name].tolist() for name in ("request", "at_ms", "reused_tokens"))
        pools = [{}] * len(requests) if "pool" not in columns else [{"pool": pool} for pool in columns["pool"]]
        for request, at_ms, reused, pool in zip(requests, times, reuses, pools, strict=True):
            history = histories[request]
            # The first admission of each pool is none.
            is_readmission = any(pool.items() <= earlier.items() for earlier in history)
            history.append({"at_ms": at_ms, "reused_input_tokens": reused, "is_readmission": is_readmission, **pool})
        return histories

    def _distributions(
        self, gap_ms: NDArray[np.float64], gap_count: NDArray[np.int64], exact_itl: bool
    ) -> dict[str, Any]:
        done = self._completed
        latencies = self.latencies
        gap_ms, gap_count = merged_stream(gap_ms, gap_count)
        positive = gap_ms > 0
        return {
            "num_ttft_samples": _present(latencies.ttft_ms[done]),
            "num_tpot_samples": _present(latencies.itl_ms[done]),
            "num_e2e_latency_samples": _present(latencies.e2e_ms[done]),
            **Distribution.of_sample(latencies.ttft_ms[done]).named("ttft_ms"),
            **Distribution.of_sample(latencies.ttst_ms[done]).named("ttst_ms"),
            **Distribution.of_sample(latencies.itl_ms[done]).named("tpot_ms"),
            **Distribution.of_stream(gap_ms, gap_count, exact_itl).named("itl_ms"),
            **Distribution.of_sample(latencies.e2e_ms[done]).named("e2e_latency_ms"),
            **Distribution.of_stream(1e3 / gap_ms[positive], gap_count[positive], exact_itl).named(
                "output_token_throughput_per_user"
            ),
        }


def _with_latencies(requests: Columns, latencies: RequestLatencies) -> Columns:
    return {
        **requests,
        "ttft_ms": latencies.ttft_ms,
        "ttst_ms": latencies.ttst_ms,
        "itl_ms": latencies.itl_ms,
        "e2e_latency_ms": latencies.e2e_ms,
    }


def request_table(requests: Columns, latencies: RequestLatencies) -> pyarrow.Table:
    """Request columns and their latencies as `ReplayReport.requests` has them."""
    return _arrow(_with_latencies(requests, latencies))


def summary_table(summary: Mapping[str, Any], partial: bool) -> Table:
    """The main figures of a summary for a terminal."""
    from rich.table import Table

    table = Table(
        title=("PARTIAL, interrupted: " if partial else "")
        + f"{summary['completed_requests']:,} of {summary['num_requests']:,} requests completed",
        caption=(
            f"{summary['duration_ms'] / 1e3:,.1f} s simulated, "
            f"{summary['request_throughput_rps']:,.2f} requests/s, "
            f"{summary['output_throughput_tok_s']:,.0f} output tokens/s"
        ),
    )
    table.add_column("ms")
    figures = ("mean", "median", "p90", "p99", "max")
    for figure in figures:
        table.add_column(figure, justify="right")
    for label, name in (
        ("TTFT", "ttft"),
        ("TTST", "ttst"),
        ("ITL", "itl"),
        ("TPOT", "tpot"),
        ("end to end", "e2e_latency"),
    ):
        table.add_row(label, *(f"{summary[f'{figure}_{name}_ms']:,.2f}" for figure in figures))
    return table


def _present(values: NDArray[np.float64]) -> int:
    return int(np.count_nonzero(~np.isnan(values)))


def _arrow(columns: Columns) -> pyarrow.Table:
    import pyarrow as pa

    # A column of names may hold nothing but None, which would leave its type open.
    return pa.table(
        {
            name: pa.array(
                column,
                pa.string() if column.dtype == object else None,
                mask=column < 0 if name in _WORKERS else None,
                from_pandas=True,
            )
            for name, column in columns.items()
        }
    )
