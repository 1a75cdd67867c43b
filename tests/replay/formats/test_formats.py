"""How the form of a trace file is chosen, and files that cannot be read at all."""

import gzip
import json

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.detect import detected_form
from fpmsdk.replay.trace import Trace

ROW = json.dumps({"input_length": 8, "output_length": 3, "hash_ids": [1]}).encode()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_the_ending_before_gz_tells_the_form(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(ROW) if name.endswith(".gz") else ROW)
    assert len(Trace.read(tmp_path / name)) == 1


def test_a_named_form_overrides_the_ending(tmp_path):
    (tmp_path / "t.txt").write_bytes(ROW)
    assert len(Trace.read(tmp_path / "t.txt", "mooncake")) == 1


def test_an_ending_that_tells_nothing_asks_for_the_form(tmp_path):
    (tmp_path / "t.txt").write_bytes(ROW)
    with pytest.raises(TraceError, match=r"known endings are \.jsonl, \.csv, \.json, \.parquet"):
        Trace.read(tmp_path / "t.txt")


def test_an_unknown_form_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(TraceError, match="unknown trace format 'pcap'; known are mooncake, mooncake-delta, dynamo,"):
        Trace.read(tmp_path / "t.jsonl", "pcap")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot read the trace: No such file"):
        Trace.read(tmp_path / "none.jsonl")


def test_cut_gzip_data_are_refused(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(ROW * 50)[:-9])
    with pytest.raises(TraceError, match="cut short or damaged"):
        Trace.read(path)


@pytest.mark.parametrize(
    ("name", "record", "form"),
    [
        ("t.jsonl", {"hash_ids": []}, "mooncake"),
        ("t.jsonl", {"metadata": {}, "metrics": {}}, "aiperf"),
        ("t.jsonl", {"requests": [], "block_size": 4}, "weka"),
        ("t.json", {"requests": []}, "recorded"),
        ("t.json", {"requests": [], "block_size": 4}, "weka"),
        ("t.json", {"benchmarks": []}, "guidellm"),
        ("t.jsonl", {"schema": "", "event_type": ""}, "dynamo"),
        ("t.jsonl", {"timestamp": 1, "event": {}}, "dynamo"),
        ("t.jsonl", "no JSON", "mooncake"),
        ("t.json.gz", {"benchmarks": []}, "guidellm"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ("t.csv.gz", "Timestamp,Request tokens,Response tokens", "burstgpt"),
        ("t.csv", "x,y", "azure"),
    ],
)
def test_the_first_record_tells_forms_of_one_ending_apart(tmp_path, name, record, form):
    content = (record if isinstance(record, str) else json.dumps(record)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert detected_form(tmp_path / name) == form


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_tokens": 4}, "block_tokens"),
        ({"time_unit": "s"}, "time_unit"),
        ({"benchmark": 0}, "benchmark"),
        ({"nested_timestamps": "auto"}, "nested_timestamps"),
    ],
)
def test_an_option_that_the_form_does_not_have_is_refused(tmp_path, options, field):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n")
    with pytest.raises(TraceError, match=f"{field} has no effect on a trace of form azure") as refused:
        Trace.read(tmp_path / "t.csv", **options)
    assert refused.value.field == field


@pytest.mark.parametrize(("option", "value"), [("time_unit", "us"), ("nested_timestamps", True)])
def test_an_option_has_one_of_its_values(tmp_path, option, value):
    with pytest.raises(TraceError, match=f"{option} is .*; give"):
        Trace.read(tmp_path / "t.jsonl", **{option: value})


@pytest.mark.parametrize(
    "block_tokens", [0, -512, True, 512.0, 2**31, 2**63 - 1, 2**64, pytest.param(10**5000, id="thousands of digits")]
)
def test_block_tokens_is_a_positive_31_bit_integer(tmp_path, block_tokens):
    with pytest.raises(TraceError, match="block_tokens is"):
        Trace.read(tmp_path / "t.jsonl", block_tokens=block_tokens)
    with pytest.raises(TraceError, match="block_tokens is"):
        Trace.from_arrays([0.0], [8], [1], hash_ids=[[1]], block_tokens=block_tokens)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", f'{{"input_length": 8, "output_length": 3, "hash_ids": [1], "other": {DEEP}}}'),
        ("t.jsonl", DEEP),
        ("t.json", f'{{"requests": [], "engine": {{"x": {DEEP}}}}}'),
        ("t.json", DEEP),
    ],
    ids=["mooncake row", "mooncake", "recorded engine", "recorded"],
)
def test_text_nested_too_deeply_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=name):
        Trace.read(tmp_path / name)
