"""Published pairs of a small deployment with their request, for tests of assessments."""

import itertools

import yaml

from fpmsdk.onboard.request import SupportRequest
from tests.perfdb.pairs import VERSION, decode, prefill, write_pair
from tests.perfdb.synthetic import HARDWARE
from tests.perfmodel.deployments import checkpoint, profile

RUN = {
    "source_plan_sha256": "a" * 64,
    "collector_attempt_id": "attempt-1",
    "runtime_run_id": "run-1",
    "runtime_grid_digest": "grid-1",
}
BATCHES, TOKENS, PREFILL_KV, DECODE_KV = (
    (1, 2, 4),
    (16, 32, 64, 128, 256),
    (0, 64, 256, 1024, 2048),
    (4, 16, 64, 256, 2048),
)


def smooth_ms(batch, tokens, kv):
    return 10 + batch / 4 + tokens / 100 + kv / 1000


def recorded_grid():
    """The grid of the recorded vector: 75 prefill rows and 15 decode rows."""
    points = itertools.product(BATCHES, TOKENS, PREFILL_KV)
    prefills = [prefill(*point, smooth_ms(*point), **RUN) for point in points]
    decodes = [decode(batch, kv, smooth_ms(batch, 0, kv), **RUN) for batch in BATCHES for kv in DECODE_KV]
    return prefills + decodes


def request_of(model, worker_type=None, **deployment):
    """The request of a local checkpoint on `x100`."""
    document = {
        "identity": {
            "model": str(model),
            "model_revision": "0123456789abcdef0123456789abcdef01234567",
            "model_kind": "dense",
            "framework_version": VERSION,
            "gpu": "x100",
            "interconnect": "none",
        },
        "search": {"context_length": 4096},
        "fpm_profile": profile(model),
    }
    if worker_type is not None:
        document["worker_type"] = worker_type
        document["fpm_profile"]["deployments"] = [
            document["fpm_profile"]["deployments"][0] | {"worker_type": worker_type}
        ]
    return SupportRequest.model_validate(document)


def publish(folder, rows, **sidecar):
    """Write a systems root with a pair of these rows; returns it and its request."""
    model = checkpoint(folder / "model")
    root = folder / "systems"
    root.mkdir()
    (root / "x100.yaml").write_text(yaml.safe_dump(HARDWARE))
    place = root / "data" / "x100" / "vllm" / VERSION
    write_pair(place, [row | {"model_path": str(model)} for row in rows], **sidecar)
    return root, model
