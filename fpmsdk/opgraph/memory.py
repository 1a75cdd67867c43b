"""GPU memory of one rank: weights, activations, overheads, and what is left for the KV cache.

Byte counts only. The rough estimate for models without a graph is in `naive_memory.py`. Source: op-level.md section 6.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from fpmsdk.errors import ConfigError, InfeasibleMemoryError, UnsupportedModelError
from fpmsdk.opgraph.architectures import ARCHITECTURES, DEEPSEEK, GEMMA4, LLAMA, MOE, MUSE, STEP
from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.kv_layout import kv_bytes_per_sequence, kv_tokens
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.quantization import MODES
from fpmsdk.opgraph.spec import EngineSpec, build_graph

MIB = 1 << 20

# What a backend's memory fraction is a fraction of.
FRACTION_KINDS = {"trtllm": "of_free", "vllm": "of_total", "sglang": "of_total"}

# Activation bytes per element of the attention width, by tensor-parallel size.
_COEFFICIENTS = {
    LLAMA: {1: 11.0, 2: 6.5, 4: 5.0, 8: 5.0},
    MOE: {1: 22.0, 2: 13.0, 4: 10.0, 8: 10.0},
    DEEPSEEK: {1: 22.0, 2: 13.0, 4: 10.0, 8: 10.0},
    "": {1: 10.0, 2: 6.0, 4: 5.0, 8: 5.0},
}
_SGLANG_COEFFICIENTS = {
    LLAMA: {1: 14.0, 2: 8.5, 4: 6.5, 8: 6.5},
    MOE: {1: 28.0, 2: 17.0, 4: 13.0, 8: 13.0},
    DEEPSEEK: {1: 28.0, 2: 17.0, 4: 13.0, 8: 13.0},
    "": {1: 13.0, 2: 8.0, 4: 6.5, 8: 6.5},
}
_LARGEST_MEASURED_TP = 8

# Families that share the figures of another one, and those whose dispatches need scales of what they send.
_MEASURED_AS = {STEP: MOE, GEMMA4: MOE, MUSE: LLAMA}
_DISPATCHING = (DEEPSEEK, STEP, GEMMA4)

# One scale of four bytes for every block of 128 elements that are sent to experts.
_DISPATCH_BLOCK = 128
_DISPATCH_SCALE_BYTES = 4


class SystemMemory(NamedTuple):
    """Memory facts of a system: bytes of one GPU, of the communication library by ranks, and of the runtime."""

    capacity_bytes: int
    comm_bytes: Mapping[int, int]
    runtime_bytes: int


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is told: tokens of one pass, the memory fraction and fixed reservations.

    `capacity_bytes` overrides the GPU's; `tolerance_fraction` asks for a second, smaller figure.
    """

    max_num_tokens: int
    memory_fraction_kind: str
    memory_fraction_value: float
    reserved_bytes: int = 0
    cuda_graph_reserved_bytes: int = 0
    tolerance_fraction: float | None = None
    capacity_bytes: int | None = None


class MemoryBreakdown(msgspec.Struct, frozen=True):
    """Bytes of one rank that are not KV cache."""

    weights_bytes: int
    activations_bytes: int
    runtime_overhead_bytes: int
    comm_overhead_bytes: int
    reserved_bytes: int
    cuda_graph_reserved_bytes: int


class ToleranceAdjusted(msgspec.Struct, frozen=True):
    """The same figures with a safety margin."""

    tolerance_fraction: float
    total_kv_size_bytes: int
    total_kv_size_tokens: int


class KvCacheEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the KV cache of one rank."""

    total_gpu_capacity_bytes: int
    total_kv_size_bytes: int
    kv_size_per_token_bytes: int
    total_kv_size_tokens: int
    kvcache_quant_mode: str | None
    source: str
    memory_breakdown: MemoryBreakdown | None
    tolerance_adjusted: ToleranceAdjusted | None

    def num_gpu_blocks(self, block_size_tokens: int) -> int:
        """Whole blocks that fit, of the adjusted size where a tolerance was asked for.

        Raises `ConfigError` for a block size that is not a positive integer.
        """
        if isinstance(block_size_tokens, bool) or not isinstance(block_size_tokens, int) or block_size_tokens <= 0:
            raise ConfigError(f"the block size must be a positive integer, found {block_size_tokens!r}", "block_size")
        return (self.tolerance_adjusted or self).total_kv_size_tokens // block_size_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the cache mode is left out where it is not known."""
        record: dict[str, Any] = msgspec.to_builtins(self)
        if record["kvcache_quant_mode"] is None:
            del record["kvcache_quant_mode"]
        return record


