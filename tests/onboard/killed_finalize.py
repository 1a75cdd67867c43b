"""Finalises a collection again and again, killed each time one step later; prints what every kill left behind.

A step is the making, syncing or renaming of a file or directory.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from fpmsdk.onboard.finalize import finalize
from fpmsdk.onboard.request import load_request

STEPS = ("mkdir", "makedirs", "fsync", "rename")


def finalize_killed_at(request, folder, target, last):
    """Whether finalising was killed before its step number `last`."""
    pid = os.fork()
    if pid == 0:
        left = last

        def counted(real):
            def step(*arguments, **options):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*arguments, **options)

            return step

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        finalize(request, folder, target)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def main():
    request, folder, target = load_request(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    outcomes, killed, step = [], True, 0
    while killed:
        killed = finalize_killed_at(request, folder, target, step)
        outcomes.append({"killed": killed, "exists": target.exists()})
        if target.exists():
            shutil.rmtree(target)
        step += 4
    finalize(request, folder, target)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
