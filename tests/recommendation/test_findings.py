"""Review findings of the onboarding workflow that are about searches (onboarding.md section 9)."""

import os
import sys
from pathlib import Path

import pytest

import fpmsdk
from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.config import RecommendConfig
from fpmsdk.recommendation.executors.processes import ProcessWorkers
from fpmsdk.recommendation.space import build_branches
from tests.recommendation.measured import SYSTEM, VERSION, measured_in, profile


def space(place, *roles):
    """What is searched of both modes where the profile has a deployment for each of these roles."""
    measured_in(place)
    measured = profile(place)
    (deployment,) = measured["deployments"]
    measured["deployments"] = [deployment | {"worker_type": role} for role in roles]
    timing = {"estimation_mode": "fpm_interpolation", "estimator_config": {"fpm_interpolation": {"method": "direct"}}}
    engine = {"model": measured["model"], "hardware": SYSTEM, "backend": "vllm", "backend_version": VERSION, **timing}
    engine["systems_paths"] = [str(place / "systems")]
    cache = {"kv_cache": {"capacity": {"type": "fixed", "blocks": 64}}}
    workers = dict.fromkeys(("aggregated", "prefill", "decode"), cache)
    mode = {"choices": ["aggregated", "disaggregated"]}
    document = {
        "engine": engine | {"mode": mode, "fpm_profile": measured, "context_length": 128, "workers": workers},
        "optimization": {"target": "throughput", "constraints": {"max_candidate_gpus": 2}},
    }
    return build_branches(RecommendConfig.from_source(document))


@pytest.mark.parametrize(
    "roles, searched, skipped",
    [(["aggregated"], "aggregated", "disaggregated"), (["prefill", "decode"], "disaggregated", "aggregated")],
)
def test_finding_9_a_mode_without_deployments_of_its_roles_is_skipped_and_the_others_go_on(
    tmp_path, roles, searched, skipped
):
    found = space(tmp_path, *roles)
    assert [branch.mode for branch in found.branches] == [searched]
    (entry,) = found.skipped
    assert entry["mode"] == skipped and entry["reasons"]


def test_finding_9_without_any_mode_each_one_is_named_with_its_reason(tmp_path):
    with pytest.raises(OnboardError) as caught:
        space(tmp_path, "prefill")
    assert "no deployment is viable" in str(caught.value)
    assert "aggregated: " in str(caught.value) and "disaggregated: " in str(caught.value)


def test_finding_21_workers_import_the_installed_package_and_nothing_of_the_caller(tmp_path, monkeypatch):
    # A source tree in which the package cannot work, as the folder and on the path of the caller.
    (tmp_path / "fpmsdk").mkdir()
    (tmp_path / "fpmsdk/__init__.py").write_text("raise ImportError('the sources of the caller')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    asked = ("__import__('fpmsdk').__file__", "__import__('sys').path", "dict(__import__('os').environ)")
    with ProcessWorkers(1, timeout_seconds=60.0) as workers:
        package, path, environment = [workers.submit(eval, text).result() for text in asked]
    assert Path(package) == Path(fpmsdk.__file__)
    assert str(tmp_path) not in path and "" not in path
    assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
