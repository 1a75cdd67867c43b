"""Typical mistakes: exit code 2, one line that names the mistake and the fix, and nothing is written.

Source: predict-recommend.md section 15.
"""

import copy
import json

import pytest
import yaml
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from tests.perfdb.synthetic import HARDWARE
from tests.prediction.cases import VERSION

TRAFFIC = {
    "source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 4},
    "load": {"type": "concurrency", "concurrency": 2},
    "stop": {"requests": 4},
}
WORKER = {
    "scheduler": {"max_batched_tokens": 512, "max_sequences": 8},
    "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 120}},
}
CONSTANTS = {"type": "fixed", "prefill_ms": 11.0, "decode_ms": 4.5}


@pytest.fixture
def run(tmp_path):
    """Predict a configuration, given as values or as text, in a folder with a model and a systems root."""
    model = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(model))
    (tmp_path / "systems/data/h200_sxm/vllm" / VERSION).mkdir(parents=True)
    (tmp_path / "systems/h200_sxm.yaml").write_text(yaml.safe_dump(HARDWARE | {"data_dir": "data/h200_sxm"}))

    def predict(content, *options):
        file = tmp_path / "predict.yaml"
        if content is not None:
            file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        output = ["--output-dir", str(tmp_path / "output")]
        return CliRunner().invoke(app, ["predict", "-c", str(file), *output, *options])

    predict.folder = tmp_path
    return predict


def plain(timing=CONSTANTS):
    """A configuration that is right; without constants its passes are priced by data of the systems root."""
    worker = WORKER | ({"timing": timing} if timing else {})
    engine = {"model": "model", "hardware": "h200_sxm", "context_length": 2048, "workers": {"aggregated": worker}}
    if not timing:
        engine |= {"backend_version": VERSION, "systems_paths": ["systems"], "estimation_mode": "op_level"}
    return copy.deepcopy({"traffic": TRAFFIC, "engine": engine})


def changed(path, value, **options):
    document = plain(**options)
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


def renamed(path, name):
    document = plain()
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[name] = place.pop(last)
    return document


def of_a_trace(path):
    source = {"type": "trace", "paths": [path], "format": "mooncake"}
    return changed("traffic", {"source": source, "load": {"type": "trace_timestamps"}})


def with_profile(**engine):
    deployment = {"system": "h200_sxm", "backend_version": VERSION}
    document = plain(timing=None)
    document["engine"] |= {"fpm_profile": {"deployments": [deployment]}} | engine
    return document


WORKERS = "engine.workers.aggregated"
MISTAKES = {
    "a misspelt field": (
        renamed(f"{WORKERS}.scheduler", "schedular"),
        "predict.yaml:26: engine.workers.aggregated.schedular: unknown field (did you mean 'scheduler'?); accepted are",
    ),
    "a misspelt section": (
        renamed("traffic", "trafic"),
        "predict.yaml:19: trafic: unknown field (did you mean 'traffic'?); accepted are engine, evaluation, execution",
    ),
    "no stop condition": (
        changed("traffic.stop", None),
        "predict.yaml:1: traffic: synthetic traffic needs an end; add stop: {requests: 100}",
    ),
    "a number in quotes": (
        changed(f"{WORKERS}.scheduler.max_sequences", "8"),
        "predict.yaml:19: engine.workers.aggregated.scheduler.max_sequences: must be a number, found the text '8'; "
        "remove the quotes",
    ),
    "disaggregated without roles": (
        changed("engine", {"model": "model", "hardware": "h200_sxm", "mode": "disaggregated"}),
        "engine.workers: mode disaggregated needs prefill and decode workers; add workers: {prefill: {parallelism: "
        "{tensor: 1}}, decode: {parallelism: {tensor: 1}}}",
    ),
    "an unknown version": (
        changed("engine.backend_version", "9.9.9", timing=None),
        "engine.backend_version: unknown version '9.9.9'; {folder}/systems has " + VERSION,
    ),
    "a version that the profile was not measured with": (
        with_profile(backend_version="9.9.9"),
        f"engine.backend_version: unknown version '9.9.9'; fpm_profile has {VERSION}",
    ),
    "an unknown backend": (
        changed("engine.backend", "vlm"),
        "predict.yaml:29: engine.backend: must be 'vllm', found 'vlm'",
    ),
    "hardware without its form": (
        changed("engine.hardware", "h200", timing=None),
        "predict.yaml:13: engine.hardware: unknown hardware 'h200' (did you mean 'h200_sxm'?); {folder}/systems has "
        "h200_sxm",
    ),
    "hardware that the profile was not measured on": (
        with_profile(hardware="h200"),
        "engine.hardware: unknown hardware 'h200' (did you mean 'h200_sxm'?); fpm_profile has h200_sxm",
    ),
    "an unknown model": (
        changed("engine.model", "Qwen/No-Such", timing=None),
        "predict.yaml:12: engine.model: model not found: model 'Qwen/No-Such' is no directory with a config.json",
    ),
    "no performance data": (
        changed("engine.systems_paths", ["nowhere"], timing=None),
        "engine.systems_paths: systems_paths entry is not a directory: {folder}/nowhere",
    ),
    "a trace that is not there": (
        of_a_trace("traces/no.jsonl"),
        "predict.yaml:5: traffic.source.paths[0]: no such file {folder}/traces/no.jsonl; a relative path is below the "
        "folder of the configuration",
    ),
    "broken YAML": ("traffic:\n  source: {type: synthetic\nengine: {}\n", "predict.yaml:3:7: broken YAML: "),
    "a key that is given twice": (
        "engine: {model: a}\ntraffic: {}\nengine: {model: b}\n",
        "predict.yaml:3: the key 'engine' is given twice; keep one",
    ),
    "a section of a search": (
        plain() | {"optimization": {"target": "throughput"}},
        "optimization: belongs to a search; run `fpmsdk recommend`, or leave the section out",
    ),
    "no configuration": (None, "predict.yaml: no such file; name a YAML configuration with --config"),
    "a tensor size that does not divide the heads": (
        changed(f"{WORKERS}.parallelism", {"tensor": 3}),
        "engine.workers.aggregated.parallelism: tensor 3 does not divide the 32 attention heads; the nearest that do "
        "are 2 and 4",
    ),
    "a field of the format that is not simulated": (
        changed(f"{WORKERS}.kv_cache.host_offload", {"blocks": 4}),
        "engine.workers.aggregated.kv_cache.host_offload: is not supported; leave it out",
    ),
    "a misspelt type": (
        changed("traffic.load.type", "poison"),
        "predict.yaml:6: traffic.load: type must be 'concurrency', 'poisson', 'constant_rate', 'trace_timestamps', "
        "'kv_capacity_fraction', found 'poison' (did you mean 'poisson'?)",
    ),
    "no rate": (
        changed("traffic.load", {"type": "poisson"}),
        "predict.yaml:6: traffic.load: give exactly one of requests_per_second and sessions_per_second",
    ),
    "a domain of a search": (
        changed("traffic.load.concurrency", {"choices": [1, 2]}),
        "traffic.load.concurrency: is a domain, and this takes one value",
    ),
    "a list in place of a section": (
        changed("evaluation", [], timing=None),
        "evaluation: must be a mapping of fields, found []",
    ),
    "a text that is no number": (
        changed("engine.context_length", "maxx"),
        "engine.context_length: must be a number, found the text 'maxx' or must be 'max', found 'maxx'",
    ),
    "automatic hardware": (
        changed("engine.hardware", "auto"),
        "predict.yaml:13: engine.hardware auto is for recommend; name the system, such as h200_sxm",
    ),
}


