"""Identity of learned forests: 28 fields of the configuration, equal in every one."""

import pytest

from fpmsdk.config import normalize_config
from fpmsdk.errors import LearnedModelError
from fpmsdk.learned.identity import learned_identity, require_identity
from tests.vectors import load_vectors

RECORDED = load_vectors("learned_peer")["forests"]["main"]["artifact"]["metadata"]["identity"]
CONFIG = normalize_config({"model": "tiny", "system": "cpu", "backend": "vllm", "worker_type": "aggregated"})


def test_the_identity_is_the_recorded_one():
    assert learned_identity(CONFIG) == RECORDED
    require_identity(RECORDED, CONFIG, "artifact")


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (RECORDED | {"tp": 4}, "identity.tp: expected 1, that of the configuration, found 4"),
        (RECORDED | {"tp": True}, "identity.tp: expected 1, that of the configuration, found True"),
        (RECORDED | {"zone": "a"}, "identity.zone"),
        ({key: value for key, value in RECORDED.items() if key != "model"}, "identity.model"),
        (None, "identity.attention_backend"),
        ("tiny", "identity.attention_backend"),
    ],
)
def test_another_identity_is_refused_by_the_first_field_that_differs(stored, named):
    with pytest.raises(LearnedModelError, match=named):
        require_identity(stored, CONFIG, "artifact")
