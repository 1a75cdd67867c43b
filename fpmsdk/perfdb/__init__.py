"""Performance data: systems roots, hardware descriptions and measured tables (op-level.md section 1).

    root = open_root(path)
    version = root.resolve_version("h200_sxm", "vllm", None).version
    database = open_database(root, "h200_sxm", "vllm", version)
    database.table("gemm_perf").slices[("bfloat16",)].latency_ms

Importing this package reads no file and loads no Parquet or YAML library.
"""

from fpmsdk.perfdb.database import PerfDatabase, open_database
from fpmsdk.perfdb.hardware import SystemSpec
from fpmsdk.perfdb.roots import SystemsRoot, open_root
from fpmsdk.perfdb.slices import Slice, Table, first_seen
from fpmsdk.perfdb.sources import Source
from fpmsdk.perfdb.tables import LOW_LATENCY_KERNEL, SCHEMAS
from fpmsdk.perfdb.versions import ResolvedVersion

__all__ = [
    "LOW_LATENCY_KERNEL",
    "SCHEMAS",
    "PerfDatabase",
    "ResolvedVersion",
    "Slice",
    "Source",
    "SystemSpec",
    "SystemsRoot",
    "Table",
    "first_seen",
    "open_database",
    "open_root",
]