def rejection_of(ran):
    assert (ran.exit_code, ran.stdout) == (2, ""), ran.output
    (line,) = ran.stderr.splitlines()
    return line


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_typical_mistake_is_one_line_with_its_fix_and_nothing_is_written(run, mistake):
    content, words = MISTAKES[mistake]
    line = rejection_of(run(content))
    assert words.replace("{folder}", str(run.folder)) in line
    assert not (run.folder / "output").exists()


def test_what_the_mistakes_were_made_in_is_right(run):
    assert run(plain()).exit_code == 0


CONTEXT_SIZES = [
    ({"tensor": 4, "prefill_context": 4, "decode_context": 2}, {}, "decode_context must be 1 or prefill_context 4"),
    ({"prefill_context": 2}, {"tensor": 2, "decode_context": 2}, "cannot take over the whole cache"),
    (
        {"tensor": 2, "prefill_context": 2, "decode_context": 2},
        {"tensor": 3, "decode_context": 3},
        "must divide one another",
    ),
]


@pytest.mark.parametrize(("prefill", "decode", "words"), CONTEXT_SIZES)
def test_context_sizes_of_prefill_and_decode_workers_must_fit_each_other(run, prefill, decode, words):
    document = plain()
    sizes = {"prefill": prefill, "decode": decode}
    workers = {role: WORKER | {"timing": CONSTANTS, "parallelism": sizes[role]} for role in sizes}
    document["engine"] |= {"mode": "disaggregated", "workers": workers}
    line = rejection_of(run(document))
    assert words in line
    assert "predict.yaml:" in line


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("engine.mode=both", "--set: engine.mode: must be 'aggregated' or 'disaggregated', found 'both'"),
        ("engine.workers.aggregated.schedular.x=1", "--set: engine.workers.aggregated.schedular: unknown field"),
        ("engine", "--set engine: must be PATH=YAML, such as engine.context_length=4096"),
        ("optimization.target=ttft", "section optimization belongs to a search; run `fpmsdk recommend`"),
        ("traffic.source.paths.0=x", "0 is a list index; replace the whole list"),
    ],
)
def test_a_faulty_override_is_one_line_that_names_the_option(run, item, words):
    assert words in rejection_of(run(plain(), "--set", item))
    assert not (run.folder / "output").exists()


def test_an_output_directory_in_use_is_kept_and_the_option_is_named(run):
    (run.folder / "output").mkdir()
    (run.folder / "output/notes.txt").write_text("mine")
    assert "output: the output directory is not empty; pass --overwrite" in rejection_of(run(plain()))
    assert [file.name for file in (run.folder / "output").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{}"], "trace.jsonl: trace line 1 is missing hash_ids"),
        (
            [json.dumps({"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}), "{"],
            "trace.jsonl: trace line 2 is not a JSON object",
        ),
        ([], "trace.jsonl did not contain any requests"),
    ],
    ids=["no fields", "broken in the middle", "empty"],
)
def test_a_bad_trace_is_named_with_its_line_before_anything_is_written_or_removed(run, rows, words):
    (run.folder / "trace.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (run.folder / "output").mkdir()
    (run.folder / "output/prediction.json").write_text("{}")
    assert words in rejection_of(run(of_a_trace("trace.jsonl"), "--overwrite"))
    assert [file.name for file in (run.folder / "output").iterdir()] == ["prediction.json"]


def test_several_mistakes_are_a_line_each(run):
    document = changed("engine.context_length", -1)
    document["engine"]["hardwear"] = "x"
    ran = run(document)
    assert ran.exit_code == 2
    assert len(ran.stderr.splitlines()) == 2
