"""The version label and the version that runs: seen once, bound to the plan, and used again only for the same."""

import json
import subprocess
import sys

import pytest

from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import sha256
from fpmsdk.onboard import version_detect
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.plan import create_plan
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.request import load_request, request_id
from fpmsdk.onboard.version_binding import bound_request, frozen_deployment, resolve_request
from fpmsdk.onboard.version_detect import RuntimeVersions, detect_versions

CLUSTER = CollectionDeployment(image="registry/x:1")


def seen(deployment):
    return RuntimeVersions(backend_version="0.31.0", dynamo_version="1.6.1")


def never(deployment):
    raise AssertionError("the image was looked into again")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plan"


@pytest.fixture
def bound(request_of, folder):
    """A request without a version, whose plan is bound."""
    request = request_of("no version")
    create_plan(request, folder)
    resolve_request(request, CLUSTER, folder, detect=seen)
    return request


# Recorded from the peer: identity of the request and of the resolved one, and the digest of the latter's file.
RESOLVED = {
    "no version": (
        "onboarding-6de75606297ff5e5d2c6258b5abc1d902705d1c105e6f459d31b0da896d58133",
        "onboarding-c0026539b7eba4cb38ebc69341dd29c638fa19fa5ed03322303e4577e28f6ad5",
        "2cdc910254a0295928d5e00ed8e7689ffec76f3690cbd21a15dd0a9c4f5552bd",
    ),
    "pending linear": (
        "onboarding-bef4b3582eb339f4f682b965a5b72d47e4261d74bcea82c41a689dc558f0c616",
        "onboarding-725c6bf5385264c8b99cbdd560f3926db01eff9f2e38c10df2e5362ba2bdc385",
        "6aae12e8254408c092afcc8e52e745fd2c5f0cc3cb5d269582f6d20c9afae67e",
    ),
    "no version and no profile": (
        "onboarding-9afc572a1df5aeea9c5a7a5965128cf219f58c7889d82486d66bdc63f193c223",
        "onboarding-811c35ccab7a3663f4ab2089c55119be913f19a1635fc7596563916d868a581d",
        "956cb205bf28de9807526329467ecf8164c3526a24104cfcf46fd0101755f963",
    ),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_the_resolved_request_is_that_of_the_peer(request_of, folder, name):
    request = request_of(name)
    if request.fpm_profile is not None:
        profile = request.fpm_profile.model_dump(mode="json")
        profile["provenance"] = json.dumps({"method": "by hand", "deployment_identity": {}})
        request = request.replaced({"fpm_profile": profile})
    create_plan(request, folder)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    resolved, resolved_folder = resolve_request(request, CLUSTER, folder, detect=seen)
    written = (request_id(request), request_id(resolved), sha256((resolved_folder / "request.yaml").read_bytes()))
    assert written == RESOLVED[name]
    assert json.loads((folder / "runtime-version.json").read_text()) == {
        "schema_version": 1,
        "source_request_id": written[0],
        "resolved_request_id": written[1],
        "deployment": {"executor": "kubernetes", "image": "registry/x:1", "container_mount": []},
        "runtime": {"backend_version": "0.31.0", "dynamo_version": "1.6.1"},
        "dynamo_version": "1.6.1",
    }
    # What was registered is not rewritten, and both plans are intact.
    assert before == {path: path.read_bytes() for path in before}
    check_plan(request, folder)
    check_plan(resolved, resolved_folder)


def test_the_label_stays_and_the_runtime_is_noted_beside_it(request_of, folder):
    request = request_of("bound runtime version")
    request = request.replaced({"identity": {"runtime_framework_version": None}})
    create_plan(request, folder)
    resolved, _ = resolve_request(request, CLUSTER, folder, detect=seen)
    assert resolved.identity.framework_version == "cpu-lab"
    assert resolved.identity.runtime_framework_version == "0.31.0"
    assert resolved.profile_deployment().backend_version == "cpu-lab"


def test_provenance_that_a_person_wrote_stays(request_of, folder):
    request = request_of("no version")
    create_plan(request, folder)
    resolved, _ = resolve_request(request, CLUSTER, folder, detect=seen)
    assert resolved.fpm_profile.provenance == "by hand"


def test_the_binding_is_used_again_without_looking(bound, folder):
    resolved, resolved_folder = resolve_request(bound, CLUSTER, folder, detect=never)
    assert bound_request(bound, CLUSTER, folder) == (resolved, resolved_folder)
    assert frozen_deployment(None, folder) == CLUSTER
    assert frozen_deployment(CLUSTER, resolved_folder) == CLUSTER
    labelled = CollectionDeployment(dynamo_version="9.9")
    assert frozen_deployment(labelled, folder) == CLUSTER.model_copy(update={"dynamo_version": "9.9"})


@pytest.mark.parametrize(
    "options",
    [
        {"image": "registry/x:2"},
        {"namespace": "other"},
        {"executor": "slurm", "image": "registry/x:1"},
        {"executor": "local"},
        {"transport": "ib"},
    ],
)
@pytest.mark.parametrize("below", ["", "runtime-resolved"])
def test_another_deployment_needs_a_fresh_plan(bound, folder, options, below):
    with pytest.raises(OnboardError, match="use the same options, or a fresh plan"):
        frozen_deployment(CollectionDeployment(**options), folder / below)


def test_a_whole_deployment_that_differs_needs_a_fresh_plan(bound, folder):
    with pytest.raises(OnboardError, match="a fresh plan"):
        bound_request(bound, CollectionDeployment(image="registry/x:2"), folder)


@pytest.mark.parametrize("part", ["fpm-checkpoint", "fpm-artifacts"])
def test_what_was_collected_unbound_is_not_bound_later(request_of, folder, part):
    request = request_of("declared linear")
    create_plan(request, folder)
    (folder / part).mkdir()
    (folder / part / "fpm_forward_smoke.json").write_text("{}")
    with pytest.raises(OnboardError, match="collected before the runtime version was recorded"):
        resolve_request(request, CLUSTER, folder, detect=never)


@pytest.mark.parametrize("version", ["", "two words", "  "])
def test_a_version_must_be_a_word(version):
    with pytest.raises(ValueError, match="backend_version"):
        RuntimeVersions(backend_version=version)


def test_a_binding_of_another_plan_is_refused(bound, folder):
    path = folder / "runtime-version.json"
    path.write_text(path.read_text().replace(request_id(bound), "onboarding-" + "0" * 64))
    with pytest.raises(OnboardError, match="resolved for another request"):
        bound_request(bound, CLUSTER, folder)


def test_a_resolved_plan_that_is_not_the_bound_one_is_refused(bound, folder):
    path = folder / "runtime-version.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"resolved_request_id": "onboarding-" + "0" * 64}))
    with pytest.raises(OnboardError, match="is not what runtime-version.json was resolved into"):
        bound_request(bound, CLUSTER, folder)
    with pytest.raises(OnboardError, match="is not the request that runtime-version.json above it"):
        frozen_deployment(CLUSTER, folder / "runtime-resolved")


@pytest.mark.parametrize("path", ["runtime-version.json", "runtime-resolved"])
def test_a_binding_through_links_is_refused(bound, folder, tmp_path, path):
    (folder / path).rename(tmp_path / "elsewhere")
    (folder / path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EvidenceError, match="link"):
        bound_request(bound, CLUSTER, folder)


def test_a_resolved_plan_that_was_modified_is_refused(bound, folder):
    (folder / "runtime-resolved" / "commands.json").write_text("{}")
    with pytest.raises(OnboardError, match=r"commands\.json.*was modified"):
        resolve_request(bound, CLUSTER, folder, detect=never)


def test_a_resolution_that_was_killed_before_its_binding_is_done_again(bound, folder):
    (folder / "runtime-version.json").unlink()
    (folder / "runtime-resolved" / "support-plan.json").unlink()
    resolved, resolved_folder = resolve_request(bound, CLUSTER, folder, detect=seen)
    check_plan(resolved, resolved_folder)
    assert load_request(resolved_folder / "request.yaml") == resolved


# --- detection ---


class Cluster:
    """Answers commands as a cluster would, and keeps them."""

    def __init__(self, answers):
        self.answers, self.commands, self.manifest = answers, [], None

    def __call__(self, command, text):
        self.commands.append(command)
        action = next((word for word in command if word in self.answers), command[0])
        if action == "create":
            self.manifest = json.loads(text)
        answer = self.answers.get(action, "")
        if isinstance(answer, Exception):
            raise answer
        return answer


TOLD = 'FPMSDK_RUNTIME_VERSION={"backend_version": "0.31.0", "dynamo_version": "1.6.1"}\n'
ENDED = json.dumps({"status": {"containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}})


def test_an_image_on_kubernetes_is_looked_into_by_one_pod_that_is_deleted():
    deployment = CollectionDeployment(image="registry/x:1", namespace="team", image_pull_secret="secret")
    cluster = Cluster({"create": "", "wait": "", "logs": "noise\n" + TOLD, "get": ENDED, "delete": ""})
    assert detect_versions(deployment, run=cluster) == seen(deployment)
    spec = cluster.manifest["spec"]
    name = cluster.manifest["metadata"]["name"]
    assert name.startswith("ais-fpm-version-") and len(name) == len("ais-fpm-version-") + 12
    assert spec["activeDeadlineSeconds"] == 240 and spec["imagePullSecrets"] == [{"name": "secret"}]
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "1", "memory": "128Mi"}}
    assert all(command[:3] == ["kubectl", "--namespace", "team"] for command in cluster.commands)
    assert "delete" in cluster.commands[-1] and name in cluster.commands[-1]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"logs": "nothing"}, "told 0 versions"),
        ({"logs": TOLD + TOLD}, "told 2 versions"),
        ({"logs": 'FPMSDK_RUNTIME_VERSION={"backend_version": ""}'}, "backend_version"),
        ({"logs": "FPMSDK_RUNTIME_VERSION=["}, "invalid JSON"),
        ({"get": ENDED.replace("0", "1"), "logs": "no package"}, "exit code 1: no package"),
        ({"get": "{}"}, "does not tell the exit code"),
        (
            {
                "wait": OnboardError("timed out"),
                "get": json.dumps(
                    {
                        "status": {
                            "containerStatuses": [
                                {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
                            ],
                            "conditions": [{"status": "False", "reason": "ContainersNotReady"}],
                        }
                    }
                ),
            },
            "timed out; pod status: ErrImagePull: no such image; ContainersNotReady",
        ),
        ({"wait": OnboardError("timed out"), "get": "nonsense"}, "timed out$"),
    ],
)
def test_a_pod_that_tells_no_version_is_an_error_and_is_deleted(answers, reason):
    cluster = Cluster({"create": "", "wait": "", "logs": TOLD, "get": ENDED, "delete": ""} | answers)
    with pytest.raises(OnboardError, match=reason):
        detect_versions(CLUSTER, run=cluster)
    assert "delete" in cluster.commands[-1]


