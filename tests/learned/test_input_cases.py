"""All recorded input cases of learned models: same outcome, same class of error, and a message of the same meaning."""

import json
from collections.abc import Callable

import pytest

from fpmsdk import ForwardPassPerfModel, errors
from fpmsdk._ext.features import WORKLOAD_KINDS
from tests.learned.checkpoints import written_checkpoint
from tests.learned.recorded import artifact_bytes, vectors
from tests.learned.test_checkpoints import flipped, in_store, move_thresholds, rewritten, tuned

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


def seeded(change=lambda folder: None, changes=None, **learned):
    """A model of the recorded checkpoint after a change of its files."""

    def run(folder):
        path = written_checkpoint(folder)
        change(path)
        section = {"checkpoint_path": str(path)} | learned
        return ForwardPassPerfModel.best_available(
            BASE | {"estimator_config": {"fpm_learned": section}} | (changes or {})
        )

    return run


def resumed(change=lambda folder: None, **learned):
    """A model of a saved learner after a change of its files."""

    def run(folder):
        path = folder / "saved"
        tuned(written_checkpoint(folder)).save_online_checkpoint(path)
        change(path)
        section = {"checkpoint_path": str(path)} | learned
        return ForwardPassPerfModel.best_available(BASE | {"estimator_config": {"fpm_learned": section}})

    return run


def halved(name):
    def change(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def of_version(number):
    return lambda folder: rewritten(folder, lambda document: document.update(schema_version=number))


def one_row_more(document):
    store = document["stores"]["pure_decode"]
    store["row_count"] += 1


def selector(folder):
    return seeded(adaptation="causal_selector")(folder)


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
    "checkpoint_model_tampered": seeded(lambda f: flipped(f / "model.json")),
    "checkpoint_rows_tampered": seeded(lambda f: flipped(f / "pure_decode.rows.parquet")),
    "checkpoint_manifest_truncated": seeded(halved("manifest.json")),
    "checkpoint_newer_version": seeded(of_version(2)),
    "checkpoint_other_exporter": seeded(lambda f: rewritten(f, lambda d: d.update(exporter_version="2"))),
    "checkpoint_missing_rows": seeded(lambda f: (f / "pure_decode.rows.parquet").unlink()),
    "checkpoint_other_identity": seeded(changes={"tp": 2}),
    "checkpoint_row_count": seeded(lambda f: rewritten(f, one_row_more)),
    "checkpoint_thresholds_moved": seeded(lambda f: rewritten(f, move_thresholds)),
    "checkpoint_wrong_digest": seeded(source_sha256="0" * 64),
    "checkpoint_min_samples_leaf": seeded(lambda f: rewritten(f, in_store(min_samples_leaf=200))),
    "runtime_ok": resumed(),
    "runtime_other_controls": resumed(recent_window=9),
    "runtime_version_4": resumed(of_version(4)),
    "runtime_version_6": resumed(of_version(6)),
    "runtime_state_tampered": resumed(lambda f: flipped(f / "state.bin")),
    "runtime_state_truncated": resumed(halved("state.bin")),
    "runtime_in_selector": resumed(adaptation="causal_selector"),
    "runtime_in_frozen": resumed(adaptation="frozen"),
    "save_over_existing": lambda folder: seeded()(folder).save_online_checkpoint(folder),
    "selector_export": lambda folder: selector(folder).export_learned_artifact(),
    "selector_save": lambda folder: selector(folder).save_online_checkpoint(folder / "saved"),
    "selector_flush": lambda folder: selector(folder).flush_updates(),
}


# What a message has to say, by the recorded meaning.
MEANINGS = {
    "stored identity is not the deployment's": "artifact.json: identity.tp: expected 1, .* found 4",
    "store kind not allowed for the role": "a decode worker has no such store",
    "source_sha256 differs from the content": "source_sha256: expected '[0-9a-f]{64}', as of .*, found",
    "invalid JSON, end of input": "invalid JSON: .*truncated",
    "schema_version 2 is not 1": "schema_version: expected 1;.* found 2",
    "wrong schema name": "schema: expected 'aic_fpm_learned_forward_perf', found 'other'",
    "file cannot be read": "cannot be read",
    "duplicate feature, named": "duplicate feature 'num_decode_requests'",
    "unknown feature, named": "unknown feature 'zzz'",
    "no features": "features: there are none",
    "no stores": "stores: there are none",
    "unknown store kind, the four are listed": "unknown store kind 'zzz'; expected some of "
    + ", ".join(WORKLOAD_KINDS),
    "unknown target, both are listed": "target: expected one of log_ms, ms, found 's'",
    "empty tree; store and tree named": r"pure_decode.trees\[0\]: .* at least one node",
    "node arrays differ in length; store and tree named": r"pure_decode.trees\[0\].value: expected 15 .* found 14",
    "children out of range; node named": r"trees\[0\], node 0: children out of range",
    "child index not larger than the parent's; node named": r"trees\[0\], node 0: .* larger than its parent's",
    "feature index out of range; node named": r"trees\[0\], node 0: feature out of range",
    "checksum of model.json": "model.json: expected SHA-256",
    "checksum of the rows file, named": "pure_decode.rows.parquet: expected SHA-256",
    "manifest is invalid JSON": "manifest.json: invalid JSON",
    "unsupported checkpoint schema or version": "schema_version: expected",
    "checkpoint identity is not the configuration's": "identity.tp: expected 2, .* found 1",
    "anchor rows differ from the manifest's count": "row_count: expected 1158, found 1159",
    "a tree threshold is not in the bin mapper": r"trees\[0\], node 0: threshold .* is not in the bin mapper",
    "a seed leaf has fewer rows than min_samples_leaf": "at least min_samples_leaf 200 rows in every leaf",
    "online controls differ from the saved ones": "recent_window: online controls differ from saved runtime state",
    "old runtime format: start again from the training seed": "found 4; restart from the training checkpoint",
    "checksum of state.bin": "state.bin: expected SHA-256",
    "the selector needs a training checkpoint": "causal_selector needs a training checkpoint",
    "destination exists": "the destination exists",
    "online needs checkpoint_path": "online needs checkpoint_path",
    "online needs correction.enabled false": "correction.enabled false",
    "exactly one of the two paths": "exactly one of artifact_path and checkpoint_path",
    "fallback_policy must be deny": "needs fallback_policy deny",
    "the selector needs a training checkpoint_path": "causal_selector needs checkpoint_path, the training checkpoint",
    "the selector needs correction on and hybrid or auto": "needs correction enabled, in mode auto or hybrid",
    "alpha in (0,1]": r"alpha must be in \(0, 1\]",
    "margin in [0,1)": r"margin must be in \[0, 1\)",
    "selector settings only with causal_selector": "selector: needs .* causal_selector",
    "update_step below 1 only with leaf_only": "update_step below 1 needs update_mode leaf_only",
    "flush_updates needs an online model": "flush_updates needs an online",
    "saving a checkpoint needs an online model": "save_online_checkpoint needs an online",
    "a forest alone cannot hold the combined state": "needs one forest per store; a causal selector has two",
    "saving the combined state is not supported": "a causal selector has two experts and their evidence",
    "request features need usable lists on every active rank": "per-request features, .* on every rank with work",
}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_input_has_the_recorded_outcome(name, tmp_path):
    case = CASES[name]
    if case["outcome"] == "accepted":
        RUN[name](tmp_path)
        return
    with pytest.raises(CLASSES[case["error"]], match=MEANINGS[case["meaning"]]) as refusal:
        RUN[name](tmp_path)
    assert isinstance(refusal.value, errors.FpmSdkError)
