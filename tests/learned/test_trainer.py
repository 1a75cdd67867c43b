"""Training: the recorded forests of the public trainer, which iterations are rows, what the report says, bad input."""

import numpy as np
import pytest

from fpmsdk import FpmBatch, errors, sample
from fpmsdk.learned.artifact import read_artifact
from fpmsdk.learned.boosting import LARGEST, BoostingOptions, TrainingRows, fit_store
from fpmsdk.learned.trainer import feature_names, train, training_checkpoint
from fpmsdk.learned.training_checkpoint import read_training_checkpoint, write_training_checkpoint
from fpmsdk.learned.training_rows import observed_rows
from tests.learned.recorded import vectors

FORESTS = vectors()["forests"]


@pytest.fixture(scope="module")
def training_batch():
    first, last = vectors()["train_frames"]
    return FpmBatch.from_frames(sample.train_frames()[first:last])


@pytest.mark.parametrize("name", ["main", "wide"])
def test_training_makes_the_recorded_trees(name, training_batch):
    recorded = FORESTS[name]["artifact"]
    given = recorded["metadata"]["hyperparameters"]
    options = BoostingOptions(
        recorded["target"],
        given["max_iter"],
        given["learning_rate"],
        given["max_leaf_nodes"],
        given["min_samples_leaf"],
    )
    seen = observed_rows(training_batch, recorded["worker_type"], tuple(recorded["features"]))
    for kind, store in recorded["stores"].items():
        fitted = fit_store(seen.stores[kind], options)
        assert fitted.forest.baseline == pytest.approx(store["baseline"], rel=1e-12)
        for tree, expected in zip(fitted.forest.trees, store["trees"], strict=True):
            assert tree.left.tolist() == expected["left"]
            assert tree.right.tolist() == expected["right"]
            assert tree.threshold.tolist() == expected["threshold"]
            np.testing.assert_allclose(tree.value, expected["value"], rtol=1e-9, atol=1e-12)


def test_rows_bins_and_targets_of_a_checkpoint_are_the_recorded_ones(training_batch):
    recorded = FORESTS["main"]
    seen = observed_rows(training_batch, "aggregated", tuple(recorded["artifact"]["features"]))
    for kind, store in recorded["checkpoint"]["stores"].items():
        fitted = fit_store(seen.stores[kind], BoostingOptions(max_iter=1))
        assert fitted.rows.row_ids.tolist() == store["row_ids"]
        assert fitted.y.tolist() == store["y"]
        assert [bounds.tolist() for bounds in fitted.bin_thresholds] == store["bin_thresholds"]


def test_a_split_between_missing_and_all_other_values_has_the_largest_threshold():
    values = np.array([1.0] * 20 + [np.nan] * 20)[:, None]
    rows = TrainingRows(np.arange(40, dtype=np.uint64), values, np.array([1.0] * 20 + [9.0] * 20), ("",) * 40)
    fitted = fit_store(rows, BoostingOptions("ms", 1, 1.0, 2, 5))
    (tree,) = fitted.forest.trees
    assert tree.threshold[0] == LARGEST
    assert fitted.forest.compiled("ms").predict_rows(np.array([[5.0], [np.nan]])).round(9).tolist() == [1.0, 9.0]


def decode(requests, wall_time=0.004):
    return {"wall_time": wall_time, "scheduled_requests": {"num_decode_requests": requests}}


