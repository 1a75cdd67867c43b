"""What cells whose identity is bound to a configuration file must prove: real text, eager execution, real KV.

Source: collector.md section 5.1 (execution_identity, input_provenance).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fpmsdk.collect.faults import fault, mapping, require, sequence, text, whole
from fpmsdk.errors import CollectionError
from fpmsdk.files import UnfitFileError, read_regular

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell

_MAX_BYTES = 2 * 2**30
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_config_bound(
    cell: Cell, fields: Mapping[str, msgspec.Raw], rows: Sequence[Any], path: Path
) -> dict[str, Any] | None:
    """The provenance of the text that a rank file was measured with; None for cells that need none.

    Parameters
    ----------
    cell: its execution identity says whether proof is needed.
    fields: fields of the rank file, unparsed.
    rows: its results.
    path: the rank file; the token streams lie beside it.

    Raises
    ------
    CollectionError: a proof is missing or contradicts the cell, the points or the token streams.
    """
    if not cell.is_config_bound:
        return None
    identity, mode, found = (
        msgspec.json.decode(fields[name]) if name in fields else None
        for name in ("execution_identity", "execution_mode", "input_provenance")
    )
    require(identity == cell.execution_columns, f"{path}: execution_identity", identity, f"{cell.execution_columns}")
    require(mode == "eager", f"{path}: execution_mode", mode, "'eager'")
    where = f"{path}: input_provenance"
    evidence = dict(mapping(found, where))
    require(evidence.get("source") == "tokenizer_text", f"{where}.source", evidence.get("source"), "'tokenizer_text'")
    for name in ("text_sha256", "token_ids_sha256"):
        _digest(evidence.get(name), f"{where}.{name}")
    expected = cell.input_text_sha256
    require(
        not expected or evidence["text_sha256"] == expected,
        f"{where}.text_sha256",
        evidence["text_sha256"],
        f"{expected}, the planned text",
    )
    text(evidence.get("tokenizer_revision"), f"{where}.tokenizer_revision")
    tokens = whole(evidence.get("token_count"), f"{where}.token_count", 2)
    unique = whole(evidence.get("unique_token_count"), f"{where}.unique_token_count", 2)
    require(unique <= tokens, f"{where}.unique_token_count", unique, f"at most token_count, {tokens}")
    warmups = msgspec.json.decode(fields["warmup_results"]) if "warmup_results" in fields else []
    _check_streams(evidence.get("token_stream_manifest"), rows, warmups, path)
    return evidence


def same_input(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> bool:
    """Whether two ranks were fed the same text; only the names of their token streams may differ."""
    return _compared(left) == _compared(right)


def _compared(evidence: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if evidence is None:
        return None
    manifest = {name: value for name, value in evidence["token_stream_manifest"].items() if name != "file"}
    return {**evidence, "token_stream_manifest": manifest}


def _digest(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise fault(where, value, "64 lowercase hexadecimal digits")
    return value


def _check_streams(manifest: Any, rows: Sequence[Any], warmups: Any, path: Path) -> None:
    where = f"{path}: input_provenance.token_stream_manifest"
    manifest = mapping(manifest, where)
    name = text(manifest.get("file"), f"{where}.file")
    is_beside = Path(name).name == name and name.endswith(".token-streams.jsonl")
    require(is_beside, f"{where}.file", name, "the name of a *.token-streams.jsonl beside the rank file")
    content = _read(path.with_name(name))
    found = hashlib.sha256(content).hexdigest()
    require(found == manifest.get("sha256"), f"{where}.sha256", manifest.get("sha256"), f"{found}, of {name}")
    schema = manifest.get("schema_version", 1)
    require(type(schema) is int and schema in (1, 2), f"{where}.schema_version", schema, "1 or 2")
    warmups = sequence(warmups, f"{path}: warmup_results")
    require(schema == 2 or not warmups, f"{path}: warmup_results", warmups, "none with token streams of schema 1")
    warmup_ids = _warmup_ids(rows, warmups, path)
    if schema == 2:
        ids = manifest.get("warmup_benchmark_ids")
        require(ids == sorted(warmup_ids), f"{where}.warmup_benchmark_ids", ids, str(sorted(warmup_ids)))
    lines = content.splitlines()
    everything = [*rows, *warmups]
    require(len(lines) == len(everything), f"{where}.file", f"{len(lines)} lines", f"{len(everything)} lines")
    require(manifest.get("records") == len(lines), f"{where}.records", manifest.get("records"), str(len(lines)))
    streams: dict[int, tuple[Mapping[str, Any], str]] = {}
    for at, line in enumerate(lines):
        place = f"{path.with_name(name)}: line {at + 1}"
        stream = mapping(_decoded(line, place), place)
        number = whole(stream.get("benchmark_id"), f"{place}: benchmark_id", 1)
        require(number not in streams, f"{place}: benchmark_id", number, "an id that no earlier line has")
        role = "warmup" if number in warmup_ids else "measurement"
        declared = stream.get("sampling_role")
        require(schema == 1 or declared == role, f"{place}: sampling_role", declared, repr(role))
        streams[number] = stream, hashlib.sha256(line).hexdigest()
    for row in everything:
        number = row["point"]["benchmark_id"]
        require(number in streams, f"{where}.file", sorted(streams), f"a line for benchmark id {number}")
        _check_witness(row, *streams[number], f"{path}: benchmark id {number}")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, limit_bytes=_MAX_BYTES, follow_links=False)
    except (UnfitFileError, FileNotFoundError) as error:
        raise CollectionError(f"{path}: the token streams cannot be read: {error}; run the attempt again") from None


def _decoded(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise CollectionError(f"{where}: expected a JSON object, found {error}; run the attempt again") from None


def _warmup_ids(rows: Sequence[Any], warmups: Sequence[Any], path: Path) -> set[int]:
    ids: set[int] = set()
    for name, group in (("results", rows), ("warmup_results", warmups)):
        for at, row in enumerate(group):
            where = f"{path}: {name}[{at}].point"
            point = mapping(mapping(row, where).get("point"), where)
            number = whole(point.get("benchmark_id"), f"{where}.benchmark_id", 1)
            require(
                point.get("point_type") in ("prefill", "decode"),
                f"{where}.point_type",
                point.get("point_type"),
                "a phase",
            )
            is_warmup = "eager_warmup" in sequence(point.get("sample_reasons", []), f"{where}.sample_reasons")
            require(
                is_warmup == (name == "warmup_results"),
                f"{where}.sample_reasons",
                point,
                "eager_warmup on replicas only",
            )
            if is_warmup:
                require(
                    number > len(rows) and number not in ids,
                    f"{where}.benchmark_id",
                    number,
                    "a new id after the points",
                )
                ids.add(number)
    return ids


def _check_witness(row: Mapping[str, Any], stream: Mapping[str, Any], line_sha256: str, where: str) -> None:
    point = row["point"]
    batch = whole(point.get("batch_size"), f"{where}: batch_size", 1)
    is_decode = point["point_type"] == "decode"
    seeded = whole(point.get("total_kv_read_tokens"), f"{where}: total_kv_read_tokens") - (batch if is_decode else 0)
    witness = mapping(row.get("real_kv_witness"), f"{where}: real_kv_witness")
    expected = {
        "same_request": True,
        "allocated_fake_tokens": 0,
        "completed_seed_tokens": seeded,
        "token_stream_sha256": line_sha256,
    }
    for name, accepted in expected.items():
        value = witness.get(name)
        same = type(value) is type(accepted) and value == accepted
        require(same, f"{where}: real_kv_witness.{name}", value, repr(accepted))
    requests = sequence(stream.get("requests"), f"{where}: requests")
    require(len(requests) == batch, f"{where}: requests", f"{len(requests)} requests", str(batch))
    prompt_tokens = 0
    for at, entry in enumerate(requests):
        place = f"{where}: requests[{at}]"
        request = mapping(entry, place)
        require(request.get("request_index") == at, f"{place}.request_index", request.get("request_index"), str(at))
        for name in ("prompt_token_ids", "output_token_ids"):
            ids = sequence(request.get(name), f"{place}.{name}")
            are_ids = bool(ids) and all(type(one) is int and one >= 0 for one in ids)
            require(are_ids, f"{place}.{name}", ids, "token ids, at least one")
        length = len(request["prompt_token_ids"])
        prompt_tokens += length
        computed = length + (2 if is_decode else 0)
        require(
            request.get("computed_tokens") == computed,
            f"{place}.computed_tokens",
            request.get("computed_tokens"),
            str(computed),
        )
    total = seeded + (0 if is_decode else whole(point.get("total_prefill_tokens"), f"{where}: total_prefill_tokens"))
    require(prompt_tokens == total, f"{where}: prompt tokens", prompt_tokens, f"{total}, as the point says")
