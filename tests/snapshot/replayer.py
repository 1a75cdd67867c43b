"""A process of its own that prices a trace with the model of a configuration; prints what it simulated."""

import json
import sys

from fpmsdk import ForwardPassPerfModel, Trace, replay_trace


def replay(config, trace, launch):
    """Requests and passes of a replay, floats as the hexadecimal form of their bits."""
    report = replay_trace(
        Trace.from_arrays(*trace),
        launch=launch,
        timing=ForwardPassPerfModel.best_available(config),
        record_passes=True,
    )
    return {"requests": told(report.requests), "passes": told(report.passes)}


def told(table):
    return [
        {name: value.hex() if isinstance(value, float) else value for name, value in row.items()}
        for row in table.to_pylist()
    ]


if __name__ == "__main__":
    print(json.dumps(replay(**json.loads(sys.argv[1]))))
