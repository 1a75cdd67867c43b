from collections.abc import Callable

from fpmsdk._ext.pricing import TimingModel

class StandInTiming(TimingModel):
    def __init__(
        self, inner: TimingModel, stand_in: Callable[[Exception, int, int, int, int, int], tuple[float, float]]
    ) -> None: ...
