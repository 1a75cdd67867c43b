"""A prepared serving run and everything that a real one would leave behind, made by hand."""

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.onboard.policy import ServingPolicy
from fpmsdk.onboard.serving_recipe import BENCHMARK, EXECUTION_FIELDS, SCHEMA, benchmark_arguments, serving_scope
from fpmsdk.prediction import predict, read_config
from tests.prediction.cases import filled, peer_systems
from tests.prediction.test_peer_cases import CASES

PLAY = CASES["plays"][0]
START_NS = 1_000_000_000_000
# What a worker resolved, without what may differ between collection and serving.
RUNTIME = {"model_config": {"dtype": "bfloat16"}, "cache_config": {}}


@dataclass
class ServingRun:
    """Files below `place`; `slower` is by how much the server was slower than predicted.

    Without `replayed` the replay is one of the recorded cases; it is `(play, trace, configuration, prediction report)`.
    `expected` is the execution that the collection had.
    """

    place: Path
    slower: float = 1.05
    replayed: tuple | None = None
    expected: dict = field(default_factory=dict)

    def __post_init__(self):
        place = self.place
        place.mkdir(parents=True)
        if self.replayed is None:
            self.replayed = self._recorded_case()
        self.play, self.trace, self.config, self.prediction = self.replayed
        self.worker = {
            "schema_name": "aisimulate_fpm_runtime_execution",
            "schema_version": 1,
            "status": "observed",
            "backend_version": self.expected.get("backend_version", "7.7.7-pr"),
            "dp_rank": 0,
            "tp_rank": 0,
            "pp_rank": 0,
            "attention_groups": self.expected.get("attention_groups", [{"kv_cache_group_id": 0}]),
            "graph_config": self.expected.get("graph_config", {"mode": "NONE"}),
            "resolved_config": {
                "model_config": {"model": "/mnt/other", "dtype": "bfloat16"},
                "cache_config": {"enable_prefix_caching": True},
            },
        }
        config = read_config(self.config)
        self.expected = self.expected or self._expected(config.engine)
        assert set(self.expected) == set(EXECUTION_FIELDS)
        self.predicted = read_document(self.prediction)["per_request"]
        self.scope = serving_scope(config, self.trace)
        self._write_recipe()
        self._write_run()

    def _recorded_case(self):
        trace, config = self.place / "play-source.json", self.place / "predict.yaml"
        trace.write_text(json.dumps(PLAY))
        texts = peer_systems(self.place / "systems-of-the-run") | {"$TRACE": str(trace)}
        config.write_text(yaml.safe_dump(filled(CASES["weka_one_lane"]["config"], texts)))
        predict(read_config(config), self.place / "prediction", capture_per_request=True)
        return PLAY, trace, config, self.place / "prediction/prediction.json"

    def _expected(self, engine):
        return {
            "model": engine.model,
            "model_revision": engine.fpm_profile["model_revision"],
            "backend": "vllm",
            "backend_version": engine.backend_version,
            "image_digest": "registry/image@sha256:1",
            "hardware": engine.hardware,
            "parallelism": engine.workers.aggregated.parallelism.model_dump(exclude_none=True),
            "precision": {"gemm": "bfloat16"},
            "attention_groups": self.worker["attention_groups"],
            "graph_config": self.worker["graph_config"],
            "scheduler": {"max_batched_tokens": 512, "max_sequences": 8},
            "context_length": 2048,
            "gpu_memory_utilization": 0.9,
            "runtime_config": RUNTIME,
        }

    def _write_recipe(self):
        place = self.place
        write_document(place / "play.json", self.play)
        tokens = [list(range(row["in"])) for row in self.play["requests"]]
        self.bodies = [
            {
                "model": self.expected["model"],
                "messages": [{"role": "user", "content": f"turn {turn}"}],
                "add_generation_prompt": True,
                "continue_final_message": False,
            }
            for turn in range(len(tokens))
        ]
        (place / "requests.jsonl").write_text("".join(json.dumps({"payload": body}) + "\n" for body in self.bodies))
        write_document(
            place / "tokenization.json",
            {
                "requests": [
                    {"turn_index": turn, "input_token_ids": ids, "input_length": len(ids)}
                    for turn, ids in enumerate(tokens)
                ]
            },
        )
        self.tokens = tokens
        (place / "tokenizer.json").write_text("{}")
        own = file_evidence(self.prediction)
        matched = dict.fromkeys(("helper", "input"), file_evidence(place / "tokenizer.json")) | {
            "payloads": file_evidence(place / "requests.jsonl"),
            "tokenization": file_evidence(place / "tokenization.json"),
            "trace": file_evidence(self.trace),
            "prediction_config": file_evidence(self.config),
            "prediction_report": own,
            "coverage_report": file_evidence(self.prediction.with_name("fpm-coverage.json")),
        }
        (place / "observer.py").write_text("")
        observer = {
            "module_files": [file_evidence(place / "observer.py")],
            "provenance_path": str(place / "serving-provenance.json"),
        }
        recipe = {
            "schema_version": SCHEMA,
            "status": "ready",
            "issues": [],
            "trace": file_evidence(self.trace),
            "prediction_config": file_evidence(self.config),
            "prediction_report": own,
            "benchmark_trace": file_evidence(place / "play.json"),
            "scope": self.scope,
            "play_id": self.play["id"],
            "timing_subset": "zero_recorded_api_time",
            "request_count": len(tokens),
            "aiperf": BENCHMARK,
            "endpoint": "http://localhost:8000",
            "tokenizer": str(place),
            "tokenizer_files": [file_evidence(place / "tokenizer.json")],
            "timing_artifacts": [],
            "expected_execution": self.expected,
            "policy": ServingPolicy().model_dump(mode="json"),
            "artifacts_dir": str(place / "aiperf"),
            "serving_observer": observer,
            "matched_workload": matched,
        }
        recipe["command_arguments"] = benchmark_arguments(recipe)
        self.recipe_path = place / "recipe.json"
        write_document(self.recipe_path, recipe)
        self.recipe = file_evidence(self.recipe_path)
        self.launch = {
            "run_id": str(uuid.UUID(int=1)),
            "recipe": self.recipe,
            "observer_modules": observer["module_files"],
        }
        write_document(place / "serving-provenance.json", self.launch)

    def _write_run(self):
        place = self.place
        provenance = file_evidence(place / "serving-provenance.json")
        self.worker |= {"execution_provenance": self.launch, "provenance_source": provenance}
        self.worker_path = place / "fpm-execution-worker-dp0-tp0-pp0.json"
        write_document(self.worker_path, self.worker)
        self.server_tokens = place / "server-tokenization.json"
        write_document(
            self.server_tokens,
            {
                "recipe": self.recipe,
                "status": "matched",
                "requests": [
                    {
                        "turn_index": turn,
                        "request": body | {"add_special_tokens": False},
                        "response": {"tokens": ids, "count": len(ids)},
                    }
                    for turn, (body, ids) in enumerate(zip(self.bodies, self.tokens, strict=True))
                ],
            },
        )
        artifacts = place / "aiperf"
        artifacts.mkdir()
        self.summary = artifacts / "profile_export_aiperf.json"
        write_document(self.summary, {"was_cancelled": False, "request_count": {"avg": len(self.play["requests"])}})
        self.records = artifacts / "profile_export.jsonl"
        self.records.write_text("".join(json.dumps(row) + "\n" for row in self._records()))
        self.execution = place / "observed-execution.json"
        write_document(
            self.execution,
            {
                "recipe": self.recipe,
                "observed_execution": self.expected,
                "scope": self.scope,
                "sources": [file_evidence(self.worker_path)],
            },
        )
        self.receipt_path = place / "benchmark-execution.json"
        self.write_receipt()

    def _records(self):
        end_ns = None
        for turn, (row, predicted) in enumerate(zip(self.play["requests"], self.predicted, strict=True)):
            gap_s = 0.0 if turn == 0 else row["t"] - self.play["requests"][turn - 1]["t"]
            start_ns = START_NS if end_ns is None else end_ns + round(gap_s * 1e9)
            end_ns = start_ns + round(predicted["e2e_latency_ms"] * self.slower * 1e6)
            yield {
                "metadata": {
                    "conversation_id": self.play["id"],
                    "turn_index": turn,
                    "x_request_id": f"r{turn}",
                    "was_cancelled": False,
                    "benchmark_phase": "profiling",
                    "request_start_ns": start_ns,
                    "request_end_ns": end_ns,
                },
                "metrics": {
                    "input_sequence_length": {"value": row["in"], "unit": "tokens"},
                    "output_sequence_length": {"value": row["out"], "unit": "tokens"},
                    "time_to_first_token": {"value": predicted["ttft_ms"] * self.slower, "unit": "ms"},
                    "inter_token_latency": {"value": predicted["itl_ms"] * self.slower, "unit": "ms"},
                },
                "error": None,
            }

    def write_receipt(self, **changes):
        recipe = read_document(self.recipe_path)
        receipt = {
            "recipe": self.recipe,
            "installation": {"source": {"vcs_info": {"commit_id": BENCHMARK["revision"]}}},
            "command": ["python", *benchmark_arguments(recipe)],
            "status": "completed",
            "exit_code": 0,
            "serving_provenance": file_evidence(recipe["serving_observer"]["provenance_path"]),
            "observer_modules": recipe["serving_observer"]["module_files"],
            "runtime_observations": [file_evidence(self.worker_path)],
            "server_tokenization": file_evidence(self.server_tokens),
            "artifacts": [file_evidence(self.summary), file_evidence(self.records)],
        }
        write_document(self.receipt_path, receipt | changes)

    def change_record(self, turn, **metadata):
        rows = [json.loads(line) for line in self.records.read_text().splitlines()]
        rows[turn]["metadata"].update(metadata)
        self.records.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.write_receipt()

    def change(self, path, **fields):
        write_document(path, read_document(path) | fields)
