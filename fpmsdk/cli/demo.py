"""`fpmsdk demo`: the whole way on real telemetry, from tuning to predicted next to measured latency."""

from typing import Any

from rich.table import Table

from fpmsdk.cli.console import JsonOption, number, progress, show
from fpmsdk.cli.tune import error_table


def demo(json: JsonOption = False) -> None:
    """Tune on a recorded vLLM run, replay another one, and print predicted next to measured.

    Uses the sample data of the package, a recording of a real engine; nothing is fetched.
    """
    document = run_demo()
    show(
        document,
        json,
        "A small Qwen3 on a two-core CPU, served by vLLM 0.31.0: "
        f"{document['train_iterations']:,} recorded iterations to learn from, "
        f"then {document['eval_iterations']:,} iterations of {document['requests']} requests to predict.",
        error_table("time per iteration, tuned on the training run only", document["error_after_training"]),
        error_table("time per iteration, learning on while predicting", document["error_while_learning"]),
        _latency_table(document["replay"]),
    )


def run_demo() -> dict[str, Any]:
    """Figures of the demo.

    Returns
    -------
    `train_iterations`, `eval_iterations`, `requests`; `error_after_training` and `error_while_learning` as
    `error_by_kind` returns them; `replay` as `compare_with_measured` does.
    """
    from fpmsdk import ForwardPassPerfModel, FpmBatch, replay_trace, sample
    from fpmsdk.perfmodel.accuracy import error_by_kind, predict_then_tune
    from fpmsdk.replay.compare import compare_with_measured

    train, evaluation, run = sample.train_frames(), sample.eval_frames(), sample.eval_run()
    batch = FpmBatch.from_frames(evaluation)
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    model.tune_with_fpms(FpmBatch.from_frames(train))
    predicted_ms = model.estimate_many(batch)
    # Priced from what training alone has taught: a replay takes a frozen view of the model.
    report = replay_trace(run.trace, launch=sample.launch(run), timing=model)
    with progress("learning on while predicting", len(evaluation)) as advance:
        online_ms = predict_then_tune(model, evaluation, advance=advance)
    return {
        "train_iterations": len(train),
        "eval_iterations": len(evaluation),
        "requests": len(run.trace),
        "error_after_training": error_by_kind(predicted_ms, batch),
        "error_while_learning": error_by_kind(online_ms, batch),
        "replay": compare_with_measured(report, run),
    }


_LABELS = {
    "ttft_ms": "TTFT, ms",
    "itl_ms": "ITL of a request, ms",
    "e2e_ms": "end to end, ms",
    "output_token_throughput_per_user": "output tokens/s per user",
    "output_throughput_tok_s": "output tokens/s, all users",
    "duration_ms": "duration, ms",
}


def _latency_table(comparison: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="the evaluation run, measured and replayed")
    table.add_column("")
    for name in ("measured", "replayed", "error %"):
        table.add_column(name, justify="right")
    for name, label in _LABELS.items():
        for figure in ("p50", "p90", "total"):
            if (pair := comparison[name].get(figure)) is not None:
                cells = (number(pair[key]) for key in ("measured", "replayed", "error_percent"))
                table.add_row(f"{label}, {figure}", *cells)
        if (errors := comparison[name].get("request_error_percent")) is not None:
            text = f"{number(errors['p50'])} / {number(errors['p90'])}"
            table.add_row("  error of a request, p50 / p90", "", "", text)
    return table
