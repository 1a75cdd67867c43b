"""The engine specification: what a deployment is, and the operators of its prefill and decode passes.

Assembles and identifies; families build the operators. Source: op-level.md sections 4.4 and 4.5.
"""

import json
from typing import Any

import msgspec

from fpmsdk.files import sha256
from fpmsdk.opgraph.architectures import DEEPSEEK, GEMMA4, HYBRID_MOE, LLAMA, MOE, MUSE, NAS, STEP
from fpmsdk.opgraph.deepseek import deepseek_ops
from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.hybrid import gemma4_ops, hybrid_moe_ops, muse_ops
from fpmsdk.opgraph.llama import llama_ops
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.moe import moe_ops
from fpmsdk.opgraph.nas import nas_ops
from fpmsdk.opgraph.ops import GenerationAttention, Op
from fpmsdk.opgraph.parallelism import check_parallelism
from fpmsdk.opgraph.phase import LaneOrder, Phase
from fpmsdk.opgraph.precision import Precision, infer_precision
from fpmsdk.opgraph.quantization import gemm_wire_name, moe_wire_name

SCHEMA_VERSION = 29
ENGINE_SCHEMA_VERSION = 1

# Version of the encoding that `EngineSpec.digest` hashes; raise it with every change of that encoding.
DIGEST_VERSION = 1

TRANSFER_KINDS = frozenset({"xshape", "xquant", "xprofile", "xop"})
SHARING_MODES = ("SILICON", "HYBRID")

FAMILIES = {
    LLAMA: llama_ops,
    MOE: moe_ops,
    DEEPSEEK: deepseek_ops,
    HYBRID_MOE: hybrid_moe_ops,
    STEP: hybrid_moe_ops,
    GEMMA4: gemma4_ops,
    MUSE: muse_ops,
    NAS: nas_ops,
}


