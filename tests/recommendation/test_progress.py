"""What is said about a sweep while it runs."""

import io
import json

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.candidate import Outcome
from fpmsdk.recommendation.progress import Progress, State, duration

FEASIBLE, LATE = Outcome("feasible"), Outcome("timed_out", "runtime_timeout", "late")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def said(style, stream=None):
    stream = stream or io.StringIO()
    with Progress(style, stream).shown(State(total=3)) as seen:
        seen(FEASIBLE, 2.5)
        seen(LATE, None)
        seen(FEASIBLE, 1.5)
    return stream.getvalue()


def test_a_line_tells_counts_best_rate_and_time_left():
    state = State(total=100, known=10)
    state.statuses.update({"feasible": 25, "timed_out": 5})
    state.best = 1234.5678
    # 20 of the 30 came in 10 s, 70 are left
    assert state.line(10.0) == "30/100 candidates, 25 feasible, 5 timed out, best 1,234.57, 2/s, 35 s left"


def test_neither_rate_nor_time_is_told_before_anything_came():
    state = State(total=100, known=10)
    state.statuses["feasible"] = 10
    assert state.line(10.0) == "10/100 candidates, 10 feasible"


def test_no_time_left_is_told_of_a_search_without_known_end():
    state = State(total=None)
    state.statuses["feasible"] = 5
    assert state.line(10.0) == "5 candidates, 5 feasible, 0.5/s"


def test_plain_lines_end_with_the_whole_count():
    last = said("plain").splitlines()[-1]
    assert last.startswith("3/3 candidates, 2 feasible, 1 timed out, best 2.5, ")


def test_events_are_one_json_object_a_line():
    events = [json.loads(line) for line in said("json").splitlines()]
    assert [event["event"] for event in events] == ["begin", "candidate", "candidate", "candidate", "end"]
    assert [event["done"] for event in events] == [0, 1, 2, 3, 3]
    assert [event.get("status") for event in events[1:4]] == ["feasible", "timed_out", "feasible"]
    assert events[-1]["statuses"] == {"feasible": 2, "timed_out": 1}
    assert (events[-1]["best"], events[-1]["total"]) == (2.5, 3)


def test_nothing_is_said_unless_asked():
    assert said("none") == ""


def test_auto_is_plain_where_nobody_watches_and_live_on_a_terminal():
    assert said("auto").startswith("3/3 candidates")
    live = said("auto", Terminal())
    assert "\x1b[" in live or "\r" in live  # a line that is drawn again


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (60, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
    ],
)
def test_times_are_told_in_units_that_fit(seconds, text):
    assert duration(seconds) == text


def test_other_styles_are_refused():
    with pytest.raises(OnboardError, match="--progress: found 'loud', accepted are auto, live, plain, json, none"):
        Progress("loud")
