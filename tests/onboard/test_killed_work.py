"""A probe or an import that is killed anywhere leaves a session from which the user goes on, and nothing is lost.

Source: onboarding.md sections 0 and 6.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.onboard.observed_sessions import EXAMPLE, Session


def test_whenever_probe_or_import_is_killed_the_next_call_succeeds(tmp_path):
    made = Session(tmp_path, {"tp1": {"draft_request": {**EXAMPLE, "worker_type": "decode"}}})
    done = subprocess.run(
        [sys.executable, "-m", "tests.onboard.killed_work", str(tmp_path), "61"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"FPMSDK_SYSTEMS_PATH": str(made.systems)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    killed = [outcome for outcome in outcomes if outcome["killed"]]
    assert [outcome["work"] for outcome in outcomes if not outcome["killed"]] == ["probe", "import"]
    assert len([outcome for outcome in killed if outcome["work"] == "probe"]) > 5
    assert len([outcome for outcome in killed if outcome["work"] == "import"]) > 5
    assert {(outcome["work"], outcome["then"]) for outcome in killed} == {
        ("probe", "completed"),
        ("import", "complete"),
    }
    # The session is the one from before or the one from after, and has the draft only then.
    assert all(outcome["drafted"] == (outcome["revision"] == 2) for outcome in outcomes if outcome["work"] == "import")
