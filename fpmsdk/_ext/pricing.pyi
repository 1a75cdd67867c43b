from typing import Any

from fpmsdk._ext.estimator import ServingView

class TimingModel:
    @property
    def composes(self) -> bool: ...

class FixedTiming(TimingModel):
    @property
    def prefill_ms(self) -> float: ...
    @property
    def decode_ms(self) -> float: ...
    def __init__(self, prefill_ms: float, decode_ms: float) -> None: ...

class PolynomialTiming(TimingModel): ...

class FpmTiming(TimingModel):
    def __init__(self, view: ServingView) -> None: ...

class PythonTiming(TimingModel):
    def __init__(self, provider: Any) -> None: ...

class PassPricer:
    @property
    def num_composed(self) -> int: ...
    @property
    def num_fallback(self) -> int: ...
    def __init__(
        self, timing: TimingModel, compose: bool, speedup_ratio: float, decode_speedup_ratio: float
    ) -> None: ...

def modeled_duration(raw_ms: float, speedup: float) -> float: ...
def price_pass(
    pricer: PassPricer,
    *,
    num_prefill: int = 0,
    sum_prefill_end_tokens: int = 0,
    sum_prefill_past_tokens: int = 0,
    num_decode: int = 0,
    sum_decode_tokens: int = 0,
    kv_capacity_tokens: int = 0,
) -> tuple[float, float, bool]: ...
