"""Price one deployment: a strict configuration in, a replayed workload and its evidence out.

Reads what planning writes (`predict/pilot.yaml`): aggregated serving, priced by a measured table.
Source: predict-recommend.md sections 1 to 5 and 9.
"""

from fpmsdk.prediction.config import PredictConfig, read_config
from fpmsdk.prediction.run import Prediction, predict

__all__ = ["PredictConfig", "Prediction", "predict", "read_config"]
