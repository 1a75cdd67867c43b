"""Execution profiles: read, checked against the graph and the data they were made with, and applied."""

import hashlib
import json

import pytest

from fpmsdk.errors import ConfigError
from fpmsdk.opgraph.execution_profile import (
    FIELD,
    apply_execution_profile,
    copy_retained_files,
    load_execution_profile,
)
from fpmsdk.opgraph.ops import Overlap
from tests.opgraph.checkpoints import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, QWEN3_30B, graph

SPEC = graph(LLAMA_8B, "vllm", systems_path="/somewhere")
CONTENT = b"data_dir: data\n"


def document(**fields):
    spec = json.loads(json.dumps(SPEC.to_dict()))
    defaults = {
        "schema_version": 1,
        "basis": spec,
        "worker_type": "decode",
        "ops": spec["generation_ops"],
        "retained_files": [
            {"path": "h200.yaml", "sha256": hashlib.sha256(CONTENT).hexdigest(), "size_bytes": len(CONTENT)}
        ],
    }
    return defaults | fields


@pytest.fixture
def load(tmp_path):
    def load_document(written, sha256=None):
        content = written if isinstance(written, bytes) else json.dumps(written).encode()
        path = tmp_path / "profile.json"
        path.write_bytes(content)
        return load_execution_profile(path, sha256 or hashlib.sha256(content).hexdigest())

    return load_document


def edited(index, **fields):
    """The decode operators with one changed."""
    ops = document()["ops"]
    [(kind, values)] = ops[index].items()
    ops[index] = {kind: values | fields}
    return ops


def plain_operators(ops):
    """Every operator of a graph that is no composite, composites opened, by kind."""
    found = {}
    for entry in ops:
        [(kind, values)] = entry.items()
        parts = [
            values.get("primary"),
            *values.get("fallback", ()),
            *values.get("group_a", ()),
            *values.get("group_b", ()),
        ]
        found |= plain_operators(filter(None, parts)) if any(parts) else {kind: values}
    return found


OPERATORS = {
    kind: values
    for config, backend, fields in (
        (LLAMA_8B, "vllm", {}),
        (QWEN3_30B, "sglang", {"cp_size": 2, "moe_tp_size": 1, "moe_ep_size": 2}),
        (DEEPSEEK_V3, "trtllm", {}),
    )
    for phase in ("context_ops", "generation_ops")
    for kind, values in plain_operators(graph(config, backend, **fields).to_dict()[phase]).items()
}


def op(kind, **fields):
    return {kind: json.loads(json.dumps(OPERATORS[kind])) | fields}


def test_a_profile_replaces_the_operators_of_its_phase(load):
    # The same weights, one normalisation priced differently.
    applied = apply_execution_profile(load(document(ops=edited(1, scale_factor=7.5))), SPEC, "decode")
    assert applied.generation_ops[1].scale_factor == 7.5
    assert applied.generation_ops[2:] == SPEC.generation_ops[2:]
    assert (applied.context_ops, applied.engine) == (SPEC.context_ops, SPEC.engine)
    assert applied.digest() != SPEC.digest()


def test_a_prefill_profile_replaces_the_prefill_operators(load):
    ops = document()["basis"]["context_ops"][::-1]
    applied = apply_execution_profile(load(document(worker_type="prefill", ops=ops)), SPEC, "prefill")
    assert applied.context_ops == SPEC.context_ops[::-1]
    assert applied.generation_ops == SPEC.generation_ops


def test_operators_may_overlap(load):
    first, second, *rest = document()["ops"]
    overlap = {"Overlap": {"name": "o", "group_a": [first], "group_b": [second]}}
    applied = apply_execution_profile(load(document(ops=[*rest, overlap])), SPEC, "decode")
    assert applied.generation_ops[-1] == Overlap(
        name="o", group_a=SPEC.generation_ops[:1], group_b=SPEC.generation_ops[1:2]
    )


def test_the_place_of_the_data_is_not_part_of_the_basis(load):
    basis = document()["basis"]
    basis["engine"]["systems_path"] = None
    assert apply_execution_profile(load(document(basis=basis)), SPEC, "decode") == SPEC


def test_a_profile_must_be_the_pinned_file(load):
    with pytest.raises(ConfigError, match="pinned SHA-256") as caught:
        load(document(), sha256="0" * 64)
    assert caught.value.path == FIELD


