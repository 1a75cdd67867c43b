"""How an engine is launched: its configuration, what it derives from a timing model, and whether the two agree.

Source: engine-and-replay.md section 1.
"""

from fpmsdk.launch.config import EngineConfig, EngineLaunchConfig, SglangConfig, config_engine_launch_mismatches
from fpmsdk.launch.materialize import canonical_performance_config, materialize_engine_launch_config

__all__ = [
    "EngineConfig",
    "EngineLaunchConfig",
    "SglangConfig",
    "canonical_performance_config",
    "config_engine_launch_mismatches",
    "materialize_engine_launch_config",
]
