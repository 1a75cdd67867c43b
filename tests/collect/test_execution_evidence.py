import json

import pytest

from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.cpu_affinity import can_run_at_once, inspect_cpu_affinity
from fpmsdk.collect.execution_evidence import inspect_execution
from fpmsdk.collect.launch_evidence import MissingLaunchError, launch_flags, launched_nodes
from fpmsdk.errors import CollectionError
from tests.collect.native import DECODE, PLAN, PREFILL, recorded
from tests.collect.observers import CELL, FLAGS, REVISION, SLURM, attempt, plan_of

OPEN = {"vllm_max_model_len": 2048, "gpu_memory_utilization": 0.9}


def inspect(campaign, change=None, flags=FLAGS, after=None, version=2, **options):
    """What is found about an attempt; `after` is done to the folder of the raw results."""
    plan = plan_of(**{**OPEN, **options})
    raw = attempt(campaign, plan, flags=flags, change=change)
    if after is not None:
        after(raw)
    return inspect_execution(plan, CELL, raw, validate_native(plan, CELL, raw), evidence_version=version)


def on_workers(path, value, dp=None):
    """A change of the execution observations, of one rank or of all."""

    def change(name, document):
        if not name.startswith("fpm-execution-") or (dp is not None and document["dp_rank"] != dp):
            return
        *folders, last = path.split(".")
        inside = document
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        if value is ...:
            del inside[last]
        else:
            inside[last] = value

    return change


def test_a_complete_attempt_is_qualified(tmp_path):
    found = inspect(tmp_path)
    assert (found["status"], found["missing_evidence"], found["failures"]) == ("qualified", [], [])
    assert found["scheduling"]["status"] == "observed" and found["scheduling"]["effective_async_scheduling"] is False
    assert found["scheduling"]["requested"] == {"source": "generated_flag", "async_scheduling": False}
    assert (found["per_point_dispatch"], found["kv_seed_regime_counts"]) == ("observed", {"real_kv": 3})
    assert len(found["observed_workers"]) == len(found["native_graph_config"]) == 2
    assert not found["cpu_affinity"]["policy_required"]


@pytest.mark.parametrize("cell", [PREFILL, DECODE])
def test_artifacts_without_observers_are_incomplete_not_failed(tmp_path, cell):
    raw = recorded(tmp_path, cell, 1) / "raw"
    found = inspect_execution(PLAN, cell, raw, validate_native(PLAN, cell, raw))
    assert (found["status"], found["failures"]) == ("incomplete", [])
    missing = "\n".join(found["missing_evidence"])
    for reason in ("is missing", "vLLM 0.31.0 are not audited", "no execution observation of worker ranks"):
        assert reason in missing
    assert "measurement evidence: legacy artifact has no measurement protocol" in missing


def test_the_first_version_has_no_scheduling_and_no_measurement_evidence(tmp_path):
    found = inspect(tmp_path, on_workers("resolved_config.scheduler_config.async_scheduling", True, 1), version=1)
    assert "scheduling" not in found and found["per_point_dispatch"] == "unreported"
    assert not any(message.startswith("measurement evidence") for message in found["missing_evidence"])
    assert not any("disagree" in message for message in found["failures"])


