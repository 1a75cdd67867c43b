"""One configuration per kind of saved state, every correction mode and role included, over data made for it.

Written once per test session; a process that restores needs nothing but the configuration. The stream is that of a real
engine, as far as the untuned model answers it.
"""

import functools
import hashlib
import json
import os

import msgspec

from fpmsdk import ForwardPassPerfModel, errors, sample
from tests.learned.checkpoints import written_checkpoint
from tests.learned.recorded import artifact_bytes, artifact_path, vectors
from tests.perfdb.pairs import VERSION, decode, prefill, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel import tiny
from tests.perfmodel.deployments import checkpoint, direct_config

UNBOUNDED = {"min": None, "max": None}
# Smaller than the traffic, so that both parts of a hybrid answer.
LIMITS = {"max_num_tokens": 200, "max_batch_size": 6, "max_kv_tokens": 6000}
THRESHOLD = {
    "kind": "error_threshold",
    "relative_tolerance": 0.05,
    "absolute_tolerance_ms": 0.2,
    "window": 12,
    "trigger": 4,
    "cooldown": 6,
}
PERIODIC = {"kind": "periodic", "step": 10}
SELECTED = ["attention", "moe", "n", "logN", "n2"]


def regression(role="aggregated", sampling=None, **fit):
    section = {"fit": fit} | ({"sampling": sampling} if sampling else {})
    return sample.MODEL | {"worker_type": role, "estimator_config": {"fpm_regression": section}}


def corrected(config, mode, **changes):
    estimator = config.get("estimator_config", {}) | {
        "correction": {"mode": mode, "factor_bounds": UNBOUNDED, **LIMITS} | changes
    }
    return config | {"estimator_config": estimator}


