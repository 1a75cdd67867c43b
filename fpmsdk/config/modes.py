"""Names of quantisation modes, by what they quantise. What a mode costs is in `fpmsdk.opgraph.quantization`.

Source: op-level.md section 4.2.
"""

GEMM_MODES = (
    "bfloat16",
    "int8_wo",
    "int4_wo",
    "fp8",
    "fp8_static",
    "sq",
    "fp8_block",
    "fp8_ootb",
    "nvfp4",
    "nvfp4_wo",
    "w4a16_nvfp4",
)
MOE_MODES = (
    "bfloat16",
    "fp8",
    "int4_wo",
    "fp8_block",
    "w4afp8",
    "nvfp4",
    "nvfp4_wo",
    "w4a16_mxfp4",
    "w4a8_mxfp4_mxfp8",
    "w4a8_mxfp4_mxfp8_trtllm",
    "w4a16_mxfp4_cutlass",
    "w4a16_nvfp4",
    "w4a16_mxfp4_humming",
)
FMHA_MODES = ("bfloat16", "fp8", "fp8_block")
# A measured deployment may record a kernel mode that no operator is priced in.
RECORDED_FMHA_MODES = ("bfloat16", "float16", "fp8", "fp8_block")
KV_CACHE_MODES = ("bfloat16", "int8", "fp8")
COMM_MODES = ("half", "int8", "fp8")
