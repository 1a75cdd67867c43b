"""Answers of the public peer on the hand-made table: equal to the last bit, evidence and coverage included."""

import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk._ext.passroofline import PassRoofline
from fpmsdk._ext.wholeforward import SolAssistedEngine
from fpmsdk.errors import ConfigError, FpmUncoveredError, PerfDataNotAvailableError
from fpmsdk.opgraph import ops
from fpmsdk.perfdb.forward_cells import build_table
from fpmsdk.perfdb.forward_pair import read_pair
from fpmsdk.perfdb.roots import SystemsRoot
from fpmsdk.perfmodel.wholeforward import SolMisses
from fpmsdk.perfmodel.wholeforward_sol import RooflineRecords
from fpmsdk.perfmodel.wholeforward_steps import mixed_step
from fpmsdk.perfmodel.wholeforward_tables import assisted_curves
from tests.perfdb.pairs import VERSION, row, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel.deployments import checkpoint, direct_config, rank
from tests.vectors import load_vectors

VECTORS = load_vectors("fpm_interpolation_peer")
KEYS = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder as working directory, with a systems root and the checkpoints that the vectors name."""
    monkeypatch.chdir(tmp_path)
    Systems(tmp_path / "systems").hardware()
    for model in ("flat", "steep", "kv", "fake"):
        checkpoint(tmp_path / model)
    return tmp_path


def table_rows(rows, model):
    for kind, batch, tokens, kv, latency_ms, *seed in rows:
        changes = {"kv_seed_regime": seed[0]} if seed else {}
        yield row(kind, batch, tokens, kv, latency_ms, model=model, cell_id=f"{model}-{kind}", **changes)


def all_rows():
    return [line for model, rows in VECTORS["table"]["models"].items() for line in table_rows(rows, model)]


def direct_model(place, model, rows):
    path = write_pair(place / model / "pair", rows)
    interpolation = {"collect_coverage": True}
    return ForwardPassPerfModel.best_available(
        direct_config(model, place / "systems", path, interpolation=interpolation)
    )


def told(detailed):
    """A detailed estimate in the short form of the vectors."""

    def query(record):
        support = [
            [*(point["coordinates"][key] for key in KEYS), point["latency_ms"], point["weight"]]
            for point in record["support"]
        ]
        return [record["phase"], record["decode_baseline"], record["resolution"], record["latency_ms"], support]

    names = ("rank", "latency_ms", "prefill_ms", "decode_ms", "decode_baseline_ms", "marginal_decode_ms")
    return {
        "ms": detailed["latency_ms"],
        "max_rank": detailed["max_rank"],
        "ranks": [
            [*(record[name] for name in names), [query(item) for item in record["queries"]]]
            for record in detailed["ranks"]
        ],
    }


def check_direct(model, ranks, expected):
    metrics = [rank(*counts) for counts in ranks]
    if "error" in expected:
        with pytest.raises(PerfDataNotAvailableError) as caught:
            model.estimate_forward_pass_time_ms(metrics)
        assert expected["contains"] in str(caught.value)
        assert "genuine" in str(caught.value)
    else:
        assert told(model.estimate_forward_pass_detailed(metrics)) == expected


@pytest.mark.parametrize("name", ["flat", "steep"])
def test_direct_answers_evidence_and_coverage_are_those_of_the_peer(place, name):
    model = direct_model(place, name, all_rows())
    for asked, ranks, expected in VECTORS["direct"]["rows"]:
        if asked == name:
            check_direct(model, ranks, expected)
    coverage, peer = model.fpm_query_coverage(), VECTORS["direct"]["coverage_after_all_rows"][name]
    for mine, theirs in zip(coverage["gaps"], peer["gaps"], strict=True):
        assert theirs["reason"] in mine["reason"]
        assert mine | {"reason": ""} == theirs | {"reason": ""}
    assert coverage | {"gaps": []} == peer | {"gaps": []}
    assert model.fpm_decode_kv_ceiling() == VECTORS["direct"]["decode_kv_ceiling"][name]


def test_kv_first_answers_are_those_of_the_peer(place):
    model = direct_model(place, "kv", list(table_rows(VECTORS["kv_first"]["rows"], "kv")))
    results = VECTORS["kv_first"]["result"]
    for ranks, expected in results:
        check_direct(model, [ranks], expected)


def test_direct_lookups_use_no_point_without_kv_of_its_own(place):
    vectors = VECTORS["fake_kv"]
    model = direct_model(place, "fake", list(table_rows(vectors["rows"], "fake")))
    for counts, expected in vectors["direct"]:
        check_direct(model, [counts], expected)
    assert model.fpm_query_coverage()["queries"] == vectors["coverage"]
    assert model.fpm_decode_kv_ceiling() == vectors["decode_kv_ceiling"]


# --- carried by the roofline ---


def roofline(place, records):
    system = SystemsRoot(place / "systems").spec("x100")
    graph = []
    for record in records:
        ((kind, fields),) = record.items()
        lanes = {"lane_order": tuple(fields["lane_order"])} if "lane_order" in fields else {}
        graph.append(getattr(ops, kind)(**fields | lanes))
    return PassRoofline(RooflineRecords(system).of(graph))


@pytest.fixture
def sol_engine(place):
    made = {}

    def engine(model, sol_list):
        if (model, sol_list) in made:
            return made[model, sol_list]
        path = write_pair(place / "pair", all_rows())
        cells = build_table(read_pair(str(path), "x100", "vllm", VERSION), heal=True).cells
        cell = next(cell for cell in cells if cell.model_path == model)
        lists = VECTORS["sol_lists"][sol_list]
        curves = assisted_curves(cell.prefill, cell.decode)
        made[model, sol_list] = SolAssistedEngine(
            *curves[:4],
            roofline(place, lists["prefill"]),
            roofline(place, lists["decode"]),
            SolMisses(cell, curves, {"prefill": (), "decode": ()}).describe,
        )
        return made[model, sol_list]

    return engine


def check_sol(answer, expected):
    status, latency_ms, *_ = answer
    if isinstance(expected, dict):
        assert status != "ok"
    else:
        assert (status, latency_ms) == ("ok", expected)


def test_prefill_answers_of_the_roofline_are_those_of_the_peer(sol_engine):
    for model, sol_list, totals, expected in VECTORS["sol"]["prefill"]:
        check_sol(sol_engine(model, sol_list).prefill_query(*totals), expected)


def test_decode_answers_of_the_roofline_are_those_of_the_peer(sol_engine):
    for model, sol_list, totals, expected in VECTORS["sol"]["decode"]:
        check_sol(sol_engine(model, sol_list).decode_query(*totals), expected)


@pytest.mark.parametrize(("model", "sol_list", "asked", "expected"), VECTORS["sol"]["step"])
def test_scheduler_steps_are_those_of_the_peer(sol_engine, model, sol_list, asked, expected):
    engine = sol_engine(model, sol_list)
    if isinstance(expected, dict):
        with pytest.raises(PerfDataNotAvailableError) as caught:
            mixed_step(engine, *asked)
        assert expected["contains"] in str(caught.value)
    else:
        assert list(mixed_step(engine, *asked)) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((504, 8, 504, 1, 0), (4.8528, 4.048, 0.0, 0.8048000000000002)),
        ((1000, 24, 1000, 1, 0), (10.8016, 6.096, 0.0, 4.7056000000000004)),
        ((512, 8, 1024, 1, 256), (5.4608, 3.824, 0.0, 1.6368)),
        ((0, 0, 1024, 1, 0), (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_direct_steps_are_those_of_the_peer(place, asked, expected):
    model = direct_model(place, "flat", all_rows())
    assert model.mixed_step_breakdown(*asked) == expected


def test_a_direct_step_beyond_the_measurements_is_refused_and_counted(place):
    model = direct_model(place, "flat", all_rows())
    with pytest.raises(FpmUncoveredError, match="total_kv_read_tokens=16392"):
        model.mixed_step_breakdown(1024, 8, 2048, 1)
    coverage = model.fpm_query_coverage()
    assert coverage["queries"] == {"measured": 0, "interpolated": 2, "unsupported": 1}


def test_a_decode_step_costs_in_full(place):
    model = direct_model(place, "flat", all_rows())
    assert model.decode_step_latency(8, 511, 1) == 4.22
    assert model.decode_step_latency(0, 511, 1) == 0.0


def test_tokens_that_are_verified_together_share_a_request(place):
    model = direct_model(place, "flat", all_rows())
    assert model.predict_decode_latency(8, 512) == model.predict_decode_latency_total(8, 4096)
    assert model.predict_decode_latency(8, 512, verify_width=4) == model.predict_decode_latency_total(8, 1024)


@pytest.mark.parametrize(("bs", "context", "width"), [(8, 512, 3), (8, 512, 0), (0, 512, 1), (8, 0, 1), (8, 1.5, 1)])
def test_impossible_decode_steps_are_errors(place, bs, context, width):
    with pytest.raises(ConfigError):
        direct_model(place, "flat", all_rows()).predict_decode_latency(bs, context, verify_width=width)


@pytest.mark.parametrize(
    ("batch", "kv", "expected"),
    [
        *((8, kv, 3.404) for kv in (16, 4096, 16384)),
        (12, 1200, 3.806),
        (12, 6000, 3.808),
        (24, 960, 4.608499999999999),
        (24, 2400, 4.701599999999999),
    ],
)
def test_the_baseline_is_the_floor_of_the_rows_that_cover_the_query(sol_engine, batch, kv, expected):
    assert sol_engine("flat", "S2").baseline_query(batch, kv)[1] == expected


@pytest.mark.parametrize(
    ("phase", "point", "expected"),
    [
        ("prefill", (3, 300.0, 100.0, 900), 1.6494240265210653),
        ("prefill", (1, 700.0, 300.0, 700), 1.4464350657121672),
        ("prefill", (16, 64.0, 256.0, 1024), 1.9643423810610046),
        ("prefill", (8, 128.0, 512.0, 1024), 2.025227261066397),
        ("decode", (32, 16.0, 0.0, 32), 0.41483648),
    ],
)
def test_the_roofline_of_a_pass_is_that_of_the_peer(place, phase, point, expected):
    assert roofline(place, VECTORS["sol_lists"]["S2"][phase]).at(*point) == expected


def test_points_without_real_kv_lie_on_the_line_through_the_two_longest_real_ones(place):
    path = write_pair(place / "pair", list(table_rows(VECTORS["fake_kv"]["rows"], "fake")))
    rows = read_pair(str(path), "x100", "vllm", VERSION)
    (healed,) = build_table(rows, heal=True).cells
    (raw,) = build_table(rows, heal=False).cells
    assert dict(zip(healed.decode.kv[:3].tolist(), healed.decode.latency_ms[:3].tolist(), strict=True))[256] == 40.0
    assert (healed.replaced_fake_rows, healed.kept_fake_rows) == (1, 1)
    assert raw.decode.latency_ms[:3].tolist() == [10.0, 20.0, 99.0]
    assert (raw.replaced_fake_rows, raw.kept_fake_rows) == (0, 2)