R = "resolved_config"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("status", "unresolved", "worker (0, 0, 0): its settings are unresolved"),
        (R, None, "resolved_config is not reported"),
        (f"{R}.kernel_config", ..., "kernel_config is not reported"),
        (f"{R}.model_config.dtype", ..., "model_config.dtype is not reported"),
        (f"{R}.quantization_config", ..., "quantization_config is not reported"),
        (f"{R}.model_config.quantization", "awq", "quantization 'awq' has no quantization_config"),
        ("graph_config.mode", ..., "graph_config is incomplete"),
        (f"{R}.compilation_config", None, "compilation_config is incomplete"),
        (f"{R}.model_config.revision", None, f"nothing shows that {REVISION} was loaded"),
    ],
)
def test_what_a_worker_does_not_say_is_missing(tmp_path, path, value, reason):
    found = inspect(tmp_path, on_workers(path, value))
    assert found["status"] == ("failed" if "has no" in reason else "incomplete")
    assert any(reason in message for message in found["missing_evidence"] + found["failures"])


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("attention_groups", [], "attention_groups must name"),
        ("attention_groups.0.layer_names", [""], "attention_groups must name"),
        ("attention_groups.0.backend_class", None, "attention_groups must name"),
        (f"{R}.model_config.enforce_eager", True, "model_config.enforce_eager: planned is False, the worker has True"),
        (f"{R}.model_config.max_model_len", 4096, "model_config.max_model_len: planned is 2048"),
        (f"{R}.model_config.max_model_len", "2048", "model_config.max_model_len: unusable value '2048'"),
        (f"{R}.model_config.max_model_len", True, "model_config.max_model_len: unusable value True"),
        (f"{R}.model_config.model", "other", "model_config.model: launch flag --model is"),
        (f"{R}.model_config.model", "", "model_config.model: unusable value ''"),
        (f"{R}.model_config.dtype", "torch.float16", "cache precision: planned is bfloat16, the worker has 'half'"),
        (f"{R}.cache_config.gpu_memory_utilization", 0.8, "gpu_memory_utilization: planned is 0.9"),
        (f"{R}.cache_config.gpu_memory_utilization", 1.5, "gpu_memory_utilization exceeds 1"),
        (f"{R}.cache_config.gpu_memory_utilization", -1, "expected a positive finite number, found -1"),
        (f"{R}.cache_config.num_gpu_blocks_override", 100, "num_gpu_blocks_override: launched is None"),
        (f"{R}.scheduler_config.max_num_seqs", 32, "max_num_seqs: launch flag --max-num-seqs is 16"),
        (f"{R}.parallel_config.data_parallel_size_local", 4, "data_parallel_size_local exceeds data_parallel_size"),
        (f"{R}.parallel_config.enable_expert_parallel", False, "enable_expert_parallel: planned is True"),
        (f"{R}.parallel_config.enable_eplb", True, "enable_eplb: planned is False"),
        (f"{R}.model_config.revision", "d" * 40, "model_config.revision: pinned is"),
        (f"{R}.model_config.loaded_config_commit_hash", "main", "loaded_config_commit_hash: no commit: 'main'"),
        (f"{R}.model_config.loaded_config_commit_hash", "d" * 40, "the engine loaded"),
        ("graph_config.cudagraph_mode", "PIECEWISE", "graph_config and compilation_config differ"),
        ("graph_config.max_cudagraph_capture_size", 8, "max_cudagraph_capture_size: expected 4, found 8"),
    ],
)
def test_what_contradicts_plan_or_launch_fails(tmp_path, path, value, reason):
    found = inspect(tmp_path, on_workers(path, value))
    assert found["status"] == "failed"
    assert any(reason in message for message in found["failures"]), found["failures"]


@pytest.mark.parametrize(
    ("flags", "options", "path", "value", "expected"),
    [
        (["--max-model-len", "$LEN"], {}, "model_config.max_model_len", 2048, "--max-model-len has no literal value"),
        (["--max-num-seqs", "many"], {}, "scheduler_config.max_num_seqs", 16, "--max-num-seqs: unusable value 'many'"),
        (["--max-model-len", "-1"], {"vllm_max_model_len": -1}, "model_config.max_model_len", 999, None),
        (["--moe-backend=auto"], {}, "kernel_config.moe_backend", "triton", None),
        (
            ["--moe-backend=cutlass"],
            {},
            "kernel_config.moe_backend",
            "triton",
            "launch flag --moe-backend is 'cutlass'",
        ),
        (["--dtype", "float16"], {}, "model_config.dtype", "torch.bfloat16", "--dtype: launched is 'float16'"),
        (["--dtype=auto"], {}, "model_config.dtype", "torch.bfloat16", None),
        (["--quantization", "fp8"], {}, "model_config.quantization", None, "quantization: launched is 'fp8'"),
        (["--enforce-eager"], {}, "model_config.enforce_eager", False, "enforce_eager: --enforce-eager is True"),
        (["--num-gpu-blocks-override", "100"], {}, "cache_config.num_gpu_blocks_override", 100, None),
    ],
)
def test_the_last_literal_flag_counts(tmp_path, flags, options, path, value, expected):
    found = inspect(tmp_path, on_workers(f"{R}.{path}", value), flags=[*FLAGS, *flags], **options)
    if expected is None:
        assert found["status"] == "qualified", found["failures"] + found["missing_evidence"]
    else:
        assert any(expected in message for message in found["failures"] + found["missing_evidence"])


