"""Canonical forms, evidence references, locks and strict models.

Source: collector.md section 12 (chash vectors), onboarding.md section 0.
"""

import os
import subprocess
import sys

import pytest

from fpmsdk.documents.canonical import canonical_bytes, digest, parse_document, read_document, write_document
from fpmsdk.documents.evidence import file_evidence, file_meta, manifest, refuse_links, verify_evidence
from fpmsdk.documents.lock import exclusive
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import EvidenceError, OnboardError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
        ([], "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"),
        (
            {
                "K8sConfig": {
                    "extra_env": [
                        {"name": "DYN_BENCH_KV_WARMUP", "value": "on"},
                        {"name": "DYN_BENCH_PREFILL_REAL_SEED", "value": "on"},
                    ]
                }
            },
            "a46acf1d7947d60fa633fade5e98a9e3fa517a74e2a4768d8fddc58f16122be5",
        ),
    ],
)
def test_digests_are_those_of_the_recorded_vectors(value, expected):
    assert digest(value) == expected


def test_the_hashed_form_escapes_what_is_not_ascii_and_refuses_nan():
    assert canonical_bytes({"é": 1}) == b'{"\\u00e9":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_bytes(float("nan"))


def test_a_written_document_is_pretty_and_read_back(tmp_path):
    path = tmp_path / "plan.json"
    write_document(path, {"b": [1], "a": None})
    assert path.read_bytes() == b'{\n  "a": null,\n  "b": [\n    1\n  ]\n}\n'
    assert read_document(path) == {"a": None, "b": [1]}


@pytest.mark.parametrize("content", [b'{"a": 1, "a": 2}', b'{"a": NaN}', b'{"a": 1e999}', b"{", b"\xff{}"])
def test_no_strict_json_is_refused_with_the_name_of_the_file(content):
    with pytest.raises(OnboardError, match=r"^plan\.json: invalid JSON"):
        parse_document(content, "plan.json")


def test_a_document_is_not_read_through_a_symbolic_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "plan.json").symlink_to("real.json")
    with pytest.raises(OnboardError, match="symbolic link"):
        read_document(tmp_path / "plan.json")
    assert read_document(tmp_path / "plan.json", follow_links=True) == {}


def test_a_document_is_not_written_through_a_symbolic_link(tmp_path):
    (tmp_path / "plan.json").symlink_to("real.json")
    with pytest.raises(OnboardError, match="symbolic link"):
        write_document(tmp_path / "plan.json", {})
    assert not (tmp_path / "real.json").exists()


def test_evidence_holds_while_the_bytes_do(tmp_path):
    path = tmp_path / "raw.json"
    path.write_bytes(b"{}")
    reference = file_evidence(path)
    assert reference == {
        "path": str(path),
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "size_bytes": 2,
    }
    verify_evidence(reference)
    path.write_bytes(b"[]")
    with pytest.raises(EvidenceError, match="evidence was changed"):
        verify_evidence(reference)
    path.unlink()
    with pytest.raises(EvidenceError, match="is gone"):
        verify_evidence(reference)


@pytest.mark.parametrize("target", ["file", "folder", "missing"])
def test_symbolic_links_are_no_evidence(tmp_path, target):
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(tmp_path / target)
    for refused in (lambda: file_meta(tree / "link"), lambda: manifest(tree), lambda: refuse_links(tree)):
        with pytest.raises(EvidenceError, match="link"):
            refused()


def test_a_pipe_is_no_evidence_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EvidenceError, match="regular file"):
        file_meta(tmp_path / "pipe")


def test_a_manifest_names_every_file_by_its_relative_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"")
    assert [(name, meta["size"]) for name, meta in manifest(tmp_path).items()] == [("a", 0), ("b/x", 2)]


def test_a_lock_has_one_holder_and_dies_with_its_process(tmp_path):
    path = tmp_path / ".lock"
    hold = f"""
from fpmsdk.documents.lock import exclusive
with exclusive({str(path)!r}, "it"):
    print(1, flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(OnboardError, match="another process works on the plan"), exclusive(path, "the plan"):
            pass
        other.kill()
    with exclusive(path, "the plan"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.exists()


def test_what_is_no_regular_file_is_no_lock(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OnboardError, match="lock"), exclusive(tmp_path / name, "the plan"):
            pass
    assert not (tmp_path / "elsewhere").exists()


class Limits(StrictDocument):
    tokens: int
    fraction: float = 0.9


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"tokens": True}, "limits: tokens: Input should be a valid integer, found True"),
        ({"tokens": 1.0}, "limits: tokens: Input should be a valid integer, found 1.0"),
        ({"tokens": "1"}, "limits: tokens: Input should be a valid integer, found '1'"),
        ({"tokens": 1, "fraction": float("inf")}, "limits: fraction: Input should be a finite number, found inf"),
        ({"tokens": 1, "extra": 2}, "limits: extra: Extra inputs are not permitted, found 2"),
        ({}, "limits: tokens: Field required"),
    ],
)
def test_every_faulty_field_is_one_line(value, line):
    with pytest.raises(OnboardError) as refused:
        checked(Limits, value, "limits")
    assert str(refused.value) == line
