"""Setting up requests: the questions that are asked, the review, and the same without anybody to ask."""

import io
import json

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.init import set_up_one, set_up_plain, set_up_several, suggest
from fpmsdk.onboard.init_options import OptionFaults, build_request, check_combinations
from fpmsdk.onboard.init_output import directory_name, directory_target, request_target, write_directory, write_request
from fpmsdk.onboard.request import load_request
from fpmsdk.onboard.talk import Cancelled, Silence, Talk, Terminal
from tests.onboard.models import BFLOAT16, IDENTITY, MIXTRAL, SMALL, WINDOWED, write_config


class Script(Talk):
    """Answers in order; what was told and asked is kept."""

    interactive = True

    def __init__(self, *answers):
        self.answers = list(answers)
        self.lines = []

    def tell(self, line):
        self.lines.append(line)

    def ask(self, question):
        self.lines.append(question)
        if not self.answers:
            raise Cancelled
        return self.answers.pop(0)

    def told(self, text):
        return any(text in line for line in self.lines)


GIVEN = {name: value for name, value in IDENTITY.items() if name != "model_kind"}
QUESTIONS = ("org/model", "rev-1", "dense", "h200_sxm", "nvswitch")


@pytest.fixture
def options(tmp_path, systems):
    """Options of the small model at TP 1, with what its files do not establish."""

    def make(config=SMALL, overrides=BFLOAT16, **more):
        stated = tmp_path / "overrides.json"
        stated.write_text(json.dumps(overrides))
        path = write_config(tmp_path / "model", config)
        return {**GIVEN, "model_config": path, "resource_overrides": stated, "context_length": 4096} | more

    return make


# --- without anybody to ask ---


def test_options_make_a_request_with_the_defaults_of_a_new_one():
    request = build_request({**IDENTITY, "context_length": 8192, "tensor_parallel": 2})
    assert request.collection.prefill_cudagraph_policy == "runtime"
    assert request.collection.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(
    ("given", "policy", "size"),
    [
        ({}, "runtime", None),
        ({"max_prefill_cudagraph_size": 64}, "explicit", 64),
        ({"prefill_cudagraph_policy": "explicit"}, "explicit", 2048),
    ],
)
def test_a_capture_size_selects_the_explicit_policy(given, policy, size):
    settings = build_request({**IDENTITY, "context_length": 8192, **given}).collection_settings()
    assert (settings["prefill_cudagraph_policy"], settings["max_prefill_cudagraph_size"]) == (policy, size)


def test_the_context_limit_is_never_assumed():
    with pytest.raises(OptionFaults, match="--context-length"):
        build_request(IDENTITY)


def test_all_missing_options_are_listed_before_profile_fields(options):
    given = options(overrides={}, model=None, gpu=None)
    with pytest.raises(OptionFaults) as fault:
        set_up_one(Silence(), given)
    assert [field for field, _ in fault.value.faults] == ["model", "gpu", ""]


def test_the_context_is_proposed_from_the_model_and_capped(options):
    assert set_up_one(Silence(), options(context_length=None)).search.context_length == 8192
    long = SMALL | {"max_position_embeddings": 1_000_000}
    assert set_up_one(Silence(), options(long, context_length=None)).search.context_length == 256_000


def test_the_default_topology_is_taken_and_an_explicit_one_kept(options):
    assert set_up_one(Silence(), options()).topology_sizes() == (1, 1, 1, 1)
    assert set_up_one(Silence(), options(tensor_parallel=4)).topology_sizes() == (4, 1, 1, 1)


def test_there_is_no_silent_topology_without_a_default(options):
    blocks = BFLOAT16 | {"gemm_quant_mode": "bfloat16", "cache_block_sizes": {"full_attention": 16}}
    with pytest.raises(OnboardError, match="no fully assessed default") as fault:
        set_up_one(Silence(), options(WINDOWED, blocks))
    assert "--tensor-parallel 1" in str(fault.value) and "cache_block_sizes" in str(fault.value)


