import pytest

from tests.onboard.models import write_systems


@pytest.fixture
def systems(tmp_path, monkeypatch):
    """The described systems h200_sxm and gb200, and no others."""
    root = write_systems(tmp_path / "systems")
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(root))
    return root