SNAPSHOT = f"/cache/hub/models--model--tiny-qwen3/snapshots/{REVISION}"


@pytest.mark.parametrize(
    ("model", "commit", "status"),
    [
        (SNAPSHOT, REVISION, "qualified"),
        (SNAPSHOT, None, "failed"),
        (SNAPSHOT, "d" * 40, "failed"),
        (f"{SNAPSHOT}/", REVISION, "failed"),
        (SNAPSHOT.replace("tiny", "big"), REVISION, "failed"),
        (SNAPSHOT.replace(REVISION, "main"), REVISION, "failed"),
        (f"/cache/../hub{SNAPSHOT}", REVISION, "failed"),
        (SNAPSHOT[1:], REVISION, "failed"),
    ],
)
def test_a_cached_snapshot_of_the_pinned_commit_is_the_model(tmp_path, model, commit, status):
    def change(name, document):
        if name.startswith("fpm-execution-"):
            document[R]["model_config"] |= {"model": model, "loaded_config_commit_hash": commit}

    assert inspect(tmp_path, change)["status"] == status


def test_workers_that_disagree_on_scheduling_are_a_mismatch(tmp_path):
    change = on_workers(f"{R}.scheduler_config.async_scheduling", True)
    failures = inspect(tmp_path / "flag", change, version=1)["failures"]
    assert (
        "worker (0, 0, 0): scheduler_config.async_scheduling: --async-scheduling is False, the worker has True"
        in failures
    )
    flags = [flag for flag in FLAGS if flag != "--no-async-scheduling"]
    with pytest.raises(CollectionError, match="rank 1: engine and workers disagree on async_scheduling"):
        inspect(tmp_path, on_workers(f"{R}.scheduler_config.async_scheduling", True, 1), flags=flags)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema_name", "other"),
        ("schema_version", 2),
        ("collector_provenance", {}),
        ("backend_version", "0.28.0"),
        ("dp_rank", 2),
        ("tp_rank", None),
        ("pp_rank", True),
    ],
)
def test_an_observation_of_something_else_is_refused(tmp_path, path, value):
    with pytest.raises(CollectionError, match="fpm-execution-worker-dp0-tp0-pp0.json"):
        inspect(tmp_path, on_workers(path, value, 0))


def test_one_rank_has_one_observation(tmp_path):
    with pytest.raises(CollectionError, match="a worker rank, once"):
        inspect(tmp_path, on_workers("dp_rank", 0))
    missing = inspect(tmp_path / "other", on_workers("status", "absent", 1))["missing_evidence"]
    assert "no execution observation of worker ranks [(1, 0, 0)]" in missing


def test_another_version_than_pinned_fails(tmp_path):
    document = json.loads(json.dumps(plan_of(**OPEN).document)) | {"runtime_backend_version": "0.28.0"}
    from fpmsdk.collect.plan import CollectionPlan, plan_digest

    plan = CollectionPlan.from_document(document | {"sha256": plan_digest(document)})
    raw = attempt(tmp_path, plan)
    found = inspect_execution(plan, CELL, raw, validate_native(plan, CELL, raw))
    assert "engine version: planned is 0.28.0, observed 0.27.0" in found["failures"]


# --- launch files ---


def launched(tmp_path, **files):
    plan = plan_of()
    cell_dir = attempt(tmp_path, plan).parent
    for name, content in files.items():
        path = cell_dir.parent.parent / "generator-overrides.json" if name == "overrides" else cell_dir / name
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
    return plan, cell_dir


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"run.sh": None}, MissingLaunchError, "run.sh is missing"),
        ({"fpm_env.sh": None}, MissingLaunchError, "fpm_env.sh is missing"),
        ({"run.sh": "echo"}, MissingLaunchError, "holds 0 literal engine commands"),
        ({"run.sh": "engine_command=(bash -c true)"}, MissingLaunchError, "starts bash -c true instead of"),
        (
            {"run.sh": "engine_command=(python3 -m dynamo.vllm --model '$M')"},
            MissingLaunchError,
            "expanded by the shell",
        ),
        ({"run.sh": "engine_command=(python3 -m dynamo.vllm --model x)"}, CollectionError, "--model must be"),
        ({"generator-request.json": "{}"}, CollectionError, "ServiceConfig.model_path must be"),
        ({"generator-request.json": "["}, CollectionError, "invalid JSON"),
        ({"overrides": "{}"}, CollectionError, "not those of the plan"),
    ],
)
def test_launch_files_that_do_not_say_are_missing_and_those_of_another_launch_refused(tmp_path, files, error, message):
    plan, cell_dir = launched(tmp_path, **files)
    with pytest.raises(error, match=message) as found:
        launch_flags(plan, cell_dir)
    assert type(found.value) is error


