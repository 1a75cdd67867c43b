from typing import TypeVar

T = TypeVar("T")

def copy_plain(value: T) -> T: ...