def estimate_kv_cache(
    model: ModelConfig, deployment: Deployment, spec: EngineSpec, system: SystemMemory, request: MemoryRequest
) -> KvCacheEstimate:
    """Size the KV cache of one rank.

    Parameters
    ----------
    spec: `build_graph` of the same model and deployment.

    Raises
    ------
    ConfigError: a fraction of the wrong kind or out of range.
    InfeasibleMemoryError: no memory is left for the cache; tells the bytes and the smallest tp that fits.
    UnsupportedModelError: a tensor-parallel size without memory measurements.
    """
    check_request(deployment.backend, request)
    capacity = system.capacity_bytes if request.capacity_bytes is None else request.capacity_bytes
    if capacity <= 0:
        raise ConfigError(f"the GPU capacity must be positive, found {capacity}", "capacity_bytes")
    rank = RankMemory.of(model, deployment, spec, system, request.max_num_tokens)
    if rank.budget(capacity, request) <= 0:
        raise _infeasible(model, deployment, system, request, capacity, rank)
    precision, tp = spec.precision, deployment.tp
    return size_cache(
        request,
        capacity=capacity,
        budget=rank.budget(capacity, request),
        per_token=kv_bytes_per_sequence(model, precision, tp, 1),
        tokens_of=lambda available: kv_tokens(model, precision, tp, available),
        kvcache_quant_mode=precision.kv_cache,
        source="native",
        breakdown=MemoryBreakdown(
            int(rank.weights),
            int(rank.activations),
            int(rank.runtime),
            int(rank.comm),
            request.reserved_bytes,
            request.cuda_graph_reserved_bytes,
        ),
    )


class RankMemory(NamedTuple):
    """Bytes of one rank that are not cache, by the rules of its backend."""

    backend: str
    weights: float
    activations: float
    runtime: float
    comm: int

    @classmethod
    def of(
        cls, model: ModelConfig, deployment: Deployment, spec: EngineSpec, system: SystemMemory, max_num_tokens: int
    ) -> "RankMemory":
        """The memory of a rank that computes up to `max_num_tokens` tokens in one pass."""
        weights = weight_bytes(model, deployment, spec)
        activations = _activation_bytes(model, deployment, max_num_tokens)
        comm = system.comm_bytes.get(min(deployment.tp, _LARGEST_MEASURED_TP))
        if comm is None:
            raise UnsupportedModelError(
                f"tp {deployment.tp} has no communication memory measurement; measured sizes are "
                f"{', '.join(map(str, sorted(system.comm_bytes)))}",
                "tp",
            )
        runtime = system.runtime_bytes * (1.2 if deployment.backend == "sglang" else 1.0)
        return cls(deployment.backend, weights, activations, runtime, comm)

    def budget(self, capacity: int, request: MemoryRequest) -> float:
        """Bytes left for the cache."""
        fixed = self.weights + request.reserved_bytes + request.cuda_graph_reserved_bytes
        fraction = request.memory_fraction_value
        if self.backend == "sglang":
            # The pool is measured after the runtime is set up, and leaves activations to the rest.
            return (capacity - self.runtime - self.comm) * fraction - fixed
        if FRACTION_KINDS[self.backend] == "of_free":
            return (capacity - fixed - self.activations - self.runtime - self.comm) * fraction
        return capacity * fraction - (fixed + self.activations + self.runtime + self.comm)

    def needed(self, request: MemoryRequest) -> int:
        """Bytes that must be available for one byte of cache."""
        overhead = self.runtime + self.comm
        overhead = overhead * request.memory_fraction_value if self.backend == "sglang" else overhead + self.activations
        return math.floor(self.weights + request.reserved_bytes + request.cuda_graph_reserved_bytes + overhead) + 1


