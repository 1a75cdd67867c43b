"""Saves a model again and again, killed each time one step later; prints what every kill left behind.

A step is a call into compiled code (a system call or less) made by the module that publishes, and half of every write.
"""

import itertools
import json
import os
import signal
import sys
from functools import partial

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.snapshot import publish
from fpmsdk.snapshot.publish import STAGING_PREFIX


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts calls of the publishing module; the process dies before call number `last`."""

    def __init__(self, last):
        self.count, self.last = 0, last

    def __call__(self, frame, event, _arg):
        if event == "c_call" and frame.f_code.co_filename == publish.__file__:
            if self.count == self.last:
                kill()
            self.count += 1


def cut_write(number):
    """Let the process die in the middle of one of its writes."""
    write, numbers = os.write, itertools.count()

    def cut(descriptor, content):
        if next(numbers) == number:
            write(descriptor, content[: len(content) // 2])
            kill()
        return write(descriptor, content)

    os.write = cut


def child(save, prepare):
    pid = os.fork()
    if pid == 0:
        prepare()
        save()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(model, folder, name, status):
    there = sorted(os.listdir(folder))
    stale = [found for found in there if found.startswith(STAGING_PREFIX)]
    whole = None
    if name in there:
        batch = FpmBatch.from_frames(sample.eval_frames()[:50])
        restored = ForwardPassPerfModel.best_available(state_snapshot=f"{folder}/{name}")
        whole = restored.estimate_many(batch).tobytes() == model.estimate_many(batch).tobytes()
    return {"status": status, "whole": whole, "stale": len(stale), "other": len(there) - len(stale) - (name in there)}


def killed_at(model, folder, place, prepare):
    """What a save into a new folder leaves behind when `prepare` arranges its death."""
    os.mkdir(f"{folder}/{place}")
    save = partial(model.save_state_snapshot, f"{folder}/{place}/saved")
    return outcome(model, f"{folder}/{place}", "saved", child(save, prepare))


def main(folder):
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[:200]))
    outcomes = []
    for step in range(1000):
        outcomes.append(killed_at(model, folder, step, partial(sys.setprofile, Steps(step))))
        if outcomes[-1]["status"] == 0:
            break
        # Whatever was left behind is in nobody's way.
        if outcomes[-1]["whole"] is None:
            model.save_state_snapshot(f"{folder}/{step}/saved")
    outcomes += [killed_at(model, folder, f"half {number}", partial(cut_write, number)) for number in range(3)]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
