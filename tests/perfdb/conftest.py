import pytest

from tests.perfdb.fixtures import own_cache  # noqa: F401
from tests.perfdb.synthetic import Systems


@pytest.fixture
def systems(tmp_path):
    built = Systems(tmp_path / "systems")
    built.hardware()
    return built
