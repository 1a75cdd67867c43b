"""The report page as a browser shows it: nothing fetched, no error, every picture drawn, passes reached by zooming."""

import pytest

from fpmsdk import FpmBatch, Trace, replay_trace, sample
from fpmsdk.replay import fit_pass_timing
from fpmsdk.replay.page import charts

pytestmark = pytest.mark.browser

FIXED = {"type": "fixed", "prefill_ms": 30.0, "decode_ms": 5.0}


class Page:
    """A report page, opened; what went wrong is kept."""

    def __init__(self, browser, path):
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.faults, self.requests = [], []
        self.page.on("pageerror", lambda fault: self.faults.append(str(fault)))
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(said.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-drawn=true]")

    def text(self, selector):
        return self.page.inner_text(selector)

    def count(self, selector):
        return self.page.locator(selector).count()

    def zoom(self, name):
        self.page.click(f"[data-zoom={name}]")

    def box(self, selector):
        """The drawing area of a picture, scrolled into sight."""
        area = self.page.locator(f"{selector} .nsewdrag").first
        area.scroll_into_view_if_needed()
        return area.bounding_box()

    def drag(self, selector, start, end):
        """Drag across a picture, from and to parts of its width."""
        box = self.box(selector)
        middle = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], middle)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + end * box["width"], middle, steps=8)
        self.page.mouse.up()


@pytest.fixture(scope="module")
def timing():
    return fit_pass_timing(FpmBatch.from_frames(sample.train_frames()))


@pytest.fixture
def opened(browser, tmp_path):
    pages = []

    def open_report(report, **options):
        path = tmp_path / "report.html"
        report.write_html(path, **options)
        pages.append(Page(browser, path))
        return pages[-1]

    yield open_report
    for page in pages:
        assert page.faults == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        page.page.close()


@pytest.fixture
def measured(opened, timing):
    run = sample.eval_run()
    return opened(replay_trace(run.trace, launch=sample.launch(run), timing=timing), measured=run, title="The eval run")


def test_every_picture_is_drawn(measured):
    assert measured.page.title() == "The eval run"
    assert measured.count("#cdf .js-plotly-plot") == 3
    assert measured.count("#cdf .scatterlayer .js-line") == 6  # replayed and measured
    assert measured.count("#measured .js-plotly-plot") == 3
    assert measured.count("#measured .points path") == 3 * 220
    assert measured.count("#time .scatterlayer .js-line") >= 4
    assert measured.count("#timeline .barlayer .point") > 100


def test_figures_stand_on_top_and_errors_under_the_points(measured):
    assert "220" in measured.text(".cards .card:first-child")
    assert measured.text("#measured-table tr:nth-child(2) td:first-child") == "Time to first token"
    assert measured.text("#measured-table tr:nth-child(2) td:nth-child(2)").startswith("188 of 176 ms (+6.8")


def test_zooming_in_by_dragging_leads_to_single_passes_and_back(measured):
    overview = measured.text("#timeline-note")
    assert "too many to draw each" in overview
    measured.drag("#timeline", 0.30, 0.34)
    measured.page.wait_for_function("document.getElementById('timeline-note').textContent.includes('each drawn')")
    passes = int(measured.text("#timeline-note").split()[0].replace(",", ""))
    assert measured.count("#timeline .barlayer .point") == passes
    measured.page.locator("#timeline .nsewdrag").first.dblclick()
    measured.page.wait_for_function("document.getElementById('timeline-note').textContent.includes('too many')")
    assert measured.text("#timeline-note") == overview


def test_buttons_lead_to_places_of_interest(measured):
    for name in ("first", "longest", "queue"):
        measured.zoom(name)
        assert "each drawn" in measured.text("#timeline-note"), name
    measured.zoom("all")
    assert "9,019 passes in view" in measured.text("#timeline-note")


def test_a_pass_tells_what_it_did(measured):
    measured.zoom("longest")
    box = measured.box("#timeline")
    measured.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    measured.page.wait_for_selector("#timeline .hoverlayer .hovertext")
    said = measured.page.text_content("#timeline .hoverlayer .hovertext")
    assert "prefill:" in said and "decode:" in said


def test_load_pictures_share_their_time_axis(measured):
    measured.drag("#time", 0.5, 0.6)
    measured.page.wait_for_timeout(300)
    low, high = measured.page.evaluate("document.getElementById('time').layout.xaxis.range")
    assert 40 < low < 50 < high < 60


def test_without_a_measured_run_nothing_is_said_of_one(opened):
    page = opened(replay_trace(Trace.from_arrays([0.0, 20.0], [64, 64], [8, 8]), timing=FIXED))
    assert not page.page.is_visible("#measured-section")
    assert page.count("#cdf .scatterlayer .js-line") == 3
    assert page.text("#time-note") == "Exact: a step for every change."


def test_a_run_of_one_token_and_a_title_of_markup_are_shown(opened):
    page = opened(replay_trace(Trace.from_arrays([0.0], [8], [1]), timing=FIXED), title="</title><b>one</b> & only")
    assert page.text("h1") == "</title><b>one</b> & only"
    assert "no request has one" in page.text("#cdf")
    assert page.text("#timeline-note") == "1 pass in view, each drawn. It is the only pass."


def test_ranks_of_two_pools_have_a_lane_each(opened):
    engine = {"block_size": 16, "num_gpu_blocks": 500, "timing_model": FIXED}
    trace = Trace.from_arrays([10.0 * i for i in range(8)], [64] * 8, [12] * 8)
    page = opened(
        replay_trace(
            trace,
            launch={"engine": {**engine, "worker_type": "decode"}, "dp_size": 2},
            prefill_launch={"engine": {**engine, "worker_type": "prefill"}},
            num_prefill_workers=2,
        )
    )
    lanes = page.page.locator("#timeline .ytick text").all_text_contents()
    assert sorted(lanes) == ["decode 0", "decode 1", "prefill 0", "prefill 1"]


def test_a_very_long_run_says_what_was_thinned_and_stays_usable(opened, monkeypatch):
    monkeypatch.setattr(charts, "MAX_PASSES", 3_000)
    count = 4_000
    trace = Trace.from_arrays([7.0 * i for i in range(count)], [100] * count, [20] * count)
    page = opened(replay_trace(trace, timing={"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0}))
    assert "Drawn through 1,000 of up to 4,000 values" in page.text("#cdf-note")
    assert "too many to draw: lines are means over 1,000 intervals" in page.text("#time-note")
    assert "passes are too many for a page: each bar stands for up to" in page.text("#timeline-note")
    page.zoom("first")
    assert "bars in view, each drawn" in page.text("#timeline-note")


def test_a_narrow_window_has_the_pictures_below_each_other(measured):
    measured.page.set_viewport_size({"width": 420, "height": 900})
    measured.page.wait_for_timeout(300)
    boxes = [panel.bounding_box() for panel in measured.page.locator("#cdf > div").all()]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
    assert all(box["width"] <= 420 for box in boxes)


def test_a_partial_report_says_so(opened, timing):
    report = replay_trace(Trace.from_arrays([0.0, 20.0], [64, 64], [8, 8]), timing=FIXED)
    report.partial = True
    assert "Partial: the replay was interrupted" in opened(report).text(".banner")
