"""How long a made-up GPU takes for a pass: a roofline with launch overhead, graph steps, communication and noise.

Source: collector.md section 11.1.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from fpmsdk.collect.grid import Point
from fpmsdk.collect.topology import Topology

_NOISE_SIGMA = 0.008
_SLOW_PROBABILITY = 0.004
_SLOW_FACTOR = 1.3
_LAUNCH_SIGMA = 0.006
_FAKE_KV_FACTOR = 0.97


class FakeGpu(NamedTuple):
    """The made-up model and GPU. Bandwidths in bytes a second, `peak_flops` in FLOP a second."""

    layers: int = 32
    hidden_size: int = 4096
    active_params: float = 8e9
    weight_bytes: float = 16e9
    kv_bytes_per_token: float = 131072
    peak_flops: float = 9.9e14
    memory_bytes_per_s: float = 4.8e12
    link_bytes_per_s: float = 4.5e11

    def pass_s(self, point: Point, topology: Topology, *, mode: str, capture: int | None) -> float:
        """Seconds of a pass without noise.

        Parameters
        ----------
        mode: `FULL`, `PIECEWISE` or `NONE`, how the pass is launched.
        capture: tokens of the captured graph; None when it runs eagerly.
        """
        tp, tokens = topology.tp, capture or point.tokens
        launch_s = {
            "FULL": 18e-6,
            "PIECEWISE": 60e-6 + 3e-6 * self.layers,
            "NONE": 400e-6 + 9e-6 * self.layers,
        }[mode]
        efficiency = 0.62 * tokens / (tokens + 96)
        compute_s = 2 * self.active_params / tp * tokens / (self.peak_flops * efficiency)
        attention_s = 0.0
        if point.point_type == "prefill":
            new, cached = point.total_prefill_tokens, point.total_kv_read_tokens
            pairs = new * cached + new**2 / (2 * point.batch_size)
            attention_s = 4 * self.hidden_size * self.layers * pairs / (tp * self.peak_flops * 0.45)
        weight_bytes = self.weight_bytes / max(tp, topology.moe_ep)
        read_bytes = weight_bytes + point.total_kv_read_tokens * self.kv_bytes_per_token / tp
        memory_s = read_bytes / (self.memory_bytes_per_s * 0.78)
        return launch_s + max(compute_s + attention_s, memory_s) + self._communication_s(topology, tokens)

    def _communication_s(self, topology: Topology, tokens: int) -> float:
        tp, width_bytes = topology.tp, self.hidden_size * 2
        if topology.dp > 1:
            return 12e-6 * self.layers + tokens * 2 * width_bytes / self.link_bytes_per_s
        if tp == 1:
            return 0.0
        return 2 * self.layers * (8e-6 + tokens * width_bytes * (tp - 1) / tp / self.link_bytes_per_s)


class FakeClock:
    """Times of one launch: the law, an offset of the launch, and noise of every sample; equal for equal seeds.

    Parameters
    ----------
    seed: of the launch.
    drift: factor on every time.
    sigma: of the logarithm of the noise of a sample.
    """

    def __init__(self, seed: int, *, drift: float = 1.0, sigma: float = _NOISE_SIGMA) -> None:
        self._random = random.Random(seed)
        self._factor = drift * self._random.gauss(1.0, _LAUNCH_SIGMA)
        self._sigma = sigma

    def sample_s(self, base_s: float, rank: int, *, is_fake_moe_kv: bool = False) -> float:
        """Seconds of one sample on one rank.

        Parameters
        ----------
        base_s: seconds by the law.
        is_fake_moe_kv: whether experts are chosen by contents that no real request has.
        """
        noise = math.exp(self._random.gauss(0.0, self._sigma))
        if self._random.random() < _SLOW_PROBABILITY:
            noise *= _SLOW_FACTOR
        bias = _FAKE_KV_FACTOR if is_fake_moe_kv else 1.0
        return base_s * (1 + 0.004 * ((37 * rank) % 5)) * noise * bias * self._factor
