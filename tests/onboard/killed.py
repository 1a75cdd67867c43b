"""Saves a session again and again, killed each time one step later; prints what every kill left behind.

A step is a call into compiled code (a system call or less) made by the modules that write.
"""

import json
import os
import signal
import sys
from pathlib import Path

from fpmsdk import files
from fpmsdk.documents import lock
from fpmsdk.onboard import checkpoint_save
from fpmsdk.onboard.checkpoint import load_checkpoint
from fpmsdk.onboard.checkpoint_save import save_checkpoint

WRITING = {files.__file__, lock.__file__, checkpoint_save.__file__}


def save_killed_at(path, last):
    """Whether the save was killed before its step number `last`."""
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
        save_checkpoint(path, patch={"research": {"n": 1}}, expected_revision=1)
        sys.setprofile(None)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def main():
    path = Path(sys.argv[1])
    before, outcomes, killed = path.read_bytes(), [], True
    for step in range(10_000):
        path.write_bytes(before)
        killed = save_killed_at(path, step)
        revision = load_checkpoint(path).revision
        # Nothing that was left behind hinders the next save.
        path.write_bytes(before)
        saves = save_checkpoint(path, patch={"decisions": {}}, expected_revision=1)[1]
        outcomes.append({"killed": killed, "revision": revision, "saves": saves})
        if not killed:
            break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
