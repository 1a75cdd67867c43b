"""The qualification of an onboarding: collection, replay and matched serving, each assessed anew from its evidence.

Source: onboarding.md section 8.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import CollectionError, EvidenceError, FpmSdkError, OnboardError
from fpmsdk.onboard.collection_gates import overall
from fpmsdk.onboard.outputs import fresh_directory
from fpmsdk.onboard.policy import ValidationPolicy, load_policy
from fpmsdk.onboard.quality import CheckedReport, check_collection_report
from fpmsdk.onboard.serving_assess import assess_serving
from fpmsdk.onboard.serving_expected import expected_execution
from fpmsdk.onboard.serving_prepare import prepare_serving
from fpmsdk.onboard.serving_recipe import checked_recipe
from fpmsdk.onboard.serving_replay import check_replay

SCHEMA = "aisimulate-onboarding-validation/v1"
REPORT_FILE, POLICY_FILE, SERVING_REPORT = "validation.json", "policy.json", "serving-validation.json"
QUALIFIED, NOT_QUALIFIED = "qualified_for_evaluated_scope", "not_qualified"
_OPTION = "--validation-output-dir"
_NOT_MEASURED = "the matched serving run is not assessed yet"


@dataclass(frozen=True)
class ServingValidation:
    """What is asked for; paths that an action does not read may be None.

    Parameters
    ----------
    output: directory of the result, apart from everything that is read.
    collection_report, replay_report: `collection-validation.json` and the `validation.json` of `validate-fpm`.
    policy: a policy file; None is that of the collection report.
    recipe, execution_evidence, forward_evidence: of a serving run that is assessed.
    endpoint, tokenizer, benchmark_python: of a serving run that is prepared.
    """

    output: Path
    collection_report: Path
    replay_report: Path
    policy: Path | None = None
    recipe: Path | None = None
    execution_evidence: Path | None = None
    forward_evidence: Path | None = None
    endpoint: str | None = None
    tokenizer: Path | None = None
    benchmark_python: Path | None = None


def prepare(asked: ServingValidation) -> dict[str, Any]:
    """Prepare a serving run for a validated collection and replay, in `serving/` of the output.

    Returns
    -------
    The combined validation, incomplete by nature; `recipe` refers to the recipe when one was written.

    Raises
    ------
    OnboardError: the endpoint or the tokenizer is not given, or the output is not apart from the inputs.
    """
    if asked.endpoint is None or asked.tokenizer is None:
        raise OnboardError("--action prepare: needs --endpoint and --tokenizer", "--endpoint")
    endpoint, tokenizer = asked.endpoint, asked.tokenizer

    def gate(
        combined: dict[str, Any], replay: Mapping[str, Any], checked: CheckedReport, policy: ValidationPolicy
    ) -> dict[str, Any]:
        recipe = prepare_serving(
            asked.output / "serving",
            trace=Path(replay["trace"]["path"]),
            prediction_config=Path(replay["prediction_config"]["path"]),
            prediction_report=Path(replay["prediction_report"]["path"]),
            endpoint=endpoint,
            tokenizer=tokenizer,
            expected_execution=expected_execution(checked.request, checked.source, checked.frozen),
            policy=policy.serving,
            benchmark_python=asked.benchmark_python,
        )
        combined["recipe"] = file_evidence(asked.output / "serving" / "recipe.json")
        return {"status": "incomplete", "issues": [*recipe["issues"], _NOT_MEASURED]}

    return _validate(asked, gate)


def assess(asked: ServingValidation) -> dict[str, Any]:
    """Assess the serving run of a recipe, and qualify the onboarding when all three gates pass.

    Raises
    ------
    OnboardError: the recipe or the observed execution is not given, or the output is not apart from the inputs.
    """
    if asked.recipe is None or asked.execution_evidence is None:
        raise OnboardError("--action assess: needs --recipe and --execution-evidence", "--recipe")
    recipe_path, execution = asked.recipe, asked.execution_evidence

    def gate(
        combined: dict[str, Any], replay: Mapping[str, Any], checked: CheckedReport, policy: ValidationPolicy
    ) -> dict[str, Any]:
        recipe = read_document(recipe_path)
        own = {name: replay[name] for name in ("trace", "prediction_config", "prediction_report")}
        own["expected_execution"] = expected_execution(checked.request, checked.source, checked.frozen)
        differing = [name for name, value in own.items() if recipe[name] != value]
        if differing:
            raise EvidenceError(
                f"{recipe_path}: {', '.join(differing)} differ from the validated collection and replay"
            )
        report = assess_serving(
            recipe_path,
            prediction_report=Path(replay["prediction_report"]["path"]),
            execution_evidence=execution,
            forward_evidence=asked.forward_evidence,
            policy=policy.serving,
        )
        write_document(asked.output / SERVING_REPORT, report)
        kept = ("status", "metrics", "forward", "missing_evidence", "failures")
        return {"report": file_evidence(asked.output / SERVING_REPORT), **{name: report[name] for name in kept}}

    return _validate(asked, gate)


def run(recipe: Path | None, benchmark_python: Path | None) -> None:
    """Check that a prepared serving run could start; driving a live engine is not part of this release.

    Raises
    ------
    OnboardError: no recipe is given, it is not ready, or a file of it changed.
    CollectionError: the run could start.
    """
    if recipe is None or benchmark_python is None:
        raise OnboardError("--action run: needs --recipe and --aiperf-python", "--recipe")
    checked_recipe(recipe)
    raise CollectionError(
        f"{recipe}: is ready; this release does not drive a live engine. Run its command_arguments with "
        f"{benchmark_python} against the server, record what the recipe asks for, and continue with --action assess"
    )


Gate = Callable[[dict[str, Any], Mapping[str, Any], CheckedReport, ValidationPolicy], dict[str, Any]]


def _validate(asked: ServingValidation, serving_gate: Gate) -> dict[str, Any]:
    policy = load_policy(asked.policy or _saved_policy(asked.collection_report))
    fresh_directory(asked.output, _inputs(asked), _OPTION)
    write_document(asked.output / POLICY_FILE, policy.document())
    gates: dict[str, Any] = {name: {"status": "incomplete"} for name in ("collection", "replay", "serving")}
    combined: dict[str, Any] = {
        "schema_version": SCHEMA,
        "status": "incomplete",
        "accuracy": NOT_QUALIFIED,
        "policy": file_evidence(asked.output / POLICY_FILE),
        "scope": "selected representative collection coordinates and one complete matched Weka play",
        "gates": gates,
        "limitations": ["nothing is said of configurations and workloads that were not evaluated"],
    }
    write_document(asked.output / REPORT_FILE, combined)
    name = "collection"
    try:
        checked = check_collection_report(asked.collection_report, policy)
        gates[name] = {
            "status": checked.report["status"],
            "report": file_evidence(asked.collection_report),
            "checks": checked.report["gates"],
        }
        name = "replay"
        formal = checked.report["inputs"]["formal_data"]
        gates[name] = replay = check_replay(asked.replay_report, checked.request, checked.source.folder, formal)
        name = "serving"
        gates[name] = serving_gate(combined, replay, checked, policy)
    except (FpmSdkError, OSError, KeyError, TypeError) as fault:
        is_missing = isinstance(fault, FileNotFoundError | KeyError) or _is_gone(fault)
        gates[name] = {"status": "incomplete" if is_missing else "failed", "issues": [str(fault)]}
    combined["status"] = overall(gate["status"] for gate in gates.values())
    if combined["status"] == "passed":
        combined["accuracy"] = QUALIFIED
    write_document(asked.output / REPORT_FILE, combined)
    return combined


def _is_gone(fault: BaseException) -> bool:
    # Evidence that is gone is missing, evidence that changed contradicts.
    return isinstance(fault, EvidenceError) and bool(fault.path) and not Path(fault.path).exists()


def _saved_policy(report: Path) -> Path | None:
    try:
        return Path(read_document(report)["policy"]["path"])
    except (OnboardError, OSError, KeyError, TypeError):
        return None  # the collection gate will say what is wrong with the report


def _inputs(asked: ServingValidation) -> Iterator[Path]:
    """Everything that is read: directories of the reports, files, and what the documents refer to."""
    yield from (asked.collection_report.parent, asked.replay_report.parent)
    if asked.recipe is not None:
        yield asked.recipe.parent
    for path in (
        asked.policy,
        asked.tokenizer,
        asked.benchmark_python,
        asked.execution_evidence,
        asked.forward_evidence,
    ):
        if path is not None:
            yield path
    for path in (asked.collection_report, asked.replay_report, asked.recipe):
        if path is not None and path.is_file():
            document = read_document(path)
            yield from _referenced(document)
            plan = document.get("collection_plan") if isinstance(document, dict) else None
            if isinstance(plan, dict):
                yield Path(plan["path"]).parent


def _referenced(value: Any) -> Iterator[Path]:
    if isinstance(value, list):
        for item in value:
            yield from _referenced(item)
    elif isinstance(value, dict):
        if isinstance(value.get("path"), str) and "sha256" in value:
            yield Path(value["path"])
        if isinstance(value.get("collection_directory"), str):
            yield Path(value["collection_directory"])
        for item in value.values():
            yield from _referenced(item)
