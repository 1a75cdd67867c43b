"""Holdouts of published tables: what is withheld, what the rest predicts, what is written.

Source: onboarding.md section 8.3 and Vectors.
"""

import json

import pyarrow.parquet as pq
import pytest
import yaml

from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import EvidenceError, FpmDataError, OnboardError
from fpmsdk.onboard.holdout import evaluate_holdout, phase_report, require_reproduced
from fpmsdk.onboard.holdout_boundaries import CellEvidence
from fpmsdk.onboard.policy import InterpolationPolicy
from tests.onboard.holdout_source import RUN, publish, recorded_grid, request_of
from tests.perfdb.pairs import decode, prefill

KNEE = {256: 38.0, 512: 75.982, 513: 678.985, 1024: 718.120, 2048: 796.54}


def knee_rows():
    return [prefill(1, tokens, 0, latency_ms, **RUN) for tokens, latency_ms in KNEE.items()]


def knee_evidence(folder, config=None, ranks=(0,), identity=None, **changes):
    source = folder / "graph.json"
    source.write_text("{}")
    config = {"mode": "PIECEWISE", "capture_sizes": [256, 512], "max_capture_size": 512} if config is None else config
    points = [
        {
            "workload_kind": "prefill",
            "batch_size": 1,
            "total_prefill_tokens": tokens,
            "total_kv_read_tokens": 0,
            "expected_cudagraph_mode": "PIECEWISE" if tokens <= 512 else "NONE",
            "expected_capture_size": tokens if tokens <= 512 else None,
        }
        | changes.get(str(tokens), {})
        for tokens in KNEE
    ]
    graphs = [{"dp_rank": rank, "config": config, "source": file_evidence(source)} for rank in ranks]
    return CellEvidence("org/tiny-prefill", RUN | (identity or {}), graphs, points)


def assess(tmp_path, rows, worker_type=None, evidence=None, output="out", **policy):
    root, model = publish(tmp_path, rows)
    return evaluate_holdout(
        request_of(model, worker_type),
        systems_root=root,
        output_dir=tmp_path / output,
        policy=InterpolationPolicy(**policy),
        evidence=evidence,
    )


# --- the recorded grid ---


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    return folder / "out", assess(folder, recorded_grid())


def test_a_smooth_table_predicts_its_withheld_points(grid):
    _, report = grid
    assert report["status"] == "passed"
    assert report["native_query_coverage"]["queries"] == {"measured": 0, "interpolated": 18, "unsupported": 0}
    for phase, count in (("prefill", 15), ("decode", 3)):
        figures = report["phases"][phase]["absolute_relative_error"]
        assert report["phases"][phase]["selected_count"] == count
        assert figures["p95"] == pytest.approx(0, abs=1e-12)
        assert figures["bias"] == pytest.approx(0, abs=1e-12)


def test_the_plan_counts_what_is_kept_and_removed(grid):
    output, _ = grid
    plan = json.loads((output / "holdout-plan.json").read_text())
    counts = {name: plan[name] for name in plan if name.endswith("_count")}
    assert counts == {
        "source_row_count": 90,
        "matching_row_count": 90,
        "eligible_row_count": 90,
        "excluded_fake_fallback_count": 0,
        "removed_row_count": 18,
        "training_row_count": 72,
    }
    assert len(plan["retained_envelope_anchors"]) == 18
    assert len(plan["selected_points"]) == 18
    assert "worker_type" not in plan


def test_the_training_pair_is_the_table_without_the_selected_points(grid):
    output, _ = grid
    [parquet] = (output / "systems").rglob("*.parquet")
    sidecar = json.loads(parquet.with_suffix(".metadata.json").read_text())
    assert sidecar["row_count"] == pq.read_table(parquet).num_rows == 72
    assert sidecar["parquet_sha256"] == file_evidence(parquet)["sha256"]
    assert sidecar["validation_derivation"] == {
        "kind": "coordinate_holdout",
        "plan": file_evidence(output / "holdout-plan.json"),
    }
    left = {
        (row["workload_kind"], row["batch_size"], row["total_kv_read_tokens"])
        for row in pq.read_table(parquet).to_pylist()
    }
    assert ("decode", 4, 16) not in left and ("decode", 2, 16) in left


def test_the_report_refers_to_every_file_it_rests_on(grid):
    output, report = grid
    assert json.loads((output / "interpolation-validation.json").read_text()) == report
    assert set(report["artifacts"]) == {
        "holdout_plan",
        "perfmodel_config",
        "training_system",
        "training_parquet",
        "training_metadata",
        "source",
    }
    assert set(report["artifacts"]["source"]) == {"system", "parquet", "metadata"}
    assert report["serving_accuracy"] == "not_assessed"


# --- launch-mode boundaries ---


