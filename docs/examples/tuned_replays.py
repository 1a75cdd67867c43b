"""A planner tunes a model and saves it; replays in other processes restore it and price the same trace.

Run it: `python docs/examples/tuned_replays.py`. Telemetry and requests are the recordings that come with the package.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from fpmsdk import ForwardPassPerfModel, FpmBatch, Trace, replay_trace, sample

NUM_REPLAYS = 4


def plan(folder: Path) -> dict:
    """Tune on recorded telemetry, save, and return the configuration that restores the tuned model."""
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()))
    return model.save_state_snapshot(folder / "tuned")


def replay(config: dict) -> dict:
    """What one replay process does: restore, replay, report."""
    run = sample.eval_run()
    model = ForwardPassPerfModel.best_available(config)
    trace: Trace = run.trace.head(100)
    report = replay_trace(trace, launch=sample.launch(run), timing=model)
    return {name: report.summary[name] for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms")}


def main() -> None:
    """Start the replays, each in a process of its own, and compare what they say."""
    with tempfile.TemporaryDirectory() as folder:
        config = plan(Path(folder))
        command = [sys.executable, __file__, json.dumps(config)]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(NUM_REPLAYS)]
        answers = [json.loads(worker.communicate()[0]) for worker in workers]
    for name, value in answers[0].items():
        print(f"{name}: {value:.3f}")
    identical = all(answer == answers[0] for answer in answers)
    print(f"{NUM_REPLAYS} replays, {'identical' if identical else 'DIFFERENT'}")
    sys.exit(0 if identical else 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(replay(json.loads(sys.argv[1]))))
    else:
        main()
