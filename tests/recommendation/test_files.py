"""What a search writes: the ledger, one column a knob and figure, and a configuration in the order of the ranking.

Source: predict-recommend.md sections 9.4, 10.1 and 10.2.
"""

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from fpmsdk.prediction.local_paths import absolute_paths
from fpmsdk.recommendation.candidate import STATUSES
from fpmsdk.recommendation.files import portable, remove_results, write_results, yaml_bytes
from fpmsdk.recommendation.ledger import Result, Search, ledger
from fpmsdk.recommendation.objectives import Objective
from tests.recommendation.made import REPORT, made, pair

TOKENS = "engine.workers.aggregated.scheduler.max_batched_tokens"
TENSOR = "engine.workers.aggregated.parallelism.tensor"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CANDIDATES = [
    made(0, score=5.0, knobs=[(TOKENS, 256)]),
    made(1, score=9.0, tensor=2, gpus=2, knobs=[(TOKENS, 256)]),
    made(2, score=5.0, knobs=[(TOKENS, 512)]),  # the first with another limit
    made(3, status="infeasible", reason_category="sla_constraint", reason="too slow", knobs=[(TOKENS, 128)]),
    made(4, metrics={}, status="uncovered", reason_category="fpm_uncovered", reason="no point", knobs=[(TOKENS, 64)]),
]


def result(candidates=CANDIDATES, target="throughput", **config):
    return Result.of(Search({"optimization": {"target": target}, **config}, Objective(target), "grid"), candidates)


def test_counts_are_by_status_and_evaluated_are_all_that_were_run():
    counts = result().counts(cache_hits=3)
    assert counts == dict.fromkeys(STATUSES, 0) | {
        "feasible": 3,
        "infeasible": 1,
        "uncovered": 1,
        "evaluated": 5,
        "cache_hits": 3,
    }


def test_only_what_was_run_counts_as_evaluated():
    reasons = {status: categories[0] for status, categories in STATUSES.items() if categories}
    candidates = [
        made(index, status=status, reason_category=category, reason="why", metrics={})
        for index, (status, category) in enumerate(reasons.items())
    ]
    counts = result(candidates).counts()
    assert (counts["evaluated"], counts["unsupported"], counts["resource_limited"]) == (4, 1, 1)


def test_views_hold_every_feasible_candidate_and_the_recommendations_each_meaning_once():
    document = ledger(result(), created_at=NOW)
    assert document["schema_version"] == "1.1"
    order = ["candidate-000002", "candidate-000001", "candidate-000003"]
    assert document["views"] == {"top_n": order, "pareto_front": []}
    assert document["recommendations"] == [
        {"rank": 1, "candidate_id": order[0], "config_path": "recommendations/0001.yaml", "folded": []},
        {"rank": 2, "candidate_id": order[1], "config_path": "recommendations/0002.yaml", "folded": [order[2]]},
    ]
    assert [record["candidate_id"] for record in document["candidates"]] == [
        candidate.candidate_id for candidate in CANDIDATES
    ]


def test_the_view_of_a_pareto_search_is_its_front():
    document = ledger(result([pair(0, 1.0, 1.0), pair(1, 1.0, 2.0), pair(2, 3.0, 0.5)], "pareto"), created_at=NOW)
    assert document["views"] == {"top_n": [], "pareto_front": ["candidate-000003", "candidate-000002"]}
    assert document["candidates"][0]["objectives"] == {"throughput_per_gpu": 1.0, "throughput_per_user": 1.0}


def test_a_record_says_what_was_run_and_what_it_rests_on():
    record = ledger(result(), created_at=NOW)["candidates"][1]
    assert record["config"] == {
        "engine.mode": "aggregated",
        "engine.backend": "vllm",
        "engine.workers.aggregated.parallelism.replicas": 1,
        TENSOR: 2,
        "engine.workers.aggregated.parallelism.pipeline": 1,
        "engine.workers.aggregated.parallelism.attention_data": 1,
        "engine.workers.aggregated.parallelism.moe_tensor": 1,
        "engine.workers.aggregated.parallelism.moe_expert": 1,
        TOKENS: 256,
    }
    assert (record["status"], record["used_gpus"], record["score"], record["metrics"]) == ("feasible", 2, 9.0, REPORT)
    provenance = record["provenance"]
    assert (provenance["model"], provenance["hardware"], provenance["backend"]) == ("org/model", "h200_sxm", "vllm")
    assert provenance["topology"]["aggregated"]["tensor"] == 2
    assert provenance["objective"] == {"target": "throughput", "strict_sla": False, "min_goodput_rps": None}


def test_the_name_of_a_run_follows_from_its_inputs_alone():
    first, again, other = result(), result(CANDIDATES[::-1]), result(seed=2)
    assert first.search.run_id == again.search.run_id != other.search.run_id
    provenance = ledger(first, created_at=NOW)["provenance"]
    # sha256 of {"optimization":{"target":"throughput"}}
    assert provenance["input_fingerprint"] == "473e9507d46c413c1a378bddd1ba856c05c81939e4c38effe0bafbb51d15cac0"
    assert provenance["run_id"] == f"run-{provenance['input_fingerprint'][:16]}"
    assert provenance["created_at"] == "2026-01-02T03:04:05+00:00"


def test_the_ledger_is_the_same_whenever_it_is_made_but_for_its_time():
    first, second = (ledger(result()) for _ in range(2))
    for document in (first, second):
        del document["provenance"]["created_at"]
    assert first == second