def test_without_evidence_a_step_in_the_curve_is_withheld_and_fails(tmp_path):
    report = assess(tmp_path, knee_rows(), "prefill", seed=0)
    [prediction] = report["predictions"]
    assert prediction["coordinates"]["total_prefill_tokens"] == 513
    assert prediction["predicted_ms"] == pytest.approx(77.23617578, abs=1e-8)
    assert report["status"] == report["phases"]["prefill"]["status"] == "failed"
    assert report["capture_boundaries"]["status"] == "not_assessed"
    assert report["collection_phases"] == ["prefill"]


def test_both_sides_of_a_known_mode_change_stay_in_the_table(tmp_path):
    report = assess(tmp_path, knee_rows(), "prefill", [knee_evidence(tmp_path)], seed=0)
    [prediction] = report["predictions"]
    assert prediction["coordinates"]["total_prefill_tokens"] == 1024
    assert prediction["predicted_ms"] == pytest.approx(718.118945, abs=1e-6)
    assert report["phases"]["prefill"]["absolute_relative_error"]["p95"] < 0.001
    boundaries = report["capture_boundaries"]
    assert (report["status"], boundaries["status"]) == ("passed", "assessed")
    assert [point["total_prefill_tokens"] for point in boundaries["additional_to_envelope"]] == [512, 513]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"mode": "SOMETHING", "capture_sizes": [256, 512]},
        {"mode": "PIECEWISE"},
        {"mode": "PIECEWISE", "capture_sizes": [256, "512"]},
    ],
)
def test_an_unknown_graph_configuration_leaves_the_assessment_incomplete(tmp_path, config):
    report = assess(tmp_path, knee_rows(), "prefill", [knee_evidence(tmp_path, config)], max_p95_relative_error=100.0)
    assert report["status"] == report["capture_boundaries"]["status"] == "incomplete"


def test_the_settings_of_a_phase_go_before_the_shared_ones(tmp_path):
    config = {"mode": "NONE", "capture_sizes": [], "prefill_mode": "PIECEWISE", "prefill_capture_sizes": [256, 512]}
    report = assess(tmp_path, knee_rows(), "prefill", [knee_evidence(tmp_path, config)])
    assert report["capture_boundaries"]["status"] == "assessed"


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("mode FULL", {"256": {"expected_cudagraph_mode": "FULL"}}),
        ("capture size 300", {"256": {"expected_capture_size": 300}}),
        ("capture size 256", {"512": {"expected_capture_size": 256}}),
        ("mode NONE", {"1024": {"expected_capture_size": 512}}),
        ("points", {"256": {"total_prefill_tokens": 255}}),
        ("ranks", {"ranks": (0, 1)}),
        ("runtime_run_id", {"identity": {"runtime_run_id": "other"}}),
        ("max_capture_size", {"config": {"mode": "PIECEWISE", "capture_sizes": [256, 512], "max_capture_size": 256}}),
    ],
)
def test_evidence_that_contradicts_the_table_or_itself_is_refused(tmp_path, name, evidence):
    with pytest.raises(EvidenceError, match=f"org/tiny-prefill.*{name}"):
        assess(tmp_path, knee_rows(), "prefill", [knee_evidence(tmp_path, **evidence)])


def test_evidence_must_be_of_exactly_the_published_cells(tmp_path):
    cell = knee_evidence(tmp_path)
    with pytest.raises(EvidenceError, match="exactly one item"):
        assess(tmp_path, knee_rows(), "prefill", [cell._replace(cell_id="other")])


def test_a_changed_source_of_a_graph_configuration_is_refused(tmp_path):
    cell = knee_evidence(tmp_path)
    (tmp_path / "graph.json").write_text("{ }")
    with pytest.raises(EvidenceError, match="graph.json.*changed"):
        assess(tmp_path, knee_rows(), "prefill", [cell])


# --- roles and rows ---


def test_a_single_role_answers_for_its_own_phase_only(tmp_path):
    report = assess(tmp_path, recorded_grid(), "decode")
    assert set(report["phases"]) == {"decode"}
    assert report["worker_type"] == "decode"
    assert report["status"] == "passed"


def test_rows_over_stand_in_kv_are_neither_asked_nor_counted_as_support(tmp_path):
    rows = [
        decode(1, kv, smooth, kv_seed_regime=regime)
        for kv, smooth, regime in (
            (4, 10.0, "real_kv"),
            (16, 10.1, "real_kv"),
            (64, 99.0, "fake_fallback"),
            (256, 10.3, "real_kv"),
        )
    ]
    report = assess(tmp_path, rows, "decode")
    assert [entry["coordinates"]["total_kv_read_tokens"] for entry in report["predictions"]] == [16]


