import hashlib
import json

import pytest

from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.cells import Cell
from fpmsdk.collect.rows import cell_rows
from fpmsdk.errors import CollectionError
from tests.collect.native import PLAN, REAL_KV, artifact, cell_of, point, write

IDENTITY = {
    "model_config_sha256": "e" * 64,
    "execution_profile": "full",
    "engram_residency": "hbm_tp_sharded",
    "input_modality": "text",
}
TEXT = "f" * 64
STREAMS = "benchmark.token-streams.jsonl"


def bound(phase="decode"):
    """A cell whose timings hold for one configuration file only."""
    source = cell_of(phase, "single").document()
    return Cell.from_document(source | {"execution_identity": IDENTITY, "input_text_sha256": TEXT})


def files(phase="decode", change_stream=None):
    """A sweep of two points with their token streams: rank file and lines."""
    if phase == "decode":
        points = [point(number, "decode", number, 0, 8 * number, ["kvwarm_real_kv"]) for number in (1, 2)]
        regimes, kvwarm = ["real_kv", "real_kv"], REAL_KV
    else:
        points = [point(number, "prefill", 1, 4 * number, 8, ["prefill_real_seed"]) for number in (1, 2)]
        regimes, kvwarm = ["real_prefix", "real_prefix"], None
    (document,) = artifact(points, regimes, kvwarm=kvwarm)
    lines = []
    for row in document["results"]:
        stream = stream_of(row["point"])
        if change_stream is not None:
            change_stream(stream)
        line = json.dumps(stream)
        lines.append(line)
        seeded = row["point"]["total_kv_read_tokens"] - (row["point"]["batch_size"] if phase == "decode" else 0)
        row["real_kv_witness"] = {
            "same_request": True,
            "allocated_fake_tokens": 0,
            "completed_seed_tokens": seeded,
            "token_stream_sha256": hashlib.sha256(line.encode()).hexdigest(),
        }
    content = "\n".join(lines) + "\n"
    document |= {
        "execution_identity": IDENTITY,
        "execution_mode": "eager",
        "input_provenance": {
            "source": "tokenizer_text",
            "text_sha256": TEXT,
            "token_ids_sha256": "a" * 64,
            "tokenizer_revision": "rev",
            "token_count": 100,
            "unique_token_count": 50,
            "token_stream_manifest": {
                "file": STREAMS,
                "sha256": hashlib.sha256(content.encode()).hexdigest(),
                "records": len(lines),
            },
        },
    }
    return document, content


def stream_of(one):
    """Requests of a decode point (or of the one request of a prefill point) that were computed from real prompts."""
    batch, is_decode = one["batch_size"], one["point_type"] == "decode"
    total = one["total_kv_read_tokens"] - (batch if is_decode else 0) + one["total_prefill_tokens"]
    length = total // batch
    return {
        "benchmark_id": one["benchmark_id"],
        "requests": [
            {
                "request_index": at,
                "prompt_token_ids": list(range(length)),
                "output_token_ids": [1],
                "computed_tokens": length + (2 if is_decode else 0),
            }
            for at in range(batch)
        ],
    }


def validate(tmp_path, document, content, phase="decode"):
    cell = bound(phase)
    raw = write(tmp_path, cell, [document])
    (raw / "node0000" / STREAMS).write_text(content)
    return cell, validate_native(None, cell, raw)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_real_text_and_real_kv_are_proven_point_by_point(tmp_path, phase):
    _, found = validate(tmp_path, *files(phase), phase)
    assert found.input_provenance["text_sha256"] == TEXT


def test_rows_of_bound_cells_name_their_text_and_read_real_kv_only(tmp_path):
    cell, found = validate(tmp_path, *files())
    row = cell_rows(PLAN, cell, found, tmp_path)[0]
    assert (row["model_config_sha256"], row["input_text_sha256"], row["input_tokenizer_revision"]) == (
        "e" * 64,
        TEXT,
        "rev",
    )
    assert row["kv_seed_regime"] == "real_kv"
    cell, found = validate(tmp_path / "prefill", *files("prefill"), "prefill")
    with pytest.raises(CollectionError, match="read legacy KV; a cell bound to a configuration publishes"):
        cell_rows(PLAN, cell, found, tmp_path)


def at(path, value):
    *folders, last = path.split(".")

    def change(document):
        inside = document
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        if value is ...:
            del inside[last]
        else:
            inside[last] = value

    return change


