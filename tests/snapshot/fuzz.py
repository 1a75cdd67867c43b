"""Mutated snapshots behind digests that fit: each is an error or exactly the state in its bytes, never a crash.

`python -m tests.snapshot.fuzz --count 100000` tries them over every kind: seeded changes of bytes, changes of fields
drawn by hypothesis, and changes of manifest and configuration. Mutants that are accepted are queried, tuned, reported
and saved, and what they save restores. Prints what came of them and exits with 1 at the first silent difference.
"""

import argparse
import contextlib
import hashlib
import json
import math
import random
import shutil
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fpmsdk import ForwardPassPerfModel, errors
from fpmsdk.learned.runtime_checkpoint import read_runtime_checkpoint, runtime_files
from fpmsdk.perfmodel.causal_selector import CausalKind
from fpmsdk.perfmodel.learned import FrozenKind
from fpmsdk.perfmodel.learned_online import OnlineKind, build_online
from fpmsdk.perfmodel.online_learner import learner_parts
from fpmsdk.perfmodel.oplevel import OpLevelKind
from fpmsdk.perfmodel.regression import RegressionKind
from fpmsdk.perfmodel.restoring import install_state
from fpmsdk.perfmodel.select import Selection, select
from fpmsdk.perfmodel.state_registry import STATES
from fpmsdk.perfmodel.wholeforward import WholeForwardKind
from tests.snapshot.golden import state_of
from tests.snapshot.kinds import continued, iterations, prepare, without_snapshot
from tests.snapshot.tampering import edited

REFUSALS = (errors.StateSnapshotError, errors.StateSnapshotIOError)
# What a model may say of a query or of tuning after it was restored.
ANSWERS = (errors.MetricsError, errors.PerfDataNotAvailableError, errors.LearnedModelError)
# Those that a configuration may be refused with.
CONFIGURATION = (
    *REFUSALS,
    errors.ConfigError,
    errors.LearnedModelError,
    errors.MissingCapabilityError,
    errors.PerfDataNotAvailableError,
)


class Target(NamedTuple):
    """A saved model of one kind and what a mutant of it is tried with."""

    name: str
    folder: Path
    original: dict
    config: dict
    state: bytes
    selection: Selection
    queries: list
    more: list

    def __repr__(self):
        return f"Target({self.name})"

    def fresh(self):
        """An untuned model of the kind, over the same engine."""
        kind = self.selection.kind
        if isinstance(kind, FrozenKind):
            new = kind.fresh()
        elif isinstance(kind, RegressionKind):
            new = RegressionKind(kind.config)
        elif isinstance(kind, OpLevelKind):
            new = OpLevelKind(kind._engine, kind.spec, kind.config, kind.data_source)
        elif isinstance(kind, CausalKind):
            return ForwardPassPerfModel.best_available(self.original)
        else:
            assert isinstance(kind, WholeForwardKind)
            new = WholeForwardKind(kind._engine, kind.table, kind.cell, kind.config, kind.data_source, kind._graph)
        return ForwardPassPerfModel(self.selection._replace(kind=new))

    def restored(self, content):
        """A model with this state; raises what a restore would."""
        if isinstance(self.selection.kind, OnlineKind):
            return self.resumed(content)
        model = self.fresh()
        install_state(model._kind, content, "state.bin")
        return model

    def resumed(self, content):
        # The state of a learner alone lies in its checkpoint, behind digests that fit and beside the trees it says.
        folder, config = self.folder / "online", self.selection.config
        checkpoint = read_runtime_checkpoint(folder)
        files = runtime_files(checkpoint._replace(state=msgspec.structs.replace(checkpoint.state, parts=content)))
        learned = config["estimator_config"]["fpm_learned"] | {
            "checkpoint_path": str(folder),
            "source_sha256": hashlib.sha256(files["manifest.json"]).hexdigest(),
        }
        estimator = config["estimator_config"] | {"fpm_learned": learned}
        kind = build_online(config | {"estimator_config": estimator}, lambda path: files[Path(path).name])
        return ForwardPassPerfModel(self.selection._replace(kind=kind))

    def saved(self, model):
        """The bytes of a model's state."""
        kind = model._kind
        if isinstance(kind, OnlineKind):
            return STATES.encode(learner_parts(kind._learned, kind._reports.rejected()))
        return STATES.encode(kind.state_parts())


def targets(folder, observations=120):
    """One target for every kind that has state."""
    built = []
    for name, config in prepare(folder / "data").items():
        model = ForwardPassPerfModel.best_available(config)
        frames = iterations(config, "train", observations + 12)
        model.tune_with_fpms([[rank] for rank in frames[:-12]])
        place = folder / name
        pinned = continued(model.save_state_snapshot(place))
        learns = name.startswith(("learned online", "learned causal_selector"))
        base = config if learns else without_snapshot(pinned)
        selection = select(ForwardPassPerfModel.normalize_config(base))
        queries = iterations(config, "eval", 8)
        more = [[rank] for rank in frames[-12:]]
        built.append(Target(name, place, config, pinned, state_of(place), selection, queries, more))
    return built


