"""Every exception fpmsdk raises on purpose, in one small tree.

Each class also derives from the builtin that callers of the field catch: `ValueError` for input that has to
be corrected, `RuntimeError` for a state of the world that may change.
Source: fpm-model.md section 2.5, clients.md section 3.1.
"""

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CollectionError",
    "ConfigError",
    "EmptyResultError",
    "EvidenceError",
    "FpmDataError",
    "FpmNoCellError",
    "FpmNotCollectedError",
    "FpmSdkError",
    "FpmUncoveredError",
    "FrameDecodeError",
    "InfeasibleMemoryError",
    "LaunchConfigError",
    "LearnedModelError",
    "MetricsError",
    "MissingCapabilityError",
    "MissingSystemFlopsError",
    "ModelConfigError",
    "OnboardError",
    "PerfDataCorruptError",
    "PerfDataNotAvailableError",
    "PerfDataWarning",
    "ReplayError",
    "ReplayInterrupted",
    "RequestNeverFitsError",
    "StartTimeoutError",
    "StateLayoutError",
    "StateSnapshotError",
    "StateSnapshotIOError",
    "SystemsPathError",
    "TimingError",
    "TraceError",
    "TuningError",
    "TuningRejectedError",
    "UnknownSystemError",
    "UnlistedVersionError",
    "UnsupportedAttentionBackendError",
    "UnsupportedModelError",
    "UnsupportedQueryError",
]


class FpmSdkError(Exception):
    """Base of every deliberate fpmsdk exception."""


class ConfigError(FpmSdkError, ValueError):
    """A forward-pass configuration is malformed, unknown or contradictory.

    `path` is the dotted path of the offending field, empty when the fault belongs to the whole document.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class InfeasibleMemoryError(ConfigError):
    """A deployment does not fit into the memory of its GPUs, so that nothing is told of its latency.

    `needed_bytes` and `available_bytes` are those of one rank; `smallest_tp` is the smallest tensor-parallel size that
    fits, None when none does.
    """

    def __init__(self, message: str, needed_bytes: int, available_bytes: int, smallest_tp: int | None) -> None:
        super().__init__(message, "tp")
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.smallest_tp = smallest_tp


class LaunchConfigError(ConfigError):
    """An engine launch configuration is malformed, unknown or contradictory."""


class SystemsPathError(ConfigError):
    """An entry of `systems_paths` does not name a usable directory."""


class UnsupportedModelError(ConfigError):
    """This model cannot be priced operator by operator in this deployment; another estimator may still price it."""


class ModelConfigError(UnsupportedModelError):
    """A checkpoint's `config.json` or its quantisation sidecar is missing, unreadable or contradictory.

    `faults` lists everything that is wrong with it, `path` the file.
    """

    def __init__(self, path: str, faults: Sequence[str]) -> None:
        super().__init__(f"{path}: {'; '.join(faults)}", path)
        self.faults = tuple(faults)


class MetricsError(FpmSdkError, ValueError):
    """A forward-pass metrics record has a wrong type, range, version or contradictory counts."""


class FrameDecodeError(MetricsError):
    """Bytes are not a forward-pass metrics frame, or a recorded stream is truncated."""


class TuningError(MetricsError):
    """The argument of a tuning call is not a list of iterations."""


class TuningRejectedError(FpmSdkError, ValueError):
    """The model was restored from a snapshot that refuses tuning (`on_tune: reject`)."""


class UnsupportedQueryError(FpmSdkError, ValueError):
    """The query does not exist for this kind of model."""


class MissingCapabilityError(FpmSdkError, ValueError):
    """The request is valid but this release has no implementation of it; the message names what is missing."""


class LearnedModelError(FpmSdkError, ValueError):
    """A learned artifact or checkpoint is damaged, foreign, of another version, or was made for another deployment.

    `path` is the place of the fault in the document, or the file; empty when the fault belongs to the whole document.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StateSnapshotError(FpmSdkError, ValueError):
    """A state snapshot is damaged, foreign, of another version, or at odds with its configuration or its data.

    The message names the first difference with what was expected and what was found.
    """


class StateSnapshotIOError(FpmSdkError, OSError):
    """A file of a state snapshot cannot be read or written; also the builtin that fits (`FileNotFoundError`, …)."""

    @classmethod
    def of(cls, fault: OSError, path: str | None = None) -> "StateSnapshotIOError":
        """The error that stands for an `OSError`; `path` is blamed when the fault names none."""
        if isinstance(fault, StateSnapshotIOError):
            return fault
        kind = next((kind for kind in _SNAPSHOT_IO if isinstance(fault, kind.__bases__[1])), cls)
        reason = fault.strerror or str(fault) or type(fault).__name__
        return kind(fault.errno, reason, path if fault.filename is None else fault.filename)


class StateSnapshotNotFoundError(StateSnapshotIOError, FileNotFoundError):
    """A file or directory of a state snapshot does not exist."""


class StateSnapshotExistsError(StateSnapshotIOError, FileExistsError):
    """The destination of a state snapshot exists."""


