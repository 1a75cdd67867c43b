"""These tests need a browser: `make test-browser` names it. Without one they are not there to be run."""

import os

import pytest

CHROMIUM = os.environ.get("FPMSDK_TEST_CHROMIUM", "")
collect_ignore_glob = [] if CHROMIUM else ["test_*.py"]


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    executable = None if CHROMIUM == "playwright" else CHROMIUM
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()
