"""What a search goes through: one branch a deployment mode, with its parallel configurations and knobs.

Source: predict-recommend.md sections 6.1 and 6.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fpmsdk.recommendation.domains import Domain

# Added to the seed of a search, so that branches draw differently.
SEED_OFFSETS = {"aggregated": 0, "disaggregated": 1}


class Arm(Struct, frozen=True):
    """A parallel configuration that a backend can serve.

    backend: that serves.
    parallelism: by role the six sizes replicas, tensor, pipeline, attention_data, moe_tensor, moe_expert.
    gpus: of all workers.
    """

    backend: str
    parallelism: Mapping[str, Mapping[str, int]]
    gpus: int


class Branch(Struct, frozen=True):
    """The candidates of one deployment mode: every arm with every value of every knob.

    mode: aggregated or disaggregated.
    arms: those that are viable, backend by backend.
    domains: what each knob may be, by dotted path in the configuration of a prediction, sorted by path; knobs with one
        value are none.
    seed_offset: added to the seed of the search.
    """

    mode: str
    arms: tuple[Arm, ...]
    domains: tuple[tuple[str, Domain], ...]
    seed_offset: int = 0

    @property
    def size(self) -> int | None:
        """Number of candidates; None where a knob is continuous."""
        size = len(self.arms)
        for _, domain in self.domains:
            if domain.count is None:
                return None
            size *= domain.count
        return size


class Space(Struct, frozen=True):
    """All that is searched, and what is not.

    branches: at least one.
    skipped: modes without a viable arm: `{mode, reasons}`.
    rejected: arms that are not viable: `{arm, rule, needed_tokens, available_tokens, nearest}`; `arm` says mode,
        backend, role and sizes, `rule` one sentence, `nearest` a configuration that is viable, or None.
    warnings: what a reader should know before the search starts, one line each.
    """

    branches: tuple[Branch, ...]
    skipped: tuple[Mapping[str, Any], ...] = ()
    rejected: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def size(self) -> int | None:
        """Number of candidates; None where a knob is continuous."""
        sizes = [branch.size for branch in self.branches]
        return None if None in sizes else sum(size for size in sizes if size is not None)