def test_a_dynamo_label_does_not_make_another_deployment(tmp_path):
    labelled = json.dumps({"K8sConfig": {"extra_env": []}, "generator_dynamo_version": "1.6.1"})
    plan, cell_dir = launched(tmp_path, overrides=labelled)
    assert launch_flags(plan, cell_dir)["--max-num-seqs"] == "16"


GROVE = {"replicas": 1, "template": {"cliques": [{"spec": {"replicas": 2}}, {"spec": {"replicas": 1}}]}}


@pytest.mark.parametrize(
    ("manifest", "nodes"),
    [
        ({"kind": "Pod"}, 1),
        ({"kind": "LeaderWorkerSet", "spec": {"replicas": 1, "leaderWorkerTemplate": {"size": 4}}}, 4),
        ({"kind": "PodCliqueSet", "spec": GROVE}, 3),
        ({"kind": "LeaderWorkerSet", "spec": {"replicas": 2, "leaderWorkerTemplate": {"size": 4}}}, None),
        ({"kind": "LeaderWorkerSet", "spec": {"replicas": 1}}, None),
        ({"kind": "PodCliqueSet", "spec": GROVE | {"replicas": True, "template": {}}}, None),
        ({"kind": "Service"}, None),
        ([], None),
    ],
)
def test_the_manifest_says_how_many_nodes_run(tmp_path, manifest, nodes):
    (tmp_path / "k8s_deploy.yaml").write_text(json.dumps(manifest))
    if nodes is not None:
        assert launched_nodes(tmp_path) == nodes
        return
    with pytest.raises(CollectionError, match="expected one Pod, LeaderWorkerSet or PodCliqueSet"):
        launched_nodes(tmp_path)


# --- CPU affinity ---


def cpus(tmp_path, change=None, nodes=2, **options):
    plan = plan_of(**{**SLURM, **options})
    raw = attempt(tmp_path, plan, change=change)
    return inspect_cpu_affinity(plan, CELL, raw, validate_native(plan, CELL, raw), expected_nodes=nodes)


def on_cpus(process, **fields):
    """A change of the CPU observations of rank 0, or of its launcher."""

    def change(name, document):
        if name.startswith(f"fpm-cpu-{process}") and document["hostname"] == "node0000":
            document |= fields

    return change


def test_processes_within_the_cpus_of_their_launcher_are_qualified(tmp_path):
    found = cpus(tmp_path)
    assert (found["status"], found["missing_evidence"], found["failures"]) == ("qualified", [], [])
    assert found["policy"] == {"executor": "slurm", "cpus_per_task": 4, "cpu_bind": "cores"}
    assert found["nodes"][0] == {
        "hostname": "node0000",
        "worker_ranks": [{"dp_rank": 0, "tp_rank": 0, "pp_rank": 0}],
        "scheduler_dp_ranks": [0],
        "launcher_allowed_cpus": [0, 1, 2, 3],
        "scheduler_main_threads_have_distinct_cpu_capacity": True,
    }


