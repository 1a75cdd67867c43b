"""Files that start what was recommended: `--emit vllm-cmd,k8s,slurm`."""

from fpmsdk.recommendation.emit.files import FILE_OF, emit, emit_ranked, parse_kinds, require_image

__all__ = ["FILE_OF", "emit", "emit_ranked", "parse_kinds", "require_image"]
