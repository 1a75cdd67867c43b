"""Random systems and traffic, replayed by the public peer and by fpmsdk: every figure of every request must be equal.

    python benchmarks/compare/replay_fuzz.py [--runs N] [--seed S] [--only KIND ...] [--keep FOLDER]

needs an environment that holds fpmsdk and the peer (aisimulate); `make compare-replay-fuzz` makes one. A differing case
is reduced to a small one and printed as an execution specification. Exits 1 on a difference.
"""

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from replay_cases import Spec, aggregated, disaggregated, first_difference

Choose = random.Random


def timing(choose: Choose, least_ms: float) -> Spec:
    if choose.random() < 0.5:
        return {"type": "polynomial"}
    # Whole milliseconds make events of different workers tie.
    prefill_ms, decode_ms = choose.choice([0, 1, 4, 10]), choose.choice([0, 0.5, 1, 2])
    return {"type": "fixed", "prefill_ms": max(least_ms, prefill_ms), "decode_ms": max(least_ms, decode_ms)}


def rank(choose: Choose, *, tight: bool, least_ms: float = 0.0) -> Spec:
    block_size = choose.choice([2, 4, 8, 16])
    return {
        "backend": "vllm",
        "block_size": block_size,
        "num_gpu_blocks": choose.randint(160, 400) // block_size if tight else 4000,
        "max_num_batched_tokens": choose.choice([8, 16, 33, 64, 256]),
        "max_num_seqs": choose.choice([1, 2, 3, 5, 8, 32]),
        "enable_prefix_caching": choose.random() < 0.5,
        "enable_chunked_prefill": choose.random() < 0.8,
        "preemption_mode": choose.choice(["lifo", "lifo", "fifo"]),
        "timing_model": timing(choose, least_ms),
        **({"max_model_len": choose.randint(60, 160)} if choose.random() < 0.3 else {}),
        **({"speedup_ratio": choose.choice([0.0, 0.5, 3.0])} if choose.random() < 0.15 else {}),
    }


def requests(choose: Choose, ranks: int = 1, prefill_ranks: int = 1) -> list[Spec]:
    prefixes = [[choose.randint(1, 9999) for _ in range(70)] for _ in range(3)]
    whole_ms = choose.random() < 0.5
    gap_ms = choose.choice([1.0, 8.0, 40.0])
    made, arrival_ms = [], 0.0
    for number in range(choose.randint(1, 20)):
        prompt = choose.randint(1, 90)
        shared = choose.choice([0, choose.randint(0, prompt), prompt])
        ids = choose.choice(prefixes)[:shared]
        ids = ids + [choose.randint(1, 9999) for _ in range(prompt - len(ids))]
        made.append(
            {
                "id": f"r{number:02}",
                "arrival_time_ms": arrival_ms,
                "input_tokens": prompt,
                "output_tokens": choose.choice([0, 1, 2, choose.randint(1, 40), choose.randint(1, 40)]),
                "input_token_ids": ids,
            }
        )
        if ranks > 1 and choose.random() < 0.3:
            made[-1]["dp_rank"] = choose.randrange(min(ranks, prefill_ranks))
        gap = choose.expovariate(1 / gap_ms) if choose.random() < 0.8 else 0.0
        arrival_ms += round(gap) if whole_ms else round(gap, 3)
    return made


def options(choose: Choose) -> Spec:
    return {
        "max_in_flight": choose.choice([None, None, 1, 3, 6]),
        "max_sim_time_ms": choose.choice([None, None, None, 150.0]),
    }


def linear(choose: Choose) -> Spec:
    return aggregated(
        rank(choose, tight=choose.random() < 0.6), requests(choose), workers=choose.randint(1, 3), **options(choose)
    )


def attention_dp(choose: Choose) -> Spec:
    dp_size = choose.randint(2, 3)
    interval = {"prefill_schedule_interval": choose.randint(1, 8)}
    return aggregated(
        rank(choose, tight=choose.random() < 0.6) | interval,
        requests(choose, dp_size, dp_size),
        workers=choose.randint(1, 2),
        dp_size=dp_size,
        **options(choose),
    )


