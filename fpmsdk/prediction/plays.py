"""How far the plays of an agentic trace came in a replay.

Source: onboarding.md section 8.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fpmsdk.replay.trace import Trace


def play_evidence(trace: Trace, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The size of the request graph, and what became of every play, whether or not its requests ever arrived.

    Parameters
    ----------
    trace: plays as sessions.
    records: the `per_request` records of the replay.

    Returns
    -------
    `agentic_graph` {node_count, play_count} and `agentic_play_outcomes`, one {play_id, status, settled_at_ms} each.

    >>> trace = Trace.from_arrays([0.0, 1.0], [8, 8], [2, 2])
    >>> record = {"request_id": trace.request_ids[0], "terminal_status": "completed", "terminal_time_ms": 9.0}
    >>> play_evidence(trace, [record])["agentic_play_outcomes"][1]["status"]
    'incomplete'
    """
    ended = {record["request_id"]: record["terminal_time_ms"] for record in records if _is_completed(record)}
    plays, first = np.unique(trace.session_index, return_index=True)
    outcomes = []
    for play in plays[np.argsort(first)]:
        rows = np.flatnonzero(trace.session_index == play)
        times = [ended[name] for name in trace.request_ids[rows] if name in ended]
        whole = len(times) == len(rows)
        outcomes.append(
            {
                "play_id": str(trace.session_ids[play]),
                "status": "completed" if whole else "incomplete",
                "settled_at_ms": max(times) if whole else None,
            }
        )
    return {
        "agentic_graph": {"node_count": len(trace), "play_count": len(outcomes)},
        "agentic_play_outcomes": outcomes,
    }


def _is_completed(record: dict[str, Any]) -> bool:
    return bool(record["terminal_status"] == "completed")
