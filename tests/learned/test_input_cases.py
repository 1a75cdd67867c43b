"""The recorded input cases of artifacts, frozen models and learned configurations: same outcome, same class of error.

Those of checkpoints are elsewhere.
"""

import json
from collections.abc import Callable

import pytest

from fpmsdk import ForwardPassPerfModel, errors
from tests.learned.recorded import artifact_bytes, vectors

CASES = {case["case"]: case for case in vectors()["errors"]}
CLASSES = {"ValueError": ValueError, "PerfDataNotAvailableError": errors.PerfDataNotAvailableError}
BASE = vectors()["identity_config"]


def document():
    return json.loads(artifact_bytes("main"))


def build(path, estimator=None, changes=None, **learned):
    section = {"fpm_learned": {"artifact_path": str(path), "adaptation": "frozen"} | learned}
    return ForwardPassPerfModel.best_available(
        BASE | {"estimator_config": section | (estimator or {})} | (changes or {})
    )


def artifact(change: Callable[[dict], object]):
    """A model of an artifact after a change."""

    def run(folder):
        changed = document()
        change(changed)
        path = folder / "artifact.json"
        path.write_text(json.dumps(changed))
        build(path)

    return run


def tree(changed):
    return changed["stores"]["pure_decode"]["trees"][0]


def configured(estimator=None, changes=None, **learned):
    """A model of the recorded artifact under another configuration."""

    def run(folder):
        path = folder / "artifact.json"
        path.write_bytes(artifact_bytes("main"))
        build(path, estimator, changes, **learned)

    return run


def plain(folder):
    path = folder / "artifact.json"
    path.write_bytes(artifact_bytes("main"))
    return build(path)


def changed_after_pinning(folder):
    path = folder / "artifact.json"
    path.write_bytes(artifact_bytes("main"))
    canonical = ForwardPassPerfModel.normalize_config(
        BASE | {"estimator_config": {"fpm_learned": {"artifact_path": str(path), "adaptation": "frozen"}}}
    )
    path.write_bytes(artifact_bytes("main") + b" ")
    ForwardPassPerfModel.best_available(canonical)


def truncated(folder):
    path = folder / "artifact.json"
    path.write_bytes(artifact_bytes("main")[: len(artifact_bytes("main")) * 2 // 3])
    build(path)


def of_decode(changed):
    changed["worker_type"] = "decode"
    del changed["metadata"]["identity"]


def without_lists(_folder):
    leaf = {"left": [-1], "right": [-1], "feature": [0], "threshold": [0.0], "value": [0.5]}
    changed = document() | {"features": ["req_batch_size"]}
    changed["stores"] = {"pure_decode": {"baseline": 1.0, "trees": [leaf]}}
    model = ForwardPassPerfModel.from_learned(changed)
    model.estimate_forward_pass_time_ms({"scheduled_requests": {"num_decode_requests": 1}})


PINNED = vectors()["forests"]["main"]["artifact_sha256"]
SELECTOR = {"adaptation": "causal_selector", "artifact_path": None, "checkpoint_path": "/x"}
RUN = {
    "artifact_other_identity": artifact(lambda d: d["metadata"]["identity"].update(tp=4)),
    "artifact_without_identity": artifact(lambda d: d["metadata"].pop("identity")),
    "artifact_other_worker_type": artifact(of_decode),
    "artifact_right_digest": configured(source_sha256=PINNED),
    "artifact_wrong_digest": configured(source_sha256="0" * 64),
    "artifact_changed_after_pinning": changed_after_pinning,
    "artifact_truncated": truncated,
    "artifact_newer_version": artifact(lambda d: d.update(schema_version=2)),
    "artifact_other_schema": artifact(lambda d: d.update(schema="other")),
    "artifact_missing_file": lambda folder: build(folder / "none.json"),
    "from_learned_truncated_text": lambda _: ForwardPassPerfModel.from_learned(artifact_bytes("main")[:9000].decode()),
    "from_learned_newer_version": lambda _: ForwardPassPerfModel.from_learned(document() | {"schema_version": 2}),
    "artifact_features_duplicate": artifact(lambda d: d.update(features=d["features"] + d["features"][:1])),
    "artifact_features_unknown": artifact(lambda d: d["features"].append("zzz")),
    "artifact_features_empty": artifact(lambda d: d.update(features=[])),
    "artifact_stores_empty": artifact(lambda d: d.update(stores={})),
    "artifact_store_unknown": artifact(lambda d: d["stores"].update(zzz=d["stores"]["pure_decode"])),
    "artifact_target_unknown": artifact(lambda d: d.update(target="s")),
    "artifact_trees_empty": artifact(lambda d: d["stores"]["pure_decode"].update(trees=[])),
    "artifact_tree_without_nodes": artifact(lambda d: [nodes.clear() for nodes in tree(d).values()]),
    "artifact_array_length": artifact(lambda d: tree(d)["value"].pop()),
    "artifact_one_child": artifact(lambda d: tree(d)["left"].__setitem__(0, -1)),
    "artifact_child_backwards": artifact(lambda d: tree(d)["left"].__setitem__(0, 0)),
    "artifact_child_out_of_range": artifact(lambda d: tree(d)["left"].__setitem__(0, 999)),
    "artifact_feature_out_of_range": artifact(lambda d: tree(d)["feature"].__setitem__(0, 99)),
    "artifact_extra_key": artifact(lambda d: d.update(extra=1)),
    "artifact_missing_left_absent": artifact(lambda d: tree(d).pop("missing_left")),
    "online_with_artifact": configured(adaptation="online"),
    "online_with_correction": configured(
        {"correction": {"enabled": True}}, adaptation="online", artifact_path=None, checkpoint_path="/x"
    ),
    "both_paths": configured(checkpoint_path="/x"),
    "no_path": configured(artifact_path=None),
    "fallback_allowed": configured(changes={"fallback_policy": "regression"}),
    "selector_artifact": configured(adaptation="causal_selector"),
    "selector_fixed": configured({"correction": {"mode": "fixed"}}, **SELECTOR),
    "selector_no_correction": configured({"correction": {"enabled": False}}, **SELECTOR),
    "selector_alpha_0": configured({"selector": {"alpha": 0}}, **SELECTOR),
    "selector_margin_1": configured({"selector": {"margin": 1}}, **SELECTOR),
    "selector_in_frozen": configured({"selector": {"alpha": 0.5}}),
    "step_with_structural": configured(update_step=0.5),
    "frozen_flush": lambda folder: plain(folder).flush_updates(),
    "frozen_save": lambda folder: plain(folder).save_online_checkpoint(folder / "checkpoint"),
    "request_features_without_lists": without_lists,
}


@pytest.mark.parametrize("name", RUN)
def test_a_recorded_input_has_the_recorded_outcome(name, tmp_path):
    case = CASES[name]
    if case["outcome"] == "accepted":
        RUN[name](tmp_path)
        return
    with pytest.raises(CLASSES[case["error"]]) as refusal:
        RUN[name](tmp_path)
    assert isinstance(refusal.value, errors.FpmSdkError)


def test_every_recorded_case_without_a_checkpoint_is_here():
    elsewhere = ("checkpoint_", "runtime_", "save_over_existing", "selector_export", "selector_save", "selector_flush")
    assert {name for name in CASES if not name.startswith(elsewhere)} == set(RUN)
