"""The cache directory in good and bad homes, each in its own process: one warning at most, no failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fpmsdk

PACKAGE = Path(fpmsdk.__file__).parent

ASK_TWICE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fpmsdk.paths import cache_dir
    found = cache_dir()
    assert cache_dir() == found
print(found)
for warning in caught:
    print(warning.category.__name__, warning.message)
"""

# A user that the system does not know has no home to fall back on.
NO_HOME = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""


def ask(script=ASK_TWICE, prefix="", package_parent=PACKAGE.parent, **variables):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package_parent)} | {
        name: str(value) for name, value in variables.items()
    }
    ran = subprocess.run(
        [sys.executable, "-B", "-c", prefix + script],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def test_the_variable_names_the_directory_and_it_is_created(tmp_path):
    wanted = tmp_path / "deep" / "cache"
    assert ask(FPMSDK_CACHE_DIR=wanted, HOME=tmp_path) == [str(wanted)]
    assert wanted.is_dir()


def test_without_the_variable_the_user_cache_directory_is_taken(tmp_path):
    (found,) = ask(HOME=tmp_path)
    assert found.startswith(str(tmp_path))
    assert Path(found).name == "fpmsdk"


@pytest.mark.parametrize("variables", [{}, {"FPMSDK_CACHE_DIR": ""}, {"FPMSDK_CACHE_DIR": "~/cache"}])
def test_a_missing_home_falls_back_to_the_temporary_directory_with_one_warning(tmp_path, variables):
    found, warning = ask(prefix=NO_HOME, TMPDIR=tmp_path, **variables)
    assert found == str(tmp_path / f"fpmsdk-{os.getuid()}")
    assert warning.startswith("RuntimeWarning no usable cache directory")
    assert "FPMSDK_CACHE_DIR" in warning


def test_an_unusable_choice_falls_back_to_the_temporary_directory_with_one_warning(tmp_path):
    (tmp_path / "file").touch()
    found, warning = ask(FPMSDK_CACHE_DIR=tmp_path / "file" / "cache", HOME=tmp_path, TMPDIR=tmp_path)
    assert found == str(tmp_path / f"fpmsdk-{os.getuid()}")
    assert str(tmp_path / "file" / "cache") in warning


def test_the_temporary_directory_of_another_user_is_not_taken(tmp_path):
    (tmp_path / f"fpmsdk-{os.getuid()}").mkdir()
    other_owner = "import pathlib, types; pathlib.Path.lstat = lambda path: types.SimpleNamespace(st_uid=-1)"
    found, warning = ask(prefix=other_owner, TMPDIR=tmp_path, FPMSDK_CACHE_DIR="/dev/null/cache")
    assert found == "None"
    assert "nothing is cached" in warning


USE_EVERYTHING = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fpmsdk.cli.demo import run_demo
    from fpmsdk.paths import cache_dir
    cache_dir()
    assert run_demo()["replay"]["ttft_ms"]["p50"]["replayed"] > 0
import fpmsdk
print(fpmsdk.__file__)
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


@pytest.fixture
def read_only_install(tmp_path):
    parent = tmp_path / "site"
    shutil.copytree(PACKAGE, parent / "fpmsdk", ignore=shutil.ignore_patterns("__pycache__"))
    entries = [parent, *parent.rglob("*")]
    for entry in entries:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    yield parent
    for entry in entries:
        entry.chmod(0o755 if entry.is_dir() else 0o644)


def test_a_read_only_install_without_home_or_cache_works_with_one_warning_and_stays_as_it_was(
    tmp_path, read_only_install
):
    before = sorted(read_only_install.rglob("*"))
    found, warning = ask(USE_EVERYTHING, NO_HOME, read_only_install, TMPDIR=tmp_path)
    assert Path(found).parent.parent == read_only_install
    assert warning.startswith("RuntimeWarning no usable cache directory")
    assert sorted(read_only_install.rglob("*")) == before
