import json

import pytest
import yaml

from fpmsdk.config import normalize_config
from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.errors import ConfigError
from tests.perfmodel.deployments import DEPLOYMENT, checkpoint, direct_config, profile

RESOURCES = DEPLOYMENT["resources"]
GROUP = {"name": "g", "kind": "attention", "num_layers": 2, "block_size_tokens": 16, "page_size_bytes": 160}
ROUND = {
    "kind": "speculative_round",
    "method": "eagle3",
    "num_draft_tokens": 3,
    "draft_model": "org/draft",
    "draft_revision": "a" * 40,
    "timing_scope": "model_step_cuda",
}
RUNTIME = {"kv_cache_bytes": 600, "gpu_memory_utilization": 0.8, "max_model_len": 4096, "provenance": "measured"}


def deployment(**changes):
    return DEPLOYMENT | changes


def resources(**changes):
    kept = {name: value for name, value in (RESOURCES | changes).items() if value is not None}
    return deployment(resources=kept)


def grouped(*groups, **changes):
    return resources(cache_layout="grouped", kv_bytes_per_token=None, cache_groups=list(groups), **changes)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (profile("m", schema_version=2), "fpm_profile.schema_version"),
        (profile("m", schema_version=True), "fpm_profile.schema_version"),
        (profile("m", schema_version=1.0), "fpm_profile.schema_version"),
        (profile(" "), "fpm_profile.model"),
        (profile("m", model_revision=" Main "), "fpm_profile.model_revision"),
        (profile("m", context_length=0), "fpm_profile.context_length"),
        (profile("m", context_length=1.0), "fpm_profile.context_length"),
        (profile("m", num_experts=-1), "fpm_profile.num_experts"),
        (profile("m", deployments=[]), "fpm_profile.deployments"),
        (profile("m", unknown=1), "fpm_profile.unknown"),
        (profile("m", deployment(backend="sglang")), "fpm_profile.deployments[0].backend"),
        (profile("m", deployment(backend_version="Current")), "fpm_profile.deployments[0].backend_version"),
        (profile("m", deployment(backend_version="a b")), "fpm_profile.deployments[0].backend_version"),
        (profile("m", deployment(backend_version="..")), "fpm_profile.deployments[0].backend_version"),
        (profile("m", deployment(backend_version="a/b")), "fpm_profile.deployments[0].backend_version"),
        (profile("m", deployment(tp=0)), "fpm_profile.deployments[0].tp"),
        (profile("m", deployment(tp=True)), "fpm_profile.deployments[0].tp"),
        (profile("m", deployment(pp=2)), "fpm_profile.deployments[0].pp"),
        (profile("m", deployment(cp=True)), "fpm_profile.deployments[0].cp"),
        (profile("m", deployment(gemm_quant_mode="fp9")), "fpm_profile.deployments[0].gemm_quant_mode"),
        (profile("m", deployment(kv_cache_dtype="half")), "fpm_profile.deployments[0].kv_cache_dtype"),
        (profile("m", deployment(enable_eplb=True)), "fpm_profile.deployments[0].enable_eplb"),
        (profile("m", deployment(enable_wideep=0)), "fpm_profile.deployments[0].enable_wideep"),
        (profile("m", deployment(worker_type="agg")), "fpm_profile.deployments[0].worker_type"),
        (profile("m", deployment(dcp=1)), "fpm_profile.deployments[0].dcp"),
        (
            profile("m", deployment(execution_profile=ROUND | {"num_draft_tokens": 6})),
            "fpm_profile.deployments[0].execution_profile.num_draft_tokens",
        ),
        (
            profile("m", deployment(execution_profile=ROUND | {"draft_model": " x"})),
            "fpm_profile.deployments[0].execution_profile.draft_model",
        ),
        (
            profile("m", deployment(execution_profile=ROUND | {"draft_revision": "main"})),
            "fpm_profile.deployments[0].execution_profile.draft_revision",
        ),
        (profile("m", resources(weights_bytes=-1)), "fpm_profile.deployments[0].resources.weights_bytes"),
        (profile("m", resources(weights_bytes=2**53, activations_bytes=1)), "fpm_profile.deployments[0].resources"),
        (
            profile("m", resources(weights_bytes=1, runtime_memory=RUNTIME)),
            "fpm_profile.deployments[0].resources",
        ),
        (
            profile("m", resources(runtime_memory=RUNTIME | {"gpu_memory_utilization": 0.0})),
            "fpm_profile.deployments[0].resources.runtime_memory.gpu_memory_utilization",
        ),
        (profile("m", resources(kv_bytes_per_token=None)), "fpm_profile.deployments[0].resources"),
        (profile("m", resources(cache_groups=[GROUP])), "fpm_profile.deployments[0].resources"),
        (profile("m", grouped()), "fpm_profile.deployments[0].resources"),
        (profile("m", grouped(GROUP, GROUP)), "fpm_profile.deployments[0].resources"),
        (
            profile("m", grouped(GROUP | {"kind": "convolution"})),
            "fpm_profile.deployments[0].resources.cache_groups[0]",
        ),
    ],
)
def test_every_rule_names_the_field(document, path):
    with pytest.raises(ConfigError) as caught:
        load_fpm_profile(document)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("experts", "sizes", "holds"),
    [
        (0, {"tp": 4, "moe_tp": 4}, True),
        (0, {"tp": 4, "moe_tp": 1}, True),
        (0, {"tp": 4, "moe_tp": 2}, False),
        (0, {"tp": 1, "dp": 2}, False),
        (8, {"tp": 4, "moe_tp": 4}, True),
        (8, {"tp": 4, "moe_tp": 1}, False),
        (8, {"tp": 1, "dp": 4, "moe_ep": 4}, True),
        (8, {"tp": 4, "moe_ep": 4}, True),
        (8, {"tp": 2, "dp": 2, "moe_ep": 4}, False),
        (6, {"tp": 4, "moe_ep": 4}, False),
        (0, {"tp": 4, "moe_ep": 4}, False),
    ],
)
def test_the_topology_is_dense_tp_or_moe_tp_dep_or_tep(experts, sizes, holds):
    document = profile("m", deployment(**sizes), num_experts=experts)
    if holds:
        assert load_fpm_profile(document).num_experts == experts
        return
    with pytest.raises(ConfigError, match=r"deployments\[0\]"):
        load_fpm_profile(document)


