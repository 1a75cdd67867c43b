"""What an embedding process pays: names load on first use, heavy libraries only where they are needed."""

import subprocess
import sys

import pytest

HEAVY = ("numba", "pyarrow", "pydantic", "rich", "typer", "platformdirs")


def modules_after(code):
    probe = f"import sys\n{code}\nprint(*sorted(set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import fpmsdk",
        "from fpmsdk import ForwardPassPerfModel, ForwardPassPerfModelConfig, FpmBatch",
        "import fpmsdk.sample; fpmsdk.sample.eval_frames()",
        "from fpmsdk import Trace; Trace.from_arrays([0.0], [1], [1])",
        "from fpmsdk import replay_trace",
    ],
)
def test_using_the_sdk_loads_no_heavy_library(code):
    assert not modules_after(code) & set(HEAVY)


def test_importing_the_package_loads_not_even_numpy():
    assert "numpy" not in modules_after("import fpmsdk")


def test_every_public_name_can_be_imported():
    code = "import fpmsdk\nfor name in fpmsdk.__all__: getattr(fpmsdk, name)"
    assert "fpmsdk.replay.run" in modules_after(code)
