"""Rules of the Azure CSV form: timestamps to 100 ns, lengths, and what is refused."""

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:15:46.6805900,374,44"


@pytest.fixture
def read(tmp_path):
    def read_lines(*lines):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(lines) + "\n")
        return Trace.read(path)

    return read_lines


def test_times_are_milliseconds_from_the_earliest_row_to_100_ns(read):
    trace = read(HEADER, "2023-11-16 18:15:50.9951691,396,109", FIRST)
    assert trace.arrival_ms.tolist() == [0.0, 4314.5791]
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.request_ids.tolist() == ["request_3", "request_2"]


@pytest.mark.parametrize(
    ("earlier", "later", "difference_ms"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", 990.07),
        ("2024-05-10T00:00:00Z", "2024-05-10T02:00:00.5+02:00", 500.0),
        ("2023-12-31 23:59:59.999", "2024-01-01 00:00:00.001", 2.0),
    ],
)
def test_iso_forms_with_and_without_a_zone(read, earlier, later, difference_ms):
    trace = read(HEADER, f"{earlier},1,1", f"{later},1,1")
    assert trace.arrival_ms.tolist() == [0.0, difference_ms]


def test_times_centuries_apart_are_refused_though_their_difference_is_no_64_bit_count_of_ns(read):
    with pytest.raises(TraceError, match="arrivals span 5.. years, from line 2 to line 3"):
        read(HEADER, "1700-01-01 00:00:00,1,1", "2260-01-01 00:00:00,1,1")


def test_columns_are_found_by_name_and_others_ignored(read):
    trace = read(
        "GeneratedTokens,Model,ContextTokens,TIMESTAMP",
        '7,"a, b",9,2023-11-16 18:15:46',
        "",
        "0,c,1,2023-11-16 18:15:47",
    )
    assert trace.prompt_tokens.tolist() == [9, 1]
    assert trace.output_tokens.tolist() == [7, 0]


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        ("2023-11-16 18:15:50,0,4", "ContextTokens", "ContextTokens is '0'"),
        ("2023-11-16 18:15:50,-1,4", "ContextTokens", "ContextTokens is '-1'"),
        ("2023-11-16 18:15:50,3.5,4", "ContextTokens", "ContextTokens is '3.5'"),
        ("2023-11-16 18:15:50,nan,4", "ContextTokens", "ContextTokens is 'nan'"),
        ("2023-11-16 18:15:50,99999999999,4", "ContextTokens", "99999999999"),
        ("2023-11-16 18:15:50,3,", "GeneratedTokens", "GeneratedTokens is ''"),
        ("2023-11-16 18:15:50,3", "", "has 2 cells, the header 3; is the file cut short?"),
        ("16/11/2023 18:15:50,3,4", "TIMESTAMP", "TIMESTAMP is '16/11/2023 18:15:50'"),
        ("2023-13-16 18:15:50,3,4", "TIMESTAMP", "TIMESTAMP is '2023-13-16 18:15:50'"),
        ("2023-11-16 18:15:50Z,3,4", "TIMESTAMP", "mixes times with and without a zone"),
    ],
)
def test_a_malformed_row_is_refused_with_line_and_column(read, row, field, said):
    with pytest.raises(TraceError) as refused:
        read(HEADER, FIRST, row)
    assert said in str(refused.value)
    assert (refused.value.line, refused.value.field) == (3, field)
    assert str(refused.value).startswith(refused.value.path)


def test_a_missing_column_is_named(read):
    with pytest.raises(TraceError, match="lacks the column GeneratedTokens"):
        read("TIMESTAMP,ContextTokens", "2023-11-16 18:15:50,3")


@pytest.mark.parametrize("lines", [(HEADER,), ()])
def test_a_file_without_requests_is_refused(tmp_path, lines):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError, match="did not contain any requests"):
        Trace.read(path)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,\xff\n")
    with pytest.raises(TraceError, match="not UTF-8"):
        Trace.read(path)


@pytest.mark.parametrize("digits", [19, 5_000, 200_000])
@pytest.mark.parametrize("row", ["2023-11-16 18:15:46,{},1", "2023-11-16 18:15:46,1,{}", "{},1,1"])
def test_an_absurdly_long_cell_is_refused_by_line(tmp_path, digits, row):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row.format("1" * digits))
    with pytest.raises(TraceError, match="trace line 2") as refused:
        Trace.read(path)
    assert len(str(refused.value)) < 1000
