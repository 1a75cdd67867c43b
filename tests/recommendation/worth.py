"""What a made-up candidate is worth, for workers to import: it brings nothing else."""

import os
import time
from pathlib import Path

from fpmsdk.recommendation.candidate import Outcome


def evaluate(document, objective, inputs):
    """The outcome of a made-up candidate; what the document says besides happens first."""
    happens = document.get("happens", {})
    if (path := happens.get("log")) is not None:
        with open(path, "a") as file:
            file.write(f"{document['knobs']}\n")
    time.sleep(happens.get("seconds", 0.0))
    if happens.get("dies_at") == document["knobs"]:
        os._exit(9)
    if happens.get("dies_once_at") == document["knobs"] and not Path(happens["mark"]).exists():
        Path(happens["mark"]).touch()
        os._exit(9)
    if happens.get("hangs_at") == document["knobs"]:
        time.sleep(60)
    worth = 100.0 - abs(document["knobs"]["a"] - 4) + document["knobs"].get("b", 0) / 7
    if document["knobs"]["a"] == 6:
        return Outcome("infeasible", "sla_constraint", "too slow", {"output_throughput_tok_s": worth}, 1)
    return Outcome("feasible", metrics={"output_throughput_tok_s": worth, "mean_ttft_ms": 1 / 3}, used_gpus=1)
