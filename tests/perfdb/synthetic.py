"""Small systems roots, written by tests: only what a test gives is in them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

HARDWARE = {
    "data_dir": "data/x100",
    "gpu": {"mem_bw": 4.8e12, "bfloat16_tc_flops": 9.89e14, "sm_version": 90},
    "node": {"num_gpus_per_node": 8, "inter_node_bw": 5e10, "intra_node_bw": 4.5e11},
    "misc": {"other_mem": 0, "nccl_mem": {1: 0}, "nccl_version": "2.26.2"},
}
GEMM = {"gemm_dtype": "bfloat16", "m": 1, "n": 64, "k": 32, "latency": 1.0}
ATTENTION = {
    "kernel_source": "fa3",
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "num_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "window_size": 0,
    "isl": 16,
    "step": 0,
    "batch_size": 1,
    "latency": 1.0,
}
MLA = {
    "model": "deepseek-ai/DeepSeek-V3",
    "mla_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "gemm_type": "fp8_block",
    "num_heads": 16,
    "batch_size": 1,
    "isl": 16,
    "step": 1,
    "latency": 1.0,
}
MOE = {
    "kernel_source": "moe_torch_flow_cutlass",
    "moe_dtype": "bfloat16",
    "distribution": "balanced",
    "topk": 8,
    "num_experts": 128,
    "hidden_size": 2048,
    "inter_size": 768,
    "moe_tp_size": 1,
    "moe_ep_size": 4,
    "num_tokens": 16,
    "latency": 1.0,
}
REUSE = {"reason": "measured again", "approved_by": "somebody"}


class Systems:
    """A systems root below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def hardware(self, system="x100", **sections):
        """Write a hardware description; `sections` override keys of the default one, `None` removes them."""
        document = {
            name: {**value, **sections.pop(name, {})} if isinstance(value, dict) else sections.pop(name, value)
            for name, value in HARDWARE.items()
        }
        for section in ("gpu", "node", "misc"):
            document[section] = {key: value for key, value in document[section].items() if value is not None}
        return self.document(f"{system}.yaml", document | sections)

    def document(self, name, content):
        return self.text(name, content if isinstance(content, str) else yaml.safe_dump(content))

    def text(self, name, content=""):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def table(self, place, name, rows):
        """Write rows (dicts) or a pyarrow table as data/x100/<place>/<name>.parquet."""
        path = self.path / "data/x100" / place / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
        return path


def rows(base, *changes):
    """One row for each change of `base`."""
    return [base | change for change in changes]