@pytest.mark.parametrize(
    ("roles", "words"),
    [((None, None), "duplicate"), (("decode", "decode"), "duplicate"), ((None, "decode"), "ambiguous")],
)
def test_one_record_per_topology_and_role(roles, words):
    with pytest.raises(ConfigError, match=words):
        load_fpm_profile(profile("m", *(deployment(worker_type=role) for role in roles)))


def test_rounds_of_speculation_need_pure_tensor_parallelism():
    document = profile("m", deployment(tp=2, moe_ep=2, execution_profile=ROUND), num_experts=2)
    with pytest.raises(ConfigError, match="pure tensor parallelism"):
        load_fpm_profile(document)


def test_unset_options_are_left_out_of_the_written_form():
    document = profile("m", grouped(GROUP), deployment(backend_version="2"))
    written = load_fpm_profile(document).model_dump(mode="json")
    assert written["deployments"][1]["resources"] == RESOURCES
    assert set(written["deployments"][0]) - set(DEPLOYMENT) == {
        *("pp", "cp", "moe_backend", "attention_backend", "enable_wideep", "enable_eplb")
    }
    assert written["deployments"][0]["resources"]["cache_groups"] == [GROUP | {"sliding_window": None}]
    assert load_fpm_profile(written) == load_fpm_profile(document)


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_a_profile_is_read_from_json_and_yaml(tmp_path, write):
    path = tmp_path / "profile"
    path.write_text(write(profile("m")))
    assert load_fpm_profile(path) == load_fpm_profile(profile("m"))


def test_an_unreadable_profile_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none"):
        load_fpm_profile(tmp_path / "none")


