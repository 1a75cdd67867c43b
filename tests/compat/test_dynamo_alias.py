"""The name `aisimulate_core` for fpmsdk: found both ways, lazy, and refused where it would be half of a mixture."""

import json
import subprocess
import sys

import pytest

from fpmsdk.compat.dynamo import alias_directory

HEAVY = (
    "numba",
    "pyarrow",
    "pandas",
    "yaml",
    "pydantic",
    "fpmsdk.perfmodel.oplevel",
    "fpmsdk.opgraph",
    "fpmsdk.perfdb",
)
CONFIG = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "estimation_mode": "fpm_regression"}


def run(program, *, path=()):
    """What a fresh interpreter prints."""
    code = "import sys\n" + "".join(f"sys.path.insert(0, {str(entry)!r})\n" for entry in path) + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ALIASES = {
    "distribution": ("", [alias_directory()]),
    "install": ("from fpmsdk.compat.dynamo import install\ninstall()\ninstall()\n", []),
}


@pytest.fixture(params=ALIASES)
def alias(request):
    program, path = ALIASES[request.param]
    return lambda body: run(program + body, path=path)


def test_the_names_that_clients_import(alias):
    program = """
import aisimulate_core, fpmsdk
from aisimulate_core.sdk import ForwardPassPerfModelConfig, RustForwardPassPerfModel
from aisimulate_core.sdk.engine import compile_engine
from aisimulate_core._native import RustForwardPassPerfModel as Native
assert RustForwardPassPerfModel is fpmsdk.ForwardPassPerfModel
assert ForwardPassPerfModelConfig is fpmsdk.ForwardPassPerfModelConfig
assert aisimulate_core.RustForwardPassPerfModel is Native and issubclass(Native, RustForwardPassPerfModel)
assert callable(compile_engine)
assert aisimulate_core.__version__ == fpmsdk.__version__
"""
    assert alias(program) == ""


def test_an_import_of_the_planner_loads_nothing_heavy(alias):
    program = f"""
from aisimulate_core.sdk import ForwardPassPerfModelConfig, RustForwardPassPerfModel
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert alias(program) == "[]"


def test_configurations_are_validated_as_text(alias):
    program = f"""
import json
from aisimulate_core._native import RustForwardPassPerfModel
from aisimulate_core.sdk import ForwardPassPerfModelConfig
text = json.dumps(ForwardPassPerfModelConfig(**{CONFIG}).to_dict())
written = RustForwardPassPerfModel.normalize_config(text)
assert written == json.dumps(json.loads(written), separators=(",", ":"), sort_keys=True)
print(written)
"""
    assert json.loads(alias(program))["model"] == "m"


@pytest.mark.parametrize("text", ["", "[1]", '{"model": "m", "model": "n"}', '{"bogus": 1}', "{", None, {"model": "m"}])
def test_what_is_no_configuration_is_a_value_error(text):
    from fpmsdk.compat.textual import TextualPerfModel

    with pytest.raises(ValueError, match=r"."):
        TextualPerfModel.normalize_config(text)


def test_modes_by_the_names_of_configurations(alias):
    program = """
from aisimulate_core.sdk import common
print(common.GEMMQuantMode["fp8"].name, common.KVCacheQuantMode["int8"].value, common.BackendName.vllm.name)
try:
    common.KVCacheQuantMode["nvfp4"]
except KeyError:
    print("refused")
"""
    assert alias(program).split() == ["fp8", "int8", "vllm", "refused"]


@pytest.mark.parametrize("imported", ["aisimulate_core", "aisimulate_core.sdk"])
def test_another_package_of_that_name_is_refused(tmp_path, imported):
    package = tmp_path / "aisimulate_core"
    (package / "sdk").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sdk" / "__init__.py").write_text("")
    program = f"""
import {imported}
from fpmsdk.compat.dynamo import install
try:
    install()
except RuntimeError as refusal:
    print(refusal)
print(getattr(sys.modules["aisimulate_core"], "FPMSDK_ALIAS", False))
"""
    said = run(program, path=[tmp_path])
    assert said.startswith(f"aisimulate_core is already imported from {package}")
    assert "new process" in said
    assert said.endswith("False")


def test_an_installed_package_that_is_not_imported_gives_way(tmp_path):
    (tmp_path / "aisimulate_core").mkdir()
    (tmp_path / "aisimulate_core" / "__init__.py").write_text("raise AssertionError\n")
    program = (
        "from fpmsdk.compat.dynamo import install\ninstall()\nimport aisimulate_core.sdk as sdk\nprint(sdk.__file__)"
    )
    assert "fpmsdk" in run(program, path=[tmp_path])


def test_the_distribution_and_the_call_go_together():
    program = "import aisimulate_core.sdk as first\nfrom fpmsdk.compat.dynamo import install\ninstall()\n"
    program += "import aisimulate_core.sdk as second\nprint(first is second)"
    assert run(program, path=[alias_directory()]) == "True"


def test_names_that_are_not_there_are_named():
    from fpmsdk.compat.aisimulate_core import sdk

    with pytest.raises(AttributeError, match="estimate_state_cache"):
        _ = sdk.estimate_state_cache