def test_open_fields_are_listed_with_their_reasons(options):
    with pytest.raises(OnboardError) as fault:
        set_up_one(Silence(), options(overrides={}, tensor_parallel=1))
    assert all(name in str(fault.value) for name in ("fmha_quant_mode", "kv_cache_dtype", "kv_bytes_per_token"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "agrees with the probe"),
        ({"attention_chunk_size": 8192}, "Nothing was saved"),
        ({"ssm_state_size": 16}, "cannot be imported yet"),
    ],
)
def test_a_cache_that_needs_a_probe_stops_with_the_next_step(options, more, said):
    config = SMALL | {"architectures": ["NewForCausalLM"], "model_type": "new", "num_experts": 0} | more
    with pytest.raises(OnboardError) as fault:
        set_up_one(Silence(), options(config))
    text = str(fault.value)
    assert said in text and "onboard checkpoint" in text and "onboard probe-runtime" in text
    assert ("agrees with the probe" in text) is (more == {})


def observed_profile(tmp_path):
    resources = {
        "runtime_memory": {
            "kv_cache_bytes": 65536,
            "gpu_memory_utilization": 0.8,
            "max_model_len": 2048,
            "provenance": "observed",
        },
        "kv_bytes_per_token": 64,
        "cache_layout": "linear",
        "max_num_tokens": 8192,
        "max_batch_size": 256,
        "provenance": "observed",
    }
    modes = {f"{name}_quant_mode": "bfloat16" for name in ("gemm", "moe", "fmha")} | {"kv_cache_dtype": "bfloat16"}
    deployment = {"system": "h200_sxm", "backend": "vllm", "backend_version": "0.27.0", "tp": 1, "dp": 1, "moe_tp": 1,
                  "moe_ep": 1, "comm_quant_mode": "half", **modes, "resources": resources}  # fmt: skip
    profile = {"schema_version": 1, "model": "org/model", "model_revision": "0" * 40, "num_experts": 0,
               "architecture": "LlamaForCausalLM", "context_length": 8192, "provenance": "by hand",
               "deployments": [deployment]}  # fmt: skip
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    return path


def test_an_observed_profile_sets_fraction_and_context(tmp_path):
    given = {**IDENTITY, "framework_version": None, "fpm_profile": observed_profile(tmp_path)}
    request = build_request(given)
    assert request.collection.gpu_memory_utilization == 0.8
    assert (request.search.context_length, request.identity.framework_version) == (2048, "0.27.0")
    assert build_request(given | {"context_length": 1500}).search.context_length == 1500
    for other in ({"context_length": 4096}, {"gpu_memory_utilization": 0.9}):
        with pytest.raises(OptionFaults, match="probe again"):
            build_request(given | other)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"resource_overrides": "o"}, "--resource-overrides needs --model-config"),
        ({"suggest_parallel": True}, "--suggest-parallel needs --model-config"),
        ({"parallel_configs": "l", "model_config": "c"}, "needs --model-config and --output-dir"),
        ({"output_dir": "d"}, "--output-dir needs --model-config"),
        ({"model_config": "c", "fpm_profile": "p"}, "--model-config does not go with --fpm-profile"),
        ({"model_config": "c", "output_dir": "d", "overwrite": True}, "--output-dir does not go with --overwrite"),
        ({"model_config": "c", "output_dir": "d", "output": "o"}, "--output-dir does not go with --output"),
        ({"model_config": "c", "output_dir": "d", "parallel_configs": "l", "moe_expert_parallel": 2},
         "--parallel-configs does not go with --moe-expert-parallel"),
        *(({"model_config": "c", "suggest_parallel": True, name: "x"}, "--suggest-parallel does not go with")
          for name in ("interactive", "profile", "tensor_parallel", "output_dir")),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_before_any_file_is_read(given, found):
    with pytest.raises(OnboardError, match=found):
        check_combinations(given)


def test_suggestions_ask_and_tell_nothing(options, capsys):
    assert suggest(options()).default.required_gpus == 1
    assert capsys.readouterr() == ("", "")


