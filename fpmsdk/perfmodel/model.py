"""The model object: estimate, tune, report. Names and results are those of the field's public facade.

Source: fpm-model.md section 2; clients.md section 2.1.
"""

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self

from fpmsdk._ext.frames import Columns, IterationSource, read_iterations
from fpmsdk._ext.plain import PlainTemplate
from fpmsdk.config import normalize_request
from fpmsdk.errors import (
    ConfigError,
    SystemsPathError,
    TuningRejectedError,
    UnsupportedQueryError,
)
from fpmsdk.perfmodel.select import Selection, select
from fpmsdk.perfmodel.topology import deployment_topology

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fpmsdk._ext.pricing import FpmTiming
    from fpmsdk.config import ForwardPassPerfModelConfig
    from fpmsdk.launch import EngineLaunchConfig

Metrics = Any  # a rank (dict, object with its fields, encoded frame) or a list of the ranks of one iteration


def _decode_frame(frame: bytes) -> object:
    # The decoder is loaded by the first encoded frame, not by the import of the model.
    from fpmsdk.metrics.wire import decode_frame

    return decode_frame(frame)


class ForwardPassPerfModel:
    """Predicts the latency of one engine iteration and learns from the engine's telemetry.

    Built by `best_available`. Any number of threads may estimate while one tunes: every answer equals the answer after
    some prefix of the tuning calls. Models are neither pickled nor copied.

    Source: fpm-model.md sections 1 and 2; clients.md section 2.1.

    Example
    -------
    >>> model = ForwardPassPerfModel.best_available(
    ...     {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode",
    ...      "estimation_mode": "fpm_regression",
    ...      "estimator_config": {"fpm_regression": {"min_observations": 2}}})
    >>> for requests in (1, 2):
    ...     model.tune_with_fpms({"wall_time": 0.01 * requests, "scheduled_requests": {
    ...         "num_decode_requests": requests, "sum_decode_kv_tokens": 100 * requests}})
    >>> round(model.estimate_forward_pass_time_ms({"scheduled_requests": {
    ...     "num_decode_requests": 1, "sum_decode_kv_tokens": 100}}), 3)
    10.0
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._kind = selection.kind
        self._estimator = selection.kind.estimator
        self._tuning = threading.Lock()
        snapshot = selection.config["estimator_config"].get("state_snapshot")
        self._rejects_tuning = snapshot is not None and snapshot["on_tune"] == "reject"
        _models.add(self)

    @cached_property
    def _report(self) -> PlainTemplate:
        return PlainTemplate(_diagnostics_template(self._selection))

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("_estimator", "_kind"):
            raise AttributeError("this ForwardPassPerfModel is closed")
        raise AttributeError(f"'ForwardPassPerfModel' object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ForwardPassPerfModel cannot be pickled or copied; build another from its configuration")

    def __repr__(self) -> str:
        config = self._selection.config
        return (
            f"<ForwardPassPerfModel {config['model']} on {config['system']}, {config['backend']} "
            f"{config['worker_type']}, {self._selection.kind.mode}>"
        )

    # --- construction ---

    @classmethod
    def best_available(
        cls,
        config: "ForwardPassPerfModelConfig | Mapping[str, Any] | None" = None,
        *,
        state_snapshot: str | PathLike[str] | None = None,
    ) -> Self:
        """Build the best model that the configuration allows.

        Parameters
        ----------
        config: canonical configuration, as a mapping or a `ForwardPassPerfModelConfig`.
        state_snapshot: directory of a saved state, instead of `config`.

        A configuration with `estimator_config.state_snapshot` restores that state, bit for bit.

        Raises
        ------
        ConfigError: the configuration is malformed, unknown or contradictory, both or neither source is given, or
            `state_snapshot` is not the directory that its own configuration pins.
        PerfDataNotAvailableError: only performance data are missing.
        StateSnapshotIOError, StateSnapshotError: a snapshot cannot be read, or is not what it should be.
        MissingCapabilityError: this release has no implementation of what is asked for; names it.

        Source: fpm-model.md sections 2.1 and 4.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model
        <ForwardPassPerfModel qwen3-small-random on cpu-2-cores, vllm aggregated, fpm_regression>
        """
        if (config is None) == (state_snapshot is None):
            raise ConfigError("give exactly one of config and state_snapshot")
        if state_snapshot is not None:
            from fpmsdk.snapshot.pinned import read_config, snapshot_path

            config = read_config(snapshot_path(state_snapshot))
        try:
            assert config is not None
            canonical = _normalized(config)
        except SystemsPathError:
            # Packed data vanish together with their snapshot, which says more.
            _require_snapshot(config)
            raise
        if canonical["estimator_config"].get("state_snapshot") is None:
            return cls(select(canonical))
        from fpmsdk.perfmodel.restoring import restore

        return cls(restore(canonical))

    @staticmethod
    def normalize_config(config: "ForwardPassPerfModelConfig | Mapping[str, Any]") -> dict[str, Any]:
        """The canonical form of a configuration, validated, without building a model.

        Parameters
        ----------
        config: as `best_available`.

        Raises
        ------
        As `fpmsdk.config.normalize_request`.

        Source: fpm-model.md section 3.3.

        >>> config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "systems_paths": ["/."]}
        >>> canonical = ForwardPassPerfModel.normalize_config(config)
        >>> canonical["systems_paths"], canonical["tp"]
        (['/'], 1)
        """
        return _normalized(config)

    @staticmethod
    def learned_identity(config: "ForwardPassPerfModelConfig | Mapping[str, Any]") -> dict[str, Any]:
        """The deployment that a learned artifact has to be trained on to serve a configuration: 28 of its fields.

        Parameters
        ----------
        config: as `best_available`, of any mode; before there is an artifact, of another one than `fpm_learned`.

        Raises
        ------
        As `normalize_config`.

        Source: regression-and-learned.md section 3.5.

        >>> identity = ForwardPassPerfModel.learned_identity(
        ...     {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "tp": 2})
        >>> identity["model"], identity["tp"]
        ('m', 2)
        """
        from fpmsdk.learned.identity import learned_identity

        return learned_identity(_normalized(config))

    @staticmethod
    def estimate_cache_budget(
        config: "ForwardPassPerfModelConfig | Mapping[str, Any]", budget: Mapping[str, Any]
    ) -> dict[str, Any]:
        """KV-cache budget of the deployment that a configuration selects from its profile.

        Parameters: `budget`, bytes of the GPU, memory fraction and scheduler limits, as
        `fpmsdk.launch.cache_budget.estimate_cache_budget` names them.
        Returns: bytes and, of a linear cache, tokens that are left, and what one request takes of them.
        Raises: `ConfigError` for a request that the profile does not support, `InfeasibleMemoryError` when nothing is
        left; it tells the bytes and the smallest tp that fits.
        Source: fpm-interpolation.md section 7.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = forward_config(folder)
        ...     config["fpm_profile"]["deployments"][0]["resources"] |= {
        ...         "weights_bytes": 600, "activations_bytes": 100,
        ...         "runtime_overhead_bytes": 0, "comm_overhead_bytes": 0}
        ...     budget = ForwardPassPerfModel.estimate_cache_budget(config, {
        ...         "total_gpu_capacity_bytes": 10_000_000, "memory_fraction_kind": "of_total",
        ...         "memory_fraction_value": 0.9, "max_num_tokens": 512, "max_batch_size": 16})
        >>> budget["total_kv_size_bytes"], budget["total_kv_size_tokens"]
        (8999300, 4394)
        """
        from fpmsdk.launch.cache_budget import estimate_cache_budget

        return estimate_cache_budget(_normalized(config), budget)

    @classmethod
    def from_learned(cls, source: Any, options: Mapping[str, Any] | None = None) -> Self:
        """Build a model from a learned artifact alone; which deployment it was trained on is not checked.

        Parameters
        ----------
        source: path of the artifact, its JSON text, or its document as a mapping.
        options: flat tuning options of the correction (`ForwardPassPerfOptions`); its mode is hybrid unless given.

        Raises
        ------
        LearnedModelError: the artifact is malformed; names the place.
        ConfigError: an option is unknown or out of its range.
        PerfDataNotAvailableError: the file cannot be read.

        Source: regression-and-learned.md section 3.5.

        >>> model = ForwardPassPerfModel.from_learned({
        ...     "schema": "aic_fpm_learned_forward_perf", "schema_version": 1, "worker_type": "decode", "target": "ms",
        ...     "features": ["num_decode_requests"], "stores": {"pure_decode": {"baseline": 4.0, "trees": [
        ...         {"left": [1, -1, -1], "right": [2, -1, -1], "feature": [0, 0, 0], "threshold": [4.5, 0, 0],
        ...          "value": [0, 1.0, 3.0]}]}}})
        >>> [model.estimate_forward_pass_time_ms({"scheduled_requests": {"num_decode_requests": n}}) for n in (4, 5)]
        [5.0, 7.0]
        >>> model.diagnostics()["source"]
        'learned'
        """
        from fpmsdk.perfmodel.learned import select_from_learned

        return cls(select_from_learned(source, options))

    def close(self) -> None:
        """Drop the estimator; later calls fail with AttributeError. Closing twice is harmless.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.close()
        >>> model.diagnostics()
        Traceback (most recent call last):
            ...
        AttributeError: this ForwardPassPerfModel is closed
        """
        self.__dict__.pop("_estimator", None)
        self.__dict__.pop("_kind", None)

    # --- estimate ---

    def estimate_forward_pass_time_ms(self, metrics: Metrics) -> float | None:
        """Latency of one iteration in ms; None while the model is not ready for its workload, 0.0 without work.

        Parameters
        ----------
        metrics: one rank, or the list of the iteration's attention-DP ranks; a rank is a dict of the message's fields,
            an object with the same attributes (Dynamo's message) or the encoded frame. Unknown keys are ignored.
            Whether the ranks belong together is the caller's to say: worker, rank and counter numbers are not
            compared (`fpmsdk.metrics.group_ranks` builds iterations from a stream and does).

        Raises
        ------
        MetricsError: a field of the wrong type or range, contradictory counts, another message version.

        Source: fpm-model.md section 5.3.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> decode = {"scheduled_requests": {"num_decode_requests": 1, "sum_decode_kv_tokens": 64}}
        >>> [round(model.estimate_forward_pass_time_ms(metrics), 3) for metrics in (decode, [decode, {}], {})]
        [5.221, 5.221, 0.0]
        """
        return self._estimator.serving.estimate_iteration(metrics, _decode_frame)

    def estimate_many(self, batch: Any) -> "NDArray[np.float64]":
        """Latencies in ms of many iterations, float64[n], NaN where the model is not ready.

        Parameters
        ----------
        batch: `FpmBatch`, or a sequence of iterations in the forms of `estimate_forward_pass_time_ms`.

        Raises
        ------
        MetricsError: as `estimate_forward_pass_time_ms`; names the iteration.

        Source: fpm-model.md section 5.3.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> decode = {"scheduled_requests": {"num_decode_requests": 1, "sum_decode_kv_tokens": 64}}
        >>> model.estimate_many([decode, {}]).round(3).tolist()
        [5.221, 0.0]
        """
        columns = _columns(batch)
        if columns is None:
            from fpmsdk.metrics import FpmBatch

            columns = FpmBatch.from_dicts(batch).columns
        return self._estimator.serving.estimate_columns(columns)

    def timing_model(self) -> "FpmTiming":
        """A compiled timing model for replays: what has been learned by now, unaffected by later tuning.

        Source: engine-and-replay.md section 4.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> from fpmsdk import Trace, replay_trace
        >>> trace = Trace.from_arrays([0.0], prompt_tokens=[128], output_tokens=[1])
        >>> round(replay_trace(trace, timing=model.timing_model()).summary["mean_ttft_ms"], 3)
        15.222
        """
        from fpmsdk._ext.pricing import FpmTiming

        return FpmTiming(self._estimator.serving)

    def sized_launch(self, launch: "EngineLaunchConfig") -> "EngineLaunchConfig":
        """A launch with the KV cache that this model's profile leaves room for; unchanged without a profile.

        Replays ask for it. Parameters: `launch`, whose scheduler limits and memory fraction decide.
        Raises: ConfigError when the memory is pending or does not support the launch, LaunchConfigError for explicit
        blocks or groups that contradict it, InfeasibleMemoryError when nothing is left for the cache.
        Source: fpm-interpolation.md section 7.

        >>> from fpmsdk import EngineLaunchConfig
        >>> model = ForwardPassPerfModel.best_available(
        ...     {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode",
        ...      "estimation_mode": "fpm_regression"})
        >>> launch = EngineLaunchConfig.from_mapping({"engine": {"num_gpu_blocks": 64}})
        >>> model.sized_launch(launch) is launch
        True
        """
        if self._selection.config["fpm_profile"] is None:
            return launch
        from fpmsdk.launch.capacity import sized_launch

        return sized_launch(launch, self._selection.config)

    def estimate_forward_pass_detailed(self, metrics: Metrics) -> dict[str, Any]:
        """The estimate with its parts: `latency_ms`, `native_latency_ms`, `correction_factor`, `max_rank`, `ranks`.

        Ranks of strict whole-forward lookups tell the parts of a pass, in ms, and their `queries`: how each was
        resolved, and the measured points behind it with their weights. Source: fpm-interpolation.md section 4.4.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
        >>> mixed = {"num_prefill_requests": 1, "sum_prefill_tokens": 100,
        ...          "num_decode_requests": 2, "sum_decode_kv_tokens": 300}
        >>> (rank,) = model.estimate_forward_pass_detailed({"scheduled_requests": mixed})["ranks"]
        >>> [query["resolution"] for query in rank["queries"]]
        ['within_curve_interpolation', 'within_curve_interpolation', 'exact_lookup']
        >>> rank["latency_ms"] == rank["prefill_ms"] + rank["marginal_decode_ms"]
        True
        """
        return self._kind.detailed(metrics, _decode_frame)

    def explain(self, metrics: Metrics) -> dict[str, Any]:
        """The estimate with the measurements behind it and the error to expect.

        Parameters
        ----------
        metrics: as `estimate_forward_pass_time_ms`.

        Returns
        -------
        `latency_ms`, `native_latency_ms`, `correction_factor`, `max_rank`, `in_domain`, `expected_error` and per rank
        its `lookups`: each with `phase` (whole-forward) or `operator` (op-level), `coordinates`, `resolution`,
        `in_domain` (nothing was carried beyond the measurements), `distance` to the nearest anchor in doublings,
        `expected_error` (relative, from the table's own leave-one-out report, None when the table cannot say) and
        `anchors` (`coordinates`, `latency_ms`, `weight`, `distance`). Ranks of an op-level model also tell the
        `measured_share` of their latency.

        Raises
        ------
        UnsupportedQueryError: not a native model.
        PerfDataNotAvailableError: the iteration is not covered; the message says which points to measure.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
        >>> prefill = {"num_prefill_requests": 1, "sum_prefill_tokens": 100}
        >>> explained = model.explain({"scheduled_requests": prefill})
        >>> explained["in_domain"], round(explained["expected_error"], 2)
        (True, 0.05)
        >>> (lookup,) = explained["ranks"][0]["lookups"]
        >>> [(anchor["coordinates"]["total_prefill_tokens"], anchor["weight"]) for anchor in lookup["anchors"]]
        [(64.0, 0.4375), (128.0, 0.5625)]
        """
        return self._kind.explain(metrics, _decode_frame)

    # --- tune ---

    def tune_with_fpms(self, iterations: Any) -> None:
        """Learn from observed iterations, in order.

        Iterations without scheduled work or without a positive finite wall time teach nothing and are counted by
        reason in `skipped_iterations()`.

        Parameters
        ----------
        iterations: `FpmBatch`, a list of iterations, one iteration as a flat list of ranks, or one rank.

        Raises
        ------
        TuningRejectedError: the model was restored with `on_tune: reject`; the argument was not looked at.
        MetricsError: a field of the wrong type or range (nothing is learned), or an iteration that contradicts itself
            or the worker type (the iterations before it stay learned).

        Source: fpm-model.md section 5.4.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> decode = {"scheduled_requests": {"num_decode_requests": 1, "sum_decode_kv_tokens": 64}}
        >>> model.tune_with_fpms([[decode | {"wall_time": 0.008}]] * 5)
        >>> round(model.estimate_forward_pass_time_ms(decode), 3)
        8.0
        """
        source = self._source(iterations)
        with self._tuning:
            self._estimator.learn_from(source)

    def _source(self, iterations: Any) -> IterationSource:
        self._require_tuning()
        source: IterationSource | None = _columns(iterations)
        if source is None:
            # Read before the lock is taken: attributes of foreign objects may run any code.
            source = read_iterations(() if iterations is None else iterations, _decode_frame)
        return source

    def predict_then_tune(self, batch: Any) -> "tuple[NDArray[np.float64], NDArray[np.int64]]":
        """Predict every iteration of a batch before learning from it: what an online user of the model sees.

        Parameters
        ----------
        batch: `FpmBatch` of n iterations.

        Returns
        -------
        Predictions in ms, float64[n], NaN while the model was not ready and 0.0 without work, and the nanoseconds that
        learning from each iteration took, int64[n], -1 where nothing was learned.

        Raises
        ------
        TuningRejectedError: the model was restored with `on_tune: reject`.
        MetricsError, PerfDataNotAvailableError: as `estimate_many` and `tune_with_fpms`; the iterations before it stay
            learned.

        Source: data/vllm_cpu, the protocol.

        >>> from fpmsdk.sample import MODEL
        >>> from fpmsdk import FpmBatch
        >>> work = {"num_decode_requests": 1, "sum_decode_kv_tokens": 9}
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> batch = FpmBatch.from_dicts([{"wall_time": 0.005, "scheduled_requests": work}, {}])
        >>> predicted_ms, update_ns = model.predict_then_tune(batch)
        >>> predicted_ms.tolist(), (update_ns >= 0).tolist()
        ([nan, 0.0], [True, False])
        """
        source = self._source(batch)
        with self._tuning:
            return self._estimator.predict_then_learn(source)

    def skipped_iterations(self) -> dict[str, int]:
        """Iterations that taught nothing, counted by reason since construction.

        Source: fpm-model.md section 5.4.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.tune_with_fpms([{"wall_time": 0.01}])
        >>> model.skipped_iterations()["idle"]
        1
        """
        return self._estimator.skipped_iterations()

    # --- reports ---

    def diagnostics(self) -> dict[str, Any]:
        """Source, readiness, retained observations and provenance of the model; the caller owns the dict.

        Source: fpm-model.md section 2.2.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> report = model.diagnostics()
        >>> report["source"], report["readiness"], report["provenance"]["selected_estimation_mode"]
        ('fallback_regression', 'insufficient_data', 'fpm_regression')
        """
        report: dict[str, Any] = self._report.copy()
        # Copying a template with all keys and filling it in costs half of building the dict anew.
        report["source"], ready, report["retained_observations"], report["correction_ready_buckets"] = (
            self._kind.status()
        )
        if ready:
            report["readiness"] = "ready"
        return report

    def regression_store_diagnostics(self) -> list[dict[str, Any]]:
        """Workload kind, readiness and retained observations of each regression store; empty for native models.

        Source: fpm-model.md section 2.1.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> store = model.regression_store_diagnostics()[0]
        >>> store["workload_kind"], store["retained_observations"]
        ('pure_decode', 0)
        """
        return self._kind.store_diagnostics()

    def readiness_report(self) -> dict[str, Any]:
        """Which stores can answer, and why the others cannot.

        Returns
        -------
        `kind`, `ready`, the regression `stores`, and in `correction` whether it is enabled and ready, and its stores.

        Source: fpm-model.md section 8.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import op_level_config
        >>> model = ForwardPassPerfModel.best_available(op_level_config(tempfile.mkdtemp()))
        >>> report = model.readiness_report()
        >>> report["ready"], report["correction"]["stores"][0]["reason"]
        (True, 'below_min_observations')
        """
        return self._kind.readiness_report()

    def deployment_topology(self) -> dict[str, Any]:
        """Identity of the deployment that the model stands for: model, system, backend, sizes, precisions.

        Source: fpm-model.md section 8.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> topology = model.deployment_topology()
        >>> topology["model"], topology["tp"]
        ('qwen3-small-random', 1)
        """
        return deployment_topology(self._selection.config, corrected=self._kind.is_corrected)

    def engine_launch_mismatches(self, launch_args: Mapping[str, Any]) -> list[str]:
        """Identity conflicts between engine launch arguments and this model; empty when a launch accepts it.

        Raises
        ------
        LaunchConfigError: the launch arguments are invalid by themselves.

        Source: engine-and-replay.md section 1.5.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.engine_launch_mismatches({"engine": {}, "tensor_parallel_size": 2})
        ['tensor_parallel_size conflicts with canonical tp']
        """
        from fpmsdk.launch import EngineLaunchConfig

        return EngineLaunchConfig.timing_config_mismatches(launch_args, self._selection.config)

    @staticmethod
    def config_engine_launch_mismatches(
        launch_args: Mapping[str, Any],
        config: "ForwardPassPerfModelConfig | Mapping[str, Any] | None" = None,
        *,
        state_snapshot: str | PathLike[str] | None = None,
    ) -> list[str]:
        """`fpmsdk.config_engine_launch_mismatches`: the same without a model.

        Source: snapshot.md section 1.

        >>> from fpmsdk.sample import MODEL
        >>> ForwardPassPerfModel.config_engine_launch_mismatches({"engine": {}}, MODEL)
        []
        """
        from fpmsdk.launch import config_engine_launch_mismatches

        return config_engine_launch_mismatches(launch_args, config, state_snapshot=state_snapshot)

    @staticmethod
    def inspect_state_snapshot(path: str | PathLike[str]) -> dict[str, Any]:
        """`fpmsdk.inspect_state_snapshot`: what a saved state says of itself.

        Source: snapshot.md section 1.

        >>> import tempfile
        >>> from fpmsdk.sample import MODEL
        >>> folder = tempfile.mkdtemp() + "/saved"
        >>> _ = ForwardPassPerfModel.best_available(MODEL).save_state_snapshot(folder)
        >>> ForwardPassPerfModel.inspect_state_snapshot(folder)["readiness"]["ready"]
        False
        """
        from fpmsdk.perfmodel.inspection import inspect_state_snapshot

        return inspect_state_snapshot(path)

    def get_min_correction_factor(self) -> float | None:
        """Smallest ready correction factor; None when there is none.

        Source: fpm-model.md section 6.6.

        >>> from fpmsdk.sample import MODEL
        >>> ForwardPassPerfModel.best_available(MODEL).get_min_correction_factor() is None
        True
        """
        return min(self._kind.correction_factors(), default=None)

    def get_max_correction_factor(self) -> float | None:
        """Largest ready correction factor; None when there is none.

        Source: fpm-model.md section 6.6.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> decode = {"scheduled_requests": {"num_decode_requests": 1, "sum_decode_kv_tokens": 64}}
        >>> observed_s = 1.5 * model.estimate_forward_pass_time_ms(decode) / 1000
        >>> model.tune_with_fpms([[decode | {"wall_time": observed_s}]] * 5)
        >>> round(model.get_max_correction_factor(), 3)
        1.5
        """
        return max(self._kind.correction_factors(), default=None)

    def get_avg_correction_factor(self) -> float | None:
        """Mean of the ready correction factors; None when there is none.

        Source: fpm-model.md section 6.6.

        >>> from fpmsdk.sample import MODEL
        >>> ForwardPassPerfModel.best_available(MODEL).get_avg_correction_factor() is None
        True
        """
        factors = self._kind.correction_factors()
        total = 0.0
        for factor in factors:  # in store order; `sum` would add with compensation
            total += factor
        return total / len(factors) if factors else None

    def fpm_query_coverage(self) -> dict[str, Any] | None:
        """Counts and gaps of table lookups since construction; None unless `collect_coverage` is set.

        Source: fpm-interpolation.md section 8.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = forward_config(folder)
        ...     config["estimator_config"]["fpm_interpolation"]["collect_coverage"] = True
        ...     model = ForwardPassPerfModel.best_available(config | {"fallback_policy": "deny"})
        >>> for kv_tokens in (64, 100):
        ...     _ = model.predict_decode_latency_total(1, kv_tokens)
        >>> model.fpm_query_coverage()["queries"]
        {'measured': 1, 'interpolated': 1, 'unsupported': 0}
        """
        return self._kind.query_coverage()

    def learned_feature_names(self) -> list[str] | None:
        """Features of a learned estimator; None for other kinds.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.learned_feature_names() is None
        True
        """
        return self._kind.learned_feature_names()

    def learned_metadata(self) -> dict[str, Any] | None:
        """Metadata of a learned estimator; None for other kinds.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.learned_metadata() is None
        True
        """
        return self._kind.learned_metadata()

    def learned_online_diagnostics(self) -> dict[str, Any] | None:
        """Adaptation and counters of a learned estimator; None for other kinds.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.learned_online_diagnostics() is None
        True
        """
        with self._tuning:
            return self._kind.learned_online_diagnostics()

    def learned_selector_diagnostics(self) -> dict[str, Any] | None:
        """Decisions of a causal selector; None for other kinds.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.learned_selector_diagnostics() is None
        True
        """
        with self._tuning:
            return self._kind.learned_selector_diagnostics()

    # --- queries of some kinds of model ---

    def static_phase_latency(self, *, batch_size: int, input_tokens: int, output_tokens: int, prefill: bool) -> float:
        """Uncorrected latency in ms of a whole prefill or decode phase of a native model.

        Parameters
        ----------
        batch_size: requests.
        input_tokens: prompt length of each request.
        output_tokens: answer length of each; 2 is one decode step, as the prefill gives the first token.
        prefill: the prefill of all prompts, else every decode step after it.

        Raises
        ------
        UnsupportedQueryError: not a native model.
        ConfigError: a count is no integer or out of its range.
        PerfDataNotAvailableError: the data do not cover the phase.

        Source: fpm-model.md section 2.1.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> round(model.static_phase_latency(batch_size=1, input_tokens=128, output_tokens=2, prefill=True), 3)
        15.222
        """
        return self._kind.static_phase_latency(batch_size, input_tokens, output_tokens, prefill=prefill)

    def static_phase_diagnostics(
        self, *, batch_size: int, context_length: int, prefill: bool, prefix: int = 0
    ) -> list[dict[str, Any]]:
        """Operators of one pass of an op-level model, uncorrected, in graph order.

        Parameters
        ----------
        batch_size: requests.
        context_length: tokens of each request, `prefix` included; a decode step is priced one token later.
        prefill: a prefill pass, else one decode step.
        prefix: cached tokens of each request, prefill only.

        Returns
        -------
        Rows of `name`, `latency_ms`, `energy_wms` (W ms, 0.0 where power was not measured), `source` and `details`
        with the speed of light in `sol` (`latency_ms`, `math_ms`, `memory_ms`).

        Raises
        ------
        As `static_phase_latency`.

        Source: op-level.md section 5.

        >>> import tempfile
        >>> from fpmsdk.sample.tiny import op_level_config
        >>> model = ForwardPassPerfModel.best_available(op_level_config(tempfile.mkdtemp()))
        >>> rows = model.static_phase_diagnostics(batch_size=2, context_length=100, prefill=False)
        >>> rows[3]["name"], rows[3]["source"], rows[3]["latency_ms"] > rows[3]["details"]["sol"]["latency_ms"]
        ('generation_attention', 'silicon', True)
        """
        return self._kind.static_phase_diagnostics(batch_size, context_length, prefix, prefill=prefill)

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Uncorrected latency in ms of one prefill of `bs` requests of `isl` tokens, `prefix` of which are cached.

        Raises
        ------
        As `static_phase_latency`.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> round(model.predict_prefill_latency(bs=2, isl=128), 3)
        23.766
        """
        return self._kind.prefill_latency(bs, isl, prefix)

    def predict_prefill_latency_total(
        self, batch_size: int, total_prefill_tokens: int, total_kv_read_tokens: int
    ) -> float:
        """Uncorrected latency in ms of one prefill, by totals over its requests.

        Parameters
        ----------
        batch_size: requests.
        total_prefill_tokens: tokens computed; 0.0 ms for none.
        total_kv_read_tokens: cached tokens read. Op-level models price whole tokens a request: of both together, and of
            the cached ones.

        Raises
        ------
        As `static_phase_latency`.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> round(model.predict_prefill_latency_total(2, total_prefill_tokens=256, total_kv_read_tokens=0), 3)
        23.766
        """
        return self._kind.prefill_latency_total(batch_size, total_prefill_tokens, total_kv_read_tokens)

    def predict_decode_latency_total(self, batch_size: int, total_past_kv_tokens: int) -> float:
        """Uncorrected latency in ms of one decode step of `batch_size` requests with `total_past_kv_tokens` cached.

        Raises
        ------
        As `static_phase_latency`.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> model = ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp()))
        >>> round(model.predict_decode_latency_total(batch_size=2, total_past_kv_tokens=300), 3)
        5.548
        """
        return self._kind.decode_latency_total(batch_size, total_past_kv_tokens)

    def predict_decode_latency(self, bs: int, context_length: int, *, verify_width: int = 1) -> float:
        """Uncorrected latency in ms of one decode step of `bs` tokens, `context_length` cached ones per request.

        With a `verify_width` above 1 each request verifies that many of the `bs` tokens. Whole-forward models only.
        Raises: as `static_phase_latency`.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
        >>> model.predict_decode_latency(2, 150) == model.predict_decode_latency_total(2, 300)
        True
        """
        return self._kind.decode_latency(bs, context_length, verify_width)

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_requests: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        """Uncorrected latency in ms of one scheduler step: (total, prefill, 0, what decoding adds).

        Parameters
        ----------
        ctx_tokens, gen_requests: prompt tokens computed in the step, and decoding requests beside them.
        isl, osl, prefix: prompt length, answer length and cached prompt tokens of the requests.

        Raises
        ------
        As `static_phase_latency`.

        Source: fpm-interpolation.md section 3.7.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
        >>> total, prefill_ms, _, marginal_ms = model.mixed_step_breakdown(100, 2, isl=100, osl=20)
        >>> total == prefill_ms + marginal_ms
        True
        """
        return self._kind.mixed_step(ctx_tokens, gen_requests, isl, osl, prefix)

    def decode_step_latency(self, gen_requests: int, isl: int, osl: int) -> float:
        """Uncorrected latency in ms of one step in which requests half-way through their answer decode a token.

        Parameters: `gen_requests`, requests that decode; `isl` and `osl`, their prompt and answer length in tokens.
        Raises: as `static_phase_latency`.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
        >>> model.decode_step_latency(2, 100, 20) == model.predict_decode_latency_total(2, 2 * (100 + 10 + 1))
        True
        """
        return self._kind.mixed_step(0, gen_requests, isl, osl, 0)[0]

    def fpm_decode_kv_ceiling(self) -> int | None:
        """Largest measured decode KV total in tokens; None for op-level models, which extrapolate.

        >>> import tempfile
        >>> from fpmsdk.sample.forward import forward_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = ForwardPassPerfModel.best_available(forward_config(folder))
        >>> model.fpm_decode_kv_ceiling()
        32736
        """
        return self._kind.decode_kv_ceiling()

    def vision_operations(self, shapes: Sequence[Mapping[str, int]]) -> list[tuple[str, float, float, str]]:
        """Operations of the vision encoder.

        Raises
        ------
        UnsupportedQueryError: the model is no such estimator; this release has none.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.vision_operations([])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        fpmsdk.errors.UnsupportedQueryError: vision_operations needs a model with an encoder (encoder_parallel)...
        """
        raise self._needs("vision_operations", "a model with an encoder (encoder_parallel)")

    def flush_updates(self) -> None:
        """Apply what waits for its batch in an online learner, and let rows go that have grown too old.

        Raises
        ------
        UnsupportedQueryError: the model is no such estimator.
        TuningRejectedError: it was restored with `on_tune: reject`.

        Source: regression-and-learned.md section 4.4.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.flush_updates()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        fpmsdk.errors.UnsupportedQueryError: flush_updates needs an online fpm_learned estimator...
        """
        self._require_tuning()
        with self._tuning:
            self._kind.flush_updates()

    def export_learned_artifact(self) -> dict[str, Any]:
        """The forests of a learned estimator as the document of an artifact, without corrections.

        Raises
        ------
        UnsupportedQueryError: the model is no such estimator.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.export_learned_artifact()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        fpmsdk.errors.UnsupportedQueryError: export_learned_artifact needs an fpm_learned estimator...
        """
        with self._tuning:
            return self._kind.export_learned_artifact()

    def save_online_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write an online learner into a new directory, whole or not at all; `checkpoint_path` may name it.

        Parameters
        ----------
        path: the directory; nothing may be there yet, its parent must exist.

        Raises
        ------
        UnsupportedQueryError: the model is no such estimator.
        LearnedModelError: something is at `path`, or it is empty.
        OSError: it cannot be written.

        Source: regression-and-learned.md section 4.7.

        >>> from fpmsdk.sample import MODEL
        >>> model = ForwardPassPerfModel.best_available(MODEL)
        >>> model.save_online_checkpoint("checkpoint")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        fpmsdk.errors.UnsupportedQueryError: save_online_checkpoint needs an online fpm_learned estimator...
        """
        with self._tuning:
            # An empty path stays one, rather than become the working directory.
            self._kind.save_online_checkpoint(os.path.abspath(os.fsdecode(path)) if path else "")

    def save_state_snapshot(self, path: str | PathLike[str], *, include_perf_db: bool = False) -> dict[str, Any]:
        """Save what tuning has learned into a new directory, whole or not at all.

        Parameters
        ----------
        path: the directory; nothing may be there yet, its parent must exist.
        include_perf_db: whether to copy the performance data of a native model into it. Other kinds have none.

        Returns
        -------
        The canonical configuration that restores the model, here or in another process. It is plain JSON, the same as
        in `config.json`, and says `on_tune: reject`.

        Raises
        ------
        StateSnapshotIOError: the directory exists (also a `FileExistsError`), or cannot be written.
        StateSnapshotError: performance data changed since this process loaded them, or cannot be packed.

        Source: snapshot.md sections 1 and 5.

        >>> import tempfile
        >>> from fpmsdk.sample import MODEL
        >>> config = ForwardPassPerfModel.best_available(MODEL).save_state_snapshot(tempfile.mkdtemp() + "/saved")
        >>> config["estimator_config"]["state_snapshot"]["on_tune"]
        'reject'
        """
        from fpmsdk.perfmodel.saving import save_state_snapshot

        return save_state_snapshot(
            self._kind, self._selection.config, path, include_perf_db=include_perf_db, tuning=self._tuning
        )

    def _require_tuning(self) -> None:
        if self._rejects_tuning:
            raise TuningRejectedError(
                "this model was restored from a state snapshot with on_tune 'reject', so it does not learn; set "
                "estimator_config.state_snapshot.on_tune to 'continue' to go on where tuning stopped"
            )

    def _needs(self, query: str, needed: str) -> UnsupportedQueryError:
        return UnsupportedQueryError(f"{query} needs {needed}; this model is {self._kind.mode}")


def _diagnostics_template(selection: Selection) -> dict[str, Any]:
    """What `diagnostics()` reports of a model that has learned nothing yet."""
    return {
        "source": None,
        "readiness": "insufficient_data" if selection.warning is None else "unsupported_config",
        "retained_observations": 0,
        "correction_ready_buckets": 0,
        "last_warning": selection.warning,
        "provenance": selection.provenance(),
    }


def _normalized(config: "ForwardPassPerfModelConfig | Mapping[str, Any]") -> dict[str, Any]:
    return normalize_request(config, _is_registered)


def _require_snapshot(config: Any) -> None:
    from fpmsdk.config.state_snapshot import read_manifest_bytes
    from fpmsdk.snapshot.pinned import pinned_section, snapshot_path

    path = (pinned_section(config) or {}).get("path")
    if isinstance(path, str):
        read_manifest_bytes(snapshot_path(path))


def _is_registered(architecture: str) -> bool:
    # The registry is loaded by the first profile.
    from fpmsdk.opgraph.architectures import ARCHITECTURES

    return architecture in ARCHITECTURES


def _columns(batch: Any) -> Columns | None:
    # Told by the compiled part, so that a single estimate need not load the batch's module.
    if type(batch) is list or type(batch) is dict:
        return None
    columns = getattr(batch, "columns", None)
    return columns if isinstance(columns, Columns) else None


# A fork copies a model between two calls, never in the middle of one, and with its lock free.
_models: "weakref.WeakSet[ForwardPassPerfModel]" = weakref.WeakSet()
_held: list[threading.Lock] = []


def _before_fork() -> None:
    _held[:] = [model._tuning for model in _models]
    for lock in _held:
        lock.acquire()


def _after_fork() -> None:
    for lock in _held:
        lock.release()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
