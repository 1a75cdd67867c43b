"""Validates a collection again and again, killed each time some steps later, and goes on; prints the outcomes.

A step is the making, syncing or renaming of a file or directory, in the validation or in a launch of the fake engine.
"""

import json
import os
import signal
import sys
from pathlib import Path

from fpmsdk.collect.executors import executor_factory
from fpmsdk.onboard.validate_collection import CollectionValidation, validate_collection

STEPS = ("mkdir", "fsync", "replace", "rename")


def validate(folder, file, output, policy, resume):
    return validate_collection(
        CollectionValidation(
            config=file,
            folder=folder,
            output=output,
            policy=policy,
            execute=True,
            resume=resume,
            retry_failed=resume,
            executors=executor_factory,
        )
    )


def killed_at(last, *arguments):
    """Whether a validation was killed before its step number `last`."""
    pid = os.fork()
    if pid == 0:
        left = last

        def counted(real):
            def step(*given, **options):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*given, **options)

            return step

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        validate(*arguments, resume=False)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def main():
    folder, file, policy, place = map(Path, sys.argv[1:5])
    stride, outcomes, killed, step = int(sys.argv[5]), [], True, 0
    while killed:
        output = place / f"quality-{step}"
        killed = killed_at(step, folder, file, output, policy)
        report = validate(folder, file, output, policy, resume=output.exists())
        samples = json.loads((output / "repeatability" / "repeatability.json").read_text())["samples"]
        outcomes.append(
            {
                "killed": killed,
                "status": report["status"],
                "passed": [
                    sum(attempt["status"] == "passed" for attempt in slot["attempts"])
                    for slots in samples.values()
                    for slot in slots
                ],
            }
        )
        step += stride
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
