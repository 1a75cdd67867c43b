"""The public configuration class as clients use it: construction, copies, fields, storage."""

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmsdk.config import ForwardPassPerfModelConfig, normalize_config, normalize_request
from fpmsdk.errors import ConfigError, SystemsPathError

IDENTITY = ("m", "s", "vllm", "decode")
KEYWORD_ONLY = {"fpm_profile", "dcp", "cp_size", "fpm_fmha_quant_mode", "moe_kernel_source"}


def config(**fields):
    return ForwardPassPerfModelConfig(*IDENTITY, **{"estimation_mode": "fpm_regression"} | fields)


def test_the_first_five_fields_are_positional_in_this_order():
    parameters = list(inspect.signature(ForwardPassPerfModelConfig).parameters)
    assert parameters[:5] == ["model", "system", "backend", "worker_type", "backend_version"]


def test_newer_fields_are_keyword_only():
    parameters = inspect.signature(ForwardPassPerfModelConfig).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == KEYWORD_ONLY


@pytest.mark.parametrize(
    ("name", "default"),
    [
        *((name, 1) for name in ("tp", "pp", "attention_dp")),
        ("nextn", 0),
        *((name, False) for name in ("decoder_replay", "strict_provenance", "enable_eplb")),
        ("estimation_mode", "auto"),
        ("database_mode", "SILICON"),
        ("systems_paths", ()),
        ("fallback_policy", "deny"),
        ("estimator_config", {}),
        *(
            (name, None)
            for name in (
                *("backend_version", "fpm_profile", "dcp", "moe_tp_size", "moe_ep_size", "cp_size"),
                *("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "fpm_fmha_quant_mode"),
                *("kvcache_quant_mode", "comm_quant_mode", "speculation", "kv_block_size"),
                *("transfer_policy", "attention_backend", "moe_kernel_source", "enable_shared_layer"),
                *("moe_backend", "wideep_num_slots", "encoder_parallel"),
            )
        ),
    ],
)
def test_defaults(name, default):
    assert getattr(ForwardPassPerfModelConfig(*IDENTITY), name) == default


def test_unknown_keywords_are_type_errors():
    with pytest.raises(TypeError, match="bogus"):
        config(bogus=1)


def test_it_is_frozen_and_compares_by_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().tp = 2
    assert config(tp=2) == config(tp=2) != config(tp=4)


def test_copies_are_equal_and_independent():
    original = config(estimator_config={"correction": {"enabled": False}})
    for made in (
        copy.deepcopy(original),
        pickle.loads(pickle.dumps(original)),
        dataclasses.replace(original),
    ):
        assert made == original
    copied = copy.deepcopy(original)
    copied.estimator_config["correction"]["enabled"] = True
    assert original.estimator_config == {"correction": {"enabled": False}}


def test_asdict_is_loss_free_and_machine_independent():
    stored = dataclasses.asdict(config(systems_paths=("default", "~"), transfer_policy="balanced"))
    assert stored["systems_paths"] == ("default", "~")
    assert stored["transfer_policy"] == "balanced"
    assert ForwardPassPerfModelConfig(**stored) == config(systems_paths=("default", "~"), transfer_policy="balanced")


def test_to_dict_has_every_field_and_drops_encoder_parallel_when_none():
    names = [field.name for field in dataclasses.fields(ForwardPassPerfModelConfig)]
    assert list(config().to_dict()) == names[:-1]
    assert list(config(encoder_parallel="tp").to_dict()) == names


def test_to_dict_is_json():
    made = config(transfer_policy=("xop", "xshape"), systems_paths=("/",))
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


@pytest.mark.parametrize(
    ("policy", "expanded"),
    [
        (None, None),
        (("xop", "xshape", "xop"), ["xop", "xshape", "xop"]),
        ("off", []),
        ("conservative", ["xshape"]),
        ("balanced", ["xquant", "xshape"]),
        ("aggressive", ["xop", "xprofile", "xquant", "xshape"]),
        ("balanced, XOP", ["xop", "xquant", "xshape"]),
        ("xshape,", ["xshape"]),
    ],
)
def test_to_dict_expands_transfer_presets(policy, expanded):
    assert config(transfer_policy=policy).to_dict()["transfer_policy"] == expanded


@pytest.mark.parametrize("policy", ["", "bogus", "xop;xshape", ","])
def test_an_unknown_transfer_preset_is_refused(policy):
    with pytest.raises(ConfigError, match="transfer_policy"):
        config(transfer_policy=policy).to_dict()


@pytest.mark.parametrize("mode", ["fpm_regression", "fpm_learned"])
def test_modes_without_data_keep_systems_paths_empty(mode, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", "/no/such/directory")
    assert config(estimation_mode=mode).to_dict()["systems_paths"] == []


def test_other_modes_resolve_systems_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path))
    assert config(estimation_mode="auto").to_dict()["systems_paths"] == [str(tmp_path)]


def test_given_systems_paths_are_resolved_in_every_mode():
    assert config(systems_paths=("/", "/.")).to_dict()["systems_paths"] == ["/"]
    with pytest.raises(SystemsPathError, match="/no/such/directory"):
        config(systems_paths=("/no/such/directory",)).to_dict()


def test_to_dict_names_nonfinite_weights():
    made = config(estimator_config={"features": {"ffn_token_weight": float("-inf")}})
    assert made.to_dict()["estimator_config"]["features"] == {"ffn_token_weight": "-Infinity"}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tp": st.integers(1, 8),
            "nextn": st.integers(0, 5),
            "decoder_replay": st.booleans(),
            "transfer_policy": st.none() | st.lists(st.sampled_from(["xop", "xshape"])).map(tuple),
            "estimator_config": st.just({"correction": {"mode": "fixed"}}),
        },
    )
)
def test_the_class_and_its_mapping_have_one_normal_form(fields):
    made = config(**fields)
    assert normalize_config(made) == normalize_config(made.to_dict()) == normalize_request(made)


def test_importing_the_configuration_loads_nothing_heavy():
    probe = "import sys, fpmsdk.config; print(*sorted(set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert not set(ran.stdout.split()) & {"numpy", "pydantic", "pyarrow", "msgspec", "numba"}
