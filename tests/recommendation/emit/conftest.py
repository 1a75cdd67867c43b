import json

import pytest

from .deployments import MODEL, REVISION


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory, monkeypatch):
    """The checkpoint of the profile, as the hub's client would have left it."""
    cache = tmp_path_factory.mktemp("hub")
    snapshot = cache / f"models--{MODEL.replace('/', '--')}/snapshots/{REVISION}"
    snapshot.mkdir(parents=True)
    fields = {"architectures": ["MixtralForCausalLM"], "num_attention_heads": 32, "num_local_experts": 8}
    (snapshot / "config.json").write_text(json.dumps(fields))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
