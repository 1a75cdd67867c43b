"""Peak memory over a hundred thousand and over a million requests, each in a process of its own.

    python benchmarks/memory.py [--write-evidence]

`make memory` runs it. Requests are made on the way, with and without prefixes that they share, or come from files: in
and out of order, with names and sessions; of a file also the statistics and the check. Exits 1 when the longer run
needs over 20 % more.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "compare"))

SHORT, LONG, MOST = 100_000, 1_000_000, 1.2
RATE = 20.0
PREFIXES = {"shared_prefix_ratio": 0.5, "num_prefix_groups": 5, "block_tokens": 64}
# Of each kind of requests: whether prefixes are cached.
KINDS = {
    "made": False,
    "made, caching": True,
    "made, shared prefixes": True,
    "file": True,
    "file, unsorted": True,
    "file, sessions": True,
    "own file": True,
}
STATISTICS, CHECK = "statistics of a file", "check of a file"


def write_trace(path: Path, kind: str, count: int) -> None:
    """A Mooncake trace of Poisson arrivals; every prompt has a first block that others have and a second of its own."""
    rng, at_ms = random.Random(1), 0.0
    with path.open("w") as file:
        for number in range(count):
            at_ms += rng.expovariate(RATE) * 1000
            row: dict[str, Any] = {
                "timestamp": at_ms + (rng.random() * 1e5 if kind == "file, unsorted" else 0.0),
                "input_length": 1024,
                "output_length": 128,
                "hash_ids": [rng.randrange(5), 5 + number],
            }
            if kind in ("file, sessions", STATISTICS, CHECK):
                row |= {"request_id": f"request {number}", "session_id": f"session {(number + rng.randrange(60)) // 3}"}
            file.write(json.dumps(row) + "\n")


def peak_rss_kib() -> int:
    """The high-water mark of this process. That of `getrusage` begins at what the process that started it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/status tells no VmHWM")


def replay(kind: str, count: int, path: str) -> dict[str, Any]:
    """Replay one kind of requests in this process; what it needed."""
    from fpmsdk.replay.run_stream import replay_stream
    from fpmsdk.replay.trace_stream import TraceStream

    started = time.perf_counter()
    if path:
        stream = TraceStream.read(path)
    else:
        shared = PREFIXES if kind == "made, shared prefixes" else {}
        stream = TraceStream.synthetic(count, 1024, 128, request_rate=RATE, **shared)
    launch = {"engine": {"timing_model": {"type": "polynomial"}, "enable_prefix_caching": KINDS[kind]}}
    summary = replay_stream(stream, launch=launch).summary
    return {
        "peak_rss_kib": peak_rss_kib(),
        "seconds": round(time.perf_counter() - started, 2),
        "completed_requests": summary["completed_requests"],
        "p99_ttft_ms": summary["p99_ttft_ms"],
    }


def statistics(path: str) -> dict[str, Any]:
    """The statistics of a file in this process; what they needed."""
    from fpmsdk.replay.stats import trace_stats

    started = time.perf_counter()
    figures = trace_stats(path)
    return {
        "peak_rss_kib": peak_rss_kib(),
        "seconds": round(time.perf_counter() - started, 2),
        "completed_requests": figures["num_requests"],
        "num_sessions": figures["num_sessions"],
    }


def check(path: str) -> dict[str, Any]:
    """The check of a file, and of what an engine would reject, in this process; what it needed."""
    from fpmsdk.replay.check import check_trace

    started = time.perf_counter()
    outcome = check_trace(path, launch={"engine": {"max_model_len": 4096}})
    return {
        "peak_rss_kib": peak_rss_kib(),
        "seconds": round(time.perf_counter() - started, 2),
        "completed_requests": outcome.num_requests,
        "num_sessions": outcome.num_sessions,
        "ok": outcome.ok,
    }


def one(kind: str, count: str, path: str) -> dict[str, Any]:
    """One run in this process."""
    if kind == STATISTICS:
        return statistics(path)
    return check(path) if kind == CHECK else replay(kind, int(count), path)


def in_own_process(*arguments: str) -> dict[str, Any]:
    """What this script says with `--one`."""
    done = subprocess.run([sys.executable, __file__, "--one", *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(kind: str, folder: Path) -> dict[str, Any]:
    """The short and the long run of one kind."""
    runs = {}
    for count in (SHORT, LONG):
        path = ""
        if "file" in kind:
            path = str(folder / "t.jsonl")
            write_trace(Path(path), kind, count)
            if kind == "own file":
                from fpmsdk.replay.convert import convert_trace

                convert_trace(path, folder / "t.parquet")
                path = str(folder / "t.parquet")
        runs[count] = in_own_process(kind, str(count), path)
        assert runs[count]["completed_requests"] == count
    ratio = runs[LONG]["peak_rss_kib"] / runs[SHORT]["peak_rss_kib"]
    print(
        f"{kind:24}{runs[SHORT]['peak_rss_kib'] / 1024:8.1f} MiB{runs[LONG]['peak_rss_kib'] / 1024:8.1f} MiB"
        f"{ratio:8.3f}{runs[LONG]['seconds']:8.1f} s"
    )
    return {"kind": kind, "ratio": ratio, "runs": runs}


def main() -> int:
    """Measure every kind and write the evidence."""
    from harness import EVIDENCE, machine

    with tempfile.TemporaryDirectory() as folder:
        results = [measured(kind, Path(folder)) for kind in (*KINDS, STATISTICS, CHECK)]
    failures = [f"{item['kind']}: {item['ratio']:.2f} times the memory" for item in results if item["ratio"] > MOST]
    if "--write-evidence" in sys.argv:
        document = {"machine": machine(), "largest_ratio": MOST, "results": results, "failures": failures}
        (EVIDENCE / "memory.json").write_text(json.dumps(document, indent=1) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(one(*sys.argv[sys.argv.index("--one") + 1 :])))
    else:
        sys.exit(main())
