"""A described GPU system, the requests of the recorded plans, and folders to plan them in."""

import json
from pathlib import Path

import pytest

from fpmsdk.documents.strict import checked
from fpmsdk.onboard.request import SupportRequest

# The memory of one H200, the one figure of a system that planning uses.
H200_BYTES = 151397597184
_HARDWARE = f"""\
data_dir: data/h200_sxm
gpu: {{mem_bw: 4.8e+12, bfloat16_tc_flops: 9.89e+14, mem_capacity: {H200_BYTES}, sm_version: 90}}
node: {{num_gpus_per_node: 8, intra_node_bw: 4.5e+11, inter_node_bw: 5.0e+10}}
misc: {{nccl_mem: {{1: 0}}, other_mem: 0}}
"""


@pytest.fixture(scope="session")
def recorded():
    """What the peer wrote for hand-made requests, without prose; the request is the key's first part."""
    return json.loads((Path(__file__).parent / "plans_peer.json").read_text())


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A systems root with one system, and a working directory in which checkpoints named `./Architecture` lie."""
    systems, work = tmp_path / "installed-systems", tmp_path / "work"
    systems.mkdir()
    (systems / "h200_sxm.yaml").write_text(_HARDWARE)
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(systems))
    for architecture in ("Qwen3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM"):
        (work / architecture).mkdir(parents=True)
        (work / architecture / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    monkeypatch.chdir(work)
    return systems


@pytest.fixture
def request_of(recorded):
    """The request of a recorded plan, by its name, with sections replaced."""

    def of(name="declared linear", **sections):
        return checked(SupportRequest, recorded[name]["request"], "request").replaced(sections)

    return of
