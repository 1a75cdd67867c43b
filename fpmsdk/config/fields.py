"""Field table of the canonical configuration, in serialisation order.

Types, aliases and defaults only; rules are in `validate.py`. Source: fpm-model.md section 3.1.
"""

from fpmsdk.config.estimator import ESTIMATOR_CONFIG, U32
from fpmsdk.config.schema import Choice, Field, Flag, FreeObject, ListOf, Nullable, Record, Text

OPTIONAL_TEXT = Nullable(Text())
OPTIONAL_U32 = Nullable(U32)

BACKEND = Choice(("trtllm", "sglang", "vllm"))
WORKER_TYPE = Choice(("prefill", "decode", "aggregated"))
DATABASE_MODE = Choice(("SILICON", "HYBRID", "EMPIRICAL", "SOL", "SOL_FULL"))
ESTIMATION_MODE = Choice(
    ("auto", "op_level", "fpm_interpolation", "fpm_regression", "fpm_learned"), {"fpm": "fpm_interpolation"}
)

CONFIG = Record(
    Field("model", Text()),
    Field("system", Text()),
    Field("backend", BACKEND),
    Field("worker_type", WORKER_TYPE),
    Field("backend_version", OPTIONAL_TEXT, None),
    Field("fpm_profile", Nullable(FreeObject()), None),
    Field("tp", U32, 1, alias="tp_size"),
    Field("pp", U32, 1, alias="pp_size"),
    Field("attention_dp", U32, 1, alias="attention_dp_size"),
    Field("dcp", OPTIONAL_U32, None),
    Field("moe_tp_size", OPTIONAL_U32, None),
    Field("moe_ep_size", OPTIONAL_U32, None),
    Field("cp_size", OPTIONAL_U32, None, omit_default=True),
    Field("gemm_quant_mode", OPTIONAL_TEXT, None, alias="gemm_dtype"),
    Field("moe_quant_mode", OPTIONAL_TEXT, None, alias="moe_dtype"),
    Field("fmha_quant_mode", OPTIONAL_TEXT, None, alias="fmha_dtype"),
    Field("fpm_fmha_quant_mode", OPTIONAL_TEXT, None, alias="fpm_fmha_dtype"),
    Field("kvcache_quant_mode", OPTIONAL_TEXT, None, alias="kv_cache_dtype"),
    Field("comm_quant_mode", OPTIONAL_TEXT, None, alias="comm_dtype"),
    Field("nextn", U32, 0),
    Field("speculation", Nullable(Record(Field("kind", Text()), Field("params", FreeObject(), {}))), None),
    Field("kv_block_size", OPTIONAL_U32, None),
    Field("decoder_replay", Flag(), False),
    Field("estimation_mode", ESTIMATION_MODE, "auto", alias="forward_model"),
    Field("database_mode", DATABASE_MODE, "SILICON"),
    Field("transfer_policy", Nullable(ListOf(Text())), None),
    Field("systems_paths", ListOf(Text()), []),
    Field("fallback_policy", Choice(("deny", "allow", "regression"), {"error": "deny"}), "deny"),
    Field("estimator_config", ESTIMATOR_CONFIG, {}),
    Field("attention_backend", OPTIONAL_TEXT, None),
    Field("moe_kernel_source", OPTIONAL_TEXT, None),
    Field("moe_backend", OPTIONAL_TEXT, None),
    Field("enable_eplb", Flag(), False),
    Field("wideep_num_slots", OPTIONAL_U32, None),
    Field("enable_shared_layer", Nullable(Flag()), None),
    Field("strict_provenance", Flag(), False),
    Field("encoder_parallel", Nullable(Choice(("tp", "dp"))), None, omit_default=True),
)
