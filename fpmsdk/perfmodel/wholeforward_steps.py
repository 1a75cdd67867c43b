"""Steps of a live scheduler, asked of a whole-forward engine: chunked prefill beside decoding requests.

Which lookups a step makes and how they add up; how one is answered is the engine's.
Source: fpm-interpolation.md section 3.7.
"""

from typing import NamedTuple

from fpmsdk._ext.wholeforward import WholeForwardEngine
from fpmsdk.errors import ConfigError, PerfDataNotAvailableError

_U32_MAX = 2**32 - 1


class StepBreakdown(NamedTuple):
    """Latency of a step in ms and its parts; there is no separate attention part of prefill, so that it is 0."""

    total_ms: float
    prefill_ms: float
    context_attention_ms: float
    marginal_decode_ms: float


def mixed_step(
    engine: WholeForwardEngine, ctx_tokens: int, gen_requests: int, isl: int, osl: int, prefix: int
) -> StepBreakdown:
    """The latency of one step that computes `ctx_tokens` of prompts and one token of each decoding request.

    Parameters
    ----------
    ctx_tokens, gen_requests: prompt tokens computed in the step, decoding requests in it; both 0: no work.
    isl, osl: prompt and answer length of the requests; decoding ones are half-way through their answer.
    prefix: cached tokens of each prompt.

    Raises
    ------
    PerfDataNotAvailableError: a lookup has no answer, or prompts have nothing to compute.
    """
    isl, osl = max(isl, 1), max(osl, 1)
    prefill_ms = _prefill(engine, ctx_tokens, gen_requests, isl, prefix) if ctx_tokens > 0 else 0.0
    marginal_ms = 0.0
    if gen_requests > 0:
        kv_tokens = gen_requests * (isl + osl // 2 + 1)
        marginal_ms = engine.decode_latency(gen_requests, kv_tokens)
        if ctx_tokens > 0:
            marginal_ms = max(marginal_ms - engine.baseline_latency(gen_requests, kv_tokens), 0.0)
    return StepBreakdown(prefill_ms + marginal_ms, prefill_ms, 0.0, marginal_ms)


def _prefill(engine: WholeForwardEngine, ctx_tokens: int, gen_requests: int, isl: int, prefix: int) -> float:
    new = isl - prefix
    if new <= 0:
        raise PerfDataNotAvailableError(
            f"perf database error: isl must be greater than prefix, got isl={isl} prefix={prefix}; a prefill computes "
            "at least one token of each prompt"
        )
    if ctx_tokens >= new:
        requests = -(-ctx_tokens // new)
        return engine.prefill_latency(requests, ctx_tokens + gen_requests, requests * prefix)
    # A prompt longer than the step is computed in chunks; the step costs as much as one of them on average.
    total_ms, chunks, done = 0.0, 0, 0
    while done < new:
        chunk = min(ctx_tokens, new - done)
        total_ms += engine.prefill_latency(1, chunk + gen_requests, prefix + done)
        done += chunk
        chunks += 1
    return total_ms / chunks


def decode_totals(batch_size: int, context_length: int, verify_width: int = 1) -> tuple[int, int]:
    """Batch and KV tokens of a decode lookup, told per request.

    With a `verify_width` the batch counts the tokens that are verified together, `verify_width` of each request.

    >>> decode_totals(8, 100), decode_totals(8, 100, verify_width=4)
    ((8, 800), (8, 200))
    """
    for name, value in (("batch_size", batch_size), ("context_length", context_length), ("verify_width", verify_width)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _U32_MAX:
            raise ConfigError(
                f"invalid engine config: {name} must be an integer in 1..={_U32_MAX}, found {value!r}", name
            )
    if batch_size % verify_width:
        raise ConfigError(
            f"invalid engine config: batch_size {batch_size} must be a multiple of verify_width {verify_width}",
            "verify_width",
        )
    return batch_size, batch_size // verify_width * context_length