# --- several workers ---


def several(options, tmp_path, entries, **more):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(entries))
    return set_up_several(Silence(), options(MIXTRAL, parallel_configs=path, output_dir=tmp_path / "out", **more))


def test_a_list_sets_up_roles_of_their_own(options, tmp_path):
    entries = [
        {"tensor_parallel": 2, "moe_tensor_parallel": 1, "moe_expert_parallel": 2, "worker_type": "prefill"},
        {"tensor_parallel": 1, "attention_data_parallel": 2, "moe_tensor_parallel": 1, "moe_expert_parallel": 2,
         "worker_type": "decode", "collection": {"max_batch_size": 128, "cudagraph_mode": "FULL_DECODE_ONLY"},
         "resource_overrides": {"kv_cache_dtype": "fp8"}},
        {"tensor_parallel": 2, "worker_type": "aggregated"},
    ]  # fmt: skip
    found = several(options, tmp_path, entries)
    assert [directory_name(request) for request in found] == [
        "prefill-tp2-dp1-moe-tp1-moe-ep2",
        "decode-tp1-dp2-moe-tp1-moe-ep2",
        "aggregated-tp2-dp1-moe-tp2-moe-ep1",
    ]
    assert [request.profile_deployment().worker_type for request in found] == ["prefill", "decode", "aggregated"]
    assert [request.scheduler_limits()["max_sequences"] for request in found] == [256, 128, 256]
    assert [request.profile_deployment().kv_cache_dtype for request in found] == ["bfloat16", "fp8", "bfloat16"]
    assert found[0].collection.cudagraph_mode is None


def test_shared_graph_settings_go_with_each_role(options, tmp_path):
    entries = [{"tensor_parallel": 2, "worker_type": "decode"}]
    assert several(options, tmp_path, entries, cudagraph_mode="FULL")[0].collection.cudagraph_mode == "FULL"


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], "at least one configuration"),
        ({}, "at least one configuration"),
        ([1], "configuration 1: must be a mapping"),
        ([{}], "tensor_parallel is missing"),
        ([{"tensor_parallel": 0}], "configuration 1: tensor_parallel must be an integer"),
        ([{"tensor_parallel": 1, "pipeline": 2}], "unknown fields pipeline"),
        ([{"tensor_parallel": 1, "worker_type": "both"}], "worker_type must be one of"),
        ([{"tensor_parallel": 1, "collection": 1}], "collection must be a mapping"),
        ([{"tensor_parallel": 1, "resource_overrides": {"nope": 1}}], "unknown override fields: nope"),
        ([{"tensor_parallel": 1, "collection": {"nope": 1}}], "collection.nope"),
        ([{"tensor_parallel": 1}, {"tensor_parallel": 1, "resource_overrides": {"kv_cache_dtype": "fp8"}}],
         "two configurations of role None"),
    ],
)  # fmt: skip
def test_a_malformed_list_is_refused_by_entry(options, tmp_path, entries, found):
    with pytest.raises(OnboardError, match=found):
        several(options, tmp_path, entries)


def test_bytes_of_one_rank_belong_to_one_entry(options, tmp_path):
    entries = [{"tensor_parallel": 1}, {"tensor_parallel": 2}]
    assert len(several(options, tmp_path, entries)) == 2
    with pytest.raises(OnboardError, match="weights_bytes belong to one configuration"):
        several(options, tmp_path, entries, overrides=BFLOAT16 | {"weights_bytes": 1})


# --- at a terminal ---


def test_a_request_without_a_config_is_asked_for(systems):
    talk = Script("", *QUESTIONS, "2", "8192")
    request = set_up_plain(talk, {})
    assert talk.told("A value is needed.")
    assert request.topology_sizes() == (2, 1, 1, 1) and request.search.context_length == 8192


def test_a_bad_answer_is_asked_for_again(systems):
    talk = Script("org/model", "main", "dense", "h200_sxm", "nvswitch", "two", "2", "4096", "rev-1")
    request = set_up_plain(talk, {})
    assert talk.told("Not an integer: two") and talk.told("not a moving one")
    assert request.identity.model_revision == "rev-1"