def prepare(folder):
    """Write the data below `folder`; returns the configurations by name."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = {
        "regression linear": regression(),
        "regression linear prefill": regression("prefill"),
        "regression linear decode": regression("decode"),
        "regression linear rebuilt": regression(rebuild_interval=5),
        "regression linear signed": regression(linear={"non_negative": False}),
        "regression linear threshold": regression(linear={"update_policy": THRESHOLD}),
        "regression linear threshold decode": regression("decode", linear={"update_policy": THRESHOLD}),
        "regression selected": regression(
            linear={"feature_axes": SELECTED[:3]}, sampling={"axes": ["moe", "logN"], "bins_per_axis": [3, 5]}
        ),
        "regression selected five": regression(
            "decode", linear={"feature_axes": SELECTED}, sampling={"axes": ["n"], "bins_per_axis": [7]}
        ),
        "regression spline": regression(kind="spline", sampling={"bins_per_axis": [4, 4], "max_observations": 48}),
        "regression spline decode": regression("decode", kind="spline", rebuild_interval=20),
        "regression spline periodic": regression(kind="spline", spline={"knots_per_axis": 3, "search": PERIODIC}),
    }
    configs |= {
        "regression recursive": regression(kind="recursive"),
        "regression recursive decode": regression("decode", kind="recursive", recursive={"forgetting": 0.9}),
        "regression automatic": regression(kind="automatic"),
    }
    op_level = op_level_config(folder)
    forward = forward_config(folder)
    for mode in ("fixed", "dynamic_local", "hybrid"):
        configs[f"op_level {mode}"] = corrected(op_level, mode)
        configs[f"fpm_interpolation {mode}"] = corrected(forward, mode)
    configs["op_level prefill"] = corrected(op_level | {"worker_type": "prefill"}, "fixed")
    configs["op_level decode"] = corrected(op_level | {"worker_type": "decode"}, "hybrid")
    # Small budgets: rows are evicted, and the local part of the dynamic store ages.
    small = {"sampling": {"bins_per_axis": [2, 3], "max_observations": 12}, "min_observations": 2}
    configs["op_level bounded"] = corrected(op_level, "hybrid", factor_bounds={"min": 0.5, "max": 120.0}, **small)
    configs["op_level uncorrected"] = op_level | {"estimator_config": {"correction": {"enabled": False}}}
    configs["fpm_interpolation in root"] = corrected(forward_in_root_config(folder), "hybrid")
    configs["execution_profile"] = profiled_config(folder, op_level)
    for name, learned in LEARNING.items():
        configs[name] = learning_config(folder, **learned)
    frozen = frozen_config(folder)
    for mode in ("fixed", "dynamic_local", "hybrid"):
        configs[f"learned frozen {mode}"] = corrected(frozen, mode)
    configs["learned frozen decode"] = corrected(frozen_decode_config(folder), "hybrid")
    configs["learned frozen uncorrected"] = frozen | {
        "estimator_config": frozen["estimator_config"] | {"correction": {"enabled": False}}
    }
    configs["from_learned"] = corrected(frozen | PLACEHOLDER, "hybrid")
    return configs


# What a model of an artifact alone says that it stands for.
PLACEHOLDER = {"model": "from_learned", "system": "from_learned"}


def frozen_config(folder):
    learned = {"artifact_path": str(artifact_path(folder, "main")), "adaptation": "frozen"}
    return vectors()["identity_config"] | {"estimator_config": {"fpm_learned": learned}}


def frozen_decode_config(folder):
    document = json.loads(artifact_bytes("main"))
    document |= {"worker_type": "decode", "stores": {"pure_decode": document["stores"]["pure_decode"]}, "metadata": {}}
    path = folder / "decode.json"
    path.write_text(json.dumps(document))
    learned = {"artifact_path": str(path), "adaptation": "frozen"}
    changes = {"worker_type": "decode", "estimator_config": {"fpm_learned": learned}}
    return vectors()["identity_config"] | changes


# Learners with their defaults, with rows that wait when the state is saved, with fixed trees, and both experts.
LEARNING = {
    "learned online": {},
    "learned online batches": {
        "update_every": 4,
        "recent_max_age_observations": 60,
        "history_bin_grouping": False,
        "mutable_tree_tail": 5,
    },
    "learned online leaf_only": {"update_mode": "leaf_only", "update_step": 0.5, "eager_refresh_interval": 7},
    "learned causal_selector": {"adaptation": "causal_selector"},
}


def learning_config(folder, **learned):
    path = folder / "checkpoint-main"
    if not path.exists():
        written_checkpoint(folder)
    estimator = {"fpm_learned": {"checkpoint_path": str(path)} | learned}
    if learned.get("adaptation") == "causal_selector":
        estimator["correction"] = LIMITS
    return vectors()["identity_config"] | {"estimator_config": estimator}


def op_level_config(folder):
    root = tiny.write_root(folder / "systems").path
    return {
        "model": str(tiny.write_model(folder / "tiny")),
        "system": "x100",
        "backend": "vllm",
        "backend_version": tiny.VERSION,
        "worker_type": "aggregated",
        "estimation_mode": "op_level",
        "systems_paths": [str(root)],
    }


def forward_rows(model):
    tokens = [2**power for power in range(10)]
    return [
        prefill(batch, new, kv, 0.9 + 0.013 * new + 0.0007 * kv + 0.05 * batch, model=model)
        for batch in range(1, 17)
        for new in tokens
        for kv in (0, 64, 512, 4096, 32768)
        if new >= batch and (kv == 0 or kv >= batch)
    ] + [
        decode(batch, kv, 1.1 + 0.07 * batch + 0.0004 * kv, model=model)
        for batch in range(1, 17)
        for kv in (0, 16, 128, 1024, 8192, 32768)
    ]


def forward_config(folder):
    # The system has no data of its own: the table is given by its path.
    bare = Systems(folder / "bare")
    bare.hardware()
    model = checkpoint(folder / "model")
    table = write_pair(folder / "pair", forward_rows(str(model)))
    return direct_config(model, bare.path, table)


def forward_in_root_config(folder):
    systems = Systems(folder / "full")
    systems.hardware()
    model = checkpoint(folder / "model in root")
    write_pair(systems.path / f"data/x100/vllm/{VERSION}", forward_rows(str(model)))
    config = direct_config(model, systems.path, "")
    config["estimator_config"] = {"fpm_interpolation": {"method": "direct"}}
    return config


def profiled_config(folder, op_level):
    plain = op_level | {
        "worker_type": "decode",
        "enable_shared_layer": False,
        "estimator_config": {"correction": {"enabled": False}},
    }
    spec = json.loads(json.dumps(ForwardPassPerfModel.best_available(plain)._kind.spec.to_dict()))
    root = op_level["systems_paths"][0]
    retained = [os.path.join(place, name) for place, _, names in os.walk(root) for name in names]
    document = {
        "schema_version": 1,
        "basis": spec,
        "worker_type": "decode",
        "ops": spec["generation_ops"],
        "retained_files": [
            {"path": os.path.relpath(path, root), "sha256": digest_of(path), "size_bytes": os.path.getsize(path)}
            for path in retained
        ],
    }
    path = folder / "a profile.json"
    path.write_text(json.dumps(document))
    plain["estimator_config"] |= {"op_level": {"execution_profile": {"path": str(path), "sha256": digest_of(path)}}}
    return plain


def digest_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=2)
def recorded(name):
    return tuple(msgspec.msgpack.decode(frame) for frame in getattr(sample, f"{name}_frames")())


def iterations(config, name, count):
    """The first iterations of a recorded stream that an untuned model of this configuration takes."""
    if config.get("estimator_config", {}).get("fpm_learned", {}).get("checkpoint_path"):
        return list(recorded(name)[:count])  # takes all of them, and one of a selector is only built from its snapshot
    cold = ForwardPassPerfModel.best_available(without_snapshot(config))
    found = []
    for frame in recorded(name):
        try:
            cold.estimate_forward_pass_time_ms(frame)
        except (errors.MetricsError, errors.PerfDataNotAvailableError):
            continue
        found.append(frame)
        if len(found) == count:
            break
    return found


def without_snapshot(config):
    estimator = {name: value for name, value in config.get("estimator_config", {}).items() if name != "state_snapshot"}
    return config | {"estimator_config": estimator}


def continued(config):
    """A returned configuration that may go on tuning."""
    estimator = config["estimator_config"]
    snapshot = estimator["state_snapshot"] | {"on_tune": "continue"}
    return config | {"estimator_config": estimator | {"state_snapshot": snapshot}}
