"""Field tables of an engine launch: names, types and defaults, in serialisation order.

Rules between fields are in `rules.py`. Source: engine-and-replay.md section 1.1.
"""

from fpmsdk.config.schema import (
    U32_MAX,
    Anything,
    Choice,
    Count,
    Field,
    Flag,
    ListOf,
    Nullable,
    Number,
    Record,
    Tagged,
    Text,
)

U64 = Count()
OPTIONAL_U64 = Nullable(U64)
RATE = Number(finite=False)  # the rules name the field of a non-finite number themselves
OPTIONAL_RATE = Nullable(RATE)

NATIVE_PROVIDERS = ("ais", "aic")
BLOCK_SIZES = {"vllm": 64, "sglang": 1, "trtllm": 32}

TIMING_MODEL = Tagged(
    "type",
    {
        "polynomial": Record(open=True),
        "fixed": Record(Field("prefill_ms", RATE), Field("decode_ms", RATE), sort_keys=False, open=True),
        "external": Record(Field("provider", Text()), Field("config", Anything(), None), sort_keys=False, open=True),
    },
)

KV_CACHE_GROUP = Record(
    Field("name", Text()),
    Field("kind", Choice(("attention", "convolution"))),
    Field("num_layers", U64),
    Field("block_size_tokens", U64),
    Field("page_size_bytes", U64),
    Field("sliding_window", OPTIONAL_U64, None),
    sort_keys=False,
)

SGLANG = Record(
    Field("schedule_policy", Choice(("fifo", "lpm")), "fifo"),
    Field("max_prefill_tokens", U64, 16384),
    Field("chunked_prefill_size", U64, 8192),
    Field("clip_max_new_tokens", U64, 4096),
    Field("schedule_conservativeness", RATE, 1.0),
    Field("vlm_cache_bytes", U64, 104_857_600),
    Field("host_loop", Flag(), False),
    sort_keys=False,
)

TRTLLM = Record(
    Field("capacity_scheduler_policy", Choice(("guaranteed_no_evict",)), "guaranteed_no_evict"),
    sort_keys=False,
)

ENGINE = Record(
    Field("backend", Choice(tuple(BLOCK_SIZES)), "vllm"),
    Field("num_gpu_blocks", U64, 16384),
    Field("block_size", OPTIONAL_U64, None),
    Field("max_model_len", OPTIONAL_U64, None),
    Field("max_num_seqs", OPTIONAL_U64, 256),
    Field("max_num_batched_tokens", OPTIONAL_U64, 8192),
    Field("prefill_schedule_interval", U64, 1),
    Field("prefill_decode_interval", U64, 0),
    Field("enable_prefix_caching", Flag(), True),
    Field("enable_chunked_prefill", Flag(), True),
    Field("speedup_ratio", RATE, 1.0),
    Field("decode_speedup_ratio", RATE, 1.0),
    Field("aic_nextn", OPTIONAL_U64, None),
    Field("aic_nextn_accept_rates", Nullable(Text()), None),
    Field("aic_mtp_seed", U64, 42),
    Field("worker_type", Choice(("aggregated", "prefill", "decode")), "aggregated"),
    Field("preemption_mode", Choice(("lifo", "fifo")), "lifo"),
    Field("emit_kv_events", Flag(), False),
    Field("emit_kv_token_ids", Flag(), False),
    Field("kv_transfer_bytes_per_token", OPTIONAL_U64, None, alias="kv_bytes_per_token"),
    Field("kv_cache_bytes_per_token", OPTIONAL_U64, None, omit_default=True),
    Field("kv_cache_groups", ListOf(KV_CACHE_GROUP), [], omit_default=True),
    Field("kv_cache_capacity_bytes", OPTIONAL_U64, None, omit_default=True),
    Field("kv_transfer_bandwidth", OPTIONAL_RATE, None),
    Field("kv_transfer_timing_mode", Choice(("full_prompt", "destination_missing")), "full_prompt"),
    Field("timing_model", TIMING_MODEL, {"type": "polynomial"}),
    Field("sglang", SGLANG, {}),
    Field("trtllm", TRTLLM, {}),
    sort_keys=False,
)

LAUNCH = Record(
    Field("engine", ENGINE, {}),
    Field("dp_size", Count(U32_MAX), 1),
    Field("tensor_parallel_size", U64, 1),
    Field("startup_time", OPTIONAL_RATE, None),
    Field("num_gpu_blocks_is_explicit", Flag(), None),
    Field("gpu_memory_utilization", OPTIONAL_RATE, None),
    Field("mem_fraction_static", OPTIONAL_RATE, None),
    Field("free_gpu_memory_fraction", OPTIONAL_RATE, None),
    Field("cuda_graph_reserved_bytes", OPTIONAL_U64, None),
    sort_keys=False,
)
