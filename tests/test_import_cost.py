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


def test_a_whole_forward_pair_is_read_without_what_pyarrow_can_load():
    # Its conversions load pandas, where that is installed, and its functions its compute module.
    code = """
class Watch:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("pandas", "pyarrow.compute"), name

sys.meta_path.insert(0, Watch())
import fpmsdk.sample
from fpmsdk.perfdb.forward_cells import open_forward_table
from fpmsdk.perfdb.forward_writer import read_origin
pair = str(fpmsdk.sample.forward_pair())
open_forward_table(pair, *read_origin(pair))
"""
    assert "pyarrow.parquet" in modules_after(code)


def test_a_plain_regression_loads_no_fit_that_it_does_not_use():
    code = "from fpmsdk import ForwardPassPerfModel, sample; ForwardPassPerfModel.best_available(sample.MODEL)"
    unused = {
        f"fpmsdk._ext.{name}" for name in ("spline", "spline_store", "spline_statistics", "recursive", "automatic")
    }
    loaded = modules_after(code)
    assert "fpmsdk._ext.linear_store" in loaded
    assert not loaded & unused
