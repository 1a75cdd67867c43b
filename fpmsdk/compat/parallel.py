"""Parallel sizes that a serving engine can run, out of lists to choose from. Source: clients.md section 1, tier 1."""

from collections.abc import Sequence
from enum import Enum
from itertools import product
from typing import Any

from fpmsdk.errors import ConfigError


def enumerate_parallel_config(
    num_gpu_list: Sequence[int],
    tp_list: Sequence[int],
    pp_list: Sequence[int],
    dp_list: Sequence[int] = (1,),
    moe_tp_list: Sequence[int] = (1,),
    moe_ep_list: Sequence[int] = (1,),
    cp_list: Sequence[int] = (1,),
    is_moe: bool = False,
    backend: Any = "trtllm",
) -> list[list[int]]:
    """`[tp, pp, attention_dp, moe_tp, moe_ep, cp]` of every combination that uses an allowed number of GPUs.

    Parameters
    ----------
    num_gpu_list: allowed numbers of GPUs of one worker.
    tp_list, pp_list, dp_list, moe_tp_list, moe_ep_list, cp_list: sizes to choose from, in order of preference; the
        sizes of attention DP and of experts are those of a mixture of experts alone.
    backend: name of the serving engine, or a member of an enumeration named after it.

    Raises
    ------
    ConfigError: context parallelism for another backend than sglang.

    Example
    -------
    >>> enumerate_parallel_config([2], [1, 2], [1, 2])
    [[1, 2, 1, 1, 1, 1], [2, 1, 1, 1, 1, 1]]
    >>> enumerate_parallel_config([2], [1, 2], [1], [1, 2], [1, 2], [1, 2], is_moe=True, backend="vllm")
    [[1, 1, 2, 1, 2, 1], [1, 1, 2, 2, 1, 1], [2, 1, 1, 1, 2, 1], [2, 1, 1, 2, 1, 1]]
    """
    name = backend.name if isinstance(backend, Enum) else backend
    if name != "sglang" and any(size != 1 for size in cp_list):
        raise ConfigError(f"context parallelism is served by sglang only, found sizes {list(cp_list)} for {name}")
    if not is_moe:
        return [
            [tp, pp, 1, 1, 1, cp] for tp, pp, cp in product(tp_list, pp_list, cp_list) if tp * pp * cp in num_gpu_list
        ]
    return [
        [tp, pp, dp, moe_tp, moe_ep, cp]
        for tp, pp, dp, moe_tp, moe_ep, cp in product(tp_list, pp_list, dp_list, moe_tp_list, moe_ep_list, cp_list)
        if tp * pp * dp * cp in num_gpu_list
        # Experts are divided over the GPUs that attention is divided over.
        and tp * dp * cp == moe_tp * moe_ep
        # Not run by these engines: attention TP beside attention DP, and TP beside EP of experts.
        and not (name == "trtllm" and tp > 1 and dp > 1)
        and not (name == "vllm" and moe_tp > 1 and moe_ep > 1)
    ]
