"""Which candidates a configuration searches, and what is said of those that it does not."""

import copy
import json

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.prediction import read_config
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.config import RecommendConfig
from fpmsdk.recommendation.paths import get, put
from fpmsdk.recommendation.space import build_branches, materialise
from fpmsdk.sample.tiny import write_checkpoint
from tests.prediction.cases import filled, peer_systems
from tests.vectors import load_vectors

PEER = load_vectors("recommend_peer")["cases"]
ONE = {"replicas": 1, "tensor": 1, "pipeline": 1, "attention_data": 1, "moe_tensor": 1, "moe_expert": 1}
FIXED = {
    "scheduler": {"max_batched_tokens": 512, "max_sequences": 8},
    "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 150}},
    "timing": {"type": "fixed", "prefill_ms": 8.0, "decode_ms": 3.0},
}
# Where the peer's knobs are in a prediction, below the worker of their role.
KNOBS = {
    "tp": "parallelism.tensor",
    "replicas": "parallelism.replicas",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_num_seqs": "scheduler.max_sequences",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return peer_systems(tmp_path_factory.mktemp("peer"))


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory):
    """A dense checkpoint with 8 attention heads."""
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A checkpoint with 4 experts, of an architecture that is known by its whole passes only."""
    folder = tmp_path_factory.mktemp("experts")
    fields = {"architectures": ["NewForCausalLM"], "num_attention_heads": 8, "num_experts": 4}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def searched(model, parallelism=None, *, mode="aggregated", context=2048, worker=FIXED, **engine):
    """The configuration of a search over workers of constant timing; `parallelism` is that of all roles."""
    roles = ("aggregated",) if mode == "aggregated" else ("prefill", "decode")
    layout = {} if parallelism is None else {"parallelism": parallelism}
    return {
        "traffic": {
            "source": {"type": "synthetic"},
            "load": {"type": "concurrency", "concurrency": 2},
            "stop": {"requests": 4},
        },
        "engine": {
            "mode": mode,
            "model": model,
            "hardware": "h200_sxm",
            "context_length": context,
            "workers": dict.fromkeys(roles, worker | layout),
            **engine,
        },
        "optimization": {"target": "throughput", "constraints": {"max_candidate_gpus": 4}},
    }  # fmt: skip


def space_of(config):
    return build_branches(RecommendConfig.from_source(config))


def arms_of(config, role="aggregated"):
    (branch,) = space_of(config).branches
    return [(arm.parallelism[role]["tensor"], arm.parallelism[role]["replicas"], arm.gpus) for arm in branch.arms]


def candidates(config):
    """Concrete configurations of the whole space."""
    config = RecommendConfig.from_source(config)
    for branch in build_branches(config).branches:
        points = [()]
        for path, domain in branch.domains:
            values = [domain.at(index) for index in range(domain.count)]
            points = [(*point, (path, value)) for point in points for value in values]
        for arm in range(len(branch.arms)):
            for point in points:
                yield materialise(config, branch, Sample(branch.mode, branch.arms[arm].backend, arm, point))


@pytest.mark.parametrize("name", PEER)
def test_the_candidates_are_those_of_the_peer(name, places):
    found = []
    for document in candidates(filled(PEER[name]["config"], places)):
        assert read_config(document).engine.mode == document["engine"]["mode"]
        workers = document["engine"]["workers"]
        load = document["traffic"]["load"]
        knobs = {"load": load.get("concurrency", load.get("fraction", load.get("requests_per_second")))}
        for role, worker in workers.items():
            knobs |= {(role, path): get(worker, path) for path in KNOBS.values()}
        found.append(knobs)
    expected = []
    for candidate in PEER[name]["candidates"]:
        load = PEER[name]["config"]["traffic"]["load"]
        knobs = {
            "load": candidate["knobs"].get("traffic_load", load.get("concurrency", load.get("requests_per_second")))
        }
        for role, prefix in (("aggregated", ""), ("prefill", "prefill_"), ("decode", "decode_")):
            for name_of_peer, path in KNOBS.items():
                names = (f"{prefix}{name_of_peer}", f"agg_{name_of_peer}" if role == "aggregated" else "")
                value = next((candidate["knobs"][key] for key in names if key in candidate["knobs"]), None)
                if role in workers:
                    # What the peer does not record is the same in all candidates.
                    knobs[role, path] = get(workers[role], path) if value is None else value
        expected.append(knobs)
    assert len(found) == len(expected)
    assert all(knobs in expected for knobs in found) and all(knobs in found for knobs in expected)


def test_left_out_sizes_are_searched_and_a_prediction_with_a_goal_is_a_search(places):
    config = searched(places["$CKPT"], {"tensor": 2})
    assert arms_of(config) == [(2, 1, 2), (2, 2, 4)]


def test_the_menu_fills_the_gpus(places):
    assert arms_of(searched(places["$CKPT"])) == [
        (1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4), (2, 1, 2), (2, 2, 4), (4, 1, 4)
    ]  # fmt: skip


def test_fewer_gpus_than_asked_for_are_not_searched(places):
    config = searched(places["$CKPT"])
    config["optimization"]["constraints"]["min_candidate_gpus"] = 4
    assert arms_of(config) == [(1, 4, 4), (2, 2, 4), (4, 1, 4)]


def test_pairs_share_the_gpus(places):
    config = searched(places["$CKPT"], {"tensor": {"choices": [1, 2]}}, mode="disaggregated")
    (branch,) = space_of(config).branches
    sizes = [(role, name) for role in ("prefill", "decode") for name in ("tensor", "replicas")]
    pairs = {tuple(arm.parallelism[role][name] for role, name in sizes) for arm in branch.arms}
    assert pairs == {
        (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3), (1, 2, 1, 1), (1, 2, 1, 2), (1, 3, 1, 1),
        (1, 1, 2, 1), (1, 2, 2, 1), (2, 1, 1, 1), (2, 1, 1, 2), (2, 1, 2, 1),
    }  # fmt: skip
    assert branch.seed_offset == 1


def test_a_list_of_one_role_goes_with_the_menu_of_the_other(places):
    config = searched(places["$CKPT"], mode="disaggregated")
    config["engine"]["workers"]["prefill"] = FIXED | {"parallelism": {"preset": [ONE | {"replicas": 2}]}}
    (branch,) = space_of(config).branches
    assert {arm.parallelism["prefill"]["replicas"] for arm in branch.arms} == {2}
    assert sorted(arm.gpus for arm in branch.arms) == [3, 4, 4]


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        ({"preset": [ONE, ONE | {"tensor": 3}]}, "preset[1]: vllm aggregated tensor 3: tensor 3 does not divide the"),
        ({"preset": [ONE | {"moe_expert": 2}]}, "preset[0]: vllm aggregated tensor 1, moe_expert 2: the model has no"),
        ({"preset": [ONE | {"replicas": 5}]}, "preset[0]: takes 5 GPUs, accepted are 4; remove it, or raise"),
        ({"tensor": 3}, "no deployment is viable: aggregated: vllm aggregated tensor 3: tensor 3 does not divide the"),
        ({"tensor": 8}, "engine.workers.aggregated.parallelism leaves no worker of at most 4 GPUs"),
        ({"tensor": 4, "replicas": 2}, "engine.workers.aggregated.parallelism leaves no number of replicas within 4"),
    ],
)
def test_what_cannot_be_deployed_is_refused_and_not_simulated(parallelism, message, eight_heads):
    with pytest.raises(OnboardError) as caught:
        space_of(searched(eight_heads, parallelism))
    assert message in str(caught.value)


def test_experts_and_attention_are_as_wide(experts):
    listed = {"preset": [ONE | {"tensor": 2, "moe_expert": 2}, ONE | {"tensor": 2}]}
    with pytest.raises(OnboardError) as caught:
        space_of(searched(experts, listed))
    assert "preset[1]" in str(caught.value) and "moe_tensor x moe_expert is 1" in str(caught.value)


def test_a_pair_beyond_the_gpus_is_refused_when_both_roles_are_listed(places):
    listed = {"preset": [ONE, ONE | {"replicas": 3}]}
    with pytest.raises(OnboardError) as caught:
        space_of(searched(places["$CKPT"], listed, mode="disaggregated"))
    assert "prefill tensor 1, replicas 3 with decode tensor 1, replicas 3 takes 6 GPUs" in str(caught.value)


def test_a_cache_that_holds_no_sequence_is_told_in_tokens(places):
    with pytest.raises(OnboardError) as caught:
        space_of(searched(places["$CKPT"], context=2400))
    assert (
        "the cache of one rank holds 2400 tokens, and one sequence of context_length 2400 needs more; nearest: "
        "context_length 2399"
    ) in str(caught.value)
    assert arms_of(searched(places["$CKPT"], context=2399))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hardware": "h200"}, "no system 'h200' in "),
        ({"hardware": "h200"}, "nearest: h200_sxm"),
        ({"systems_paths": ["/no/such/folder"]}, "systems_paths entry is not a directory: /no/such/folder"),
    ],
)
def test_a_system_without_tables_is_refused_before_anything_is_simulated(change, message, places):
    worker = {name: part for name, part in FIXED.items() if name != "timing"}
    engine = {"systems_paths": [places["$ROOT"]], **change}
    with pytest.raises(OnboardError) as caught:
        space_of(searched(places["$CKPT"], worker=worker, **engine))
    assert message in str(caught.value)


def test_the_smallest_searched_block_decides(places):
    worker = put(FIXED, "kv_cache.block_size", {"choices": [32, 16]})
    with pytest.raises(OnboardError):
        space_of(searched(places["$CKPT"], context=2400, worker=worker))


def test_a_role_has_its_own_longest_sequence(places):
    config = searched(places["$CKPT"], mode="disaggregated", context=2400)
    config["traffic"]["source"] |= {"input_tokens": 100, "output_tokens": 10}
    for role in ("prefill", "decode"):
        config["engine"]["workers"][role] |= {"context_length": 500}
    assert space_of(config).rejected == ()


def test_a_mode_without_deployments_is_skipped_and_the_others_go_on(places):
    config = searched(places["$CKPT"], mode="disaggregated")
    config["engine"]["mode"] = {"choices": ["disaggregated", "aggregated"]}
    config["engine"]["workers"]["aggregated"] = FIXED
    config["optimization"]["constraints"]["max_candidate_gpus"] = 1
    space = space_of(config)
    assert [branch.mode for branch in space.branches] == ["aggregated"]
    ((skipped),) = space.skipped
    assert skipped["mode"] == "disaggregated"
    assert skipped["reasons"] == ["vllm: no viable configuration takes 1 to 1 GPUs (optimization.constraints)"]
    assert any(line.startswith("disaggregated deployments are skipped: vllm: no viable") for line in space.warnings)


def test_a_context_size_takes_gpus_in_every_candidate(places):
    assert arms_of(searched(places["$CKPT"], {"tensor": 1, "prefill_context": 2})) == [(1, 1, 2), (1, 2, 4)]


def test_the_longest_sequence_of_the_model_is_told(eight_heads):
    worker = put(FIXED, "kv_cache.capacity.blocks", 257)
    config = searched(eight_heads, context="max", worker=worker)
    config["engine"] |= {"mode": "aggregated"}
    assert space_of(config).warnings == (
        "engine.context_length is max: the model's 4096 tokens; workers whose cache does not hold one such sequence "
        "are left out; set engine.context_length to your longest request to have them searched",
    )


def test_workers_that_are_left_out_are_told(places):
    config = profiled(places)
    config["engine"]["fpm_profile"]["deployments"][0]["resources"]["weights_bytes"] = 135_000_000_000
    config["engine"]["context_length"] = 2000
    assert space_of(config).warnings == (
        "workers whose cache does not hold one sequence are left out: vllm aggregated tensor 1",
    )


def profiled(places, **worker):
    config = filled(PEER["r2_pareto_fpm"]["config"], places)
    config["engine"]["workers"]["aggregated"] = {"kv_cache": {"block_size": 16}, **worker}
    return config


def test_the_menu_of_a_profile_is_its_deployments(places):
    assert arms_of(profiled(places)) == [(1, 1, 1), (1, 2, 2), (2, 1, 2)]


def test_limits_that_are_left_out_are_those_of_the_profile(places):
    paths = [path for path, _ in space_of(profiled(places)).branches[0].domains]
    assert paths == ["traffic.load.concurrency"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler": {"max_batched_tokens": {"choices": [256, 1024]}}}, "the 512 of the profile, found 256 to 1024"),
        ({"scheduler": {"max_sequences": 9}}, "scheduler.max_sequences may be at most the 8 of the profile, found 9"),
        ({"parallelism": {"tensor": 4}}, "leaves no worker of at most 2 GPUs"),
    ],
)  # fmt: skip
def test_what_the_profile_does_not_answer_for_is_refused(change, message, places):
    with pytest.raises(OnboardError) as caught:
        space_of(profiled(places, **change))
    assert message in str(caught.value)


def test_memory_that_no_rank_has_is_told_in_bytes_with_the_nearest_that_fits(places):
    config = profiled(places)
    resources = config["engine"]["fpm_profile"]["deployments"][0]["resources"]
    resources["weights_bytes"] = 200_000_000_000
    space = space_of(config)
    ((rejected),) = space.rejected
    assert rejected["arm"]["tensor"] == 1
    assert "200000000000" not in rejected["rule"] and "201500000001 bytes of one rank" in rejected["rule"]
    assert (rejected["needed_tokens"], rejected["available_tokens"], rejected["nearest"]) == (2049, 0, "tensor 2")
    assert [arm.parallelism["aggregated"]["tensor"] for arm in space.branches[0].arms] == [2]


def test_the_size_of_a_space_is_that_of_its_branches(places):
    config = searched(places["$CKPT"])
    config["engine"]["workers"]["aggregated"] = put(FIXED, "scheduler.max_sequences", {"choices": [4, 8]})
    assert space_of(config).size == 14
    worker = {name: part for name, part in FIXED.items() if name != "kv_cache"}
    worker = put(worker, "kv_cache.capacity.memory_fraction", {"range": {"min": 0.5, "max": 0.9}})
    config = searched(places["$CKPT"], worker=worker, systems_paths=[places["$ROOT"]])
    config["engine"]["workers"]["aggregated"]["timing"] = {"type": "default"}
    config["engine"]["fpm_profile"] = filled(PEER["r2_pareto_fpm"]["config"], places)["engine"]["fpm_profile"]
    config["engine"]["backend_version"] = "7.7.7-pr"
    assert space_of(config).size is None


def test_a_candidate_leaves_the_search_as_it_is(places):
    source = searched(places["$CKPT"], {"preset": [ONE]})
    source["engine"]["workers"]["aggregated"] = put(
        source["engine"]["workers"]["aggregated"], "scheduler.max_sequences", {"choices": [4, 8]}
    )
    before = copy.deepcopy(source)
    first, second = candidates(source)
    assert source == before
    assert [get(one, "engine.workers.aggregated.scheduler.max_sequences") for one in (first, second)] == [4, 8]
    assert "optimization" not in first and first["engine"]["backend"] == "vllm"
