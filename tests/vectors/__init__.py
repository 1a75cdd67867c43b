"""Golden vectors: figures made by running public software, stored as gzipped JSON beside this file."""

import gzip
import json
from pathlib import Path
from typing import Any


def load_vectors(name: str) -> Any:
    """Return the document `<name>.json.gz` of this folder."""
    with gzip.open(Path(__file__).parent / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)