def test_files_hold_the_ledger_the_table_and_a_configuration_for_every_recommendation(tmp_path):
    written = write_results(result(), tmp_path, created_at=NOW)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "recommendation.csv",
        "recommendation.json",
        "recommendation.parquet",
        "recommendations",
        "recommendations/0001.yaml",
        "recommendations/0002.yaml",
    ]
    assert json.loads((tmp_path / "recommendation.json").read_text()) == written
    configs = [yaml.safe_load((tmp_path / f"recommendations/000{rank}.yaml").read_text()) for rank in (1, 2)]
    assert configs == [CANDIDATES[1].document, CANDIDATES[0].document]


def test_a_search_without_feasible_candidates_leaves_its_ledger_and_no_configurations(tmp_path):
    write_results(result(CANDIDATES[3:]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "recommendation.csv",
        "recommendation.json",
        "recommendation.parquet",
    ]


def test_csv_and_parquet_have_a_real_column_for_every_knob_and_figure(tmp_path):
    write_results(result(), tmp_path)
    rows = list(csv.DictReader((tmp_path / "recommendation.csv").read_text().splitlines()))
    table = pyarrow.parquet.read_table(tmp_path / "recommendation.parquet")
    assert table.column_names == list(rows[0])
    assert [row["rank"] for row in rows] == ["2", "1", "3", "", ""]
    first, second, third = (f"recommendations/{name}.yaml" if name else "" for name in ("0001", "0002", ""))
    assert [row["config_path"] for row in rows] == [second, first, second, third, third]
    assert [row[TOKENS] for row in rows] == ["256", "256", "512", "128", "64"]
    assert table.column(TOKENS).to_pylist() == [256, 256, 512, 128, 64]
    assert table.column(TENSOR).to_pylist() == [1, 2, 1, 1, 1]
    assert table.column("mean_ttft_ms").to_pylist() == [20.0, 20.0, 20.0, 20.0, None]
    assert table.column("score").to_pylist() == [5.0, 9.0, 5.0, None, None]
    assert not [name for name in table.column_names if name.endswith("json")]


def test_columns_of_modes_that_others_lack_are_empty_there_and_kinds_may_be_mixed(tmp_path):
    candidates = [made(0, score=1.0, knobs=[("traffic.load.speedup", 1)]), made(1, score=2.0, knobs=[("k", "a")])]
    candidates += [made(2, score=3.0, knobs=[("traffic.load.speedup", 0.5), ("k", 2)])]
    write_results(result(candidates), tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "recommendation.parquet")
    assert table.column("traffic.load.speedup").to_pylist() == [1.0, None, 0.5]
    assert table.column("k").to_pylist() == [None, "a", "2"]


def test_results_of_an_earlier_search_are_removed_and_other_files_stay(tmp_path):
    write_results(result(), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "recommendations/mine.yaml").write_text("mine")
    outside = tmp_path / "outside.yaml"
    outside.write_text("linked")
    (tmp_path / "recommendations/0009.yaml").symlink_to(outside)
    remove_results(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "notes.txt",
        "outside.yaml",
        "recommendations",
        "recommendations/mine.yaml",
    ]
    (tmp_path / "recommendations/mine.yaml").unlink()
    remove_results(tmp_path)
    assert not (tmp_path / "recommendations").exists()


def test_a_linked_folder_of_configurations_is_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0001.yaml").write_text("mine")
    (tmp_path / "results").mkdir()
    (tmp_path / "results/recommendations").symlink_to(elsewhere)
    remove_results(tmp_path / "results")
    assert (elsewhere / "0001.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"engine": {"systems_paths": ["/o/r/s", "/else", "default"]}}, {"systems_paths": ["s", "/else", "default"]}),
        ({"engine": {"systems_paths": ["default"]}}, {"systems_paths": ["default"]}),
        ({"engine": {"systems_paths": ["/o/r2/s", "/o/r"]}}, {"systems_paths": ["/o/r2/s", "/o/r"]}),
        (
            {"engine": {"estimator_config": {"state_snapshot": {"path": "/o/r/snap", "sha256": "0"}}}},
            {"estimator_config": {"state_snapshot": {"path": "snap", "sha256": "0"}}},
        ),
        (
            {"engine": {"workers": {"decode": {"timing": {"fpm_parquet_path": "/o/r/t.parquet"}}}}},
            {"workers": {"decode": {"timing": {"fpm_parquet_path": "t.parquet"}}}},
        ),
        (
            {"engine": {"estimator_config": {"fpm_interpolation": {"fpm_parquet_path": "/o/r/a/t.parquet"}}}},
            {"estimator_config": {"fpm_interpolation": {"fpm_parquet_path": "a/t.parquet"}}},
        ),
    ],
)
def test_local_paths_below_the_file_are_relative_to_it_and_others_stay_absolute(document, expected):
    before = json.dumps(document)
    written = portable(document, "/o/r")
    assert written["engine"] == expected
    assert json.dumps(document) == before
    assert absolute_paths(written, Path("/o/r"), "0001.yaml") == document


def test_a_checkpoint_below_the_file_is_found_again(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    document = {"engine": {"model": str(tmp_path / "model")}}
    written = portable(document, tmp_path)
    assert written == {"engine": {"model": "model"}}
    assert absolute_paths(written, tmp_path, "0001.yaml") == document


def test_yaml_has_no_references_and_keeps_every_number():
    shared = {"a": 0.1, "b": 1e-07, "c": 1e22, "d": True, "e": "1e3", "f": None, "g": 12345678901234567890}
    content = yaml_bytes({"one": shared, "two": shared})
    assert b"&" not in content and b"*" not in content
    assert yaml.safe_load(content) == {"one": shared, "two": shared}