def trtllm(choose: Choose) -> Spec:
    dp_size = choose.choice([1, 1, 1, 2])
    return aggregated(
        rank(choose, tight=True) | {"backend": "trtllm"},
        requests(choose, dp_size, dp_size),
        workers=choose.randint(1, 2),
        dp_size=dp_size,
        **options(choose),
    )


def speculation(choose: Choose) -> Spec:
    drafts = choose.randint(1, 5)
    rates = ",".join(choose.choice(["0", "1", "0.5", "0.85", "0.3"]) for _ in range(drafts))
    drawn = {"aic_nextn": drafts, "aic_mtp_seed": choose.randint(0, 2**32)}
    return drawn | ({"aic_nextn_accept_rates": rates} if choose.random() < 0.8 else {})


def mtp(choose: Choose) -> Spec:
    dp_size = choose.choice([1, 1, 1, 2])
    return aggregated(
        rank(choose, tight=choose.random() < 0.8) | speculation(choose),
        requests(choose, dp_size, dp_size),
        workers=choose.randint(1, 2),
        dp_size=dp_size,
        **options(choose),
    )


def trtllm_mtp(choose: Choose) -> Spec:
    return aggregated(
        rank(choose, tight=choose.random() < 0.8) | speculation(choose) | {"backend": "trtllm"},
        requests(choose),
        workers=choose.randint(1, 2),
        **options(choose),
    )


def grouped(choose: Choose) -> Spec:
    groups: list[Spec] = [
        {"name": "full", "kind": "attention", "num_layers": 4, "block_size_tokens": 4, "page_size_bytes": 8},
        {
            "name": "window",
            "kind": "attention",
            "num_layers": 4,
            "block_size_tokens": choose.choice([2, 4, 16]),
            "page_size_bytes": choose.choice([4, 6]),
            "sliding_window": choose.choice([1, 4, 7, 30]),
        },
        {
            "name": "conv",
            "kind": "convolution",
            "num_layers": 2,
            "block_size_tokens": choose.choice([1, 2, 4]),
            "page_size_bytes": choose.choice([1, 2]),
            "sliding_window": choose.choice([2, 4]),
        },
    ]
    kept = choose.sample(groups, choose.randint(1, 3))
    engine = rank(choose, tight=True) | {
        "enable_prefix_caching": False,
        "kv_cache_groups": kept,
        "kv_cache_capacity_bytes": choose.choice([400, 700, 1500, 100_000]),
    }
    dp_size = choose.choice([1, 1, 2])
    return aggregated(
        engine, requests(choose, dp_size, dp_size), workers=choose.randint(1, 2), dp_size=dp_size, **options(choose)
    )


