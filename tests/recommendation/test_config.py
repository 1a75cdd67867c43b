"""The configuration of a search: what is read, what is assumed, and what is refused with its line."""

import pytest
import yaml

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.config import RecommendConfig, read_recommend_config
from fpmsdk.recommendation.domains import Choices
from fpmsdk.recommendation.paths import get, put

PREDICTION = {
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 256, "output_tokens": 16},
        "load": {"type": "concurrency", "concurrency": 4},
        "stop": {"requests": 8},
    },
    "engine": {"model": "org/m", "hardware": "h200_sxm", "workers": {"aggregated": {"parallelism": {"tensor": 2}}}},
}
SEARCH = PREDICTION | {"optimization": {"target": "throughput"}}
PAIR = {"prefill": {}, "decode": {}}
AGGREGATED = "engine.workers.aggregated"
RATE = {"type": "poisson", "requests_per_second": 30.0}
BOUNDS = {"sla": {"ttft_ms": 60.0}}
MIN_GPUS = {"target": "min_gpus", "constraints": {"min_goodput_rps": 20.0}}


def changed(*changes, base=SEARCH):
    for path, value in changes:
        base = put(base, path, value)
    return base


def parsed(*changes):
    return RecommendConfig.from_source(changed(*changes))


def domains(config, mode="aggregated"):
    return {path: [one.at(index) for index in range(one.count)] for path, one in config.domains(mode).items()}


def test_a_prediction_with_a_goal_is_a_search():
    config = parsed()
    assert (config.modes, config.backends, config.layouts("aggregated").kind) == (("aggregated",), ("vllm",), "domains")
    assert "optimization" not in config.template("aggregated")


def test_limits_that_nobody_states_are_searched():
    assert domains(parsed()) == {
        "traffic.load.concurrency": [4],
        f"{AGGREGATED}.scheduler.max_batched_tokens": [8192, 16384, 32768],
        f"{AGGREGATED}.scheduler.max_sequences": [256, 512, 1024],
    }
    config = parsed(("engine.mode", "disaggregated"), ("engine.workers", PAIR))
    assert domains(config, "disaggregated") == {
        "traffic.load.concurrency": [4],
        "engine.workers.prefill.scheduler.max_batched_tokens": [8192, 16384, 32768],
        "engine.workers.prefill.scheduler.max_sequences": [1, 2, 4, 8, 16, 32, 64, 128, 256],
        "engine.workers.decode.scheduler.max_batched_tokens": [8192],
        "engine.workers.decode.scheduler.max_sequences": [256, 512, 1024],
    }


@pytest.mark.parametrize(
    ("change", "path", "values"),
    [
        (None, f"{AGGREGATED}.scheduler.max_sequences", [2, 4, 6]),
        (None, f"{AGGREGATED}.kv_cache.block_size", [16, 32]),
        (None, f"{AGGREGATED}.kv_cache.capacity.memory_fraction", [0.8, 0.9]),
        (None, "traffic.load.concurrency", [1, 2]),
        (RATE, "traffic.load.requests_per_second", [10, 20]),
        ({"type": "kv_capacity_fraction"}, "traffic.load.fraction", [0.5, 1.0]),
    ],
)
def test_a_domain_is_read_where_one_is_accepted(change, path, values):
    changes = [] if change is None else [("traffic.load", change)]
    config = parsed(*changes, (path, {"choices": values}))
    assert domains(config)[path] == values
    assert [name for name, _ in config.knobs("aggregated") if name == path] == [path]
    assert get(config.template("aggregated"), path) == values[0]


def test_one_value_is_no_knob():
    config = parsed((f"{AGGREGATED}.scheduler", {"max_batched_tokens": {"choices": [512]}, "max_sequences": 8}))
    assert config.knobs("aggregated") == ()
    assert config.template("aggregated")["engine"]["workers"]["aggregated"]["scheduler"]["max_batched_tokens"] == 512


