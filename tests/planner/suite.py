"""Runs the Dynamo Planner's own tests on fpmsdk and holds the outcome against `expected.json`.

    python tests/planner/suite.py

needs an environment with ai-dynamo, fpmsdk and its alias; `make test-planner` makes one. Exits 1 when a test fails,
anything is skipped that is not listed, something listed is not skipped, or too few pass.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Expected = dict[str, Any]
OPTIONS = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-o", "junit_family=xunit1", "-W", "ignore"]


def planner_tests() -> Path:
    """The folder of the Planner's tests; an exit where fpmsdk does not stand behind it."""
    for package in ("dynamo.planner", "aisimulate_core"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"FAILED: {package} is not installed; run `make test-planner`")
    import aisimulate_core

    if not hasattr(aisimulate_core, "FPMSDK_ALIAS"):
        sys.exit(f"FAILED: aisimulate_core is {aisimulate_core.__file__}, not the alias of fpmsdk")
    import dynamo.planner

    return Path(dynamo.planner.__path__[0]) / "tests"


def run(tests: Path, expected: Expected) -> tuple[int, Path]:
    """The exit status of pytest and its report."""
    report = Path(tempfile.mkdtemp()) / "report.xml"
    ignored = [f"--ignore={tests / name}" for name in expected["ignored"]]
    left_out = [f"--rootdir={tests}", *(f"--deselect={name}" for name in expected["deselected"])]
    command = [sys.executable, "-m", "pytest", str(tests), *OPTIONS, "--timeout=120", f"--junitxml={report}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    status = subprocess.run([*command, *ignored, *left_out], env=environment, cwd=report.parent, check=False)
    return status.returncode, report


def complaints(report: Path, expected: Expected) -> tuple[int, list[str]]:
    """How many tests passed, and what is not as expected."""
    found: list[str] = []
    passed: list[str] = []
    skipped: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase"):
        module = (case.get("classname") or case.get("name") or "").split("dynamo.planner.tests.")[-1]
        path = "/".join(part for part in module.split(".") if not part[:1].isupper()) + ".py"
        name = f"{path}::{case.get('name')}"
        if (skip := case.find("skipped")) is not None:
            skipped.add(path)
            if path not in expected["skipped_modules"]:
                found.append(f"{name} was skipped: {skip.get('message')}")
        elif case.find("failure") is not None or case.find("error") is not None:
            found.append(f"{name} failed")
        else:
            passed.append(name)
    found += [f"{path} was not skipped" for path in set(expected["skipped_modules"]) - skipped]
    for name in expected["must_pass"]:
        if not any(test.endswith(name) for test in passed):
            found.append(f"{name} did not pass")
    if len(passed) < expected["at_least_passed"]:
        found.append(f"{len(passed)} tests passed, {expected['at_least_passed']} are expected")
    return len(passed), found


if __name__ == "__main__":
    wanted = json.loads((Path(__file__).parent / "expected.json").read_text())
    returncode, junit = run(planner_tests(), wanted)
    if not junit.is_file():
        sys.exit(f"FAILED: pytest ended with status {returncode} and left no report")
    count, faults = complaints(junit, wanted)
    print(f"{count} of the Planner's tests pass on fpmsdk")
    for fault in faults:
        print("FAILED:", fault)
    sys.exit(1 if faults or returncode not in (0, 1) else 0)
