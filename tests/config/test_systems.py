"""How systems roots are named: packaged, home, relative, environment, repeated, absent."""

import pytest

from fpmsdk.config import packaged_systems_root, resolve_systems_paths, systems
from fpmsdk.config.systems import installed_systems_roots
from fpmsdk.errors import SystemsPathError


def install(site, monkeypatch, package, *, with_data=True):
    """An importable data package that fails when it is really imported."""
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("raise AssertionError('imported')")
    if with_data:
        (site / package / "systems").mkdir()
    monkeypatch.syspath_prepend(str(site))
    return str(site / package / "systems")


@pytest.fixture(autouse=True)
def no_data_packages(monkeypatch):
    # Names that no installed package has.
    monkeypatch.setattr(systems, "DATA_PACKAGES", {"first": "fpmsdk_test_first", "second": "fpmsdk_test_second"})


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    return install(tmp_path / "site", monkeypatch, "fpmsdk_test_second")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in ("FPMSDK_SYSTEMS_PATH", "AICONFIGURATOR_SYSTEMS_PATH"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("name", ["default", "Default", "DEFAULT"])
def test_default_in_any_case_is_the_packaged_root(name, packaged):
    assert packaged_systems_root() == packaged
    assert resolve_systems_paths([name]) == [packaged]


def test_the_first_data_package_that_holds_data_counts(packaged, monkeypatch, tmp_path):
    install(tmp_path / "empty", monkeypatch, "fpmsdk_test_first", with_data=False)
    assert installed_systems_roots() == {"first": None, "second": packaged}
    (tmp_path / "empty" / "fpmsdk_test_first" / "systems").mkdir()
    assert packaged_systems_root() == str(tmp_path / "empty" / "fpmsdk_test_first" / "systems")


def test_default_without_data_says_how_to_get_some():
    assert packaged_systems_root() is None
    with pytest.raises(SystemsPathError, match=r"'default' found no performance data.*fpmsdk\[data\]"):
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


def test_nothing_given_is_the_default(packaged):
    assert resolve_systems_paths() == [packaged]


def test_nothing_given_and_no_data_is_nothing():
    assert resolve_systems_paths() == []


def test_the_environment_is_the_default_before_installed_data_and_ours_comes_first(packaged, monkeypatch, tmp_path):
    monkeypatch.setenv("AICONFIGURATOR_SYSTEMS_PATH", "/")
    assert resolve_systems_paths() == resolve_systems_paths(["default"]) == ["/"]
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path))
    assert resolve_systems_paths() == resolve_systems_paths(["default"]) == [str(tmp_path)]


def test_a_variable_may_say_default(packaged, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", "default")
    assert resolve_systems_paths() == [packaged]


def test_an_empty_environment_variable_counts_as_unset(packaged, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", "")
    assert resolve_systems_paths() == [packaged]


def test_a_wrong_environment_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", "/no/such/directory")
    with pytest.raises(SystemsPathError, match="FPMSDK_SYSTEMS_PATH.*/no/such/directory"):
        resolve_systems_paths()
