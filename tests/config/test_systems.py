"""How systems roots are named: packaged, home, relative, environment, repeated, absent."""

import pytest

from fpmsdk.config import packaged_systems_root, resolve_systems_paths, systems
from fpmsdk.errors import SystemsPathError


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    root = tmp_path / "packaged"
    root.mkdir()
    monkeypatch.setattr(systems, "PACKAGED_ROOT", root)
    return str(root)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in ("FPMSDK_SYSTEMS_PATH", "AICONFIGURATOR_SYSTEMS_PATH"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("name", ["default", "Default", "DEFAULT"])
def test_default_in_any_case_is_the_packaged_root(name, packaged):
    assert packaged_systems_root() == packaged
    assert resolve_systems_paths([name]) == [packaged]


def test_default_without_packaged_data_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(systems, "PACKAGED_ROOT", tmp_path / "absent")
    assert packaged_systems_root() is None
    with pytest.raises(SystemsPathError, match="default"):
        resolve_systems_paths(["default"])


def test_home_and_relative_entries_become_absolute(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_systems_paths(["~/data"]) == resolve_systems_paths(["data"]) == [str(tmp_path / "data")]


def test_repeats_are_dropped_and_the_order_is_kept(packaged, tmp_path):
    entries = [str(tmp_path), "default", f"{tmp_path}/.", packaged, "/"]
    assert resolve_systems_paths(entries) == [str(tmp_path), packaged, "/"]


@pytest.mark.parametrize("entry", ["", 5, None])
def test_entries_are_nonempty_strings(entry):
    with pytest.raises(SystemsPathError, match="non-empty strings"):
        resolve_systems_paths([entry])


def test_an_entry_must_be_a_directory(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "absent"):
        with pytest.raises(SystemsPathError, match=f"not a directory: {tmp_path}/{name}") as caught:
            resolve_systems_paths([f"{tmp_path}/{name}"])
        assert caught.value.path == "systems_paths"


def test_nothing_given_is_the_packaged_root_or_nothing(packaged, monkeypatch, tmp_path):
    assert resolve_systems_paths() == [packaged]
    monkeypatch.setattr(systems, "PACKAGED_ROOT", tmp_path / "absent")
    assert resolve_systems_paths() == []


def test_the_environment_replaces_the_packaged_root_and_ours_comes_first(packaged, monkeypatch, tmp_path):
    monkeypatch.setenv("AICONFIGURATOR_SYSTEMS_PATH", "/")
    assert resolve_systems_paths() == ["/"]
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path))
    assert resolve_systems_paths() == [str(tmp_path)]
    assert resolve_systems_paths(["default"]) == [packaged]


def test_an_empty_environment_variable_counts_as_unset(packaged, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", "")
    assert resolve_systems_paths() == [packaged]


def test_a_wrong_environment_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", "/no/such/directory")
    with pytest.raises(SystemsPathError, match="/no/such/directory"):
        resolve_systems_paths()
