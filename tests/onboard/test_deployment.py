"""Deployment options: which executor takes which, and their forms."""

import pytest

from fpmsdk.documents.strict import checked
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.deployment import CollectionDeployment

SLURM = {"executor": "slurm", "image": "registry/image:1"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"image": "registry/image@sha256:12", "namespace": "team-a", "model_cache": "pvc:/models:Qwen/Qwen3"},
        {"model_cache": "pvc", "transport": "ib", "image_pull_secret": "pull.secret", "dynamo_version": "1.6.1"},
        {"model_cache": "pvc::sub"},
        {**SLURM, "container_mount": ["/a:/b:ro"], "cpus_per_task": 16, "cpu_bind": "cores"},
        {"executor": "local"},
        {"executor": "fake", "image": "any:1"},
    ],
)
def test_options_that_belong_together_are_kept(options):
    document = CollectionDeployment.model_validate(options).document()
    assert {key: document[key] for key in options} == options


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"executor": "slurm"}, "needs --image"),
        ({**SLURM, "namespace": "a"}, "does not take --namespace"),
        ({**SLURM, "model_cache": "a"}, "does not take --model-cache"),
        ({**SLURM, "image_pull_secret": "a"}, "does not take --image-pull-secret"),
        ({"container_mount": ["/a:/b"]}, "does not take --container-mount"),
        ({"cpus_per_task": 4}, "does not take --cpus-per-task"),
        ({"cpu_bind": "none"}, "does not take --cpu-bind"),
        ({"executor": "local", "namespace": "a"}, "does not take --namespace"),
        ({"executor": "ray"}, "executor"),
        ({"image": "two words"}, "image"),
        ({"image": ""}, "image"),
        ({**SLURM, "container_mount": ["/a,/b"]}, "commas"),
        ({**SLURM, "container_mount": [" "]}, "container_mount"),
        ({**SLURM, "container_mount": ["/a\n"]}, "control characters"),
        ({**SLURM, "cpus_per_task": 0}, "cpus_per_task"),
        ({**SLURM, "cpus_per_task": True}, "cpus_per_task"),
        ({**SLURM, "cpu_bind": "sockets"}, "cpu_bind"),
        ({"namespace": "Team"}, "DNS label"),
        ({"namespace": "a" * 64}, "DNS label"),
        ({"image_pull_secret": ".".join(["a" * 60] * 5)}, "DNS subdomain"),
        ({"model_cache": "a:/b:c:d"}, "NAME"),
        ({"model_cache": "A_b"}, "NAME"),
        ({"model_cache": "a:relative"}, "absolute"),
        ({"model_cache": "a:/b:c\n"}, "line breaks"),
        ({"dynamo_version": " "}, "dynamo_version"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_other_options_are_refused_by_name(options, found):
    with pytest.raises(OnboardError, match=found):
        checked(CollectionDeployment, options, "deployment")


def test_the_dynamo_label_is_no_part_of_the_identity():
    plain = CollectionDeployment(image="i:1")
    assert CollectionDeployment(image="i:1", dynamo_version="1.6.1").identity() == plain.identity()
