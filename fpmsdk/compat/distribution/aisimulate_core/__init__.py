"""The name `aisimulate_core` for fpmsdk: the modules themselves are part of fpmsdk."""

from fpmsdk.compat import aisimulate_core as _modules
from fpmsdk.compat.aisimulate_core import *  # noqa: F403
from fpmsdk.compat.aisimulate_core import FPMSDK_ALIAS, __all__, __getattr__, __version__  # noqa: F401

__path__ = list(_modules.__path__)
