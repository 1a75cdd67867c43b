"""The configuration file of a prediction, as a strict document; what a field means is in `fpmsdk.prediction.compile`.

Source: predict-recommend.md section 2.
"""

from fpmsdk.prediction.config.engine import ROLES, Engine, KvTransfer, Workers
from fpmsdk.prediction.config.execution import Evaluation, Execution, Resources, SlaBounds
from fpmsdk.prediction.config.root import PredictConfig, read_config
from fpmsdk.prediction.config.timing import DefaultTiming, FixedTiming, PolynomialTiming, Timing
from fpmsdk.prediction.config.traffic import (
    ConcurrencyLoad,
    ConstantRateLoad,
    KvCapacityLoad,
    PoissonLoad,
    SessionSource,
    Stop,
    SyntheticSource,
    TimestampsLoad,
    TraceSource,
    Traffic,
)
from fpmsdk.prediction.config.worker import Capacity, KvCache, Parallelism, Scheduler, Worker

__all__ = [
    "ROLES",
    "Capacity",
    "ConcurrencyLoad",
    "ConstantRateLoad",
    "DefaultTiming",
    "Engine",
    "Evaluation",
    "Execution",
    "FixedTiming",
    "KvCache",
    "KvCapacityLoad",
    "KvTransfer",
    "Parallelism",
    "PoissonLoad",
    "PolynomialTiming",
    "PredictConfig",
    "Resources",
    "Scheduler",
    "SessionSource",
    "SlaBounds",
    "Stop",
    "SyntheticSource",
    "TimestampsLoad",
    "Timing",
    "TraceSource",
    "Traffic",
    "Worker",
    "Workers",
    "read_config",
]
