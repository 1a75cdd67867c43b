"""A whole-forward model that goes on where its table has no answer, to learn of every point that a replay misses.

Source: predict-recommend.md section 5.4.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpmsdk.errors import FpmUncoveredError, MissingCapabilityError
from fpmsdk.perfmodel.model import ForwardPassPerfModel
from fpmsdk.perfmodel.wholeforward import WholeForwardKind

if TYPE_CHECKING:
    from fpmsdk._ext.standin import StandInTiming
    from fpmsdk.perfdb.forward_cells import ForwardCell, Points


class MissingPoint(NamedTuple):
    """A point that a table would have needed: `total_prefill_tokens` is 0 in decode."""

    phase: str
    batch_size: int
    total_prefill_tokens: int
    total_kv_read_tokens: int


class StandInModel:
    """Timings of a model for one replay, with those of the nearest measured batch where it has none.

    What a replay with it says of time is made up. Replays may run in any thread, one after the other.

    Parameters
    ----------
    model: of measured whole forwards.

    Attributes
    ----------
    missing: points without an answer and how often each was asked for, in the order of the first time.

    Raises
    ------
    MissingCapabilityError: the model has no table of whole forwards.

    Source: predict-recommend.md section 5.4.

    >>> import tempfile
    >>> from fpmsdk import ForwardPassPerfModel, Trace, replay_trace
    >>> from fpmsdk.sample.forward import forward_config
    >>> model = StandInModel(ForwardPassPerfModel.best_available(forward_config(tempfile.mkdtemp())))
    >>> trace = Trace.from_arrays([0.0], prompt_tokens=[900], output_tokens=[1])
    >>> launch = {"engine": {"num_gpu_blocks": 64, "block_size": 16}}
    >>> _ = replay_trace(trace, launch=launch, timing=model)
    >>> list(model.missing)
    [MissingPoint(phase='prefill', batch_size=1, total_prefill_tokens=900, total_kv_read_tokens=0)]
    """

    def __init__(self, model: ForwardPassPerfModel) -> None:
        kind = model._kind
        if not isinstance(kind, WholeForwardKind):
            raise MissingCapabilityError(
                f"{model!r} has no table of whole forwards; missing points are named for fpm_interpolation alone"
            )
        self._model, self._cell = model, kind.cell
        self._table_path, self._config = kind.table.path, model._selection.config
        self._lock = threading.Lock()
        self.missing: Counter[MissingPoint] = Counter()

    @staticmethod
    def has_table(model: ForwardPassPerfModel) -> bool:
        """Whether a model prices by a table of whole forwards."""
        return isinstance(model._kind, WholeForwardKind)

    @property
    def cell(self) -> ForwardCell:
        """The cell of the table that is asked, with its measured points."""
        return self._cell

    @property
    def table_path(self) -> str:
        """The file of the table."""
        return self._table_path

    @property
    def config(self) -> Mapping[str, Any]:
        """The canonical configuration of the model, with the one systems root that it reads."""
        return self._config

    def timing_model(self) -> StandInTiming:
        """The compiled timing model of a replay."""
        from fpmsdk._ext.standin import StandInTiming

        return StandInTiming(self._model.timing_model(), self._stand_in)

    def _stand_in(
        self,
        error: Exception,
        num_prefill: int,
        prefill_tokens: int,
        prefill_kv_tokens: int,
        num_decode: int,
        decode_tokens: int,
    ) -> tuple[float, float]:
        if not isinstance(error, FpmUncoveredError) or not error.points:
            raise error
        with self._lock:
            for phase, (batch, tokens, kv) in error.points:
                self.missing[MissingPoint(phase, int(batch), int(tokens or 0), int(kv))] += 1
        return (
            _nearest_ms(self._cell.prefill, num_prefill, prefill_tokens, prefill_kv_tokens),
            _nearest_ms(self._cell.decode, num_decode, 0, decode_tokens),
        )


def _nearest_ms(points: Points, batch: int, tokens: int, kv: int) -> float:
    """Latency of the point that is nearest in the nearest batch, in ms; 0 without requests or points."""
    if not batch or not len(points):
        return 0.0
    apart = np.abs(np.log2(points.batch / batch))
    inside = np.flatnonzero(apart == apart.min())
    distance = np.abs(np.log2((points.tokens[inside] + 1) / (tokens + 1)))
    distance += np.abs(np.log2((points.kv[inside] + 1) / (kv + 1)))
    return float(points.latency_ms[inside[distance.argmin()]])