def test_each_mode_has_a_prediction_of_its_own_workers():
    config = parsed(
        ("engine.mode", {"choices": ["aggregated", "disaggregated"]}),
        ("engine.workers", {"aggregated": {}, **PAIR}),
        ("engine.kv_transfer", {"bandwidth_gb_per_second": 20}),
    )
    engines = [config.template(mode)["engine"] for mode in config.modes]
    assert [sorted(engine["workers"]) for engine in engines] == [["aggregated"], ["decode", "prefill"]]
    assert ["kv_transfer" in engine for engine in engines] == [False, True]


@pytest.mark.parametrize(
    ("workers", "modes"),
    [({"aggregated": {}}, 1), (PAIR, 1), ({"aggregated": {}, **PAIR}, 2), ({}, 1)],
)
def test_without_a_mode_those_with_workers_are_searched(workers, modes):
    config = parsed(("engine.workers", workers))
    assert len(config.modes) == modes
    assert any("engine.mode is left out" in note for note in config.notes) == (modes == 1)


def test_assumed_traffic_is_told():
    config = RecommendConfig.from_source({name: part for name, part in SEARCH.items() if name != "traffic"})
    assert config.template("aggregated")["traffic"] == {
        "source": {"type": "synthetic", "input_tokens": 1024, "output_tokens": 128},
        "load": {"type": "concurrency", "concurrency": 10},
        "stop": {"requests": 100},
    }
    assert config.notes[-1] == (
        "no traffic is configured: assuming synthetic requests of 1024 input and 128 output tokens, concurrency 10, "
        "100 requests; state the traffic section for your workload"
    )


def test_hardware_may_come_from_the_goal():
    config = parsed(("engine.hardware", "auto"), ("optimization.hardware", "h100_sxm"))
    assert config.template("aggregated")["engine"]["hardware"] == "h100_sxm"


