"""Golden files: figures made by running public software, committed gzipped."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_vectors(name: str) -> Any:
    """Contents of `<name>.json.gz` in this folder; shared, so not to be changed."""
    with gzip.open(Path(__file__).parent / f"{name}.json.gz", "rt") as file:
        return json.load(file)
