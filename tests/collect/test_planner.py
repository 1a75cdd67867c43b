"""Plans equal those of the upstream collector for the same arguments (collector.md sections 1 and 12)."""

import base64
import hashlib
import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.planner import build_plan
from fpmsdk.collect.revision import git_revision, installed_revision, source_revision
from fpmsdk.errors import MissingCapabilityError, OnboardError
from fpmsdk.sample.tiny import write_systems

FAKE_PREFIXES = "K8sConfig.extra_env=[{name: DYN_BENCH_PREFILL_REAL_SEED, value: 'off'}]"
PLANS = [
    "declared_profile",
    "decode_role",
    "dense_runtime",
    "fp8_caches",
    "hybrid_native",
    "mla_pinned",
    "moe",
    "pending_profile",
    "slurm_points",
]


@pytest.fixture
def planned(peer_plans, tmp_path, monkeypatch):
    """Plan what the upstream collector planned, with further arguments or changes to its inputs."""
    # The memory of these GPUs as the upstream package describes it.
    systems = Path(write_systems(tmp_path / "systems"))
    for system, capacity in (("h200_sxm", 151397597184), ("gb200", 198674743296)):
        text = (systems / "tiny_gpu.yaml").read_text()
        (systems / f"{system}.yaml").write_text(_with_capacity(text, capacity))
    # As there, the version is none whose timings are kept, so that no operator graph estimates memory.
    (systems / "query_versions.yaml").write_text('defaults: {vllm: {current: "0.24.0"}}')
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(systems))
    monkeypatch.setenv("FPM_COLLECTOR_SOURCE_REVISION", "golden")

    def plan(name, *further, **changes):
        inputs = {**peer_plans[name], **changes}
        arguments = [*inputs["arguments"], *further]
        for key, option in (
            ("config", "--fpm-model-config"),
            ("profile", "--fpm-model-profile"),
            ("points", "--fpm-benchmark-points-file"),
        ):
            if inputs[key] is not None:
                (tmp_path / f"{key}.json").write_text(json.dumps(inputs[key]))
                arguments += [option, str(tmp_path / f"{key}.json")]
        return build_plan(parse_arguments(arguments))

    return plan