def test_versions_may_be_given_by_backend():
    config = parsed(("engine.backend", {"choices": ["vllm"]}), ("engine.backend_version", {"vllm": "0.24.0"}))
    assert config.template("aggregated")["engine"]["backend_version"] == "0.24.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("optimization", None)], "optimization: missing; a search needs a goal: add optimization: {target: through"),
        ([("optimization.target", "speed")], "optimization.target: must be 'throughput', 'throughput_per_gpu'"),
        ([("optimization.targt", "pareto")], "optimization.targt: unknown field"),
        ([("optimizer", {"max_trials": "5"})], "optimizer.max_trials: must be a number, found the text '5'"),
        ([("optimizer", {"algorithm": "simplex"})], "optimizer.algorithm: must be 'auto', 'grid', 'random', 'optuna'"),
        ([("optimization.constraints", {"min_candidate_gpus": 8, "max_candidate_gpus": 4})], "8 is above max_candid"),
        ([("optimization.constraints", {"min_goodput_rps": 8.0})], "min_goodput_rps belongs to target min_gpus"),
        ([("optimization.strict_sla", True)], "optimization.strict_sla: needs a bound; add evaluation: {sla:"),
        ([("optimization.target", "goodput")], "optimization.target: goodput: needs a bound"),
        ([("engine.hardware", "auto")], "optimization.hardware: missing; engine.hardware auto takes the system"),
        ([("optimization.hardware", "a100")], "optimization.hardware: found 'a100', but engine.hardware is 'h200_sxm'"),
        ([("engine.mode", "afd")], "engine.mode: found 'afd', accepted are aggregated, disaggregated"),
        ([("engine.backend", {"choices": ["vllm", "nim"]})], "engine.backend: found 'nim', accepted are vllm"),
        ([("engine.mode", "disaggregated")], "engine.workers: mode disaggregated needs prefill and decode workers"),
        ([("engine.mode", "aggregated"), ("engine.workers.decode", {})], "mode aggregated has no decode workers"),
        ([("engine.backend_version", {"sglang": "1"})], "engine.backend_version: found a version of sglang; searched"),
        ([(f"{AGGREGATED}.schedular", {})], f"{AGGREGATED}.schedular: unknown field"),
        ([(f"{AGGREGATED}.parallelism", {"tensr": 2})], f"{AGGREGATED}.parallelism.tensr: unknown field"),
        ([(f"{AGGREGATED}.scheduler.max_sequences", {"choices": [8, 0]})], f"{AGGREGATED}.scheduler.max_sequences"),
        ([(f"{AGGREGATED}.scheduler.max_sequences", {"choices": [8, 8]})], "choices[1]: 8 is listed twice"),
        ([(f"{AGGREGATED}.kv_cache.capacity.memory_fraction", {"range": {"min": 0.5, "max": 1.5}})], "found 1.5"),
        ([("traffic.source.input_tokens", {"choices": [1, 2]})], "traffic.source.input_tokens: is a domain, and this takes one"),
        ([("trafic", {})], "trafic: unknown field"),
        ([("optimization", MIN_GPUS | {"constraints": {}}), ("evaluation", BOUNDS), ("traffic.load", RATE)],
         "optimization.constraints.min_goodput_rps: missing; min_gpus at a rate needs it, at most 30.0"),
        ([("optimization", MIN_GPUS), ("evaluation", BOUNDS), ("traffic.load", RATE | {"requests_per_second": 10.0})],
         "optimization.constraints.min_goodput_rps: found 20.0, which is above the rate 10.0"),
        ([("optimization", MIN_GPUS), ("evaluation", BOUNDS), ("traffic.load.concurrency", {"choices": [1, 2]})],
         "optimization.target: min_gpus needs synthetic requests at one fixed concurrency or rate"),
        ([("engine.mode", "disaggregated"), ("engine.workers", PAIR | {"decode": {"context_length": 271}})],
         "engine.workers.decode.context_length: found 271, a request of 256 input and 16 output tokens needs 272"),
        ([("engine.mode", "disaggregated"), ("engine.workers", PAIR | {"prefill": {"context_length": 256}})],
         "engine.workers.prefill.context_length: found 256, a request of 256 input and 16 output tokens needs 257"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_fix(changes, message):
    with pytest.raises(OnboardError) as caught:
        parsed(*changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        [("optimization", MIN_GPUS), ("evaluation", BOUNDS), ("traffic.load", RATE)],
        [("optimization", MIN_GPUS), ("evaluation", BOUNDS)],
        [("engine.mode", "disaggregated"), ("engine.workers", PAIR | {"decode": {"context_length": 272}})],
        [("engine.mode", "disaggregated"), ("engine.workers", PAIR | {"prefill": {"context_length": 257}})],
    ],
)
def test_what_a_goal_can_be_decided_on_is_accepted(changes):
    assert parsed(*changes).optimization.target in ("min_gpus", "throughput")


def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "search.yaml"
    source = changed((f"{AGGREGATED}.scheduler", {"max_sequences": {"choices": [8, "16"]}}))
    file.write_text(yaml.safe_dump(source))
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if "'16'" in text)
    with pytest.raises(OnboardError) as caught:
        read_recommend_config(file)
    assert str(caught.value) == (
        f"{file}:{line}: {AGGREGATED}.scheduler.max_sequences.choices[1]: found '16', accepted is an integer; remove "
        "the quotes"
    )


def test_overrides_reach_the_goal(tmp_path):
    file = tmp_path / "search.yaml"
    file.write_text(yaml.safe_dump(SEARCH))
    config = read_recommend_config(
        file, ["optimizer.max_trials=7", f"{AGGREGATED}.scheduler.max_sequences={{choices: [4]}}"]
    )
    assert config.optimizer.max_trials == 7
    assert config.domains("aggregated")[f"{AGGREGATED}.scheduler.max_sequences"] == Choices((4,))