PREFILL = {"wall_time": 0.004, "scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 5}}


@pytest.mark.parametrize(
    ("iteration", "count"),
    [
        ({"wall_time": 0.004}, "idle"),
        (decode(2, 0.0), "untimed"),
        (decode(2, -1.0), "untimed"),
        (decode(2, float("nan")), "untimed"),
        (PREFILL, "refused"),
        ([decode(2), PREFILL], "refused"),
    ],
)
def test_iterations_that_teach_nothing_are_counted(iteration, count):
    observed = observed_rows(FpmBatch.from_dicts([decode(1), iteration]), "decode", ("num_decode_requests",))
    assert observed.num_rows == 1
    assert {name: getattr(observed, name) for name in ("idle", "untimed", "refused")} == {
        "idle": 0,
        "untimed": 0,
        "refused": 0,
    } | {count: 1}


def test_iterations_without_lists_are_refused_only_where_features_need_them():
    batch = FpmBatch.from_dicts([decode(1)])
    assert observed_rows(batch, "decode", ("req_batch_size",)).refused == 1
    assert observed_rows(batch, "decode", ("num_decode_requests",)).refused == 0


def test_the_slowest_rank_is_the_target():
    ranks = [decode(1, 0.004), decode(2, 0.009), decode(3, float("nan")), {}]
    observed = observed_rows(FpmBatch.from_dicts([ranks]), "decode", ("num_decode_requests",), first_row_id=7)
    rows = observed.stores["pure_decode"]
    assert rows.wall_time_ms.tolist() == [0.009 * 1000.0]
    assert rows.row_ids.tolist() == [7]


def steps(count):
    # Latency follows the requests, plainly.
    return FpmBatch.from_dicts([decode(n % 8 + 1, (n % 8 + 1) / 1000) for n in range(count)])


def test_equal_input_gives_equal_bytes():
    options = BoostingOptions(max_iter=20)
    made = [train(steps(80), steps(16), "decode", ("num_decode_requests",), options) for _ in range(2)]
    assert made[0].artifact.to_json_bytes() == made[1].artifact.to_json_bytes()


def test_what_is_trained_reads_as_an_artifact_with_its_identity():
    identity = {"model": "m"}
    trained = train(
        steps(80), steps(16), "decode", ("num_decode_requests",), BoostingOptions(max_iter=3), identity=identity
    )
    again = read_artifact(trained.artifact.to_json_bytes())
    assert again.identity == identity
    assert again.metadata["train_rows"] == {"pure_decode": 80}
    assert again.metadata["trees_fitted"] == {"pure_decode": 3}


def test_the_report_is_of_later_iterations_and_of_three_predictors():
    # Later, everything takes a tenth longer: whoever learned the past exactly is off by a tenth of the present.
    later = FpmBatch.from_dicts([decode(n % 8 + 1, 1.25 * (n % 8 + 1) / 1000) for n in range(16)])
    report = train(steps(400), later, "decode", ("num_decode_requests",), BoostingOptions(learning_rate=0.2)).report
    for predictor in ("forest", "last_value", "linear"):
        figures = report[predictor]["all"]
        assert figures["iterations"] == 16
        if predictor != "last_value":  # its buckets hold several sizes
            assert figures["mape_percent"] == pytest.approx(20.0, abs=0.1)
            assert figures["median_percent"] == pytest.approx(20.0, abs=0.1)
            assert figures["p95_percent"] == pytest.approx(20.0, abs=0.1)
    assert report["last_value"]["pure_decode"] == report["last_value"]["all"]


def test_the_report_counts_what_was_not_predicted():
    later = FpmBatch.from_dicts([decode(1), PREFILL, decode(1, 0.0), {}])
    trained = train(steps(80), later, "aggregated", ("num_decode_requests",), BoostingOptions(max_iter=1))
    counts = {name: trained.report[name] for name in ("refused", "unpredicted", "untimed", "idle")}
    assert counts == {"refused": 0, "unpredicted": 1, "untimed": 1, "idle": 1}


def test_without_later_iterations_there_are_no_figures():
    report = train(steps(80), steps(0), "decode", ("num_decode_requests",), BoostingOptions(max_iter=1)).report
    assert report["forest"]["all"] == {
        "iterations": 0,
        "mape_percent": None,
        "median_percent": None,
        "p95_percent": None,
    }


def test_a_constant_target_is_learned_as_it_is():
    batch = FpmBatch.from_dicts([decode(n % 8 + 1, 0.005) for n in range(64)])
    trained = train(batch, batch, "decode", ("num_decode_requests",), BoostingOptions(max_iter=5))
    assert trained.report["forest"]["all"]["mape_percent"] == pytest.approx(0.0, abs=1e-9)


def test_too_few_rows_say_how_many_there_were():
    with pytest.raises(
        errors.ConfigError, match="no workload kind has 20 rows .found: pure_decode 5; 1 iterations ref"
    ):
        train(
            FpmBatch.from_dicts([decode(1)] * 5 + [PREFILL]),
            steps(0),
            "decode",
            ("num_decode_requests",),
            BoostingOptions(),
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "s"),
        ("max_iter", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("max_leaf_nodes", 1),
        ("min_samples_leaf", 0),
        ("max_depth", 0),
        ("l2_regularization", -1.0),
        ("seed", -1),
    ],
)
def test_options_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(errors.ConfigError, match=f"{field}: expected") as refusal:
        train(steps(40), steps(0), "decode", ("num_decode_requests",), BoostingOptions(**{field: value}))
    assert refusal.value.path == field


@pytest.mark.parametrize("written", ["zzz", "num_decode_requests,num_decode_requests", "", "num_decode_requests,"])
def test_features_that_cannot_be_are_refused(written):
    with pytest.raises(errors.ConfigError, match="features: ") as refusal:
        feature_names(written, "decode")
    assert refusal.value.path == "features"


def test_a_checkpoint_of_what_was_trained_is_read_with_every_check(tmp_path, training_batch):
    recorded = FORESTS["main"]
    given = recorded["artifact"]["metadata"]
    hyperparameters = given["hyperparameters"]
    options = BoostingOptions(
        "log_ms",
        hyperparameters["max_iter"],
        hyperparameters["learning_rate"],
        hyperparameters["max_leaf_nodes"],
        hyperparameters["min_samples_leaf"],
    )
    features = tuple(recorded["artifact"]["features"])
    trained = train(
        training_batch,
        training_batch[:0],
        "aggregated",
        features,
        options,
        identity=given["identity"],
        min_store_rows=1,
    )
    write_training_checkpoint(tmp_path / "checkpoint", training_checkpoint(trained))
    again = read_training_checkpoint(tmp_path / "checkpoint")
    assert again.identity == given["identity"]
    for kind, store in recorded["checkpoint"]["stores"].items():
        assert again.stores[kind].row_ids.tolist() == store["row_ids"]
        assert again.stores[kind].targets.tolist() == store["y"]
        assert [bounds.tolist() for bounds in again.stores[kind].bin_thresholds] == store["bin_thresholds"]
        for name in ("learning_rate", "l2_regularization", "min_samples_leaf", "max_depth", "max_leaf_nodes"):
            assert getattr(again.stores[kind], name) == store[name]
    assert again.stores["pure_prefill"].sources[0].startswith('[{"counter_id":')


def test_a_checkpoint_needs_an_identity():
    trained = train(steps(80), steps(0), "decode", ("num_decode_requests",), BoostingOptions(max_iter=1))
    with pytest.raises(errors.ConfigError, match="identity: a training checkpoint needs one"):
        training_checkpoint(trained)
