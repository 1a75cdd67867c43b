"""Which form a trace file has: its ending, and where several forms share one, how its first record begins."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats import azure, burstgpt
from fpmsdk.replay.formats.source import csv_rows, lines, opened

ENDINGS = (".jsonl", ".csv", ".json", ".parquet")


def detected_form(path: str | Path) -> str:
    """The name of the form of a file.

    Raises
    ------
    TraceError: the ending tells nothing, or the file cannot be read.
    """
    if Path(path).is_dir():
        return "weka"
    ending = Path(Path(path).name.removesuffix(".gz")).suffix
    if ending == ".csv":
        return _form_of_table(path)
    if ending == ".jsonl":
        _, record = next(lines(path), (0, b""))
        return _form_of_record(record, "mooncake")
    if ending == ".json":
        return _form_of_document(path)
    if ending == ".parquet":
        return "parquet"
    raise TraceError(
        f"{path}: the ending does not tell the trace format; known endings are {', '.join(ENDINGS)} "
        "(and .gz after the first three), or name the format",
        path=str(path),
    )


def _form_of_document(path: str | Path) -> str:
    """The form that the keys of a JSON document tell, as soon as they tell it."""
    from fpmsdk.replay.formats.json_parts import NOT_JSON, json_parts

    keys: set[str] = set()
    with opened(path) as content:
        try:
            for place, event, value in json_parts(content):
                if place == "" and event == "map_key":
                    keys.add(value)
                    if (form := _form_of_keys(keys)) is not None:
                        return form
        except NOT_JSON:
            pass  # its reader says what is wrong
    return "recorded"


def _form_of_table(path: str | Path) -> str:
    _, header = next(csv_rows(path), (0, []))
    names = {name.strip() for name in header}
    is_burstgpt = len(names.intersection(burstgpt.COLUMNS)) > len(names.intersection(azure.COLUMNS))
    return "burstgpt" if is_burstgpt else "azure"


def _form_of_record(record: bytes, default: str) -> str:
    try:
        keys = set(msgspec.json.decode(record, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return default  # its reader says what is wrong
    return _form_of_keys(keys) or default


def _form_of_keys(keys: set[str]) -> str | None:
    for form, marks in (
        ("aiperf", {"metadata", "metrics"}),
        ("weka", {"requests", "block_size"}),
        ("guidellm", {"benchmarks"}),
        ("dynamo", {"schema", "event_type"}),
        ("dynamo", {"event"}),
    ):
        if marks <= keys:
            return form
    return None
