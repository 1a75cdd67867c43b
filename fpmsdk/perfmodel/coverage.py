"""Evidence of how well a measured table covers what it is asked: counts of lookups and the gaps among them.

Counts only; it never changes an answer. Source: fpm-interpolation.md section 8.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from fpmsdk._ext.wholeforward import AnswerCounts

GAP_LIMIT = 128
COUNTING_UNIT = "native_lookup_resolutions"

_OUTCOMES = ("measured", "interpolated", "unsupported")
Coordinates = tuple[float, float | None, float]


class CoverageLog:
    """Counts lookups of one model. Any number of threads may record.

    Parameters
    ----------
    model_path, cell_identity, cell_ids: the cell that is asked.
    describe: makes the exception of a lookup without an answer; its text is the reason of a gap.
    answers: what the compiled engine counts by itself, the answered lookups of passes.
    """

    def __init__(
        self,
        model_path: str,
        cell_identity: Mapping[str, str],
        cell_ids: tuple[str, ...],
        describe: Callable[..., Exception],
    ) -> None:
        self._cell = {"model_path": model_path, "cell_identity": dict(cell_identity), "cell_ids": list(cell_ids)}
        self.answers = AnswerCounts()
        self._describe = describe
        self._counts = {name: dict.fromkeys(_OUTCOMES, 0) for name in ("prefill", "decode", "mixed_decode_baseline")}
        self._gaps: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._omitted = 0
        self._lock = threading.Lock()

    def record(
        self, phase: str, is_baseline: bool, coordinates: Coordinates, resolution: str | None, status: str
    ) -> None:
        """Count one lookup; `resolution` is None when it has no answer, `status` then says why."""
        outcome = "unsupported"
        if resolution is not None:
            # A blend of floors is no measurement, although each floor is one.
            outcome = "measured" if resolution == "exact_lookup" else "interpolated"
        with self._lock:
            self._counts["mixed_decode_baseline" if is_baseline else phase][outcome] += 1
            if resolution is None:
                self._note_gap(phase, is_baseline, coordinates, status)

    def _note_gap(self, phase: str, is_baseline: bool, coordinates: Coordinates, status: str) -> None:
        key = (phase, is_baseline, coordinates, status)
        if key in self._gaps:
            self._gaps[key]["occurrences"] += 1
        elif len(self._gaps) < GAP_LIMIT:
            batch, tokens, kv = coordinates
            axes = {"batch_size": batch, "total_kv_read_tokens": kv, "total_prefill_tokens": tokens}
            self._gaps[key] = {
                "phase": phase,
                "purpose": "mixed_decode_baseline" if is_baseline else "forward_pass",
                **self._cell,
                "coordinates": {name: float(value) for name, value in axes.items() if value is not None},
                "reason": str(self._describe(phase, is_baseline, coordinates, status)),
                "occurrences": 1,
            }
        else:
            self._omitted += 1

    def snapshot(self) -> dict[str, Any]:
        """The counts and gaps up to now; the caller owns the dict, counting goes on."""
        with self._lock:
            counts = {name: dict(parts) for name, parts in self._counts.items()}
            for name, answered in self.answers.read().items():
                for outcome, count in answered.items():
                    counts[name][outcome] += count
            gaps = [_copied(gap) for gap in self._gaps.values()]
            omitted = self._omitted
        totals = {outcome: sum(parts[outcome] for parts in counts.values()) for outcome in _OUTCOMES}
        return {
            "counting_unit": COUNTING_UNIT,
            "queries": totals,
            **counts,
            "gaps": gaps,
            "gap_limit": GAP_LIMIT,
            "omitted_gap_queries": omitted,
        }


def _copied(gap: dict[str, Any]) -> dict[str, Any]:
    return {
        key: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
        for key, value in gap.items()
    }
