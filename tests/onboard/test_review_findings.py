"""Where each review finding of the onboarding workflow is tested; a test that goes missing is missed here.

Source: onboarding.md section 9.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FINDINGS = {
    1: [
        "replay/test_coverage.py::test_finding_1_an_uncovered_query_is_told_once_and_its_cause_is_the_next_in_the_chain"
    ],
    2: ["replay/test_coverage.py::test_finding_2_the_error_of_a_replay_stays_primary_whatever_becomes_of_its_coverage"],
    3: [
        "replay/test_cache_of_a_profile.py::test_finding_3_a_profile_is_asked_for_a_cache_of_vllm_without_pipeline_alone"
    ],
    4: [
        "collect/test_roles_and_caches.py::test_finding_4_prefill_of_an_aggregated_worker_goes_up_to_its_own_limit",
        "collect/test_roles_and_caches.py::test_finding_4_aggregated_workers_of_different_limits_need_a_shared_one",
    ],
    5: ["collect/test_selection.py::test_the_ordinary_sample_stands_for_seeded_prefill_without_kv"],
    6: [
        "replay/test_cache_of_a_profile.py::test_finding_6_engines_without_grouped_caches_refuse_them_and_say_what_they_need"
    ],
    7: ["onboard/test_import_observations.py::test_without_a_probe_nothing_is_taken_over_and_nothing_is_verified"],
    8: ["onboard/test_init.py::test_the_context_limit_is_never_assumed"],
    9: [
        "recommendation/test_findings.py::"
        "test_finding_9_a_mode_without_deployments_of_its_roles_is_skipped_and_the_others_go_on",
        "recommendation/test_findings.py::test_finding_9_without_any_mode_each_one_is_named_with_its_reason",
    ],
    10: ["replay/test_cache_of_a_profile.py::test_finding_10_a_grouped_cache_is_counted_in_bytes_and_has_no_tokens"],
    11: [
        "replay/test_cache_of_a_profile.py::test_finding_11_flat_arguments_are_normalised_before_the_cache_is_looked_at"
    ],
    12: [
        "onboard/planning/test_collector_command.py::test_explicit_captures_without_a_role_warn_unless_eager",
        "onboard/planning/test_collect_gate.py::test_explicit_captures_without_a_role_warn_through_the_preview",
    ],
    13: [
        "collect/test_roles_and_caches.py::test_finding_13_explicit_graphs_of_an_aggregated_worker_reach_both_launches",
        "collect/test_roles_and_caches.py::test_finding_13_a_single_role_keeps_its_own_graphs",
    ],
    14: [
        "onboard/planning/test_collect_flow.py::"
        "test_finding_14_a_collector_that_cannot_run_launches_nothing_and_keeps_a_report"
    ],
    15: [
        "onboard/planning/test_plan_folder.py::test_a_saved_plan_of_any_role_goes_on_with_the_same_bytes",
        "onboard/planning/test_collect_gate.py::test_a_campaign_keeps_its_bytes_when_it_is_selected_again",
    ],
    16: [
        "onboard/test_finalize.py::test_finding_16_the_quality_marker_is_verified_again_without_a_probe",
        "onboard/planning/test_plan_folder.py::test_a_quality_marker_is_recomputed_without_a_probe",
    ],
    17: [
        "perfmodel/test_wholeforward.py::test_finding_17_prefill_latency_takes_the_batch_as_bs_with_a_measured_profile",
        "perfmodel/test_oplevel.py::test_finding_17_prefill_latency_takes_the_batch_as_bs_without_a_measured_profile",
    ],
    18: ["onboard/test_suggest.py::test_a_grouped_cache_of_one_role_is_assessed_like_any"],
    19: ["collect/test_repeatability_run.py::test_a_report_of_schema_1_is_shown_and_never_upgraded"],
    20: [
        "onboard/planning/test_version_binding.py::test_another_deployment_needs_a_fresh_plan",
        "onboard/planning/test_collect_gate.py::test_another_deployment_is_refused_after_the_first_run",
    ],
    21: [
        "recommendation/test_findings.py::"
        "test_finding_21_workers_import_the_installed_package_and_nothing_of_the_caller"
    ],
    22: ["collect/test_measurement.py::test_finding_22_evidence_of_version_2_lists_what_stays_unknown"],
    23: ["collect/test_roles_and_caches.py::test_finding_23_every_form_of_a_model_volume_renders_valid_launch_files"],
    24: [
        "onboard/test_import_observations.py::"
        "test_a_dep8_probe_of_three_roles_imports_from_64_records_and_368_artifacts"
    ],
}


@pytest.mark.parametrize("number", FINDINGS)
def test_a_finding_has_its_test(number):
    for place in FINDINGS[number]:
        file, name = place.split("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_finding_is_listed():
    assert list(FINDINGS) == list(range(1, 25))