def test_a_pod_that_was_not_created_is_not_deleted():
    cluster = Cluster({"create": OnboardError("connection refused"), "delete": ""})
    with pytest.raises(OnboardError, match="connection refused"):
        detect_versions(CLUSTER, run=cluster)
    assert len(cluster.commands) == 1


def test_an_image_in_slurm_is_looked_into_by_a_step_without_gpus():
    deployment = CollectionDeployment(executor="slurm", image="x.sqsh", container_mount=["/a:/b", "/c"])
    cluster = Cluster({"srun": TOLD})
    assert detect_versions(deployment, run=cluster, environment={"SLURM_JOB_ID": "7"}) == seen(deployment)
    assert cluster.commands[0][:-3] == [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--gpus=0",
        "--overlap",
        "--container-image=x.sqsh",
        "--container-mounts=/a:/b,/c",
    ]
    assert cluster.commands[0][-3:-1] == ["python3", "-c"]


def test_slurm_needs_an_allocation_and_a_cluster_an_image():
    with pytest.raises(OnboardError, match="SLURM_JOB_ID"):
        detect_versions(CollectionDeployment(executor="slurm", image="x"), environment={})
    with pytest.raises(OnboardError, match="--image"):
        detect_versions(CollectionDeployment(), run=never)


def test_a_cluster_command_that_fails_shows_its_diagnostic(monkeypatch, tmp_path):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho 'the server could not be reached' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OnboardError, match="the server could not be reached"):
        detect_versions(CLUSTER)
    kubectl.unlink()
    with pytest.raises(OnboardError, match="No such file or directory: 'kubectl'"):
        detect_versions(CLUSTER)


def test_the_script_tells_what_is_installed(monkeypatch, tmp_path):
    """The script that runs in an image, run here with an engine beside it."""
    for name, version in (("vllm", "0.31.0"), ("ai_dynamo", "1.6.1")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    script = version_detect._SCRIPT
    told = subprocess.check_output([sys.executable, "-c", script], env={"PYTHONPATH": str(tmp_path)}, text=True)
    assert version_detect._told(told) == seen(None)
    # The local executor reads the same packages in this process.
    monkeypatch.syspath_prepend(tmp_path)
    assert detect_versions(CollectionDeployment(executor="local")) == seen(None)


def test_a_local_collection_needs_an_engine():
    with pytest.raises(OnboardError, match="vllm is not installed"):
        detect_versions(CollectionDeployment(executor="local"))


def test_the_fake_engine_has_the_version_that_it_is_told_to_report():
    fake = CollectionDeployment(executor="fake")
    assert detect_versions(fake, environment={}).document() == {"backend_version": "0.27.0"}
    assert detect_versions(fake, environment={"FPMSDK_FAKE_VERSION": "0.31.0"}).backend_version == "0.31.0"
