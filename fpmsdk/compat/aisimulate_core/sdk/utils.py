"""Model configurations and parallel sizes to choose from."""

from fpmsdk.compat.parallel import enumerate_parallel_config
from fpmsdk.compat.static import model_facts as get_model_config_from_model_path

__all__ = ["enumerate_parallel_config", "get_model_config_from_model_path"]
