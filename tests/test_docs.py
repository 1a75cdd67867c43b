"""The documentation runs: the Python blocks of each page, in order, in one namespace; links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Blank lines before the block keep the page's line numbers in a traceback.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files(page):
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []


GUIDES = [
    "README.md",
    "tune.md",
    "estimators.md",
    "learned.md",
    "online-learning.md",
    "op-level.md",
    "predict.md",
    "recommend.md",
    "replay.md",
    "search-spaces.md",
    "snapshots.md",
    "scheduler.md",
    "traces.md",
    "perf-data.md",
    "whole-forward.md",
    "collection.md",
    "telemetry.md",
    "onboarding.md",
    "runtime-probes.md",
    "missing-points.md",
    "deployment-export.md",
]


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_has_python_to_run(name):
    (page,) = (page for page in PAGES if page.name == name)
    assert BLOCK.search(page.read_text())
