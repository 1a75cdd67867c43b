"""Every learned estimator beside the public peer wheel, part by part.

    python benchmarks/compare/learned.py [--write-evidence]

Options go to every part. Exits 1 when some part does; all of them run.
"""

import subprocess
import sys
from pathlib import Path

PARTS = sorted(Path(__file__).parent.glob("learned_*.py"))


def main() -> int:
    """Run the parts one after the other, each in a process of its own."""
    failed = []
    for part in PARTS:
        print(f"--- {part.stem}", flush=True)
        if subprocess.run([sys.executable, str(part), *sys.argv[1:]], check=False).returncode:
            failed.append(part.stem)
    print(f"failed: {', '.join(failed)}" if failed else "all parts hold", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
