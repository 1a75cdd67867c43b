"""Measure a small random model with a real engine on this machine: a smoke run, then a formal one that is published.

    python benchmarks/journey_real/collect.py --engine ENVIRONMENT --model FOLDER --work FOLDER

Each step continues what an earlier call left in the work folder. Ends with exit code 1 when a cell has failed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from fpmsdk.sample.tiny import SYSTEM, write_systems

# Small enough for two cores, and more than one of everything.
LIMITS = {
    "--fpm-max-gpus": "1",
    "--fpm-max-num-batched-tokens": "512",
    "--fpm-max-num-seqs": "4",
    "--fpm-max-model-len": "1024",
    "--fpm-prefill-cudagraph-policy": "runtime",
}
CACHE_GIB = "1"
CHECKPOINT, SMOKE_CHECKPOINT = "fpm_forward.json", "fpm_forward_smoke.json"


def main() -> None:
    """Run both campaigns and say what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("engine", "model", "work"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).absolute(), required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        # The hardware of the plan is a label here: nothing of this machine is derived from it.
        "FPMSDK_SYSTEMS_PATH": write_systems(given.work / "systems"),
        "FPMSDK_LOCAL_ENGINE": str(given.engine),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB,
    }
    checkpoints = given.work / "checkpoints"
    words = ["--model-path", str(given.model), "--fpm-model-config", str(given.model / "config.json"), "--gpu", SYSTEM]
    words += ["--fpm-backend-version", "0.31.0", "--fpm-executor", "local", "--checkpoint-dir", str(checkpoints)]
    words += ["--fpm-artifact-root", str(given.work / "artifacts"), "--fpm-database-root", str(given.work / "data")]
    words += [word for pair in LIMITS.items() for word in pair]
    for further, name in ((["--smoke", "--limit", "2"], SMOKE_CHECKPOINT), ([], CHECKPOINT)):
        resume = ["--resume", "--resume-retry-failed"] if (checkpoints / name).exists() else []
        command = [sys.executable, "-m", "fpmsdk.collect", *words, *further, *resume]
        ended = subprocess.run(command, env=environment, check=False)
        if ended.returncode:
            sys.exit(ended.returncode)
        for cell, entry in json.loads((checkpoints / name).read_text())["cells"].items():
            print(f"{cell}: {entry['measured_point_count']} points in {entry['duration_seconds']:.0f} s")


if __name__ == "__main__":
    main()