def handed_over(choose: Choose) -> Spec:
    dp_size, prefill_dp_size = choose.choice([1, 1, 2]), choose.choice([1, 1, 2])
    block_size = {"block_size": choose.choice([2, 4, 8])}
    caching = {"enable_prefix_caching": choose.random() < 0.5}
    shared = block_size | caching
    transfer: Spec = {"kv_transfer_timing_mode": choose.choice(["full_prompt", "destination_missing"])}
    if choose.random() < 0.7:
        transfer |= {
            "kv_transfer_bytes_per_token": choose.choice([1000, 100_000, 1_000_000]),
            "kv_transfer_bandwidth": choose.choice([0.5, 1.0, 100.0]),
        }
    # Passes without duration are left out: the order of what happens at one instant is then known in part only.
    prefill = rank(choose, tight=choose.random() < 0.3, least_ms=0.25) | shared | transfer
    decode = rank(choose, tight=choose.random() < 0.5, least_ms=0.25) | shared | transfer
    # A prompt that only the prefill worker can take fails at the peer; here it is an error that names it.
    decode["max_model_len"] = prefill.get("max_model_len")
    decode["num_gpu_blocks"] = max(decode["num_gpu_blocks"], -(-130 // decode["block_size"]))
    return disaggregated(
        prefill,
        decode,
        requests(choose, min(dp_size, prefill_dp_size), min(dp_size, prefill_dp_size)),
        prefill_workers=choose.randint(1, 3),
        workers=choose.randint(1, 3),
        prefill_dp_size=prefill_dp_size,
        dp_size=dp_size,
        handoff_latency_ms=choose.choice([0.0, 2.0]),
        **options(choose),
    )


KINDS: dict[str, Callable[[Choose], Spec]] = {
    "linear": linear,
    "attention_dp": attention_dp,
    "trtllm": trtllm,
    "mtp": mtp,
    "trtllm_mtp": trtllm_mtp,
    "grouped": grouped,
    "disaggregated": handed_over,
}


def reduced(spec: Spec, difference: Callable[[Spec], str | None]) -> Spec:
    """The smallest case found by leaving out, step by step, what the difference does not need."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(spec):
            try:
                differs = difference(candidate)
            except Exception:  # a case that one side refuses explains nothing
                differs = None
            if differs is not None and "invalid" not in differs:
                spec, smaller = candidate, True
                break
    return spec


def _simpler(spec: Spec) -> Iterator[Spec]:
    yield from _with_fewer_requests(spec)
    yield from (spec | {key: None} for key in ("max_in_flight", "max_sim_time_ms") if spec.get(key) is not None)
    yield from _with_smaller_requests(spec)
    if spec["topology"]["kind"] == "aggregated":
        yield from _with_simpler_system(spec)


def _with_fewer_requests(spec: Spec) -> Iterator[Spec]:
    count = len(spec["requests"])
    size = count // 2
    while size >= 1:
        for start in range(0, count, size):
            kept = spec["requests"][:start] + spec["requests"][start + size :]
            if kept:
                yield spec | {"requests": kept}
        size //= 2


def _with_smaller_requests(spec: Spec) -> Iterator[Spec]:
    least = {"output_tokens": 0, "input_tokens": 1, "arrival_time_ms": 0}
    for number, request in enumerate(spec["requests"]):
        for field, lowest in least.items():
            for value in (lowest, request[field] // 2, request[field] - 1):
                if not lowest <= value < request[field]:
                    continue
                changed = request | {field: value}
                if field == "input_tokens" and "input_token_ids" in request:
                    changed["input_token_ids"] = request["input_token_ids"][:value]
                yield spec | {"requests": [*spec["requests"][:number], changed, *spec["requests"][number + 1 :]]}


PLAIN_RANK = {
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
    "preemption_mode": "lifo",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": None,
    "timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1},
}


def _with_simpler_system(spec: Spec) -> Iterator[Spec]:
    for field, plain in PLAIN_RANK.items():
        if spec["engine"]["rank"].get(field, plain) != plain:
            candidate = copy.deepcopy(spec)
            candidate["engine"]["rank"][field] = plain
            yield candidate
    if spec["engine"]["dp_size"] > 1:
        candidate = copy.deepcopy(spec)
        candidate["engine"]["dp_size"] = 1
        for request in candidate["requests"]:
            request.pop("dp_rank", None)
        yield candidate
    if spec["topology"]["workers"]["initial_workers"] > 1:
        candidate = copy.deepcopy(spec)
        candidate["topology"]["workers"]["initial_workers"] = 1
        yield candidate


def main() -> int:
    """Replay the cases and print the differing ones, reduced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--keep", type=Path, help="folder for the specifications of differing cases")
    parser.add_argument("--as-found", action="store_true", help="do not reduce differing cases")
    arguments = parser.parse_args()
    differing = 0
    for kind in arguments.only:
        found = 0
        for run in range(arguments.runs):
            spec = KINDS[kind](random.Random(f"{kind} {arguments.seed} {run}"))
            difference = first_difference(spec)
            if difference is None:
                continue
            found += 1
            print(f"{kind} {run}: {difference}", flush=True)
            if not arguments.as_found:
                spec = reduced(spec, first_difference)
                print(f"  reduced: {first_difference(spec)}\n  {json.dumps(spec)}", flush=True)
            if arguments.keep:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                (arguments.keep / f"{kind}_{arguments.seed}_{run}.json").write_text(json.dumps(spec, indent=1) + "\n")
        print(f"{kind}: {found} of {arguments.runs} cases differ", flush=True)
        differing += found
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
