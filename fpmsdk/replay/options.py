"""Checks of option values; what an option means is said where it is used."""

from __future__ import annotations

import math
import sys
from typing import Any

from fpmsdk.config.schema import shown
from fpmsdk.errors import ConfigError


def check_choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    """Raise ConfigError for another value than the accepted ones."""
    if not isinstance(value, str) or value not in accepted:
        raise ConfigError(f"{name} is {shown(value)}; give {' or '.join(accepted)}", name)


def check_integer(name: str, value: Any, lowest: int, highest: int | None = None) -> None:
    """Raise ConfigError for what is no integer within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest or value > (highest or value):
        limit = "" if highest is None else f" and at most {highest}"
        raise ConfigError(f"{name} is {shown(value)}; give an integer of at least {lowest}{limit}", name)


def check_number(name: str, value: Any, lowest: float, below: float = math.inf) -> None:
    """Raise ConfigError for what is no finite number within bounds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not lowest <= value < below or value > sys.float_info.max:
        limit = "" if below == math.inf else f" and below {below}"
        raise ConfigError(f"{name} is {shown(value)}; give a finite number of at least {lowest}{limit}", name)