def _with_capacity(text, capacity):
    return re.sub(r"mem_capacity: [^,}]*", f"mem_capacity: {capacity}", text)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_the_digest_and_cells_of_the_upstream_collector(peer_plans, planned, name):
    plan, expected = planned(name), peer_plans[name]["plan"]
    for key in ("topology_memory_admission", "sha256"):
        assert plan.document.keys() == expected.keys(), key
    for key in expected.keys() - {"topology_memory_admission", "sha256"}:
        assert plan.document[key] == expected[key], key
    assert plan.sha256 == expected["sha256"]


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("dense_runtime", ["--fpm-enable-wideep", "true"], "vLLM has none"),
        ("dense_runtime", ["--fpm-attention-backend", "FLASHINFER"], "only auto is measured"),
        ("dense_runtime", ["--fpm-enforce-eager"], "models that are measured without graphs"),
        ("dense_runtime", ["--fpm-decoder-replay"], "only for DeepSeek-V4.1"),
        ("dense_runtime", ["--fpm-weight-quantizations", "fp8"], "the checkpoint has bfloat16"),
        ("dense_runtime", ["--fpm-kv-cache-dtypes", "int8"], "vLLM has no int8 cache"),
        ("dense_runtime", ["--fpm-kv-cache-dtypes", "fp4"], "use auto"),
        ("dense_runtime", ["--fpm-parallel-presets", "dep"], "dense models run as tp only"),
        ("hybrid_native", ["--generator-set", FAKE_PREFIXES], "needs real prefixes"),
        ("pending_profile", ["--fpm-max-model-len", "8193"], "exceeds the 8192 tokens of the profile"),
        ("pending_profile", ["--fpm-max-num-seqs", "65"], "max_batch_size: 65 exceeds 64"),
        ("pending_profile", ["--fpm-max-num-batched-tokens", "8192"], "max_num_tokens: 8192 exceeds 4096"),
        ("pending_profile", ["--fpm-kv-cache-dtypes", "fp8"], "kv_cache_dtype: measured 'fp8', profile 'bfloat16'"),
        ("pending_profile", ["--fpm-backend-version", "0.28.0"], "no deployment"),
        ("pending_profile", ["--fpm-backend-version", "a b"], "cannot name a folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(planned, name, arguments, reason):
    with pytest.raises(OnboardError, match=reason):
        planned(name, *arguments)


def test_a_profile_that_declares_more_than_the_memory_leaves_no_topology(peer_plans, planned):
    profile = json.loads(json.dumps(peer_plans["declared_profile"]["profile"]))
    for deployment in profile["deployments"]:
        deployment["resources"]["weights_bytes"] = 10**12
    with pytest.raises(OnboardError, match="no topology fits into the memory of h200_sxm"):
        planned("declared_profile", profile=profile)


def test_without_a_version_label_there_is_no_plan(planned, peer_plans):
    arguments = peer_plans["dense_runtime"]["arguments"]
    place = arguments.index("--fpm-backend-version")
    with pytest.raises(MissingCapabilityError, match="--fpm-backend-version or --fpm-model-profile"):
        planned("dense_runtime", arguments=arguments[:place] + arguments[place + 2 :])


@pytest.mark.parametrize("architecture", ["DeepseekV41ForCausalLM", "Glm5NextForConditionalGeneration"])
def test_models_that_need_adapters_of_their_engine_are_refused(planned, peer_plans, architecture):
    config = {**peer_plans["dense_runtime"]["config"], "architectures": [architecture]}
    with pytest.raises(MissingCapabilityError, match="pinned to one engine's sources"):
        planned("dense_runtime", config=config)


def test_a_source_tree_is_known_by_its_commit(monkeypatch):
    monkeypatch.delenv("FPM_COLLECTOR_SOURCE_REVISION", raising=False)
    revision = source_revision()
    assert revision.startswith("installed:fpmsdk==") or len(revision.split("-dirty-")[0]) == 40


@pytest.fixture
def wheel(tmp_path):
    """An installed wheel of two files, and a way to write its record."""
    package, info = tmp_path / "fpmsdk", tmp_path / "fpmsdk-1.2.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fpmsdk\nVersion: 1.2\n")
    (package / "__init__.py").write_text("")
    (package / "plan.py").write_text("X = 1\n")

    def record(*further):
        rows = []
        for path in sorted(package.iterdir()):
            hashed = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
            rows.append(f"fpmsdk/{path.name},sha256={hashed},{path.stat().st_size}")
        (info / "RECORD").write_text("\n".join([*rows, "../../bin/fpmsdk,,", *further]) + "\n")
        return metadata.Distribution.at(info)

    return package, record


def test_an_installed_wheel_is_known_by_its_files(wheel):
    package, record = wheel
    revision = installed_revision(record("fpmsdk/__pycache__/plan.cpython-311.pyc,,"))
    assert revision.startswith("installed:fpmsdk==1.2:record-sha256:")
    assert installed_revision(record()) == revision
    (package / "plan.py").write_text("X = 2\n")
    assert installed_revision(record()) != revision


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda package: (package / "plan.py").write_text("X = 2\n"), "not the file that was installed"),
        (lambda package: (package / "plan.py").unlink(), "cannot be read"),
    ],
)
def test_a_damaged_installation_has_no_revision(wheel, damage, reason):
    package, record = wheel
    distribution = record()
    damage(package)
    with pytest.raises(OnboardError, match=reason):
        installed_revision(distribution)


def test_a_repeated_entry_of_a_record_is_refused(wheel):
    _, record = wheel
    first = record().read_text("RECORD").splitlines()[0]
    with pytest.raises(OnboardError, match="malformed entry"):
        installed_revision(record(first))


def test_a_checkout_is_known_by_its_commit_and_changes(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    (tmp_path / "untracked").write_text("artifacts of campaigns")
    clean = git_revision(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "file").write_text("b")
    assert re.fullmatch(f"{clean}-dirty-[0-9a-f]{{12}}", git_revision(tmp_path))


def test_without_wheel_and_checkout_there_is_no_revision(tmp_path):
    with pytest.raises(OnboardError, match="set FPM_COLLECTOR_SOURCE_REVISION"):
        git_revision(tmp_path)
