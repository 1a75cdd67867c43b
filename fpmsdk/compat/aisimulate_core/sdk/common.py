"""Enumerations of the modes that a configuration names."""

from enum import Enum

from fpmsdk.config.modes import COMM_MODES, FMHA_MODES, GEMM_MODES, KV_CACHE_MODES, MOE_MODES

GEMMQuantMode = Enum("GEMMQuantMode", {mode: mode for mode in GEMM_MODES})  # type: ignore[misc]
MoEQuantMode = Enum("MoEQuantMode", {mode: mode for mode in MOE_MODES})  # type: ignore[misc]
FMHAQuantMode = Enum("FMHAQuantMode", {mode: mode for mode in FMHA_MODES})  # type: ignore[misc]
KVCacheQuantMode = Enum("KVCacheQuantMode", {mode: mode for mode in KV_CACHE_MODES})  # type: ignore[misc]
CommQuantMode = Enum("CommQuantMode", {mode: mode for mode in COMM_MODES})  # type: ignore[misc]
BackendName = Enum("BackendName", {name: name for name in ("trtllm", "sglang", "vllm")})  # type: ignore[misc]

__all__ = ["BackendName", "CommQuantMode", "FMHAQuantMode", "GEMMQuantMode", "KVCacheQuantMode", "MoEQuantMode"]
