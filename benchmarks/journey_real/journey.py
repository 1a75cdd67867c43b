"""Onboard a small random model on this machine for real, serve it, and compare the replay with what was served.

    python benchmarks/journey_real/journey.py --engine ENVIRONMENT --model FOLDER --work FOLDER [--until STEP]

Each step goes on where an earlier call was stopped.
"""

import argparse
from pathlib import Path

import serving
import steps
from work import Work

STEPS = {
    "probe": steps.probe,
    "plan": steps.plan,
    "smoke": steps.smoke,
    "formal": steps.formal,
    "quality": steps.quality,
    "finalize": steps.finalize,
    "serve": serving.serve,
    "compare": serving.compare,
    "budget": serving.budget,
}


def main() -> None:
    """Run what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("engine", "model", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--until", choices=STEPS)
    given = parser.parse_args()
    work = Work(given.work, given.engine, given.model)
    for name, step in STEPS.items():
        work.run(name, step)
        if name == given.until:
            break


if __name__ == "__main__":
    main()