def _infeasible(
    model: ModelConfig,
    deployment: Deployment,
    system: SystemMemory,
    request: MemoryRequest,
    capacity: int,
    rank: RankMemory,
) -> InfeasibleMemoryError:
    of_free = FRACTION_KINDS[deployment.backend] == "of_free"
    available = capacity if of_free else math.floor(capacity * request.memory_fraction_value)
    needed = rank.needed(request)

    def fits(larger: Deployment, spec: EngineSpec) -> bool:
        return RankMemory.of(model, larger, spec, system, request.max_num_tokens).budget(capacity, request) > 0

    smallest = _smallest_tp(model, deployment, fits)
    return does_not_fit(
        f"{model.name} at tp {deployment.tp} leaves no memory for the KV cache: one rank needs",
        needed,
        available,
        smallest,
        "no tensor-parallel size of the model fits; raise the fraction, lower max_num_tokens or use larger GPUs",
    )


def does_not_fit(
    what: str,
    needed_bytes: int,
    available_bytes: int,
    smallest_tp: int | None,
    no_size: str = "no tensor-parallel size fits",
) -> InfeasibleMemoryError:
    """The error for a rank without room; `what` says of what, and ends where the bytes that it needs follow.

    >>> str(does_not_fit("m at tp 1 does not fit: weights need", 20, 16, 2))
    'm at tp 1 does not fit: weights need 20 bytes, 16 are available; the smallest tensor-parallel size that fits is 2'
    """
    advice = no_size if smallest_tp is None else f"the smallest tensor-parallel size that fits is {smallest_tp}"
    return InfeasibleMemoryError(
        f"{what} {needed_bytes} bytes, {available_bytes} are available; {advice}",
        needed_bytes,
        available_bytes,
        smallest_tp,
    )


def require_weights_fit(model: ModelConfig, deployment: Deployment, spec: EngineSpec, capacity_bytes: int) -> None:
    """Check that the weights of one rank leave room on its GPU.

    Parameters
    ----------
    spec: `build_graph` of the same model and deployment.
    capacity_bytes: memory of one GPU.

    Raises
    ------
    InfeasibleMemoryError: they do not; tells the bytes and the smallest tp that fits.
    """
    weights = weight_bytes(model, deployment, spec)
    if weights < capacity_bytes:
        return
    smallest = _smallest_tp(
        model, deployment, lambda larger, graph: weight_bytes(model, larger, graph) < capacity_bytes
    )
    what = f"{model.name} at tp {deployment.tp} does not fit: the weights of one rank need"
    raise does_not_fit(what, int(weights), capacity_bytes, smallest)


def _smallest_tp(
    model: ModelConfig, deployment: Deployment, fits: Callable[[Deployment, EngineSpec], bool]
) -> int | None:
    tp = 2 * deployment.tp
    while tp <= model.num_heads:
        larger = msgspec.structs.replace(deployment, tp=tp)
        if model.is_moe:
            # Experts are divided as far as attention is: by tensor when they were, else by expert.
            grown = tp // deployment.tp
            by_tensor = deployment.moe_tp > 1 or deployment.moe_ep == 1
            larger = msgspec.structs.replace(
                larger,
                moe_tp_size=deployment.moe_tp * (grown if by_tensor else 1),
                moe_ep_size=deployment.moe_ep * (1 if by_tensor else grown),
            )
        try:
            if fits(larger, build_graph(model, larger, lambda _kind, _table: ())):
                return tp
        except UnsupportedModelError:
            pass  # the model cannot be divided so
        tp *= 2
    return None


def weight_bytes(model: ModelConfig, deployment: Deployment, spec: EngineSpec) -> float:
    """Bytes of weights on one rank, from the operators of the prefill graph.

    The graph of latent-attention models takes every layer for a MoE layer and the embedding for replicated; what
    SGLang keeps of DeepSeek-V3 is known better and counted as it is.
    """
    total = sum(op.weight_bytes for op in spec.context_ops) / deployment.pp
    plain = deployment.cp == deployment.pp == 1 and not deployment.nextn
    if deployment.backend != "sglang" or model.architecture != "DeepseekV3ForCausalLM" or not plain:
        return total
    precision, tp, hidden = spec.precision, deployment.tp, model.hidden_size
    gated_expert = 3 * hidden * model.moe_inter_size
    shared = gated_expert * MODES[precision.shared_experts].bytes_per_element / tp
    router = hidden * model.num_experts * MODES["bfloat16"].bytes_per_element
    experts = gated_expert * model.num_experts * MODES[precision.moe].bytes_per_element
    routed = experts / (deployment.moe_tp * deployment.moe_ep) + router
    dense = 3 * hidden * model.inter_size * MODES[precision.gemm].bytes_per_element / tp
    embedding = model.vocab_size * hidden * MODES["bfloat16"].bytes_per_element
    return (
        total
        - embedding * (1 - 1 / tp)
        - model.num_layers * (routed + shared)
        + model.num_moe_layers * (routed + model.num_shared_experts * shared)
        + (model.num_layers - model.num_moe_layers) * dense
    )