def test_a_table_that_cannot_spare_a_point_is_not_assessed(tmp_path):
    report = assess(tmp_path, [decode(1, 4, 10.0), decode(1, 16, 11.0)], "decode")
    assert report["phases"]["decode"]["status"] == "not_assessed"
    assert report["status"] == "incomplete"


# --- the verdict of a phase ---


def predicted(*errors):
    return [{"status": "predicted", "relative_error": error, "boundary_axes": []} for error in errors]


def test_quantiles_are_linear():
    figures = phase_report(predicted(0.0, -0.1, 0.2, 0.3), InterpolationPolicy())["absolute_relative_error"]
    assert figures["p95"] == pytest.approx(0.285)
    assert figures["bias"] == pytest.approx(0.1)
    assert (figures["p50"], figures["max"]) == (pytest.approx(0.15), 0.3)


UNSUPPORTED = [{"status": "unsupported", "boundary_axes": ["max_batch_size"]}]


@pytest.mark.parametrize(
    ("predictions", "policy", "status"),
    [
        (predicted(0.2), {}, "passed"),
        (predicted(0.21), {}, "failed"),
        (predicted(0.0) + UNSUPPORTED, {}, "failed"),
        (predicted(0.0) + UNSUPPORTED, {"max_unsupported_fraction": 0.5}, "passed"),
        (UNSUPPORTED, {"max_unsupported_fraction": 1.0}, "failed"),
        ([], {}, "not_assessed"),
    ],
)
def test_a_phase_passes_within_both_thresholds(predictions, policy, status):
    assert phase_report(predictions, InterpolationPolicy(**policy))["status"] == status


def test_unsupported_points_at_the_ends_of_an_axis_are_counted():
    assert phase_report(UNSUPPORTED, InterpolationPolicy())["boundary_unsupported_count"] == 1


# --- refusals ---


def test_the_output_must_be_fresh_and_apart(tmp_path):
    root, model = publish(tmp_path, recorded_grid())
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place, reason in (
        (root / "out", "apart"),
        (tmp_path, "apart"),
        (root, "apart"),
        (tmp_path / "used", "not empty"),
        (tmp_path / "link", "symbolic link"),
    ):
        with pytest.raises(OnboardError, match=reason):
            evaluate_holdout(request_of(model), systems_root=root, output_dir=place, policy=InterpolationPolicy())
    assert not (root / "out").exists()


def test_the_system_must_keep_its_data_beside_it(tmp_path):
    root, model = publish(tmp_path, recorded_grid())
    system = yaml.safe_load((root / "x100.yaml").read_text())
    (root / "x100.yaml").write_text(yaml.safe_dump(system | {"data_dir": "../data/x100"}))
    with pytest.raises(OnboardError, match="data_dir"):
        evaluate_holdout(request_of(model), systems_root=root, output_dir=tmp_path / "o", policy=InterpolationPolicy())


@pytest.mark.parametrize("name", ["x100.yaml", "fpm_forward_perf.parquet", "fpm_forward_perf.metadata.json"])
def test_a_missing_file_is_named(tmp_path, name):
    root, model = publish(tmp_path, recorded_grid())
    next(root.rglob(name)).unlink()
    with pytest.raises(OnboardError, match=name):
        evaluate_holdout(request_of(model), systems_root=root, output_dir=tmp_path / "o", policy=InterpolationPolicy())


def test_a_pair_that_breaks_its_format_is_refused(tmp_path):
    root, model = publish(tmp_path, recorded_grid(), row_count=1)
    with pytest.raises(FpmDataError, match="row_count"):
        evaluate_holdout(request_of(model), systems_root=root, output_dir=tmp_path / "o", policy=InterpolationPolicy())


def test_a_table_of_another_model_is_refused(tmp_path):
    root, _ = publish(tmp_path, recorded_grid())
    with pytest.raises(EvidenceError, match="no rows"):
        evaluate_holdout(
            request_of("org/other"), systems_root=root, output_dir=tmp_path / "o", policy=InterpolationPolicy()
        )


# --- repeating it ---


def test_a_repeated_assessment_gives_the_same_results(tmp_path):
    root, model = publish(tmp_path, recorded_grid())
    reports = [
        evaluate_holdout(request_of(model), systems_root=root, output_dir=tmp_path / name, policy=InterpolationPolicy())
        for name in ("one", "two")
    ]
    require_reproduced(*reports, "report.json")


def test_a_changed_result_or_file_is_told(tmp_path):
    report = assess(tmp_path, recorded_grid())
    with pytest.raises(EvidenceError, match="report.json: predictions"):
        require_reproduced({**report, "predictions": []}, report, "report.json")
    (tmp_path / "out" / "perfmodel-config.json").write_text("{}")
    with pytest.raises(EvidenceError, match="perfmodel-config.json"):
        require_reproduced(report, report, "report.json")