def test_a_missing_profile_is_a_fault_of_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_execution_profile(tmp_path / "none.json", "0" * 64)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"{", "malformed"),
        ({}, "missing required field `schema_version`"),
        (document(schema_version=2), "schema_version 2, supported is 1"),
        (document(worker_type="aggregated"), "worker_type"),
        (document(ops=[]), "at least one operator"),
        (document(retained_files=[]), "at least one operator"),
        (document(extra=1), "unknown field `extra`"),
        (document(basis=3), "basis"),
        (document(ops=[{"Bogus": {}}]), "kind 'Bogus' cannot be part of a profile"),
        (document(ops=[{"Fallback": {}}]), "kind 'Fallback' cannot be part of a profile"),
        (document(ops=[{"Op": {"name": "x"}}]), "kind 'Op' cannot be part of a profile"),
        (document(ops=[{"P2P": {}, "Gemm": {}}]), "only key"),
        (document(ops=[{"Gemm": {}}]), "missing required field `name`"),
        (document(ops=edited(2, n="x")), "ops[2].Gemm"),
        (document(ops=edited(2, bogus=1)), "unknown fields: bogus"),
        (document(ops=edited(2, quant_mode="fp7")), "quant_mode 'fp7' is unknown"),
        (document(ops=edited(3, kv_cache_dtype="fp7")), "kv_cache_dtype 'fp7' is unknown"),
        (document(ops=edited(1, scale_factor=-1.0)), "scale_factor must be finite and not negative"),
        (document(ops=edited(1, name="generation_embedding")), "used more than once: generation_embedding"),
        (document(ops=[{"Overlap": {"name": "o", "group_a": 3, "group_b": []}}]), "group_a must be a list"),
        (document(ops=[{"Overlap": {"group_a": [], "group_b": []}}]), "Overlap.name must be a string, found None"),
        (document(ops=[{"Overlap": {"name": "o", "group_a": [], "group_b": [], "c": 1}}]), "unknown fields: c"),
        (document(ops=edited(3, dcp_size=2)), "dcp_size 2 has no price; leave it 1"),
        (document(ops=[op("Moe", enable_eplb=True)]), "enable_eplb True has no price; leave it False"),
        (document(ops=[op("Moe", moe_backend="deepep_moe")]), "moe_backend 'deepep_moe' has no price; leave it None"),
        (document(ops=[op("MoeDispatch", scale_num_tokens=2)]), "scale_num_tokens 2 has no price; leave it 1"),
        (document(ops=[op("MoeDispatch", backend="x")]), "backend 'x' is unknown; use one of trtllm, sglang, vllm"),
        (document(ops=[op("Nccl", operation="gather")]), "operation 'gather' is unknown"),
    ],
)
def test_malformed_profiles(load, written, words):
    with pytest.raises(ConfigError) as caught:
        load(written)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", sorted(OPERATORS))
def test_counts_divide_something_so_they_are_positive_and_fit_compiled_code(load, kind):
    counts = {name for name, value in OPERATORS[kind].items() if type(value) is int}
    assert counts
    for name in counts:
        may_be_zero = name in ("window_size", "verify_query_tokens")
        for value in (-1, 2**31, 2**70) if may_be_zero else (0, -1, 2**31, 2**70):
            with pytest.raises(
                ConfigError, match=f"{kind}.{name} must be an integer from {0 if may_be_zero else 1} to"
            ):
                load(document(ops=[op(kind, **{name: value})]))


def test_a_name_used_twice_inside_an_overlap_is_found(load):
    first, *rest = document()["ops"]
    with pytest.raises(ConfigError, match="generation_embedding"):
        load(document(ops=[first, *rest, {"Overlap": {"name": "o", "group_a": [first], "group_b": []}}]))


@pytest.mark.parametrize("path", ["", ".", "/h200.yaml", "./h200.yaml", "../h200.yaml", "a/../b", "a//b", "a/"])
def test_retained_paths_are_relative_and_in_their_shortest_form(load, path):
    file = document()["retained_files"][0] | {"path": path}
    with pytest.raises(ConfigError, match="shortest form"):
        load(document(retained_files=[file]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sha256": "0" * 63}, "64 lower-case"),
        ({"sha256": "A" * 64}, "64 lower-case"),
        ({"size_bytes": -1}, "negative size"),
    ],
)
def test_retained_files_have_a_digest_and_a_size(load, fields, words):
    with pytest.raises(ConfigError, match=words):
        load(document(retained_files=[document()["retained_files"][0] | fields]))


def test_retained_files_are_listed_once(load):
    with pytest.raises(ConfigError, match="listed twice"):
        load(document(retained_files=document()["retained_files"] * 2))


def test_a_profile_of_the_other_role_is_refused(load):
    with pytest.raises(ConfigError, match="'decode', the configuration asks for 'prefill'"):
        apply_execution_profile(load(document()), SPEC, "prefill")


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (graph(LLAMA_8B, "vllm", tp=2), "context_ops[0].Embedding.vocab_size (compiled 64128, basis 128256)"),
        (graph(LLAMA_8B, "vllm", kv_block_size=16), "engine.kv_block_size (compiled 16, basis None)"),
        (graph(LLAMA_8B, "vllm", nextn=1), "engine.nextn (compiled 1, basis None)"),
        (graph(QWEN3_30B, "vllm"), "context_ops (compiled length 12, basis length 14)"),
        (graph(GPT_OSS_120B, "vllm"), "context_ops (compiled length 13, basis length 14)"),
    ],
)
def test_another_graph_is_refused_with_the_first_difference(load, spec, place):
    with pytest.raises(ConfigError) as caught:
        apply_execution_profile(load(document()), spec, "decode")
    assert place in str(caught.value)


def test_a_basis_with_other_fields_is_refused(load):
    basis = document()["basis"]
    basis["engine"]["later"] = 1
    del basis["engine"]["pp_size"]
    with pytest.raises(ConfigError, match="engine.later \\(only in the basis\\)"):
        apply_execution_profile(load(document(basis=basis)), SPEC, "decode")


@pytest.mark.parametrize(
    "ops", [edited(2, scale_factor=64.0), edited(2, quant_mode="fp8"), edited(2, n=1), document()["ops"][3:]]
)
def test_the_weights_must_stay(load, ops):
    with pytest.raises(ConfigError, match="bytes of weights"):
        apply_execution_profile(load(document(ops=ops)), SPEC, "decode")


def test_retained_files_are_copied(load, tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    root.mkdir()
    (root / "h200.yaml").write_bytes(CONTENT)
    (root / "other.yaml").write_bytes(CONTENT)
    copy_retained_files(load(document()), root, copy)
    assert [path.name for path in copy.iterdir()] == ["h200.yaml"]
    assert (copy / "h200.yaml").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONTENT + b" ", "has changed"),
        (CONTENT[::-1], "has changed"),
        (None, "cannot be read"),
        ("folder", "not a regular file"),
    ],
)
def test_retained_files_must_be_those_of_the_profile(load, tmp_path, content, words):
    file = tmp_path / "h200.yaml"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        copy_retained_files(load(document()), tmp_path, tmp_path / "copy")
