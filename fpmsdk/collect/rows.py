"""Rows of the published table: one a measured coordinate of a cell, with all that identifies how it was measured.

Source: collector.md sections 6.2 and 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.artifact import NativeCollection, validate_native
from fpmsdk.collect.capability import NATIVE_TEMPLATE
from fpmsdk.collect.dense_policy import reads_synthetic_kv_unbiased
from fpmsdk.collect.kvwarm import BALANCED_SKIP, DENSE_SKIP
from fpmsdk.collect.launch_evidence import launched_model
from fpmsdk.collect.selection import selected_rows
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import CollectionError
from fpmsdk.perfdb.forward_schema import EXECUTION_COLUMNS, FAKE_KV, PARTITION_POLICY, REAL_KV, SINGLE_SAMPLE

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell
    from fpmsdk.collect.plan import CollectionPlan

DENSE_REGIME = f"skip:{DENSE_SKIP}"
_DTYPES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "fmha_resolution", "comm_quant_mode")


def attempt_rows(
    plan: CollectionPlan, cell: Cell, cell_dir: str | Path, *, attempt_id: str, is_dense_policy_on: bool = True
) -> list[dict[str, Any]]:
    """Validate what an attempt left in the folder of its cell, and turn it into rows.

    Parameters
    ----------
    plan, cell: what was to be measured.
    cell_dir: `cells/<cell_id>` of a campaign, with `raw/` and the launch files.
    attempt_id: the attempt it must be of.
    is_dense_policy_on: False when an older publication, which knew no such policy, is verified again.

    Raises
    ------
    CollectionError: the artifacts break a rule, or cannot be published.
    """
    folder = Path(cell_dir)
    if not attempt_id:
        raise CollectionError(
            f"{cell.cell_id}: rows need the identity of the attempt they come from; resume the campaign"
        )
    check_markers(cell, folder / "raw")
    collection = validate_native(plan, cell, folder / "raw", attempt_id=attempt_id)
    return cell_rows(plan, cell, collection, folder, is_dense_policy_on=is_dense_policy_on)


def cell_rows(
    plan: CollectionPlan,
    cell: Cell,
    collection: NativeCollection,
    cell_dir: str | Path,
    *,
    is_dense_policy_on: bool = True,
) -> list[dict[str, Any]]:
    """Rows of a validated collection, in the order in which their coordinates first occur.

    Parameters
    ----------
    plan, cell: what was to be measured.
    collection: what was measured.
    cell_dir: `cells/<cell_id>`, whose launch files are read when the engine reports a mounted model.
    is_dense_policy_on: see `attempt_rows`.

    Returns
    -------
    Columns of schema 7 by name; `latency_ms` is that of the slowest rank.

    Raises
    ------
    CollectionError: another engine version than planned, conflicting samples, or KV that may not be published.

    Source: collector.md sections 6.2 and 6.3.
    """
    pinned = plan.runtime_backend_version
    if pinned is not None and collection.backend_version != pinned:
        raise CollectionError(
            f"{cell.cell_id}: vLLM {collection.backend_version} was observed, {pinned} was planned; run the planned "
            "version, or plan again"
        )
    is_unbiased = (
        is_dense_policy_on
        and cell.workload_kind == "decode"
        and reads_synthetic_kv_unbiased(plan, cell, collection, lambda: launched_model(plan, Path(cell_dir)))
    )
    shared_before, shared_after = _shared_columns(plan, cell, collection)
    latency_s = collection.wall_s
    rows = []
    for at in selected_rows(collection, cell.cell_id):
        point = collection.points[at]
        regime = kv_seed_regime(cell, point, collection.kvwarm, is_unbiased=is_unbiased)
        _check_publishable(plan, cell, point, regime, collection.regimes[at])
        rows.append(
            {
                **shared_before,
                "batch_size": point["batch_size"],
                "total_prefill_tokens": point["total_prefill_tokens"],
                "total_kv_read_tokens": point["total_kv_read_tokens"],
                "partition_policy": PARTITION_POLICY,
                "kv_seed_regime": regime,
                "latency_ms": float(latency_s[at]) * 1000.0,
                **shared_after,
            }
        )
    return rows


def kv_seed_regime(
    cell: Cell, point: Mapping[str, Any], kvwarm: Mapping[str, Any] | None, *, is_unbiased: bool = False
) -> str:
    """What the table says of the KV that a point read.

    Parameters
    ----------
    point: the point, with its sample reasons.
    kvwarm: the warm-up block of the artifact.
    is_unbiased: whether synthetic KV of this cell was found to be as good as real KV.

    Raises
    ------
    CollectionError: the point claims real KV although the warm-up was skipped.

    Source: collector.md section 6.2.
    """
    if point["point_type"] == "prefill" and (not cell.is_config_bound or point["total_kv_read_tokens"] == 0):
        return "n/a"
    if kvwarm is None:
        return "legacy"
    skip = kvwarm.get("skip_reason")
    if skip == BALANCED_SKIP:
        return f"skip:{skip}"
    reasons = point.get("sample_reasons") or ()
    if "kvwarm_real_kv" in reasons:
        if skip:
            raise CollectionError(
                f"{cell.cell_id}: benchmark id {point['benchmark_id']} reports real KV although the warm-up was "
                f"skipped ({skip}); run the attempt again"
            )
        return REAL_KV
    if "kvwarm_fake_fallback" in reasons:
        return DENSE_REGIME if is_unbiased else FAKE_KV
    return FAKE_KV if skip else "legacy"


def check_markers(cell: Cell, raw_root: str | Path) -> None:
    """Compare what the engine resolved with what the cell's backend policy expects of it.

    Raises
    ------
    CollectionError: a resolved configuration is missing, or a marker in it has another value.
    """
    expected = cell.backend_policy["expected_markers"]
    if not expected:
        return
    paths = sorted(Path(raw_root).rglob("resolved-config*.json"))
    policy = cell.backend_policy["policy_id"]
    if not paths:
        raise CollectionError(f"{raw_root}: no resolved configuration, which backend policy {policy} needs as evidence")
    for path in paths:
        document = read_document(path)
        for name, value in expected.items():
            found = document
            for part in name.split("."):
                found = found.get(part, "<missing>") if isinstance(found, dict) else "<missing>"
            # Markers are texts, the resolved configuration keeps its types.
            if str(found) != str(value):
                raise CollectionError(f"{path}: {name}: backend policy {policy} expects {value!r}, found {found!r}")


def _check_publishable(
    plan: CollectionPlan, cell: Cell, point: Mapping[str, Any], regime: str, seeded: str | None
) -> None:
    reads_cache = point["point_type"] == "decode" or point["total_kv_read_tokens"] > 0
    if cell.is_config_bound and reads_cache and regime != REAL_KV:
        raise CollectionError(
            f"{cell.cell_id}: benchmark id {point['benchmark_id']} read {regime} KV; a cell bound to a configuration "
            "publishes cached points only with real KV"
        )
    is_generic = plan.capability.get("template_id") == NATIVE_TEMPLATE
    if is_generic and point["point_type"] == "prefill" and reads_cache and seeded != "real_prefix":
        raise CollectionError(
            f"{cell.cell_id}: benchmark id {point['benchmark_id']} was seeded as {seeded or 'unreported'}; with this "
            "cache layout cached prefill is published only with a real prefix (DYN_BENCH_PREFILL_REAL_SEED=on)"
        )


def _shared_columns(
    plan: CollectionPlan, cell: Cell, collection: NativeCollection
) -> tuple[dict[str, Any], dict[str, Any]]:
    # What all rows of a cell share, before and after the columns of a point.
    deployment = plan.deployment(cell.topology)
    label = plan.backend_version or collection.backend_version if deployment is None else deployment.backend_version
    capability, source = plan.capability, collection.input_provenance or {}
    execution = cell.execution_columns
    dtypes = {name: cell.resolved_dtypes[name] for name in _DTYPES}
    before = {
        "cell_id": cell.cell_id,
        "model_path": plan.model_path,
        "system": plan.system,
        "backend": plan.backend,
        "backend_version": label,
        "runtime_backend_version": collection.backend_version,
        "weight_quantization": cell.weight_quantization,
        **dtypes,
        "kv_cache_dtype": cell.kv_cache_dtype,
        "parallel_strategy": cell.parallel_strategy,
        **cell.topology.document(),
        **cell.backend_columns,
        **{name: execution[name] for name in EXECUTION_COLUMNS},
        "workload_kind": cell.workload_kind,
    }
    after = {
        "global_warmup_iterations": plan.options["global_warmup_iterations"],
        "warmup_repeats": 0,
        "measurement_repeats": 1,
        "measurement_policy": SINGLE_SAMPLE,
        "model_support_level": capability["support_level"],
        "model_template_id": capability["template_id"],
        "model_template_version": capability["template_version"],
        "aic_database_version": capability["aic_database_version"],
        "source_plan_sha256": plan.sha256,
        "collector_attempt_id": collection.attempt_id,
        "runtime_run_id": collection.run_id,
        "runtime_grid_digest": collection.grid_digest,
        "input_text_sha256": source.get("text_sha256"),
        "input_token_ids_sha256": source.get("token_ids_sha256"),
        "input_tokenizer_revision": source.get("tokenizer_revision"),
    }
    return before, after
