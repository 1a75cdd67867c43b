import pytest

from fpmsdk.perfdb import cache, database, roots
from tests.perfdb.synthetic import Systems


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """An empty cache for every test, and no root or database kept from another one."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(cache, "cache_dir", lambda: folder)
    monkeypatch.setattr(roots, "_roots", {})
    monkeypatch.setattr(database, "_databases", {})
    return folder


@pytest.fixture
def systems(tmp_path):
    built = Systems(tmp_path / "systems")
    built.hardware()
    return built