def test_options_that_are_given_are_not_asked_for():
    talk = Script("4096")
    request = set_up_plain(talk, {**IDENTITY, "tensor_parallel": 1})
    assert request.search.context_length == 4096 and talk.answers == []


def test_a_fault_of_the_whole_request_asks_which_option(systems):
    given = {**IDENTITY, "context_length": 4096, "tensor_parallel": 2, "attention_data_parallel": 2}
    talk = Script("nonsense", "attention-data-parallel", "1")
    assert set_up_plain(talk, given).topology_sizes() == (2, 1, 1, 1)
    assert talk.told("Known options")


def test_missing_fields_are_asked_for_and_the_review_is_accepted_in_words(options):
    talk = Script("fp4", "bfloat16", "bfloat16", "", "", "yes", "accept")
    request = set_up_one(talk, options(overrides={}))
    assert talk.told("must be one of bfloat16") and talk.told("nothing else accepts")
    deployment = request.profile_deployment()
    assert (deployment.fmha_quant_mode, deployment.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert talk.answers == []


@pytest.mark.parametrize("answers", [("cancel",), ("", "cancel"), (), ("9", "x", "cancel")])
def test_nothing_is_returned_when_cancelled(options, answers):
    with pytest.raises(Cancelled):
        set_up_one(Script(*answers), options())


def test_a_candidate_is_chosen_by_number(options):
    assert set_up_one(Script("0", "2", "accept"), options()).topology_sizes() == (2, 1, 1, 1)


def test_several_candidates_are_chosen_at_once(options, tmp_path):
    talk = Script("1,1", "1, 2", "accept", "accept")
    found = set_up_several(talk, options(output_dir=tmp_path / "out"))
    assert [request.topology_sizes()[0] for request in found] == [1, 2]
    assert talk.told("Nothing is saved before every selected profile is accepted.")


def test_an_edit_recomputes_what_depends_on_it(options):
    talk = Script("", "edit", "tokens", "max_num_tokens", "4096", "edit", "kv_cache_dtype", "fp8", "accept")
    request = set_up_one(talk, options(LARGE_WIDTH))
    resources = request.profile_deployment().resources
    assert (resources.max_num_tokens, request.scheduler_limits()["max_batched_tokens"]) == (4096, 4096)
    planned = json.loads(resources.provenance)["planning_estimates"]["activations_bytes"]["value"]
    assert planned == 4096 * 4 * 1024 * 22
    assert resources.kv_bytes_per_token == 2 * 2 * 2 * 1024


# Wide enough for its activations to exceed the floor of the estimate.
LARGE_WIDTH = SMALL | {"head_dim": 1024}


def test_explicit_bytes_survive_an_edit(options):
    talk = Script("", "edit", "weights_bytes", "1 KiB", "edit", "runtime_context_length", "2048", "accept")
    request = set_up_one(talk, options())
    assert request.search.context_length == 2048
    record = json.loads(request.fpm_profile.provenance)
    assert record["fields"]["weights_bytes"]["value"] == 1024


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("runtime_context_length", "100000"), "exceeds the 8192 tokens"),
        (("cache_block_sizes", '{"full_attention": 16}'), "has no groups"),
        (("cudagraph_mode", "FULL"), "belong to one serving role"),
        (("max_num_tokens", "64"), "must be at least max_batch_size"),
    ],
)
def test_an_edit_that_contradicts_something_leaves_the_profile_as_it_was(options, edit, said):
    talk = Script("", "edit", *edit, "accept")
    request = set_up_one(talk, options())
    assert talk.told(said)
    assert request.yaml_bytes() == set_up_one(Script("", "accept"), options()).yaml_bytes()


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (("gpu_memory_utilization", "1.5", "0.8"), {"gpu_memory_utilization": 0.8}),
        (("max_prefill_cudagraph_size", "0", "512"),
         {"prefill_cudagraph_policy": "explicit", "max_prefill_cudagraph_size": 512}),
        (("max_prefill_cudagraph_size", "512", "edit", "prefill_cudagraph_policy", "runtime"),
         {"prefill_cudagraph_policy": "runtime"}),
        (("worker_type", "decode", "edit", "cudagraph_capture_sizes", "4 2", "2 4"),
         {"cudagraph_capture_sizes": [2, 4]}),
        (("worker_type", "decode", "edit", "cudagraph_mode", "FULL", "edit", "cudagraph_mode", "clear"), {}),
    ],
)  # fmt: skip
def test_collection_settings_are_edited(options, edits, expected):
    request = set_up_one(Script("", "edit", *edits, "accept"), options())
    found = request.document()["collection"]
    assert {name: found.get(name) for name in expected} == expected
    assert "cudagraph_mode" not in found and (expected or request.worker_type == "decode")
    assert request.profile_deployment().worker_type == request.worker_type


