"""The measured table and the checkpoint that the peer's recorded predictions were run on.

Source: predict-recommend.md section 13.
"""

import yaml

from tests.perfdb.pairs import row, write_pair
from tests.perfdb.synthetic import HARDWARE
from tests.perfmodel.deployments import checkpoint

VERSION = "7.7.7-pr"
PREFILL_TOKENS = (8, 64, 256, 512, 1024)
PREFILL_KV = (0, 32, 64, 128, 256, 512, 2048, 8192)
QWEN3_8B = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
DECODE_KV = (256, 1024, 4096, 16384)


def peer_systems(place):
    """A systems root with the table, and the checkpoint beside it, as the texts that `$ROOT` and `$CKPT` stand for."""
    model = checkpoint(place / "checkpoint", "Qwen3ForCausalLM", **QWEN3_8B)
    root = place / "systems"
    data = root / "data/h200_sxm/vllm" / VERSION
    rows = [point for tp, scale in ((1, 1.0), (2, 0.6)) for point in _rows(str(model), tp, scale)]
    write_pair(data, rows, system="h200_sxm", backend_version=VERSION)
    gpu = HARDWARE["gpu"] | {"mem_capacity": 151397597184}
    (root / "h200_sxm.yaml").write_text(yaml.safe_dump(HARDWARE | {"data_dir": "data/h200_sxm", "gpu": gpu}))
    return {"$ROOT": str(root), "$CKPT": str(model)}


def _rows(model, tp, scale):
    identity = {"model": model, "tp": tp, "system": "h200_sxm", "backend_version": VERSION}
    for batch in range(1, 9):
        for tokens in PREFILL_TOKENS:
            for kv in PREFILL_KV if tokens >= batch else ():
                latency_ms = scale * (1.5 + 0.01 * tokens + 0.0004 * kv + 0.05 * batch)
                yield row("prefill", batch, tokens, kv, latency_ms, **identity)
        for kv in (batch, *DECODE_KV):
            yield row("decode", batch, 0, kv, scale * (2.0 + 0.08 * batch + 0.0003 * kv), **identity)


def filled(value, places):
    """A document with its placeholders filled in."""
    if isinstance(value, dict):
        return {key: filled(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, places) for item in value]
    return places.get(value, value) if isinstance(value, str) else value
