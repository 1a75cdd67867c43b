"""Why candidates are not feasible, each reason once.

Source: predict-recommend.md section 14 (failure of one candidate).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from fpmsdk.recommendation.candidate import FEASIBLE, Candidate

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Reason(Struct, frozen=True):
    """A reason that some candidates have in common, but for the numbers in it.

    status, category: as in the outcomes.
    text: the whole reason of the first one, on one line.
    candidate_ids: who has it, as they were suggested.
    """

    status: str
    category: str
    text: str
    candidate_ids: tuple[str, ...]

    def line(self) -> str:
        """The reason as one line of a terminal.

        >>> Reason("infeasible", "sla_constraint", "too slow", ("candidate-000001", "candidate-000004")).line()
        '2 infeasible (sla_constraint), such as candidate-000001: too slow'
        """
        count = len(self.candidate_ids)
        which = f", such as {self.candidate_ids[0]}" if count > 1 else f", {self.candidate_ids[0]}"
        return f"{count} {self.status.replace('_', ' ')} ({self.category}){which}: {self.text}"


def distinct_reasons(candidates: Iterable[Candidate]) -> list[Reason]:
    """The reasons of candidates that are not feasible, the most frequent first.

    Parameters
    ----------
    candidates: as they were suggested.

    Example
    -------
    >>> from fpmsdk.recommendation.candidate import Outcome, Sample
    >>> sample = Sample("aggregated", "vllm", 0)
    >>> slow = [Outcome("infeasible", "sla_constraint", f"mean {mean} is over 10") for mean in (11, 12.5)]
    >>> candidates = [Candidate(f"candidate-{n:06d}", sample, {}, outcome) for n, outcome in enumerate(slow, 1)]
    >>> [reason.line() for reason in distinct_reasons(candidates)]
    ['2 infeasible (sla_constraint), such as candidate-000001: mean 11 is over 10']
    """
    groups: dict[tuple[str, str, str], list[Candidate]] = {}
    for candidate in candidates:
        outcome = candidate.outcome
        if outcome.status != FEASIBLE:
            shape = _NUMBER.sub("#", outcome.reason or "")
            groups.setdefault((outcome.status, outcome.reason_category or "", shape), []).append(candidate)
    reasons = [
        Reason(status, category, members[0].outcome.reason or "", tuple(member.candidate_id for member in members))
        for (status, category, _), members in groups.items()
    ]
    return sorted(reasons, key=lambda reason: (-len(reason.candidate_ids), reason.candidate_ids[0]))
