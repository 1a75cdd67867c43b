"""Where static estimates come from."""

from fpmsdk.compat.static import Database as PerfDatabase
from fpmsdk.compat.static import latest_version as get_latest_database_version
from fpmsdk.compat.static import open_database as get_database

__all__ = ["PerfDatabase", "get_database", "get_latest_database_version"]
