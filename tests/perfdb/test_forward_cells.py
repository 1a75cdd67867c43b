import numpy as np
import pytest

from fpmsdk.errors import FpmNoCellError
from fpmsdk.perfdb import forward_cells
from fpmsdk.perfdb.forward_cells import Points, build_table, open_forward_table
from fpmsdk.perfdb.forward_curves import capture_batches, decode_curves, flat_batch_limit, prefill_curves
from fpmsdk.perfdb.forward_pair import read_pair
from tests.perfdb.pairs import IDENTITY, VERSION, decode, prefill, write_pair

ASKED = {name: str(value) for name, value in IDENTITY.items()}


@pytest.fixture(autouse=True)
def no_table_is_kept(monkeypatch):
    monkeypatch.setattr(forward_cells, "_tables", {})


def table_of(folder, rows, *, heal=True, **sidecar):
    return build_table(read_pair(str(write_pair(folder, rows, **sidecar)), "x100", "vllm", VERSION), heal=heal)


def points(*rows):
    batch, tokens, kv, latency_ms = np.array(rows).T
    integers = [column.astype(np.int64) for column in (batch, tokens, kv)]
    return Points(*integers, latency_ms, np.ones(len(batch), np.bool_))


def test_cells_are_told_apart_by_model_and_identity_and_ordered(tmp_path):
    rows = [prefill(1, 1, 0, 1.0, model="b"), prefill(1, 1, 0, 1.0, model="a", tp=2), prefill(1, 1, 0, 1.0, model="a")]
    cells = table_of(tmp_path, rows).cells
    assert [(cell.model_path, cell.identity["tp"]) for cell in cells] == [("a", "1"), ("a", "2"), ("b", "1")]


def test_a_cell_holds_both_phases_and_its_ids_as_first_seen(tmp_path):
    (cell,) = table_of(tmp_path, [prefill(1, 8, 0, 1.0), decode(1, 2, 3.0), decode(2, 4, 3.0)]).cells
    assert cell.cell_ids == ("org/tiny-prefill", "org/tiny-decode")
    assert (cell.prefill.tokens.tolist(), cell.decode.kv.tolist()) == ([8], [2, 4])


@pytest.mark.parametrize("name", ["gemm_quant_mode", "moe_backend", "tp", "enable_eplb"])
def test_selection_is_exact(tmp_path, name):
    table = table_of(tmp_path, [prefill(1, 1, 0, 1.0)])
    assert table.select("org/tiny", ASKED) is table.cells[0]
    with pytest.raises(FpmNoCellError, match=r"No FPM cell matches .*other.*collected: org/tiny"):
        table.select("org/tiny", ASKED | {name: "other"})


def test_a_miss_lists_at_most_eight_collected_identities(tmp_path):
    table = table_of(tmp_path, [prefill(1, 1, 0, 1.0, tp=tp) for tp in range(1, 12)])
    with pytest.raises(FpmNoCellError) as caught:
        table.select("org/none", ASKED)
    assert str(caught.value).count("org/tiny") == 8


def test_empty_identity_values_are_matched_by_nothing_recorded(tmp_path):
    rows = [prefill(1, 1, 0, 1.0, fmha_quant_mode=None), prefill(1, 1, 0, 1.0, model="org/other")]
    table = table_of(tmp_path, rows)
    with pytest.raises(FpmNoCellError):
        table.select("org/tiny", ASKED)
    assert table.select("org/tiny", ASKED | {"fmha_quant_mode": ""}).identity["fmha_quant_mode"] == ""


def test_a_request_without_dcp_matches_no_recorded_dcp(tmp_path):
    table = table_of(tmp_path, [prefill(1, 1, 0, 1.0, dcp=1), prefill(2, 1, 0, 1.0, dcp=2)])
    with pytest.raises(FpmNoCellError):
        table.select("org/tiny", ASKED)
    assert table.select("org/tiny", ASKED | {"dcp": "2"}).prefill.batch.tolist() == [2]


def test_a_request_without_execution_identity_matches_the_defaults_of_older_tables(tmp_path):
    execution = {"model_config_sha256": "", "execution_profile": "full", "engram_residency": "none"}
    rows = [prefill(1, 1, 0, 1.0, **execution, input_modality=modality) for modality in ("text", "image")]
    table = table_of(tmp_path, rows, schema_version=7)
    assert table.select("org/tiny", ASKED).identity["input_modality"] == "text"