class Difference(AssertionError):
    """A mutant was taken for something that it is not."""


def try_state(target, content):
    """Restore a mutated state into a fresh model; what came of it in a word."""
    try:
        model = target.restored(content)
    except (*REFUSALS, errors.LearnedModelError):
        return "refused"
    if target.saved(model) != content:
        raise Difference(f"{target.name}: restored another state than the one in the bytes")
    use(target, model)
    return "unchanged" if content == target.state else "accepted"


def use(target, model):
    """Query, tune, report, save: errors of the public classes are fine, and what is saved restores."""
    for query in target.queries:
        try:
            estimate = model.estimate_forward_pass_time_ms(query)
        except ANSWERS:
            continue
        if estimate is not None and not estimate >= 0.0:
            raise Difference(f"{target.name}: an estimate of {estimate}")
    with contextlib.suppress(ANSWERS):
        model.tune_with_fpms(target.more)
    model.diagnostics(), model.readiness_report(), model.regression_store_diagnostics()
    model.get_min_correction_factor(), model.get_max_correction_factor(), model.get_avg_correction_factor()
    if isinstance(model._kind, OnlineKind):
        return  # its trees are no longer those of the checkpoint's artifact
    saved = target.saved(model)
    if target.saved(target.restored(saved)) != saved:
        raise Difference(f"{target.name}: what was saved again restores as another state")


# --- seeded changes of bytes ---


def flipped(random_numbers, content):
    """One to a few changes at any offset: bits, bytes, words, cuts, copies."""
    changed = bytearray(content)
    for _ in range(random_numbers.choice((1, 1, 1, 2, 4))):
        where = random_numbers.randrange(len(changed) + 1)
        choice = random_numbers.randrange(8)
        if choice <= 2 and where < len(changed):
            changed[where] ^= 1 << random_numbers.randrange(8)
        elif choice == 3 and where < len(changed):
            changed[where] = random_numbers.choice((0, 1, 127, 128, 255))
        elif choice == 4 and len(changed) >= 8:
            where = min(where, len(changed) - 8)
            changed[where : where + 8] = random_numbers.choice(WORDS)
        elif choice == 5:
            del changed[where : where + random_numbers.choice((1, 4, 8, 64, 10**6))]
        elif choice == 6:
            changed[where:where] = random_numbers.randbytes(random_numbers.choice((1, 2, 8, 16)))
        else:
            source = random_numbers.randrange(len(changed) + 1)
            changed[where : where + 8] = changed[source : source + 8]
    return bytes(changed)


WORDS = [struct.pack("<q", value) for value in (0, 1, -1, 2, 63, 64, 65, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))]
WORDS += [struct.pack("<d", value) for value in (0.0, -0.0, 1.0, -1.0, 5e-324, 1e308, math.inf, -math.inf, math.nan)]


# --- changes of fields ---

REALS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 5e-324, 1e-300, 1e300, math.inf, -math.inf, math.nan]),
    st.floats(),
)
WHOLE = st.one_of(st.integers(-3, 130), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)]))


@st.composite
def field_edits(draw, target):
    """Changes of a few elements, and of the lengths of a few fields, of one state."""
    parts = STATES.decode(target.state)
    if not parts:
        return target.state + draw(st.binary(max_size=9))

    def edit(arrays_of):
        for _ in range(draw(st.integers(1, 3))):
            arrays = arrays_of[draw(st.sampled_from(sorted(arrays_of)))]
            name = draw(st.sampled_from(list(arrays)))
            array = arrays[name]
            kind = draw(st.sampled_from(("element", "element", "element", "swap", "shift", "drop", "repeat")))
            flat = array.reshape(-1)
            if kind == "drop":
                arrays[name] = array[: draw(st.integers(0, len(array)))]
            elif kind == "repeat":
                arrays[name] = np.concatenate([array, array[-1:]])
            elif flat.size == 0:
                continue
            elif kind == "element":
                value = draw(REALS if array.dtype.kind == "f" else WHOLE)
                flat[draw(st.integers(0, flat.size - 1))] = np.array(value).astype(array.dtype, casting="unsafe")
            elif kind == "swap":
                one, other = (draw(st.integers(0, flat.size - 1)) for _ in range(2))
                flat[one], flat[other] = flat[other].copy(), flat[one].copy()
            else:
                place = draw(st.integers(0, flat.size - 1))
                flat[place] = (
                    np.nextafter(flat[place], np.inf)
                    if array.dtype.kind == "f"
                    else np.array(int(flat[place]) ^ draw(st.sampled_from((1, 2, 64)))).astype(array.dtype)
                )

    with np.errstate(all="ignore"):
        return edited(target.state, edit)