def test_rounds_of_speculation_are_part_of_the_identity():
    loaded = load_fpm_profile(profile("m", deployment(execution_profile=ROUND)))
    (record,) = loaded.deployments
    assert record.execution_identity("b" * 40) == {
        "execution_profile": 'speculative_round_v1:{"model_revision":"' + "b" * 40 + '","execution_profile":'
        '{"kind":"speculative_round","method":"eagle3","num_draft_tokens":3,"draft_model":"org/draft",'
        '"draft_revision":"' + "a" * 40 + '","timing_scope":"model_step_cuda"}}'
    }
    with pytest.raises(ConfigError, match="model_revision"):
        record.execution_identity("abc")


# --- normalisation ---


@pytest.fixture
def asked(tmp_path):
    """A configuration over a checkpoint that exists, without a table."""
    (tmp_path / "systems").mkdir()
    model = checkpoint(tmp_path / "model")

    def config(**changes):
        interpolation = changes.pop("interpolation", {})
        written = direct_config(model, tmp_path / "systems", "/table.parquet") | changes
        written["estimator_config"] = {"fpm_interpolation": interpolation}
        return written

    return config


def test_precision_and_attention_backend_are_filled_from_the_profile(asked):
    config = normalize_config(asked())
    names = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kvcache_quant_mode", "comm_quant_mode")
    assert [config[name] for name in names] == ["bfloat16"] * 4 + ["half"]
    assert config["attention_backend"] == "auto"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"gemm_quant_mode": "fp8"}, "gemm_quant_mode"),
        ({"attention_backend": "fa3"}, "attention_backend"),
        ({"model": "other"}, "model"),
        ({"backend_version": "0"}, "fpm_profile"),
        ({"backend_version": "LATEST"}, "backend_version"),
        ({"tp": 2}, "fpm_profile"),
        ({"system": "other"}, "fpm_profile"),
    ],
)
def test_what_contradicts_the_profile_is_an_error(asked, changes, path):
    with pytest.raises(ConfigError) as caught:
        normalize_config(asked(**changes))
    assert caught.value.path == path


def test_a_record_for_another_role_does_not_serve(asked):
    config = asked(worker_type="prefill")
    config["fpm_profile"]["deployments"] = [DEPLOYMENT | {"worker_type": "decode"}]
    with pytest.raises(ConfigError, match="worker_type prefill"):
        normalize_config(config)
    assert normalize_config(config | {"worker_type": "decode"})["worker_type"] == "decode"


@pytest.mark.parametrize(
    ("written", "registered", "resolved"),
    [("auto", True, "sol"), ("auto", False, "direct"), ("sol", True, "sol"), ("direct", True, "direct")],
)
def test_the_method_follows_from_the_registry(asked, written, registered, resolved):
    config = normalize_config(asked(interpolation={"method": written}), lambda _name: registered)
    assert config["estimator_config"]["fpm_interpolation"]["method"] == resolved


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"interpolation": {"method": "sol"}}, "sol needs"),
        ({"database_mode": "HYBRID"}, "SILICON"),
        ({"database_mode": "HYBRID", "estimation_mode": "op_level"}, "SILICON"),
    ],
)
def test_methods_without_their_basis_are_errors(asked, changes, words):
    with pytest.raises(ConfigError, match=words):
        normalize_config(asked(**changes))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"architectures": ["Other"]}, "Other"),
        ({"architectures": ["Outer"], "text_config": {"architectures": ["Inner"]}}, "Inner"),
        ({"architectures": []}, "declares no architectures"),
        ([], "JSON object"),
        (None, "cannot verify"),
    ],
)
def test_the_architecture_is_that_of_the_checkpoint(asked, tmp_path, document, words):
    path = tmp_path / "model" / "config.json"
    path.unlink() if document is None else path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=words) as caught:
        normalize_config(asked())
    assert caught.value.path == "fpm_profile.architecture"


def test_a_checkpoint_may_lie_in_the_hub_cache(asked, tmp_path, monkeypatch):
    config = asked(model="org/name")
    config["fpm_profile"]["model"] = "org/name"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        normalize_config(config)
    checkpoint(tmp_path / "models--org--name" / "snapshots" / config["fpm_profile"]["model_revision"])
    assert normalize_config(config)["model"] == "org/name"
