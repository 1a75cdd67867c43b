"""The files of a plan: those of the peer for the same request, apart from names of programs and what prose says."""

import json

import pytest
import yaml

from fpmsdk.config.profile import CacheGroup
from fpmsdk.errors import OnboardError
from fpmsdk.files import sha256
from fpmsdk.onboard.pilot import linear_rate, measured_block_tokens
from fpmsdk.onboard.plan import create_plan
from fpmsdk.onboard.request import request_id, validation_id

PROSE = {
    "baseline_rule",
    "detail",
    "launch",
    "next",
    "resource_requirement",
    "sampling",
    "scheduling_policy",
    "sources",
}
RECORDED = [
    "legacy without a profile",
    "plain dense TP2",
    "explicit captures and sm",
    "pending linear",
    "pending linear of another version",
    "declared linear",
    "declared linear without a fraction",
    "declared linear aggregated with one graph policy",
    "declared grouped TP2",
    "runtime linear",
    "runtime grouped TP2",
    "prefill DEP4",
    "decode TEP4 with graphs",
    "no version",
    "no version and no profile",
    "bound runtime version",
    "another workload",
]


def without_prose(value):
    """A document with the names of its prose in the place of the prose."""
    if isinstance(value, list):
        return [without_prose(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_prose(item) for key, item in value.items() if key not in PROSE}
    return kept | ({"prose": sorted(PROSE & value.keys())} if PROSE & value.keys() else {})


def written(folder):
    """The files of a plan folder, places and program names as recorded."""
    files = {}
    for place in sorted(folder.rglob("*")):
        path = place.relative_to(folder).as_posix()
        if place.is_dir() or place.name == ".support.lock":
            continue
        if path.startswith("systems/"):
            files[path] = None
            continue
        text = place.read_text().replace(str(folder), "<root>")
        text = text.replace("fpmsdk.collect", "collector.fpm_forward")
        document = yaml.safe_load(text)
        files[path] = json.loads(json.dumps(document).replace('"fpmsdk"', '"aisimulate"'))
    return files


def test_every_recorded_plan_is_compared(recorded):
    assert set(RECORDED) == recorded.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_a_plan_has_the_files_of_the_recorded_one(recorded, request_of, tmp_path, name):
    expected, request = recorded[name], request_of(name)
    folder = tmp_path / "plan"
    create_plan(request, folder)
    assert (request_id(request), validation_id(request)) == (expected["request_id"], expected["validation_id"])
    assert sha256((folder / "request.yaml").read_bytes()) == expected["request_sha256"]
    files = written(folder)
    assert files.pop("request.yaml") == expected["request"]
    profile = files.pop("fpm-model-profile.json", None)
    assert (profile is not None) == expected["profile"]
    plan = files["support-plan.json"]
    for path, digest in plan["generated_files_sha256"].items():
        assert sha256((folder / path).read_bytes()) == digest
    plan["generated_files_sha256"] = sorted(plan["generated_files_sha256"])
    if "plan_command" in plan["fpm"]:
        assert plan["fpm"]["plan_command"] == files["commands.json"]["fpm_plan_local"]
        plan["fpm"]["plan_command"] = "<fpm_plan_local>"
    files["support-plan.json"] = without_prose(plan)
    for configuration in files.values():
        if configuration and "fpm_profile" in configuration.get("engine", {}):
            assert configuration["engine"]["fpm_profile"] == profile
            configuration["engine"]["fpm_profile"] = "<profile>"
    if "worker.yaml" in files:
        files["worker.yaml"]["collection"].pop("sources")
    assert files == expected["files"]


def with_resources(request, **resources):
    """A request whose one deployment has further resources."""
    profile = request.fpm_profile.model_dump(mode="json")
    profile["deployments"][0]["resources"] |= resources
    return request.replaced({"fpm_profile": profile})


def test_a_declared_cache_needs_room_for_one_token_more_than_the_context(request_of, tmp_path):
    request = request_of()
    # 0.9 of the GPU less the declared bytes, 4096 tokens exactly.
    weights = int(151397597184 * 0.9) - 10**8 - 10**8 - 4096 * 262144
    with pytest.raises(OnboardError, match="one request needs 4097 tokens of one rank's cache.*leaves 4096"):
        create_plan(with_resources(request, weights_bytes=weights), tmp_path / "plan")
    create_plan(with_resources(request, weights_bytes=weights - 262144), tmp_path / "plan")


def test_the_declared_memory_of_a_real_model(request_of, tmp_path):
    # Qwen3-32B on one H200, as recorded; half of the GPU does not even hold its weights.
    declared = {
        "weights_bytes": 65524246528,
        "activations_bytes": 1476395008,
        "runtime_overhead_bytes": 3758096384,
        "comm_overhead_bytes": 0,
    }
    plan = create_plan(with_resources(request_of(), **declared), tmp_path / "plan")
    resources = plan["resources"]
    assert (resources["total_kv_size_bytes"], resources["total_kv_size_tokens"]) == (65499099545, 249859)
    assert len(resources["memory_breakdown"]) == 6
    half = request_of(collection={"gpu_memory_utilization": 0.47})
    with pytest.raises(OnboardError, match="insufficient KV capacity for search.context_length 4096"):
        create_plan(with_resources(half, **declared), tmp_path / "half")


def test_an_observed_cache_has_room_for_exactly_the_context(request_of, tmp_path):
    request = request_of("runtime linear")

    def observed(tokens):
        memory = {"gpu_memory_utilization": 0.9, "max_model_len": 4096, "provenance": "by hand"}
        return with_resources(request, runtime_memory=memory | {"kv_cache_bytes": tokens * 262144})

    with pytest.raises(OnboardError, match="needs 4096 tokens.*runtime memory leaves 4095"):
        create_plan(observed(4095), tmp_path / "plan")
    create_plan(observed(4096), tmp_path / "plan")


def test_a_grouped_cache_has_room_for_the_peak_of_one_request(request_of, tmp_path):
    # 256 pages of the full group, and ((127 + 2048 + 15) / 16 rounded up) = 137 of the sliding one.
    peak, request = (256 + 137) * 294912, request_of("runtime grouped TP2")

    def observed(size):
        memory = {"gpu_memory_utilization": 0.9, "max_model_len": 4096, "provenance": "by hand"}
        return with_resources(request, runtime_memory=memory | {"kv_cache_bytes": size})

    with pytest.raises(OnboardError, match=f"needs {peak} bytes.*leaves {peak - 1}"):
        create_plan(observed(peak - 1), tmp_path / "plan")
    create_plan(observed(peak), tmp_path / "plan")


def test_memory_that_does_not_fit_at_all_is_refused(request_of, tmp_path):
    request = request_of(collection={"gpu_memory_utilization": 0.005})
    with pytest.raises(OnboardError, match="nothing is left|exceed|fit"):
        create_plan(request, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_a_grouped_profile_needs_its_checkpoint_at_hand(request_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OnboardError, match="cannot verify it"):
        create_plan(request_of("declared grouped TP2"), tmp_path / "plan")


@pytest.mark.parametrize("name", ["declared linear", "no version"])
def test_a_gpu_without_a_description_is_refused(request_of, tmp_path, surroundings, name):
    (surroundings / "h200_sxm.yaml").rename(surroundings / "b200_sxm.yaml")
    with pytest.raises(OnboardError, match="no description of system 'h200_sxm'"):
        create_plan(request_of(name), tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


GROUP = {"name": "a", "kind": "attention", "num_layers": 2, "block_size_tokens": 16, "page_size_bytes": 2097152}


@pytest.mark.parametrize(
    ("groups", "rate"),
    [
        ([GROUP], 131072),
        ([GROUP, GROUP | {"name": "b"}], 262144),
        ([GROUP | {"sliding_window": 128}], None),
        ([GROUP, GROUP | {"name": "b", "block_size_tokens": 32}], None),
        ([GROUP | {"block_size_tokens": 1}], None),
        ([GROUP | {"page_size_bytes": 2097153}], None),
    ],
)
def test_groups_are_a_rate_when_they_have_one_block_no_window_and_whole_bytes(groups, rate):
    assert linear_rate([CacheGroup.model_validate(group) for group in groups]) == rate


def finalized(request, groups, noted):
    """A request of linear cache that a finalisation of probed memory wrote."""
    profile = request.fpm_profile.model_dump(mode="json")
    manifest = {
        "schema_version": "aisimulate-onboarding-finalization/v1",
        "runtime_probe": {"observed_resources": {"cache_groups": groups}},
    }
    profile["deployments"][0]["resources"]["runtime_memory"]["provenance"] = json.dumps(manifest)
    profile["provenance"] = json.dumps({} if noted is None else {"measured_cache_groups": noted})
    return request.replaced({"fpm_profile": profile})


def test_a_linear_profile_that_was_measured_replays_with_the_measured_block(request_of):
    groups = [GROUP, GROUP | {"name": "b"}]
    assert measured_block_tokens(finalized(request_of("runtime linear"), groups, groups[::-1])) == 16
    assert measured_block_tokens(request_of("runtime linear")) is None


@pytest.mark.parametrize(
    ("groups", "noted", "reason"),
    [
        ([GROUP, GROUP | {"name": "b"}], [GROUP], "measured_cache_groups differ"),
        ([GROUP, GROUP | {"name": "b"}], None, "measured_cache_groups differ"),
        ([GROUP], [GROUP], "kv_bytes_per_token 262144 is not that of the measured groups, 131072"),
        ([], [], "no observed cache_groups"),
        ([GROUP | {"kind": "other"}], [], "malformed measured cache groups"),
    ],
)
def test_a_linear_profile_that_contradicts_its_measurement_is_refused(request_of, groups, noted, reason):
    with pytest.raises(OnboardError, match=reason):
        measured_block_tokens(finalized(request_of("runtime linear"), groups, noted))


def test_measured_groups_without_a_measurement_are_refused(request_of):
    request = request_of("runtime linear")
    profile = request.fpm_profile.model_dump(mode="json")
    profile["provenance"] = json.dumps({"measured_cache_groups": [GROUP]})
    with pytest.raises(OnboardError, match="no runtime probe measured them"):
        measured_block_tokens(request.replaced({"fpm_profile": profile}))
