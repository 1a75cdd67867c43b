"""What a model object asks of the estimator behind it; one subclass per estimation mode.

Queries that a kind does not have are refused here, by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fpmsdk._ext.estimator import Estimator, ServingView
from fpmsdk.errors import UnsupportedQueryError

if TYPE_CHECKING:
    from fpmsdk.perfmodel.native import DataSource
    from fpmsdk.snapshot.layout import StateLayout
    from fpmsdk.snapshot.manifest import RecordedFile
    from fpmsdk.snapshot.publish import Staging
    from fpmsdk.snapshot.state import StatePart

# Contents of files by path that were read and checked already, so that nobody reads them again.
Verified = Mapping[str, bytes]

DecodeFrame = Callable[[bytes], Any]

# Writes files into a snapshot and names them in the configuration that restores the model. Called with that
# configuration, whose sections are replaced and not changed, where files are written, and the directory that they will
# be in; returns what was written.
StageSources = Callable[[dict[str, Any], "Staging", str], "Iterator[RecordedFile]"]


def _no_sources(pinned: dict[str, Any], staging: "Staging", destination: str) -> "Iterator[RecordedFile]":
    return iter(())


# The counters of `diagnostics()`: source, ready, retained observations, buckets with a ready correction. A plain tuple:
# the planner asks often, and making a named one costs as much as all the rest.
Status = tuple[str, bool, int, int]


class Kind(ABC):
    """An estimator with its reports and the queries that only it can answer.

    Parameters
    ----------
    mode: estimation mode.
    estimator: compiled estimator.
    config: canonical configuration.
    """

    def __init__(self, mode: str, estimator: Estimator, config: dict[str, Any]) -> None:
        self.mode = mode
        self.estimator = estimator
        self.config = config

    @property
    def serving(self) -> ServingView:
        """What has been learned by now."""
        return self.estimator.serving

    @abstractmethod
    def status(self) -> Status:
        """Counters for `diagnostics()`."""

    def detailed(self, metrics: Any, decode_frame: DecodeFrame) -> dict[str, Any]:
        """The estimate with its parts; alone, of an estimator that has none."""
        return {
            "latency_ms": self.serving.estimate_iteration(metrics, decode_frame),
            "native_latency_ms": None,
            "correction_factor": None,
            "max_rank": None,
            "ranks": [],
        }

    def explain(self, metrics: Any, decode_frame: DecodeFrame) -> dict[str, Any]:
        """The estimate with the measurements behind it and the error to expect."""
        raise self._lacks("explain", "a native estimator")

    def store_diagnostics(self) -> list[dict[str, Any]]:
        """Regression stores; empty for other kinds."""
        return []

    def correction_factors(self) -> list[float]:
        """Ready correction factors in store order."""
        return []

    @abstractmethod
    def readiness_report(self) -> dict[str, Any]:
        """Which stores can answer, and why the others cannot."""

    # --- saved state ---

    @abstractmethod
    def state_layouts(self) -> "list[tuple[str, StateLayout]]":
        """Store and layout of each part of the state, in the order in which it is saved."""

    @abstractmethod
    def state_parts(self) -> "list[StatePart]":
        """Everything that tuning has changed, part by part; more tuning changes it under the caller's eyes."""

    @abstractmethod
    def install_part(self, part: "StatePart") -> None:
        """Take over one saved part; nobody sees it before the estimator publishes."""

    def state_diagnostics(self) -> dict[str, Any]:
        """What a restored model must report again, whatever selected it."""
        source, ready, retained, ready_buckets = self.status()
        return {
            "source": source,
            "ready": ready,
            "retained_observations": retained,
            "correction_ready_buckets": ready_buckets,
            "stores": self.store_diagnostics(),
            "correction_factors": self.correction_factors(),
        }

    def sources(self) -> StageSources:
        """How to write what else a snapshot has to hold, as of now; nothing for most kinds."""
        return _no_sources

    @property
    def data_source(self) -> "DataSource | None":
        """The performance data that the model prices from; None for kinds without."""
        return None

    @property
    def engine_spec_sha256(self) -> str | None:
        """Digest of what was compiled to price passes, the places of data left out; None for kinds without."""
        return None

    @property
    def engine_spec_schema_version(self) -> int | None:
        """Version of that specification's form; None for kinds without."""
        return None

    @property
    def is_corrected(self) -> bool:
        """Whether online correction applies."""
        return False

    def query_coverage(self) -> dict[str, Any] | None:
        """Counts and gaps of table lookups; None unless they are collected."""
        return None

    def static_phase_latency(self, batch_size: int, input_tokens: int, output_tokens: int, *, prefill: bool) -> float:
        """Uncorrected latency in ms of a whole phase."""
        raise self._lacks("static_phase_latency", "a native estimator")

    def static_phase_diagnostics(
        self, batch_size: int, context_length: int, prefix: int, *, prefill: bool
    ) -> list[dict[str, Any]]:
        """Operations of one step."""
        raise self._lacks("static_phase_diagnostics", "an op_level estimator")

    def prefill_latency(self, batch_size: int, isl: int, prefix: int) -> float:
        """Uncorrected latency in ms of one prefill."""
        raise self._lacks("predict_prefill_latency", "a native estimator")

    def prefill_latency_total(self, batch_size: int, prefill_tokens: int, kv_tokens: int) -> float:
        """Uncorrected latency in ms of one prefill, by totals."""
        raise self._lacks("predict_prefill_latency_total", "a native estimator")

    def decode_latency_total(self, batch_size: int, past_kv_tokens: int) -> float:
        """Uncorrected latency in ms of one decode step, by totals."""
        raise self._lacks("predict_decode_latency_total", "a native estimator")

    def decode_latency(self, batch_size: int, context_length: int, verify_width: int) -> float:
        """Uncorrected latency in ms of one decode step, told per request."""
        raise self._lacks("predict_decode_latency", "an fpm_interpolation estimator")

    def mixed_step(
        self, ctx_tokens: int, gen_requests: int, isl: int, osl: int, prefix: int
    ) -> tuple[float, float, float, float]:
        """Uncorrected latency in ms of one scheduler step, with its parts."""
        raise self._lacks("mixed_step_breakdown", "an fpm_interpolation estimator")

    def decode_kv_ceiling(self) -> int | None:
        """Largest measured decode KV total in tokens."""
        raise self._lacks("fpm_decode_kv_ceiling", "a native estimator")

    def learned_feature_names(self) -> list[str] | None:
        """Features that a learned estimator reads; None for other kinds."""
        return None

    def learned_metadata(self) -> dict[str, Any] | None:
        """What a learned estimator's artifact says of its training; None for other kinds."""
        return None

    def learned_online_diagnostics(self) -> dict[str, Any] | None:
        """Adaptation and counters of a learned estimator; None for other kinds."""
        return None

    def learned_selector_diagnostics(self) -> dict[str, Any] | None:
        """Decisions of a causal selector; None for other kinds."""
        return None

    def flush_updates(self) -> None:
        """Apply pending updates of an online learner."""
        raise self._lacks("flush_updates", "an online fpm_learned estimator")

    def export_learned_artifact(self) -> dict[str, Any]:
        """The forests of a learned estimator as an artifact."""
        raise self._lacks("export_learned_artifact", "an fpm_learned estimator")

    def save_online_checkpoint(self, path: str) -> None:
        """Write an online learner into a new directory."""
        raise self._lacks("save_online_checkpoint", "an online fpm_learned estimator")

    def _lacks(self, query: str, needed: str) -> UnsupportedQueryError:
        return UnsupportedQueryError(f"{query} needs {needed}; this model is {self.mode}")