P = "input_provenance"
M = f"{P}.token_stream_manifest"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("execution_identity", {}, "execution_identity: expected"),
        ("execution_mode", "graph", "execution_mode: expected 'eager'"),
        (P, None, "input_provenance: expected an object"),
        (f"{P}.source", "random", "source: expected 'tokenizer_text'"),
        (f"{P}.text_sha256", "x", "text_sha256: expected 64 lowercase"),
        (f"{P}.text_sha256", "0" * 64, "the planned text"),
        (f"{P}.token_ids_sha256", None, "token_ids_sha256: expected 64 lowercase"),
        (f"{P}.tokenizer_revision", "", "tokenizer_revision: expected non-empty"),
        (f"{P}.token_count", 1, "token_count: expected an integer of at least 2"),
        (f"{P}.unique_token_count", True, "unique_token_count: expected an integer of at least 2"),
        (f"{P}.unique_token_count", 101, "at most token_count, 100"),
        (M, None, "token_stream_manifest: expected an object"),
        (f"{M}.file", "../x.token-streams.jsonl", "beside the rank file"),
        (f"{M}.file", "streams.jsonl", "beside the rank file"),
        (f"{M}.file", "absent.token-streams.jsonl", "cannot be read"),
        (f"{M}.sha256", "0" * 64, "token_stream_manifest.sha256"),
        (f"{M}.records", 3, "records: expected 2, found 3"),
        (f"{M}.schema_version", 3, "schema_version: expected 1 or 2"),
        (f"{M}.schema_version", 2, r"warmup_benchmark_ids: expected \[\]"),
        ("warmup_results", [{}], "none with token streams of schema 1"),
        ("results.0.real_kv_witness", None, "benchmark id 1: real_kv_witness: expected an object"),
        ("results.0.real_kv_witness.same_request", 1, "same_request: expected True"),
        ("results.0.real_kv_witness.allocated_fake_tokens", 1, "allocated_fake_tokens: expected 0"),
        ("results.0.real_kv_witness.completed_seed_tokens", 8, "completed_seed_tokens: expected 7"),
        ("results.0.real_kv_witness.token_stream_sha256", "0" * 64, "token_stream_sha256: expected"),
    ],
)
def test_a_proof_that_does_not_hold_is_refused(tmp_path, path, value, message):
    document, content = files()
    at(path, value)(document)
    with pytest.raises(CollectionError, match=message):
        validate(tmp_path, document, content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("requests", []), "requests: expected 1, found '0 requests'"),
        (at("requests.0.request_index", 1), "request_index: expected 0"),
        (at("requests.0.prompt_token_ids", []), "prompt_token_ids: expected token ids"),
        (at("requests.0.output_token_ids", [True]), "output_token_ids: expected token ids"),
        (at("requests.0.computed_tokens", 7), "computed_tokens: expected 9, found 7"),
        (at("benchmark_id", 1), "an id that no earlier line has"),
        (at("benchmark_id", 9), "an id that no earlier line has"),
        (
            at(
                "requests",
                [{"request_index": 0, "prompt_token_ids": [1], "output_token_ids": [1], "computed_tokens": 3}],
            ),
            "prompt tokens: expected 7, as the point says, found 1",
        ),
    ],
)
def test_a_token_stream_must_be_that_of_its_point(tmp_path, change, message):
    with pytest.raises(CollectionError, match=message):
        validate(tmp_path, *files(change_stream=change))


def with_warmup(document, content, number=3, reasons=("eager_warmup",), role="warmup"):
    """The same artifact with an eager replica, in token streams of schema 2."""
    replica = point(number, "decode", 1, 0, 8, reasons)
    streams = [json.loads(line) | {"sampling_role": "measurement"} for line in content.splitlines()]
    streams.append(stream_of(replica) | {"sampling_role": role})
    lines = [json.dumps(stream) for stream in streams]
    document["warmup_results"] = [{"point": replica}]
    for row, line, seeded in zip([*document["results"], *document["warmup_results"]], lines, (7, 14, 7), strict=True):
        row["real_kv_witness"] = {
            "same_request": True,
            "allocated_fake_tokens": 0,
            "completed_seed_tokens": seeded,
            "token_stream_sha256": hashlib.sha256(line.encode()).hexdigest(),
        }
    content = "\n".join(lines)
    document[P]["token_stream_manifest"] |= {
        "schema_version": 2,
        "records": 3,
        "warmup_benchmark_ids": [number],
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
    }
    return document, content


def test_eager_replicas_are_proven_too_and_stay_apart(tmp_path):
    assert validate(tmp_path, *with_warmup(*files()))[1].num_points == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"number": 2}, "a new id after the points"),
        ({"reasons": ()}, "eager_warmup on replicas only"),
        ({"role": "measurement"}, "sampling_role: expected 'warmup'"),
    ],
)
def test_a_replica_that_could_be_taken_for_a_measurement_is_refused(tmp_path, options, message):
    with pytest.raises(CollectionError, match=message):
        validate(tmp_path, *with_warmup(*files(), **options))
