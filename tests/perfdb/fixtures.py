"""Fixtures of every test over a systems root, for the conftest of its folder."""

import pytest

from fpmsdk.perfdb import cache, database, roots


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """An empty cache for every test, and no root or database kept from another one."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(cache, "cache_dir", lambda: folder)
    monkeypatch.setattr(roots, "_roots", {})
    monkeypatch.setattr(database, "_databases", {})
    return folder
