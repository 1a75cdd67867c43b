"""Precision that a checkpoint's files establish, and sidecars that contradict them."""

import hashlib

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.intake import load_model_config
from fpmsdk.onboard.precision import precision_facts
from tests.onboard.models import SMALL, write_config


def facts(folder, quantization=None, sidecar=None, **more):
    config = SMALL | more | ({} if quantization is None else {"quantization_config": quantization})
    found = load_model_config(write_config(folder, config, sidecar))
    values = precision_facts(found.raw, has_sidecar=bool(found.source_files))
    return tuple(values.get(name, (None,))[0] for name in ("gemm_quant_mode", "moe_quant_mode", "kv_cache_dtype"))


def scaled(dynamic):
    return {"config_groups": {"g": {"input_activations": {"dynamic": dynamic}}}}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, ("bfloat16", "bfloat16", None)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8_block", "fp8_block", None)),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, (None, None, None)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("fp8", "fp8", None)),
        ({"quant_method": "fp8", **scaled(True)}, ("fp8", "fp8", None)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8_static", "fp8", None)),
        ({"quant_method": "fp8"}, ("fp8_static", "fp8", None)),
        ({"quant_method": "fp8", "activation_scheme": "other"}, (None, "fp8", None)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8_static", "fp8", None)),
        ({"quant_algo": "NVFP4"}, ("nvfp4", "nvfp4", None)),
        ({"quant_method": "mxfp4"}, (None, None, None)),
        ({"quant_method": "compressed-tensors"}, (None, None, None)),
        ({"quant_method": "awq", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, (None, None, "int8")),
        ({"quant_method": "fp8", "kv_cache_scheme": "FP8"}, ("fp8_static", "fp8", "fp8")),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, ("fp8_static", "fp8", None)),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, ("nvfp4", "nvfp4", "fp8")),
    ],
)
def test_precision_follows_from_the_quantisation_of_config_json(tmp_path, quantization, expected):
    assert facts(tmp_path, quantization) == expected


@pytest.mark.parametrize("more", [{"torch_dtype": "float16"}, {"quant_algo": "unknown"}, {"hf_quant_config": {}}])
def test_other_tensors_and_unknown_metadata_are_no_plain_weights(tmp_path, more):
    assert facts(tmp_path, **more) == (None, None, None)


def section(**fields):
    return {"quantization": fields}


@pytest.mark.parametrize(
    ("sidecar", "quantization", "expected"),
    [
        (section(quant_algo="FP8", kv_cache_quant_algo="FP8"), None, ("fp8_static", "fp8", "fp8")),
        (section(quant_algo="NVFP4", kv_cache_quant_algo="bf16"), None, ("nvfp4", "nvfp4", "bfloat16")),
        (section(quant_algo="NVFP4", kv_cache_quant_algo="none"), None, ("nvfp4", "nvfp4", "bfloat16")),
        (section(quant_algo="NVFP4", kv_cache_quant_algo=None), None, ("nvfp4", "nvfp4", None)),
        (section(quant_algo="NVFP4"), None, ("nvfp4", "nvfp4", None)),
        (section(quant_algo="W4A16_MXFP4"), None, ("bfloat16", "w4a16_mxfp4", None)),
        (section(quant_algo="FP8"), {"quant_method": "fp8", "weight_block_size": [128, 128]},
         ("fp8_block", "fp8_block", None)),
        (section(quant_algo="FP8"), {"quant_method": "fp8", "activation_scheme": "dynamic"}, ("fp8", "fp8", None)),
        (section(quant_algo="FP8"), {"quant_method": "modelopt"}, ("fp8_static", "fp8", None)),
        (section(quant_algo="NVFP4"), {"quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
         ("nvfp4", "nvfp4", "fp8")),
        (section(quant_algo="MIXED_PRECISION", quantized_layers={"m.experts.0": {"quant_algo": "NVFP4"},
                                                                 "m.q_proj": {"quant_algo": "FP8"}}), None,
         ("fp8_static", "nvfp4", None)),
        (section(quant_algo="MIXED_PRECISION"), None, (None, None, None)),
        (section(quant_algo="AWQ"), None, (None, None, None)),
        (section(), None, (None, None, None)),
        ({}, None, (None, None, None)),
    ],
)  # fmt: skip
def test_a_sidecar_tells_weights_and_cache(tmp_path, sidecar, quantization, expected):
    assert facts(tmp_path, quantization, sidecar) == expected


def test_compressed_tensors_beside_a_sidecar_quantise_what_they_do_not_ignore(tmp_path):
    groups = {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}, "ignore": ["re:.*self_attn.*"]}
    quantization = {"quant_method": "compressed-tensors", **groups}
    assert facts(tmp_path, quantization, section()) == (None, "fp8", None)


@pytest.mark.parametrize(
    ("sidecar", "quantization", "more", "found"),
    [
        (section(quant_algo="NVFP4"), {"quant_method": "fp8"}, {}, "config.json says 'fp8'"),
        (section(quant_algo="NVFP4"), None, {"quant_algo": "fp8"}, "config.json says 'fp8'"),
        (section(quant_algo="FP8", kv_cache_quant_algo="FP8"), {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, {},
         "config.json says 'int8'"),
        (section(quant_algo="FP8", kv_cache_quant_algo="none"), {"kv_cache_scheme": "FP8"}, {}, "kv_cache_quant_algo"),
        (section(quant_algo="FP8", kv_cache_quant_algo="FP8"), {"kv_cache_scheme": {"num_bits": 16, "type": "float"}},
         {}, "config.json says 'bfloat16'"),
        (section(quant_algo="FP8", quantization_algo="NVFP4"), None, {}, "two algorithms"),
        (section(quant_algo=8), None, {}, "must be text"),
        (section(quant_algo=""), None, {}, "must be text"),
        ({"quantization": []}, None, {}, "must be an object"),
        ("[]", None, {}, "one object"),
        ('{"quantization": {"group_size": NaN}}', None, {}, "finite"),
        ('{"quantization": {}, "quantization": {}}', None, {}, "given twice"),
        (section(quant_algo="FP8"), {"activation_scheme": "static"}, {"quant_dynamic": True}, "quant_dynamic"),
        (section(quant_algo="FP8"), None, {"hf_quant_config": section(quant_algo="NVFP4")}, "inside config.json"),
    ],
)  # fmt: skip
def test_contradictory_files_are_refused(tmp_path, sidecar, quantization, more, found):
    with pytest.raises(OnboardError, match=found) as fault:
        facts(tmp_path, quantization, sidecar, **more)
    assert "hf_quant_config.json: " in str(fault.value)


def test_an_explicitly_plain_cache_agrees_with_a_bfloat16_one(tmp_path):
    quantization = {"quant_method": "fp8", "kv_cache_quant_algo": "none"}
    assert facts(tmp_path, quantization, section(quant_algo="FP8", kv_cache_quant_algo="bf16"))[2] == "bfloat16"


def test_the_sidecar_has_a_digest_of_its_own(tmp_path):
    path = write_config(tmp_path, SMALL, section(quant_algo="FP8"))
    sidecar = tmp_path / "hf_quant_config.json"
    found = load_model_config(path)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.source_files == {sidecar.name: hashlib.sha256(sidecar.read_bytes()).hexdigest()}
