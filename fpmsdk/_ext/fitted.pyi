from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.pricing import TimingModel

FEATURES: tuple[str, ...]

class LinearPassTiming(TimingModel):
    @property
    def coefficients_ms(self) -> list[float]: ...
    def __init__(self, coefficients_ms: Sequence[float]) -> None: ...

def feature_matrix(
    prefill_requests: NDArray[np.float64],
    prefill_tokens: NDArray[np.float64],
    prefill_kv_tokens: NDArray[np.float64],
    decode_requests: NDArray[np.float64],
    decode_kv_tokens: NDArray[np.float64],
) -> NDArray[np.float64]: ...