def try_fields(target, count, number):
    """Try mutants whose fields hypothesis has changed."""
    outcomes = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(field_edits(target))
    def run(content):
        outcomes[try_state(target, content)] += 1

    run()
    return outcomes


# --- changes of the documents around the state ---


def try_documents(target, random_numbers, count):
    """Try mutants of manifest and configuration, each with the state, through the public constructor."""
    outcomes = Counter()
    manifest = (target.folder / "manifest.json").read_bytes()
    untouched = (target.folder / "state.bin").read_bytes()
    folder = target.folder.with_name(f"{target.name} mutants")
    shutil.copytree(target.folder, folder)
    for _ in range(count):
        content, config = manifest, json.loads(json.dumps(target.config))
        choice = random_numbers.randrange(4)
        if choice == 0:
            content = flipped(random_numbers, manifest)
        elif choice == 1:
            document = json.loads(manifest)
            change_document(random_numbers, document)
            content = json.dumps(document).encode()
        elif choice == 2:
            change_document(random_numbers, config)
        else:
            state = flipped(random_numbers, untouched)
            (folder / "state.bin").write_bytes(state)
            document = json.loads(manifest)
            record = next(file for file in document["files"] if file["path"] == "state.bin")
            record |= {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}
            content = json.dumps(document).encode()
        (folder / "manifest.json").write_bytes(content)
        names_a_snapshot = pin(config, folder, content)
        try:
            model = ForwardPassPerfModel.best_available(config)
        except CONFIGURATION:
            outcomes["refused"] += 1
        else:
            if not names_a_snapshot:
                outcomes["without a snapshot"] += 1
                continue
            expected = (folder / "state.bin").read_bytes()
            if STATES.encode(model._kind.state_parts()) != expected:
                raise Difference(f"{target.name}: restored another state than the one on disk")
            outcomes["accepted"] += 1
        finally:
            (folder / "state.bin").write_bytes(untouched)
    shutil.rmtree(folder)
    return outcomes


def pin(config, folder, manifest):
    section = config.get("estimator_config")
    section = section.get("state_snapshot") if isinstance(section, dict) else None
    if isinstance(section, dict):
        section |= {"path": str(folder), "sha256": hashlib.sha256(manifest).hexdigest()}
    return isinstance(section, dict)


VALUES = (None, True, False, 0, 1, -1, 1.0, 2**64, "", "x", "deny", [], [0], {}, {"a": 1}, "../x", "0" * 64)


def change_document(random_numbers, document):
    """Replace, drop or add one value anywhere in a JSON document."""
    place = document
    for _ in range(random_numbers.randrange(1, 6)):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = random_numbers.choice(keys)
        if isinstance(place[key], dict | list) and random_numbers.random() < 0.8:
            place = place[key]
            continue
        choice = random_numbers.randrange(4)
        if choice == 0 and isinstance(place, dict):
            del place[key]
        elif choice == 1 and isinstance(place, dict):
            place["added"] = random_numbers.choice(VALUES)
        else:
            place[key] = random_numbers.choice(VALUES)
        return


def run(count, number, folder, report=lambda _text: None):
    """Try so many mutants over every kind; returns what came of them, by kind of change."""
    built = targets(folder)
    outcomes = {"bytes": Counter(), "fields": Counter(), "documents": Counter()}
    for index, target in enumerate(built):
        random_numbers = random.Random(f"{number} {target.name}")
        # Rebuilding a native model for each document is slow; its documents are read by the code of all kinds.
        documents = (
            20 if isinstance(target.selection.kind, RegressionKind | FrozenKind) else 2
        ) * count // 1000 // len(built) + 1
        fields = count // 5 // len(built)
        share = count // len(built) + 1 - documents - fields
        for _ in range(share):
            outcomes["bytes"][try_state(target, flipped(random_numbers, target.state))] += 1
        outcomes["fields"] += try_fields(target, fields, number + index)
        outcomes["documents"] += try_documents(target, random_numbers, documents)
        report(f"{target.name}: {share + fields + documents} mutants")
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="mutants in all")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(given.count, given.seed, Path(folder) / "fuzz", report=lambda text: print(text, flush=True))
    total = sum(sum(counter.values()) for counter in outcomes.values())
    for name, counter in outcomes.items():
        print(f"{name}: {dict(counter)}")
    print(f"{total} mutated snapshots: 0 crashes, 0 silent differences")
    return 0 if total >= given.count else 1


if __name__ == "__main__":
    sys.exit(main())
