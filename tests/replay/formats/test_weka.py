"""Rules of Weka plays: turns, idle times, subagents, block hashes, and corpora of several plays."""

import json
import tracemalloc

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats import weka
from fpmsdk.replay.formats.reader import ReadOptions
from fpmsdk.replay.trace import Trace


def call(t, prompt, output, hash_ids=(), kind="s", **more):
    return {"t": t, "type": kind, "model": "m", "in": prompt, "out": output, "hash_ids": list(hash_ids), **more}


def play(*requests, name="trace_0001", **more):
    return {"id": name, "models": ["m"], "block_size": 4, "hash_id_scope": "local", "requests": requests} | more


def subagent(t, *requests, agent="agent_001"):
    return {"t": t, "type": "subagent", "agent_id": agent, "subagent_type": "Explore", "requests": requests}


@pytest.fixture
def read(tmp_path):
    def read_plays(*plays, **options):
        path = tmp_path / "plays.jsonl"
        path.write_text("\n".join(json.dumps(play) for play in plays) + "\n")
        return Trace.read(path, **options)

    return read_plays


def test_requests_are_turns_that_wait_for_the_recorded_idle_time(read):
    trace = read(
        play(
            call(0.0, 8, 3, [1, 2], api_time=1.5),
            call(4.0, 12, 5, [1, 2, 3], "n", api_time=2.0),
            call(5.0, 12, 1, [1, 2, 3]),  # sent before the one before it was answered
        )
    )
    assert trace.session_ids.tolist() == ["trace_0001"]
    assert trace.request_ids.tolist() == [f"trace_0001:{number}" for number in range(3)]
    assert trace.delay_ms.tolist() == [0.0, 2500.0, 0.0]
    assert trace.prompt_tokens.tolist() == [8, 12, 12]
    assert trace.output_tokens.tolist() == [3, 5, 1]
    assert trace.block_tokens == 4
    assert trace.hash_ids.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]


def test_the_last_block_of_a_prompt_has_no_hash_when_it_is_not_full(read):
    trace = read(play(call(0.0, 9, 1, [1, 2]), call(1.0, 13, 1, [1, 2, 3])))
    assert trace.hash_ids.tolist() == [0, 1, 2, 0, 1, 3, 4]


def test_a_request_without_hashes_shares_nothing(read):
    assert read(play(call(0.0, 9, 1))).hash_ids.tolist() == []


def awaited(trace):
    """The names of the requests that each one waits for; the turn before it where none is named."""
    names = [name.partition(":")[2] for name in trace.request_ids]
    told = {}
    for row, name in enumerate(names):
        steps = trace.awaits[trace.awaits_offsets[row] : trace.awaits_offsets[row + 1]].tolist()
        told[name] = [names[row - step] for step in steps or [1] if row]
    return told


def test_a_play_starts_subagents_and_goes_on_when_they_are_done(read):
    trace = read(
        play(
            call(0.0, 8, 3, [1, 2], api_time=1.0),
            subagent(2.0, call(2.5, 8, 1, [1, 9], api_time=1.0), call(4.0, 8, 1, [1, 9], api_time=1.0), agent="x"),
            subagent(2.0, call(3.0, 4, 1, [1], api_time=2.5), agent="y"),
            call(6.0, 8, 1, [1, 2], api_time=1.0),
            call(8.0, 8, 1, [1, 2]),
        )
    )
    assert trace.session_ids.tolist() == ["trace_0001"]
    assert awaited(trace) == {
        "0": [],
        "1-x:0": ["0"],
        "2-y:0": ["0"],
        "1-x:1": ["1-x:0"],
        "1": ["0", "2-y:0", "1-x:1"],
        "2": ["1"],
    }
    # From the recorded end of the last one that is awaited to the start, in order of time.
    assert trace.delay_ms.tolist() == [0.0, 1500.0, 2000.0, 500.0, 500.0, 1000.0]
    assert trace.hash_ids.tolist() == [0, 1, 0, 2, 0, 0, 2, 0, 1, 0, 1]


