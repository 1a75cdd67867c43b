"""Which executor a plan asks for."""

import pytest

from fpmsdk.collect.executors import executor_factory
from fpmsdk.errors import MissingCapabilityError


@pytest.mark.parametrize("command", [None, "", "  "])
def test_the_local_executor_has_no_engine_by_default(monkeypatch, command):
    monkeypatch.delenv("FPMSDK_LOCAL_ENGINE", raising=False)
    if command is not None:
        monkeypatch.setenv("FPMSDK_LOCAL_ENGINE", command)
    with pytest.raises(MissingCapabilityError, match="FPMSDK_LOCAL_ENGINE is not set"):
        executor_factory("local")


@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
def test_clusters_are_planned_and_not_driven(name):
    with pytest.raises(MissingCapabilityError, match=f"executor {name}: this release plans and renders"):
        executor_factory(name)