def test_a_correction_of_the_topology_is_asked_for(options):
    talk = Script("2", "accept")
    assert set_up_one(talk, options(tensor_parallel=3)).topology_sizes() == (2, 1, 1, 1)
    assert talk.told("does not divide the 4 num_attention_heads")


def test_facts_that_are_not_in_the_config_are_asked_for(options):
    config = {name: value for name, value in SMALL.items() if name != "max_position_embeddings"}
    talk = Script("1024", "", "accept")
    request = set_up_one(talk, options(config, context_length=None, input_tokens=16, output_tokens=4))
    assert (request.fpm_profile.context_length, request.search.context_length) == (1024, 1024)


def test_a_terminal_needs_one(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(OnboardError, match="--interactive needs a terminal"):
        Terminal()


# --- what is written ---


def test_a_request_is_written_only_where_nothing_is(tmp_path):
    request = build_request({**IDENTITY, "context_length": 4096})
    target = tmp_path / "new" / "request.yaml"
    assert write_request(request, target, overwrite=False) == target
    assert load_request(target).yaml_bytes() == request.yaml_bytes()
    with pytest.raises(OnboardError, match="--overwrite"):
        write_request(request, target, overwrite=False)
    other = build_request({**IDENTITY, "context_length": 2048})
    write_request(other, target, overwrite=True)
    assert load_request(target).search.context_length == 2048
    assert [path.name for path in target.parent.iterdir()] == ["request.yaml"]


def test_a_target_that_cannot_be_a_request_is_refused_at_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, found in (
        (tmp_path, "must be a file"),
        (tmp_path / "link", "symbolic link"),
        ("/dev/null/x", "no directory"),
    ):
        with pytest.raises(OnboardError, match=found):
            request_target(target, overwrite=True)


def test_a_directory_is_filled_whole_or_not_at_all(options, tmp_path, monkeypatch):
    request = set_up_one(Silence(), options())
    root = tmp_path / "out"
    index = write_directory([request], root)
    entry = index["configurations"][0]
    assert json.loads((root / "onboarding.json").read_text()) == index
    assert load_request(entry["request"]).yaml_bytes() == request.yaml_bytes()
    assert json.loads((root / "tp1-dp1-moe-tp1-moe-ep1" / "fpm-profile.json").read_text())["model"] == "org/model"
    assert entry["plan_command"].startswith("fpmsdk onboard plan --config ")
    with pytest.raises(OnboardError, match="new or empty"):
        write_directory([request], root)
    monkeypatch.setattr("fpmsdk.onboard.init_output.write_request", fail)
    with pytest.raises(OSError, match="full"):
        write_directory([request], tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir() if "other" in path.name) == []


def fail(*arguments, **options):
    raise OSError("the disk is full")


def test_two_of_one_role_and_topology_are_not_written(options, tmp_path):
    request = set_up_one(Silence(), options())
    with pytest.raises(OnboardError, match="two configurations"):
        write_directory([request, request], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_link_is_on_the_way_to_a_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OnboardError, match="symbolic link"):
        directory_target(tmp_path / "link" / "out")
