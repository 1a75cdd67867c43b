"""All six stages of an onboarding on one CPU, from `config.json` to a prediction; `make journey-fast` runs it.

Only the engine is made up: every command is the product's own, in a process of its own. Prints what each stage came to.
Source: onboarding.md sections 1 and 10.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from fpmsdk.prediction import predict, read_config
from tests.onboard.finished import CONFIG

HARDWARE = """\
data_dir: data/h200_sxm
gpu: {mem_bw: 4.8e+12, mem_capacity: 151397597184, bfloat16_tc_flops: 989.0e+12, sm_version: 90}
node: {num_gpus_per_node: 8, intra_node_bw: 4.5e+11, inter_node_bw: 5.0e+10}
misc: {nccl_mem: {1: 0, 2: 358612992, 4: 411041792, 8: 411041792}, other_mem: 3758096384}
"""
OVERRIDES = {"fmha_quant_mode": "bfloat16", "kv_cache_dtype": "bfloat16", "max_num_tokens": 64, "max_batch_size": 4}
PLAY = {
    "id": "play",
    "block_size": 16,
    "requests": [
        {"type": "n", "t": 0.0, "in": 16, "out": 3, "hash_ids": [1]},
        {"type": "n", "t": 0.1, "in": 32, "out": 4, "hash_ids": [1, 2]},
    ],
}
FAKE = ("--executor", "fake")
_COMMAND = "from fpmsdk.cli import main; main()"


def in_a_process(*words):
    """Exit code, stdout and stderr of `fpmsdk onboard WORDS`."""
    ran = subprocess.run(
        [sys.executable, "-c", _COMMAND, "onboard", *words], capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout, ran.stderr


class Journey:
    """The files of one onboarding; `call` runs a command and returns exit code, stdout and stderr."""

    def __init__(self, place, call=in_a_process, say=lambda _text: None):
        self.place, self._call, self._say = Path(place), call, say
        self.request, self.collection = self.place / "request.yaml", self.place / "collection"
        self.resolved, self.session = self.place / "resolved", self.place / "onboarding-checkpoint.json"
        (self.place / "installed-systems").mkdir()
        (self.place / "installed-systems/h200_sxm.yaml").write_text(HARDWARE)
        (self.place / "model").mkdir()
        (self.place / "model/config.json").write_text(json.dumps(CONFIG))
        (self.place / "overrides.yaml").write_text(yaml.safe_dump(OVERRIDES))
        (self.place / "plays.jsonl").write_text(json.dumps(PLAY) + "\n")

    def run(self, *words, code=0):
        """The output of a command, which must end with a code."""
        found, out, errors = self._call(*map(str, words))
        if found != code:
            command = " ".join(map(str, words))
            raise SystemExit(f"onboard {command}: exit code {found}, expected {code}\n{out}\n{errors}")
        return out

    def document(self, *words, code=0):
        """The JSON that a command prints."""
        return json.loads(self.run(*words, code=code))

    def whole(self):
        """All stages in order."""
        for stage in (self.inspect, self.choose, self.review, self.plan, self.collect, self.use):
            started = time.monotonic()
            text = stage()
            self._say(f"{stage.__name__:8} {time.monotonic() - started:5.1f} s  {text}")

    def inspect(self):
        """Stage 1: the session knows the model."""
        update = {
            "inputs": {"model_config": str(self.place / "model/config.json")},
            "progress": {"stage": 1, "status": "complete"},
        }
        report = self._save(update)
        return f"session at revision {report['state']['revision']}"

    def choose(self):
        """Stage 2: which topologies fit."""
        report = self.document("init", *self._model(), "--suggest-parallel")
        assert report["default"]["required_gpus"] == 1
        return f"{len(report['candidates'])} candidates, default tp 1"

    def review(self):
        """Stage 3: one request, accepted."""
        self.run("init", *self._model(), "--tensor-parallel", "1", "--output", self.request)
        return f"accepted {self._accept(self.request)[:12]}"

    def plan(self):
        """Stage 4: the plan and the command of the collector."""
        self.run("plan", "-c", self.request, "--output-dir", self.collection)
        preview = self.run("collect-fpm", "-c", self.request, "--output-dir", self.collection, *FAKE)
        assert preview.rstrip().endswith("--plan-only")
        return "planned; memory pending"

    def collect(self):
        """Stage 5: smoke, formal collection, and its finalisation."""
        words = ("collect-fpm", "-c", self.request, "--output-dir", self.collection, *FAKE)
        assert self.document(*words, "--execute", "--smoke")["status"] == "ready"
        assert self.document(*words, "--check-readiness")["ready_for_full_collection"] is True
        assert self.document(*words, "--execute")["collector_exit_status"] == 0
        folder = self.collection / "runtime-resolved"
        outcome = self.document(
            *("finalize", "-c", folder / "request.yaml", "--output-dir", folder),
            *("--resolved-output-dir", self.resolved),
        )
        assert outcome["review_status"] == "requires_review"
        self._accept(Path(outcome["request"]))
        return f"published and finalised; quality {outcome['collection_quality']}"

    def use(self):
        """Stage 6: the recorded traffic is covered, and the deployment is priced."""
        self.run(
            *("validate-fpm", "-c", self.resolved / "request.yaml", "--output-dir", self.resolved),
            *("--trace", self.place / "plays.jsonl", "--validation-output-dir", self.place / "replay"),
        )
        report = json.loads((self.place / "replay/validation.json").read_text())
        assert report["status"] == "covered"
        prediction = predict(read_config(self.resolved / "predict/pilot.yaml"), self.place / "prediction")
        assert prediction.exit_code == 0 and prediction.report is not None
        return f"{report['fpm_query_coverage']['queries']}; mean TTFT {prediction.report['mean_ttft_ms']:.3f} ms"

    def _model(self):
        place = self.place
        return (
            *("--model-config", place / "model/config.json", "--model", place / "model"),
            *("--model-revision", "synthetic-immutable-revision", "--framework-version", "0.27.0"),
            *("--gpu", "h200_sxm", "--interconnect", "nvswitch", "--context-length", "128"),
            *("--resource-overrides", place / "overrides.yaml"),
            *("--input-tokens", "16", "--output-tokens", "4", "--request-count", "1"),
        )

    def _save(self, update, *options):
        file = self.place / "update.json"
        file.write_text(json.dumps(update))
        revision = ()
        if self.session.exists():
            revision = ("--expect-revision", str(json.loads(self.session.read_text())["revision"]))
        return self.document("checkpoint", "--file", self.session, "--update", file, *revision, *options)

    def _accept(self, request):
        """Save a request as the draft of the one configuration and accept it; the digest of the acceptance."""
        draft = yaml.safe_load(request.read_text())
        self._save({"configurations": {"tp1": {"draft_request": draft}}})
        report = self._save({}, "--accept-profile", "tp1")
        assert report["configurations"]["tp1"]["profile_accepted"] is True
        return report["state"]["configurations"]["tp1"]["acceptance"]["sha256"]


def main():
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {
            "FPMSDK_SYSTEMS_PATH": f"{place}/installed-systems",
            "FPM_COLLECTOR_SOURCE_REVISION": os.environ.get("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40),
        }
        Journey(place, say=print).whole()
    print(f"journey  {time.monotonic() - started:5.1f} s  from config.json to a prediction")


if __name__ == "__main__":
    main()