def test_nobody_waits_for_a_subagent_that_was_not_done_in_the_record(read):
    trace = read(
        play(
            call(0.0, 8, 3, api_time=1.0),
            subagent(2.0, call(2.0, 8, 1, api_time=9.0), agent="slow"),
            call(6.0, 8, 1, api_time=1.0),
            call(12.0, 8, 1),
        )
    )
    assert awaited(trace) == {"0": [], "1-slow:0": ["0"], "1": ["0"], "2": ["1-slow:0", "1"]}
    assert trace.delay_ms.tolist() == [0.0, 1000.0, 5000.0, 1000.0]


def test_a_subagent_before_any_request_of_the_play_starts_it(read):
    trace = read(play(subagent(1.0, call(1.0, 8, 1), agent="x"), call(2.0, 8, 1)))
    assert awaited(trace) == {"0-x:0": [], "0": ["0-x:0"]}


@pytest.mark.parametrize(
    ("inner_t", "basis", "delay_ms"),
    [(0.5, None, 2500.0), (2.5, None, 2500.0), (2.5, "relative", 4500.0), (0.5, "absolute", 500.0)],
)
def test_times_within_a_subagent_count_from_its_start_or_from_the_play(read, inner_t, basis, delay_ms):
    trace = read(play(call(0.0, 8, 3), subagent(2.0, call(inner_t, 8, 1))), nested_timestamps=basis)
    assert trace.delay_ms[1] == delay_ms


def test_local_hashes_of_different_plays_are_different_blocks_and_global_ones_are_equal(read):
    def both(scope):
        return [play(call(0.0, 4, 1, [5]), name=name, hash_id_scope=scope) for name in ("a", "b")]

    assert read(*both("local")).hash_ids.tolist() == [0, 1]
    assert read(*both("global")).hash_ids.tolist() == [0, 0]


def test_a_directory_is_a_corpus_in_order_of_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(play(call(0.0, 4, 1), name=name)))
    (tmp_path / "notes.txt").write_text("no play")
    assert Trace.read(tmp_path).session_ids.tolist() == ["a", "b"]


def test_a_file_may_hold_one_play(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps(play(call(0.0, 4, 1)), indent=1))
    assert len(Trace.read(tmp_path / "trace.json")) == 1


@pytest.mark.parametrize(
    ("second", "field", "said"),
    [
        (play(call(0.0, 4, 1), name="x", block_size=8), "block_size", "has block_size 8 and hash_id_scope local"),
        (play(call(0.0, 4, 1)), "", 'repeats the play "trace_0001"'),
        (play(call(-1.0, 4, 1), name="x"), "requests[0].t", "not a Weka play"),
        (play(call(0.0, 0, 1), name="x"), "requests[0].in", "not a Weka play"),
        (play({"t": 0.0, "type": "tool"}, name="x"), "requests[0].type", "not a Weka play"),
        (play(call(0.0, 12, 1, [1]), name="x"), "hash_ids", 'request "x:0" has a prompt of 12 tokens, but'),
    ],
)
def test_a_malformed_play_is_refused(read, second, field, said):
    with pytest.raises(TraceError) as refused:
        read(play(call(0.0, 4, 1)), second)
    assert said in str(refused.value)
    assert refused.value.field == field


def test_an_empty_folder_has_no_requests(tmp_path):
    with pytest.raises(TraceError, match="did not contain any requests"):
        Trace.read(tmp_path)


def test_memory_does_not_grow_with_plays_and_their_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(weka, "_RECENT_IDENTITIES", 64)
    peaks, identities = [], []
    for plays in (300, 3000):
        path = tmp_path / f"{plays}.jsonl"
        with path.open("w") as file:
            for number in range(plays):
                # The first block is everybody's, so is the second of the play before; the others are new.
                blocks = [0, 3 * number, *range(3 * number + 1, 3 * number + 4)]
                asked = call(0.0, 20, 1, blocks)
                file.write(json.dumps(play(asked, name=f"play {number}", hash_id_scope="global")) + "\n")
        reader = weka.WekaReader(path, ReadOptions())
        tracemalloc.start()
        for line, record in reader.records():
            identities = [*identities[-1:], *(row.hash_ids for row in reader.parse(line, record))]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        before, last = identities
        assert last[0] == 0 and last[1] == before[-1] and len(set(last)) == 5
    assert peaks[1] < 1.2 * peaks[0]
