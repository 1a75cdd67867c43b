"""Builds the distribution files, audits the wheel and tries it as those who install it do.

    python tests/packaging/wheel_check.py [--peer] [--write-evidence]

needs an environment with build and auditwheel; `make wheel-check` makes one. With `--peer` the public peer is installed
too and the sizes are compared. Exits 1 at the first thing that does not hold.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PEER = "aisimulate==0.13.0.dev202610270000000085"
LARGEST_SHARE = 0.4
# From an import to a tuned estimate, a command, and a replay.
TRIAL = """
import os, sys
from fpmsdk import ForwardPassPerfModel, replay_trace, Trace
model = ForwardPassPerfModel.best_available({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode",
    "estimation_mode": "fpm_regression", "estimator_config": {"fpm_regression": {"min_observations": 2}}})
for n in (1, 2):
    model.tune_with_fpms({"wall_time": 0.01 * n, "scheduled_requests": {
        "num_decode_requests": n, "sum_decode_kv_tokens": 100 * n}})
assert round(model.estimate_forward_pass_time_ms({"scheduled_requests": {
    "num_decode_requests": 1, "sum_decode_kv_tokens": 100}}), 3) == 10.0
from fpmsdk.cli import main
sys.argv = ["fpmsdk", "demo"]
main()
"""


def say(step: str) -> None:
    """Announce a step."""
    print(f"== {step}", flush=True)


def run(*command: object, **options: Any) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"FAILED: {' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return str(done.stdout)


def build(folder: Path) -> Path:
    """The repaired wheel, made from the source distribution alone."""
    say("source distribution")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    missing = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "ext/grid.pyx", "fpmsdk/_ext/grid.pxd"} - names
    if missing:
        sys.exit(f"FAILED: {sdist.name} lacks {sorted(missing)}")
    say("wheel from the source distribution")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "raw", sdist)
    [raw] = (folder / "raw").glob("*.whl")
    say("audit")
    print(run("auditwheel", "show", raw).strip())
    run("auditwheel", "repair", "--wheel-dir", folder / "wheel", raw)
    [wheel] = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    foreign = [name for name in inside if name.split("/")[0].split("-")[0] not in ("fpmsdk", "fpmsdk.libs")]
    sources = [name for name in inside if name.endswith((".c", ".pyx"))]
    if foreign or sources or not any(name.endswith("LICENSE") for name in inside):
        sys.exit(f"FAILED: {wheel.name} holds {foreign + sources}, or no licence")
    return wheel


def install(what: object, target: Path, *options: str) -> int:
    """Install with everything required; the bytes that it takes."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *options, "--target", target, what)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file() and not path.is_symlink())


def common_interpreter() -> str:
    """An interpreter of this version that every user may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = ["-c", "import ctypes, json, ssl"]
    for candidate in (sys.executable, f"/usr/local/bin/{version}", f"/usr/bin/{version}"):
        with contextlib.suppress(OSError):
            if not subprocess.run([candidate, *program], capture_output=True, check=False, **nobody()).returncode:
                return candidate
    sys.exit(f"FAILED: no {version} that another user than root may run; install one below /usr")


def nobody() -> dict[str, Any]:
    """Options that run a command as a user without rights, when this one is root."""
    return {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


def try_out(site: Path, folder: Path) -> None:
    """Run the trial where nothing may be written, as a user without rights and without a home."""
    python = common_interpreter()
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    work = folder / "work"
    work.mkdir()
    work.chmod(0o777)
    say("another user, a home that does not exist")
    run(python, "-c", TRIAL, cwd=work, env=clean | {"HOME": str(folder / "nowhere")}, **nobody())
    say("no HOME at all")
    run(python, "-c", TRIAL, cwd=work, env=clean, **nobody())
    say("an installation that cannot be written to")
    for path in [site, *site.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    run(python, "-c", TRIAL, cwd=work, env=clean | {"HOME": str(work)}, **nobody())
    for path in [site, *site.rglob("*")]:
        if path.is_dir():
            path.chmod(path.stat().st_mode | 0o200)


def sizes_by_package(site: Path) -> dict[str, float]:
    """MB of each top-level entry of an installation, the largest first, and of the rest."""
    found = {
        entry.name: sum(path.stat().st_size for path in entry.rglob("*") if path.is_file()) if entry.is_dir() else 0
        for entry in site.iterdir()
    }
    largest = sorted(found.items(), key=lambda item: -item[1])[:10]
    return {name: round(size / 1e6, 1) for name, size in largest}


def main() -> None:
    """Every step in turn."""
    folder = Path(tempfile.mkdtemp(prefix="fpmsdk-wheel-"))
    folder.chmod(0o755)
    try:
        wheel = build(folder)
        site = folder / "site"
        ours = install(wheel, site)
        facts: dict[str, object] = {
            "wheel": wheel.name,
            "wheel_mb": round(wheel.stat().st_size / 1e6, 2),
            "installed_mb": round(ours / 1e6, 1),
            "largest_mb": sizes_by_package(site),
        }
        print(json.dumps(facts, indent=1))
        try_out(site, folder)
        if "--peer" in sys.argv:
            say("the peer, with everything that it requires")
            peer = install(PEER, folder / "peer", "--pre", "--prefer-binary")
            facts |= {"peer_installed_mb": round(peer / 1e6, 1), "share_of_the_peer": round(ours / peer, 3)}
            print(f"{ours / 1e6:.0f} MB installed, the peer takes {peer / 1e6:.0f} MB")
            if ours > LARGEST_SHARE * peer:
                sys.exit(f"FAILED: {ours / peer:.2f} of the peer's size, {LARGEST_SHARE} is allowed")
        if "--write-evidence" in sys.argv:
            (ROOT / "benchmarks" / "evidence" / "package.json").write_text(json.dumps(facts, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
