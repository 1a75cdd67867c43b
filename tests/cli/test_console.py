"""Progress appears late, only on a terminal, and never on stdout."""

import time

from fpmsdk.cli import console


def test_quick_work_and_redirected_work_show_no_progress(capsys):
    with console.progress("quick", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_work_of_more_than_a_second_shows_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress("slow work", 4) as advance:
        advance(2)
        time.sleep(1.3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "slow work" in shown.err
    assert "50%" in shown.err
