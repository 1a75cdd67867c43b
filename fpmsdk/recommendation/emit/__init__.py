"""Files that start what was recommended: `--emit vllm-cmd,k8s,slurm`."""

from fpmsdk.recommendation.emit.files import FILE_OF, emit, parse_kinds

__all__ = ["FILE_OF", "emit", "parse_kinds"]