class TestHealing:
    FAKE = "fake_fallback"

    def rows(self, *decodes):
        return [prefill(1, 1, 0, 1.0, kv_seed_regime="n/a")] + [
            decode(batch, kv, ms, kv_seed_regime=seed) for batch, kv, ms, seed in decodes
        ]

    def healed(self, folder, *decodes, heal=True):
        return table_of(folder, self.rows(*decodes), heal=heal).cells[0]

    def test_the_line_goes_through_the_two_longest_real_points_below(self, tmp_path):
        cell = self.healed(
            tmp_path,
            (8, 16, 1.0, "real_kv"),
            (8, 64, 10.0, "real_kv"),
            (8, 128, 20.0, "real_kv"),
            (8, 192, 99.0, self.FAKE),
            (8, 512, 7.0, "real_kv"),
        )
        assert cell.decode.latency_ms.tolist() == [1.0, 10.0, 20.0, 30.0, 7.0]
        assert (cell.replaced_fake_rows, cell.kept_fake_rows) == (1, 0)

    def test_points_of_other_batches_and_regimes_say_nothing(self, tmp_path):
        cell = self.healed(
            tmp_path,
            (9, 64, 10.0, "real_kv"),
            (9, 128, 20.0, "real_kv"),
            (8, 64, 10.0, "legacy"),
            (8, 128, 20.0, "real_kv"),
            (8, 192, 99.0, self.FAKE),
        )
        assert cell.decode.latency_ms[-1] == 99.0
        assert (cell.replaced_fake_rows, cell.kept_fake_rows) == (0, 1)

    def test_a_line_that_falls_below_zero_keeps_the_recorded_latency(self, tmp_path):
        cell = self.healed(tmp_path, (8, 64, 20.0, "real_kv"), (8, 128, 1.0, "real_kv"), (8, 512, 99.0, self.FAKE))
        assert cell.decode.latency_ms[-1] == 99.0

    def test_only_genuine_leaves_points_without_real_kv_out(self, tmp_path):
        cell = self.healed(tmp_path, (8, 64, 20.0, "real_kv"), (8, 128, 1.0, self.FAKE), (8, 256, 3.0, "legacy"))
        assert cell.decode.only_genuine().kv.tolist() == [64, 256]

    def test_the_environment_switch_is_part_of_the_fingerprint(self, tmp_path, monkeypatch):
        decodes = ((8, 64, 10.0, "real_kv"), (8, 128, 20.0, "real_kv"), (8, 192, 99.0, self.FAKE))
        path = str(write_pair(tmp_path, self.rows(*decodes)))
        healed = open_forward_table(path, "x100", "vllm", VERSION)
        monkeypatch.setattr(forward_cells, "_tables", {})
        monkeypatch.setenv("AIC_FPM_FAKE_FALLBACK_RAW", "1")
        raw = open_forward_table(path, "x100", "vllm", VERSION)
        assert (healed.cells[0].decode.latency_ms[2], raw.cells[0].decode.latency_ms[2]) == (30.0, 99.0)
        assert healed.fingerprint != raw.fingerprint


def test_one_table_serves_a_process_until_its_files_change(tmp_path):
    path = str(write_pair(tmp_path, [prefill(1, 1, 0, 1.0)]))
    first = open_forward_table(path, "x100", "vllm", VERSION)
    assert open_forward_table(path, "x100", "vllm", VERSION) is first
    write_pair(tmp_path, [prefill(1, 1, 0, 2.0), prefill(1, 2, 0, 2.0)])
    assert len(open_forward_table(path, "x100", "vllm", VERSION).cells[0].prefill) == 2


def test_curves_are_sorted_by_site_and_coordinate():
    curves = prefill_curves(points((2, 8, 0, 1.0), (1, 16, 4, 2.0), (1, 8, 4, 3.0), (1, 8, 0, 4.0)))
    assert curves.batch.tolist() == [1, 1, 2]
    assert curves.second.tolist() == [0, 4, 0]
    assert curves.first.tolist() == [0, 1, 3, 4]
    assert curves.latency_ms.tolist() == [4.0, 3.0, 2.0, 1.0]
    assert (curves.batches.tolist(), curves.batch_first.tolist()) == ([1, 2], [0, 2, 3])


def test_a_batch_ends_a_captured_graph_when_its_successor_was_collected():
    rows = [(batch, 0, 64, 1.0) for batch in (1, 2, 4, 8, 9, 16)]
    assert capture_batches(decode_curves(points(*rows))).tolist() == [1, 8]


FLAT = [(batch, tokens, 0, 10.0 * tokens) for batch in (1, 2) for tokens in (1, 2, 4)]


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        (FLAT, 2.0),
        ([*FLAT[:3], (2, 1, 0, 10.4), (2, 2, 0, 20.8), (2, 4, 0, 90.0)], 2.0),
        ([*FLAT[:3], (2, 1, 0, 10.6), (2, 2, 0, 21.2), (2, 4, 0, 40.0)], None),
        (FLAT[:3], None),
        (FLAT[:5], None),
        ([*FLAT[:3], *((2, tokens, 64, 10.0 * tokens) for tokens in (1, 2, 4))], None),
        ([*FLAT[:3], (2, 1, 0, 10.0), (2, 3, 0, 30.0), (2, 4, 0, 40.0), (2, 8, 0, 999.0)], 2.0),
    ],
)
def test_prefill_is_flat_when_the_median_deviation_of_the_next_batch_is_small(rows, limit):
    assert flat_batch_limit(prefill_curves(points(*rows))) == limit