class StateSnapshotNotADirectoryError(StateSnapshotIOError, NotADirectoryError):
    """The path of a state snapshot leads through something that is no directory."""


class StateSnapshotIsADirectoryError(StateSnapshotIOError, IsADirectoryError):
    """There is a directory in the place of a file of a state snapshot."""


class StateSnapshotPermissionError(StateSnapshotIOError, PermissionError):
    """A file or directory of a state snapshot may not be read or written."""


_SNAPSHOT_IO = (
    StateSnapshotNotFoundError,
    StateSnapshotExistsError,
    StateSnapshotNotADirectoryError,
    StateSnapshotIsADirectoryError,
    StateSnapshotPermissionError,
)


class StateLayoutError(StateSnapshotError):
    """Estimator state does not have the fields, shapes or ranges that its layout declares."""


class PerfDataNotAvailableError(FpmSdkError, RuntimeError):
    """Performance data for the request are not installed; a sweep may skip the point."""


class FpmDataError(PerfDataNotAvailableError):
    """A whole-forward table or its sidecar breaks a rule of the format; the message names file, rule and place."""


class FpmNotCollectedError(PerfDataNotAvailableError):
    """No whole-forward table was collected where one is asked for, or none of its rows serve the phase."""


class FpmNoCellError(PerfDataNotAvailableError):
    """No cell of a whole-forward table has the requested identity; the message lists those that were collected."""


class FpmUncoveredError(PerfDataNotAvailableError):
    """The measured points of a cell do not support a query.

    `points` is the smallest set whose measurement would support it: (phase, (batch size, prefill tokens or None, KV
    tokens)) each. Whole ranks name the points of all their lookups.
    """

    def __init__(self, message: str, points: Sequence[tuple[str, tuple[float, float | None, float]]] = ()) -> None:
        super().__init__(message)
        self.points = tuple(points)


class PerfDataCorruptError(FpmSdkError, ValueError):
    """A file of a systems root is damaged, malformed or holds impossible values; no other root or mode can stand in.

    `path` is the file.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class MissingSystemFlopsError(FpmSdkError, ValueError):
    """The system states no FLOPS for the compute dtype of an operator."""


class PerfDataWarning(UserWarning):
    """Metadata beside performance data are malformed and were ignored."""


class UnknownSystemError(FpmSdkError, ValueError):
    """No hardware description of this name in the systems root; the message names the nearest ones."""


class UnlistedVersionError(FpmSdkError, ValueError):
    """A backend version is not one of the queryable slots of its system, or an alias has no slot."""


class UnsupportedAttentionBackendError(FpmSdkError, ValueError):
    """An attention backend override does not exist for the backend, or nothing was measured with it."""


class TraceError(FpmSdkError, ValueError):
    """A request trace is unreadable, or one of its rows is malformed or contradictory.

    `path` is the file (None for arrays), `line` its line counted from 1 (None when the fault belongs to the
    whole file or the form has no lines), `field` the offending field (empty when no single one is at fault).
    """

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None, field: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.line = line
        self.field = field


class TimingError(FpmSdkError, ValueError):
    """A timing model returned a negative or non-finite latency, or is not ready to price a pass."""


class ReplayError(FpmSdkError, RuntimeError):
    """A replay cannot continue; the message names the request or the pass."""


class StartTimeoutError(FpmSdkError, RuntimeError):
    """A simulation, or a worker of a search, had not begun in the time that it may take."""


class RequestNeverFitsError(ReplayError):
    """A running request outgrew the whole KV cache, so that it can never be scheduled again."""


class EmptyResultError(ReplayError):
    """A run produced no completed request, so that there is nothing to report."""


class ReplayInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a replay; no error but a wish, so loops over replays end too.

    `report` is a `ReplayReport` of what was simulated so far, marked as partial; None when no request had completed.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class KvForwardTooLargeError(ReplayError):
    """One forward needs more bytes than the whole grouped KV cache has; `request` is its index."""

    def __init__(self, request: int, needed: int, tokens: int, computed: int, capacity: int) -> None:
        self.request = request
        self.figures = (needed, tokens, computed, capacity)
        super().__init__(self.describe(str(request)))

    def describe(self, name: str) -> str:
        """The message, with a name for the request."""
        needed, tokens, computed, capacity = self.figures
        return (
            f"request {name} grouped KV forward needs {needed} bytes for {tokens} scheduled tokens after {computed} "
            f"computed tokens, exceeding the entire {capacity}-byte cache pool; reduce max_num_batched_tokens or "
            "increase cache memory"
        )


class OnboardError(FpmSdkError, ValueError):
    """Input of an onboarding stage or of the collector is rejected; nothing was started. Exit code 2.

    `path` is the dotted field, the option or the file at fault; empty when the fault belongs to the whole request.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class EvidenceError(OnboardError):
    """A file that a result rests on is missing, changed, swapped or linked."""


class CollectionError(FpmSdkError, RuntimeError):
    """Work that had begun did not succeed: an engine, an executor, a validation of what they produced. Exit code 1."""
