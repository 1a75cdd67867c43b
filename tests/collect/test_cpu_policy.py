"""CPUs of a Slurm task: frozen, inherited, checked against the allocation (collector.md sections 4.4 and 12)."""

import json

import pytest

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.cpu_policy import allocated_cpus, check_allocation, resolve_cpu_policy
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.documents.canonical import write_document
from fpmsdk.errors import EvidenceError, OnboardError


def archive(tmp_path, document, cpus, bind):
    """A campaign of before, with this policy."""
    options = document["options"]
    options.update(executor="slurm", slurm_container_image="i", slurm_cpus_per_task=cpus, slurm_cpu_bind=bind)
    for name in ("slurm_cpus_per_task", "slurm_cpu_bind"):
        if options[name] is None:
            del options[name]
    document["sha256"] = plan_digest(document)
    write_document(tmp_path / "fpm_forward.json", {"plan_sha256": document["sha256"]})
    campaign = tmp_path / document["sha256"][:16]
    campaign.mkdir()
    write_document(campaign / "collection-plan.json", document)
    return CollectionPlan.from_document(document)


def resolve(tmp_path, cpus=None, bind=None, *, resume=True):
    return resolve_cpu_policy(cpus, bind, resume=resume, checkpoint_dir=tmp_path, artifact_root=tmp_path, smoke=False)


@pytest.mark.parametrize(
    ("archived", "given", "expected"),
    [
        ((32, "none"), (None, None), (32, "none")),
        ((32, "none"), (8, None), (8, "none")),
        ((None, None), (None, None), (None, None)),
        ((None, None), (32, None), (32, None)),
    ],
)
def test_a_resumed_campaign_inherits_its_policy(tmp_path, dense_plan, archived, given, expected):
    archive(tmp_path, dense_plan, *archived)
    assert resolve(tmp_path, *given) == expected


def test_new_campaigns_get_the_default_policy(tmp_path, dense_plan):
    assert resolve(tmp_path) == (16, "cores")
    archive(tmp_path, dense_plan, 32, "none")
    assert resolve(tmp_path, resume=False) == (16, "cores")


def test_an_archived_plan_must_be_that_of_the_checkpoint(tmp_path, dense_plan):
    plan = archive(tmp_path, dense_plan, 32, "none")
    path = tmp_path / plan.sha256[:16] / "collection-plan.json"
    other = json.loads(path.read_text())
    other["options"]["slurm_cpus_per_task"] = 64
    write_document(path, other)
    with pytest.raises(OnboardError, match="sha256"):
        resolve(tmp_path)
    other["sha256"] = plan_digest(other)
    write_document(path, other)
    with pytest.raises(EvidenceError, match="of the checkpoint"):
        resolve(tmp_path)


def test_a_plan_without_a_policy_launches_nothing_and_loses_nothing(tmp_path, dense_plan):
    plan = archive(tmp_path, dense_plan, None, None)
    raw = tmp_path / plan.sha256[:16] / "cells" / plan.cells[0].cell_id / "raw"
    raw.mkdir(parents=True)
    with pytest.raises(OnboardError, match="has no CPU policy"):
        run_campaign(
            plan,
            executor=None,
            artifact_root=tmp_path,
            checkpoint_dir=tmp_path / "checkpoint",
            database_root=tmp_path / "data",
        )
    assert raw.is_dir()


@pytest.mark.parametrize(
    ("words", "hosts", "expected"),
    [("72(x2),36", "abc", [72, 72, 36]), ("8", "a", [8]), ("4, 4", "ab", [4, 4])],
)
def test_allocated_cpus_by_host(words, hosts, expected):
    assert list(allocated_cpus(words, list(hosts)).values()) == expected


@pytest.mark.parametrize(
    ("words", "hosts", "reason"),
    [("72(x2)", "abc", "describes 2 hosts"), ("0", "a", "expected counts"), ("72x2", "ab", "expected counts")],
)
def test_a_malformed_allocation_is_refused(words, hosts, reason):
    with pytest.raises(OnboardError, match=reason):
        allocated_cpus(words, list(hosts))


@pytest.mark.parametrize(
    ("cpus", "per_task", "schedulers", "reason"),
    [
        ({"a": 16, "b": 8}, 16, 1, "host b has 8 allocated CPUs"),
        ({"a": 16}, 2, 4, "fewer than the 4 schedulers"),
        ({"a": 16}, 16, 8, None),
    ],
)
def test_a_policy_must_fit_into_the_allocation(cpus, per_task, schedulers, reason):
    if reason is None:
        check_allocation(cpus, per_task, local_schedulers=schedulers)
    else:
        with pytest.raises(OnboardError, match=reason):
            check_allocation(cpus, per_task, local_schedulers=schedulers)