OUTSIDE = {"main_thread_allowed_cpus": [9], "threads": [{"tid": 2, "allowed_cpus": [9]}]}


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("worker", {"schema_version": 2}, "schema_version: expected 1"),
        ("worker", {"collector_provenance": {}}, "of this attempt"),
        ("worker", {"measurement": "before_engine_start"}, "measurement: expected after_warmup"),
        ("worker", {"kind": "other"}, "kind: expected launcher, worker, scheduler"),
        ("worker", {"dp_rank": 5}, "a rank of the topology, once"),
        ("worker", {"dp_rank": True}, "a rank of the topology, once"),
        ("worker", {"hostname": " "}, "hostname: expected non-empty text"),
        ("worker", {"pid": 0}, "pid: expected an integer"),
        ("worker", {"status": "guessed"}, "status: expected observed, partial, unavailable"),
        ("worker", {"main_thread_allowed_cpus": [1, 0]}, "main_thread_allowed_cpus: expected increasing integers"),
        ("worker", {"main_thread_allowed_cpus": [0]}, "no complete snapshot while masks are missing"),
        ("worker", {"thread_ids_after": [2, 7]}, "no complete snapshot"),
        ("worker", {"observer_thread_id": 7}, "no complete snapshot"),
        ("worker", {"errors": ["denied"]}, "no complete snapshot"),
        ("worker", {"thread_errors": [{"tid": 9, "error": "x"}]}, "thread_errors[0].tid"),
        ("worker", {"threads": [{"tid": 9, "allowed_cpus": [0]}]}, "a thread that was listed before, once"),
        ("worker", OUTSIDE, "worker on node0000: its main thread may leave"),
        ("worker", OUTSIDE, "worker on node0000: thread 2 may leave"),
        ("worker", {"hostname": "elsewhere"}, "scheduler of DP rank 0 ran on node0000, its worker on elsewhere"),
        ("scheduler", {"tp_rank": 0}, "a dp_rank of the topology alone"),
        ("scheduler", {"dp_rank": 1}, "file name: expected fpm-cpu-scheduler-dp1.json"),
        ("launcher", {"dp_rank": 0}, "no rank of a launcher"),
        ("launcher", {"requested_cpus_per_task": 8}, "another CPU policy than 4 CPUs, bound to cores"),
        ("launcher", {"cpu_bind": "none"}, "another CPU policy"),
        ("launcher", {"local_gpu_count": 2}, "2 GPUs for 1 workers"),
        ("launcher", {"local_gpu_count": 2}, "2 GPUs, the launch gives a node 1"),
        ("launcher", {"local_gpu_count": None}, "local_gpu_count must be a positive integer"),
        (
            "launcher",
            {"main_thread_allowed_cpus": [0, 1], "threads": [{"tid": 1, "allowed_cpus": [0, 1]}]},
            "2 CPUs, 4 were asked for",
        ),
    ],
)
def test_what_contradicts_the_policy_or_the_launch_fails(tmp_path, kind, fields, reason):
    found = cpus(tmp_path, on_cpus(kind, **fields))
    assert found["status"] == "failed"
    assert any(reason in message for message in found["failures"]), found["failures"]


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("worker", {"status": "absent"}, "no worker observation of ranks [(0, 0, 0)]"),
        ("scheduler", {"status": "absent"}, "no scheduler observation of DP ranks [0]"),
        ("launcher", {"status": "absent"}, "no launcher observation of node0000"),
        ("worker", {"status": "partial", "errors": ["x"]}, "worker (0, 0, 0) on node0000: its snapshot is partial"),
    ],
)
def test_what_was_not_observed_leaves_the_policy_open(tmp_path, kind, fields, reason):
    found = cpus(tmp_path, on_cpus(kind, **fields))
    assert (found["status"], found["failures"]) == ("incomplete", [])
    assert reason in found["missing_evidence"]


def test_hosts_must_be_those_of_the_launch(tmp_path):
    assert any("3 nodes were asked for" in message for message in cpus(tmp_path, nodes=3)["failures"])
    missing = cpus(tmp_path / "other", nodes=None)["missing_evidence"]
    assert missing == ["the launch files do not say how many nodes were asked for"]


def test_schedulers_need_a_cpu_each():
    assert can_run_at_once([[0, 1], [1, 2], [0, 2]]) and not can_run_at_once([[0, 1], [0, 1], [0, 1]])


def test_only_a_required_policy_counts(tmp_path):
    bad = on_cpus("launcher", cpu_bind="none")
    assert inspect(tmp_path / "free", bad)["status"] == "qualified"
    found = inspect(tmp_path / "slurm", bad, **SLURM)
    assert found["failures"] == ["CPU affinity: launcher of node0000: another CPU policy than 4 CPUs, bound to cores"]
    assert found["cpu_affinity"]["expected_nodes"] == 2
    no_manifest = inspect(tmp_path / "bare", after=lambda raw: (raw.parent / "k8s_deploy.yaml").unlink(), **SLURM)
    assert no_manifest["status"] == "incomplete"
