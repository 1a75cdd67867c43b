"""Probes and imports that are killed at many of their steps, each followed by what a user does next; prints outcomes.

A step is a call into compiled code made by the modules that write files; only some of the many steps are tried.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from fpmsdk import files
from fpmsdk.collect import observation_files, observer_staging, probe, probe_attempt
from fpmsdk.collect.executors import executor_factory
from fpmsdk.documents import canonical
from fpmsdk.onboard import checkpoint_save, import_observations, observation_snapshot
from fpmsdk.onboard.checkpoint import load_checkpoint
from fpmsdk.onboard.probe import probe_runtime

WRITING = {
    module.__file__
    for module in (
        files,
        canonical,
        checkpoint_save,
        import_observations,
        observation_files,
        observation_snapshot,
        observer_staging,
        probe,
        probe_attempt,
    )
}


def killed_at(last, work):
    """Whether the work was killed before its step number `last`; how many steps it made otherwise is printed."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def step(frame, event, _argument):
            nonlocal count
            if event == "c_call" and frame.f_code.co_filename in WRITING:
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        sys.setprofile(step)
        work()
        sys.setprofile(None)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def main():
    folder, stride = Path(sys.argv[1]), int(sys.argv[2])
    session, bundle = folder / "session.json", folder / "bundle" / "manifest.json"
    before = session.read_bytes()
    outcomes = []

    def probed(output, resume=False):
        return probe_runtime(
            session, folder / output, instrumentation=bundle, executors=executor_factory, resume=resume
        )["status"]

    def imported(output):
        index = folder / "sound" / "observations.json"
        return import_observations.import_observations(session, index, folder / output)["status"]

    def fresh():
        session.write_bytes(before)
        for name in ("probe", "drafts", "next"):
            shutil.rmtree(folder / name, ignore_errors=True)

    probed("sound")
    for step in range(0, 100_000, stride):
        fresh()
        killed = killed_at(step, lambda: probed("probe"))
        revision = load_checkpoint(session).revision
        outcome = {"work": "probe", "killed": killed, "revision": revision}
        if killed:
            outcome["then"] = probed("probe", resume=True)
        outcomes.append(outcome)
        if not killed:
            break
    for step in range(0, 100_000, stride):
        fresh()
        killed = killed_at(step, lambda: imported("drafts"))
        state = load_checkpoint(session)
        drafted = "fpm_profile" in state.configurations["tp1"].draft_request
        outcome = {"work": "import", "killed": killed, "revision": state.revision, "drafted": drafted}
        if killed:
            outcome["then"] = imported("next")
        outcomes.append(outcome)
        if not killed:
            break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
