from numpy.typing import ArrayLike

from fpmsdk._ext.pricing import TimingModel

class RecordedTiming(TimingModel):
    def __init__(
        self,
        offsets: ArrayLike,
        prefill_ms: ArrayLike,
        decode_ms: ArrayLike,
        composed: ArrayLike,
        work: ArrayLike | None = None,
    ) -> None: ...
    def unused_passes(self) -> list[int]: ...

def work_text(num_prefill: int, end_tokens: int, past_tokens: int, num_decode: int, decode_tokens: int) -> str: ...
