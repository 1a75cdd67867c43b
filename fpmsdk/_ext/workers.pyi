from fpmsdk._ext.placement import Placement
from fpmsdk._ext.pricing import PassPricer
from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.rolling import RollingKeys
from fpmsdk._ext.scheduler import Scheduler

class WorkerPool:
    @property
    def placement(self) -> Placement: ...
    def __init__(
        self,
        schedulers: list[Scheduler],
        pricer: PassPricer,
        placement: Placement,
        recorder: Recorder,
        pass_by_pass: bool = False,
        rolling_keys: RollingKeys | None = None,
    ) -> None: ...
    def warm_prefix_caches(self) -> None: ...
