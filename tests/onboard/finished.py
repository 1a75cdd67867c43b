"""A finished collection of a small model: planned, run with the fake engine, published; every validator is real.

Source: onboarding.md section 10.
"""

import json

from fpmsdk.collect.campaign import run_campaign
from fpmsdk.collect.fake_executor import FakeExecutor
from fpmsdk.collect.options import parse_arguments
from fpmsdk.collect.planner import build_plan
from fpmsdk.onboard.collector_command import COLLECTOR, collector_arguments
from fpmsdk.onboard.plan import create_plan
from tests.onboard.collected import request_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
# Blocks of the cache that the engine of each phase has.
BLOCKS = {"prefill": 1000, "decode": 900}


def model_in(place):
    """The checkpoint folder of the small model."""
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def request_for(model, **options):
    """The request to collect it on engine 0.27.0, its memory pending."""
    request = request_of(model, version="0.27.0", memory={}, **options)
    return request.replaced({"identity": {"runtime_framework_version": "0.27.0"}})


def with_blocks(launch, blocks=None):
    count = (blocks or BLOCKS)[launch.cell.workload_kind]
    return FakeExecutor(launch, environment={"FPMSDK_FAKE_NUM_BLOCKS": str(count)})


def collect(request, folder, *, smoke=False, executor=with_blocks):
    """Run a campaign of a plan folder; it must succeed."""
    plan = build_plan(parse_arguments(collector_arguments(request, folder)[len(COLLECTOR) :]))
    outcome = run_campaign(
        plan,
        executor=executor,
        artifact_root=folder / "fpm-artifacts",
        checkpoint_dir=folder / "fpm-checkpoint",
        database_root=folder / "systems/data",
        smoke=smoke,
        limit=len(plan.cells) if smoke else None,
    )
    assert outcome.errors == []
    return plan


def finished_in(place, **options):
    """The request and the plan folder of a collection that is done."""
    request, folder = request_for(model_in(place), **options), place / "collection"
    create_plan(request, folder)
    collect(request, folder)
    (place / "request.yaml").write_bytes(request.yaml_bytes())
    return request, folder
