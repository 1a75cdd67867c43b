"""An engine that behaves as a real one does, and serves on after its benchmark, or as badly as its first argument says.

The second argument is the model's document; then come the arguments of `python3 -m dynamo.vllm`. Times are made up.
"""

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fpmsdk.collect.fake_engine import run_fake_engine
from fpmsdk.collect.fake_launch import MODEL_FILE, NUM_BLOCKS

# As an engine core is that has set its title: nothing is left of its environment. It does not listen to SIGTERM either.
CORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def main() -> None:
    behaviour, model, *words = sys.argv[1:]
    if behaviour == "crashes_at_start":
        sys.exit("RuntimeError: Engine core initialization failed")
    core = subprocess.Popen([sys.executable, "-c", CORE], env={}, stdout=subprocess.PIPE)
    assert core.stdout is not None
    core.stdout.readline()
    print(f"core {core.pid}", flush=True)
    place = words.index("--benchmark-output-path") + 1
    output = Path(words[place])
    if behaviour == "crashes_in_the_middle":
        output.write_text('{"schema_version": 2, "status": ')
        sys.exit("RuntimeError: EngineDeadError")
    if behaviour == "hangs":
        time.sleep(60)
    if behaviour == "plays_back":
        # What a real engine wrote; the second argument is the folder of the recordings instead.
        phase = words[words.index("--benchmark-mode") + 1]
        for suffix in ("", "_merged"):
            content = gzip.decompress(Path(model, f"local_{phase}{suffix}.json.gz").read_bytes())
            output.with_name(f"benchmark{suffix}.json").write_bytes(content)
        time.sleep(60)
    # Somewhere else first, so that each file appears whole, and in the order of a real engine.
    scratch = output.parent.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    words[place] = str(scratch / output.name)
    run_fake_engine(words, {**os.environ, NUM_BLOCKS: "64", MODEL_FILE: model})
    results = scratch / output.name
    if behaviour == "measures_partly":
        results.write_text(results.read_text().replace('"complete"', '"partial"', 1))
    results.rename(output)
    if behaviour == "crashes_after_measuring":
        sys.exit("RuntimeError: merge failed")
    if behaviour != "never_merges":
        (scratch / "benchmark_merged.json").rename(output.with_name("benchmark_merged.json"))
    time.sleep(60)


if __name__ == "__main__":
    main()