def _activation_bytes(model: ModelConfig, deployment: Deployment, max_num_tokens: int) -> float:
    sglang = deployment.backend == "sglang"
    table = _SGLANG_COEFFICIENTS if sglang else _COEFFICIENTS
    family = _MEASURED_AS.get(model.family, model.family)
    measured = table[family if ARCHITECTURES[model.architecture].calibrated else ""]
    coefficient = measured.get(min(deployment.tp, _LARGEST_MEASURED_TP))
    if coefficient is None:
        raise UnsupportedModelError(
            f"tp {deployment.tp} has no activation measurement; measured sizes are {', '.join(map(str, measured))}",
            "tp",
        )
    width = model.num_heads * model.head_size
    activations = 2 * max_num_tokens * width * coefficient
    if model.family in _DISPATCHING and model.num_experts:
        counted = width if model.family == DEEPSEEK and not sglang else model.hidden_size
        sent = max_num_tokens * counted * deployment.attention_dp
        scales = sent * model.num_experts * model.topk / deployment.moe_ep / _DISPATCH_BLOCK
        activations += scales * _DISPATCH_SCALE_BYTES
    return max(activations, 90 * MIB) * 1.15 if sglang else max(activations, 70 * MIB)


def check_request(backend: str, request: MemoryRequest) -> None:
    """Refuse a memory request that the backend does not take.

    Raises `ConfigError` that names the field.
    """
    kind, expected = request.memory_fraction_kind, FRACTION_KINDS.get(backend)
    if expected is None:
        raise ConfigError(f"backend {backend!r} is unknown; use one of {', '.join(FRACTION_KINDS)}", "backend")
    if kind != expected:
        raise ConfigError(f"memory_fraction_kind of {backend} is {expected!r}, found {kind!r}", "memory_fraction_kind")
    _check_number("memory_fraction_value", request.memory_fraction_value, highest=1.0)
    if request.tolerance_fraction is not None:
        _check_number("tolerance_fraction", request.tolerance_fraction, highest=math.nextafter(1.0, 0.0))
    for field in ("reserved_bytes", "cuda_graph_reserved_bytes"):
        value = getattr(request, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{field} must be a non-negative integer, found {value!r}", field)


def _check_number(field: str, value: float, highest: float) -> None:
    if not 0.0 <= value <= highest:
        bound = "1]" if highest == 1.0 else "1)"
        raise ConfigError(f"{field} must be finite and in [0, {bound}, found {value!r}", field)


def size_cache(
    request: MemoryRequest,
    *,
    capacity: int,
    budget: float,
    per_token: float,
    tokens_of: Callable[[float], int],
    kvcache_quant_mode: str | None,
    source: str,
    breakdown: MemoryBreakdown | None,
) -> KvCacheEstimate:
    """The estimate of a budget in bytes; `tokens_of` says how many tokens a number of bytes holds."""
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: everything else takes {int(-budget)} bytes too many "
            f"of {capacity}; raise the fraction, lower max_num_tokens or use more GPUs",
            "memory_fraction_value",
        )
    adjusted = None
    if request.tolerance_fraction is not None:
        kept = math.floor(math.floor(budget) * (1.0 - request.tolerance_fraction))
        adjusted = ToleranceAdjusted(request.tolerance_fraction, kept, tokens_of(kept))
    return KvCacheEstimate(
        total_gpu_capacity_bytes=capacity,
        total_kv_size_bytes=math.floor(budget),
        kv_size_per_token_bytes=math.floor(per_token),
        total_kv_size_tokens=tokens_of(budget),
        kvcache_quant_mode=kvcache_quant_mode,
        source=source,
        memory_breakdown=breakdown,
        tolerance_adjusted=adjusted,
    )
