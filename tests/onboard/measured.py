"""A plan folder whose collection was run and published; its engine is a real one's recorded launches."""

import gzip
import json

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.executors import executor_factory
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.planner import build_plan
from fpmsdk.collect.provenance import provenance_document
from fpmsdk.documents.strict import checked
from fpmsdk.onboard.collector_command import COLLECTOR, collector_arguments
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.plan import create_plan
from fpmsdk.onboard.request import SupportRequest
from tests.collect.native import PLAN, RECORDED
from tests.collect.repetitions import keep
from tests.onboard.collected import BYTES, REVISION, VERSION, deployment_of

MODEL_CONFIG = PLAN.capability["model_config"]["payload"]
INPUTS = {"K8sConfig": {"k8s_image": "registry/engine@sha256:" + "0" * 64}}


class Replays:
    """Makes executors that replay a recorded launch of each phase, under a run id of its own every time.

    `changes` are done to the results of the next launches, one each.
    """

    def __init__(self, points=None, run=1):
        self.count, self.changes, self._points, self._run = 0, [], points, run

    def __call__(self, launch):
        return _Replay(self, launch)

    def results(self, phase):
        """The result file of a launch."""
        self.count += 1
        document = json.loads(gzip.decompress((RECORDED / f"{phase}_run{self._run}.json.gz").read_bytes()))
        document["run_id"] = f"{phase}-{self._run}-{self.count}"
        if self._points is not None:
            keep(self._points)(document)
        if self.changes:
            self.changes.pop(0)(document)
        return document


class _Replay:
    def __init__(self, owner, launch):
        self._owner, self._launch = owner, launch
        self._raw, self._results = launch.folder / "raw" / "node0000", None

    def apply(self):
        pass

    def wait_ready(self, expected_nodes, timeout_seconds=0):
        return [f"node{node:04d}" for node in range(expected_nodes)]

    def pods(self):
        return []

    def stage(self, units, files):
        pass

    def prepare_attempt(self, units, *, cell_id, plan_sha256, attempt_id, expected_backend_version=None):
        self._provenance = provenance_document(
            cell_id=cell_id, plan_sha256=plan_sha256, attempt_id=attempt_id, backend_version=VERSION
        )

    def execute(self, units, timeout_seconds=0):
        pass

    def collect(self, units, *, require_benchmark=True):
        self._raw.mkdir(parents=True, exist_ok=True)
        (self._raw / "collector-provenance.json").write_text(json.dumps(self._provenance))
        if self._results is None:
            self._results = self._owner.results(self._launch.cell.workload_kind)
            self._results["engine"]["model"]["model"] = self._launch.plan.model_path
        (self._raw / "benchmark.json").write_text(json.dumps(self._results))

    def result_manifest(self, unit):
        return {}

    def cleanup(self):
        pass


def request_of(model, role=None, version=VERSION, runtime=None, context=2048, tokens=512, sequences=16):
    """The request of the recorded model; `runtime` is the engine version that was seen in its image."""
    resources = {
        "cache_layout": "linear",
        "kv_bytes_per_token": 4096,
        "max_num_tokens": tokens,
        "max_batch_size": sequences,
        "provenance": "by hand",
    }
    deployment = deployment_of(version, resources | BYTES)
    role_of = {} if role is None else {"worker_type": role}
    return checked(
        SupportRequest,
        {
            "identity": {
                "model": str(model),
                "model_revision": REVISION,
                "model_kind": "dense",
                "gpu": "h200_sxm",
                "interconnect": "nvswitch",
                "framework_version": version,
                **({} if runtime is None else {"runtime_framework_version": runtime}),
            },
            "workload": {"input_tokens": 16, "output_tokens": 4, "request_count": 1},
            "search": {"context_length": context},
            "collection": {"prefill_cudagraph_policy": "runtime", "gpu_memory_utilization": 0.9},
            "fpm_profile": {
                "schema_version": 1,
                "model": str(model),
                "model_revision": REVISION,
                "architecture": "Qwen3ForCausalLM",
                "context_length": context,
                "num_experts": 0,
                "provenance": "by hand",
                "deployments": [deployment | role_of],
            },
            **role_of,
        },
        "request",
    )


def measured(place, role=None, points=None, executor=None, deployment=None, **settings):
    """The plan folder of a request with its published collection, and the file of the request.

    The installed systems must describe `h200_sxm`; see `tests.onboard.collected.systems`. `settings` are those of
    `request_of`.
    """
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    request = request_of(model, role, **settings)
    file, folder = place / "request.yaml", place / "collection"
    file.write_bytes(request.yaml_bytes())
    create_plan(request, folder)
    words = collector_arguments(request, folder, deployment=deployment)
    options = parse_arguments(words[len(COLLECTOR) :])
    outcome = run_campaign(
        build_plan(options),
        executor=executor or Replays(points),
        artifact_root=options.artifact_root,
        checkpoint_dir=options.checkpoint_dir,
        database_root=options.database_root,
        deployment=options.deployment,
    )
    assert not outcome.errors, outcome.errors
    return folder, file


def faked(place, role=None):
    """As `measured`, a small one by the fake engine, as a release whose evidence is audited."""
    return measured(
        place,
        role,
        executor=executor_factory("fake"),
        deployment=CollectionDeployment(executor="fake"),
        version="0.28.0",
        runtime="0.28.0",
        context=128,
        tokens=32,
        sequences=2,
    )