class EngineSpec(msgspec.Struct, frozen=True):
    """A compiled deployment: identity (`engine`, a plain record) and the operators of both phases.

    `precision` is what the graph was built with, before the names of `engine` collapse some modes.
    Made by `build_graph`. Source: op-level.md section 4.5.

    >>> import tempfile
    >>> from fpmsdk.opgraph import Deployment, read_model_config
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> model = read_model_config(write_checkpoint(tempfile.mkdtemp()))
    >>> lanes = lambda kind, table: ("flash_attention",)
    >>> spec = build_graph(model, Deployment(system="h200_sxm", backend="vllm"), lanes)
    >>> spec.engine["weight_dtype"], [op.name for op in spec.generation_ops[:2]]
    ('bfloat16', ['generation_embedding', 'generation_add_norm_1'])
    """

    engine: dict[str, Any]
    context_ops: tuple[Op, ...]
    generation_ops: tuple[Op, ...]
    precision: Precision

    def to_dict(self) -> dict[str, Any]:
        """The specification as a JSON document of schema 29.

        >>> spec = EngineSpec({"model_name": "m"}, (), (), Precision())
        >>> spec.to_dict()
        {'schema_version': 29, 'engine': {'model_name': 'm'}, 'context_ops': [], 'generation_ops': []}
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "engine": dict(self.engine),
            "context_ops": [op.to_dict() for op in self.context_ops],
            "generation_ops": [op.to_dict() for op in self.generation_ops],
        }

    def digest(self) -> str:
        """SHA-256 over everything but where data are stored.

        The hashed text is `{"digest_version", "spec"}` as JSON with sorted keys, no blanks and the shortest form
        of every float, with all storage locations of the engine record set to null.

        >>> def digest_at(path):
        ...     return EngineSpec({"systems_path": path, "extra": {}}, (), (), Precision()).digest()
        >>> digest_at("/here") == digest_at("/there")
        True
        """
        spec = self.to_dict()
        spec["engine"] = _without_locations(spec["engine"])
        document = {"digest_version": DIGEST_VERSION, "spec": spec}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return sha256(text.encode())


def build_graph(model: ModelConfig, deployment: Deployment, lanes: LaneOrder) -> EngineSpec:
    """Build the operators of a model in a deployment.

    Parameters
    ----------
    model: result of `read_model_config`.
    deployment: how it is served.
    lanes: `(operator kind, table name)` to the attention kernels in the order in which they are looked up;
        `PerfDatabase.lane_order` knows them.

    Raises
    ------
    ConfigError: unknown mode names or contradictory sizes.
    UnsupportedModelError: the model cannot be divided that way, or its checkpoint has an unknown quantisation.
    MissingCapabilityError: the deployment asks for what has no operator form.

    Source: op-level.md sections 4.3 to 4.5.

    >>> import tempfile
    >>> from fpmsdk.opgraph import read_model_config
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> model = read_model_config(write_checkpoint(tempfile.mkdtemp()))
    >>> deployment = Deployment(system="h200_sxm", backend="vllm", tp=2)
    >>> spec = build_graph(model, deployment, lambda kind, table: ("flash_attention",))
    >>> attention = next(op for op in spec.context_ops if op.name == "context_attention")
    >>> attention.n, attention.n_kv, attention.scale_factor  # heads of one of two ranks, over four layers
    (4, 1, 4.0)
    """
    precision = infer_precision(model, deployment)
    check_parallelism(model, deployment, precision)
    family = FAMILIES[model.family]
    return EngineSpec(
        engine=_engine(model, deployment, precision),
        context_ops=family(Phase("context", model, deployment, precision, lanes)),
        generation_ops=_verifying(family(Phase("generation", model, deployment, precision, lanes)), deployment),
        precision=precision,
    )


def _verifying(operators: tuple[Op, ...], deployment: Deployment) -> tuple[Op, ...]:
    # Drafts that were looked up cost nothing and are verified in one pass, in which attention reads the cache of each
    # request once for all of them. The batch of a query counts tokens. Latent attention has no such form.
    if deployment.speculation is None:
        return operators
    width = deployment.verify_width
    return tuple(
        msgspec.structs.replace(op, scale_num_tokens=op.scale_num_tokens * width, verify_query_tokens=width)
        if isinstance(op, GenerationAttention)
        else op
        for op in operators
    )


def _engine(model: ModelConfig, deployment: Deployment, precision: Precision) -> dict[str, Any]:
    sharing = deployment.enable_shared_layer
    policy = deployment.transfer_policy
    return {
        "schema_version": ENGINE_SCHEMA_VERSION,
        "model_name": model.name,
        "system_name": deployment.system,
        "systems_path": deployment.systems_path,
        "backend": deployment.backend,
        "backend_version": deployment.backend_version,
        "forward_model": "op_level",
        "fpm_parquet_path": None,
        "decoder_replay": deployment.decoder_replay,
        "moe_kernel_source": deployment.moe_kernel_source,
        "kv_block_size": deployment.kv_block_size,
        "tp_size": deployment.tp,
        "pp_size": deployment.pp,
        "attention_dp_size": deployment.attention_dp,
        "moe_tp_size": deployment.moe_tp,
        "moe_ep_size": deployment.moe_ep,
        "cp_size": deployment.cp,
        "dcp_size": deployment.dcp,
        "weight_dtype": gemm_wire_name(precision.gemm),
        "moe_dtype": moe_wire_name(precision.moe),
        "activation_dtype": precision.fmha,
        "fpm_fmha_dtype": None,
        "kv_cache_dtype": precision.kv_cache,
        "nextn": deployment.verify_width - 1 or None,
        "enable_shared_layer": deployment.database_mode in SHARING_MODES if sharing is None else sharing,
        "strict_provenance": deployment.strict_provenance,
        "database_mode": deployment.database_mode,
        "tolerate_dirless_version": deployment.tolerate_dirless_version,
        "transfer_policy": None if policy is None or set(policy) >= TRANSFER_KINDS else sorted(set(policy)),
        "extra": {},
    }


def _without_locations(engine: dict[str, Any]) -> dict[str, Any]:
    cleared = engine | {"systems_path": None, "fpm_parquet_path": None}
    if "estimator_config" in engine["extra"]:
        estimator = json.loads(engine["extra"]["estimator_config"])
        for section in estimator.values():
            if isinstance(section, dict) and "fpm_parquet_path" in section:
                section["fpm_parquet_path"] = None
        cleared["extra"] = engine["extra"] | {"estimator_config": json.dumps(estimator, sort_keys=True)}
    return cleared
