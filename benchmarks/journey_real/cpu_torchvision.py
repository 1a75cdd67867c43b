"""Makes torchvision importable where torch is built for CPUs and torchvision is not.

    python benchmarks/journey_real/cpu_torchvision.py

installs this file where its interpreter finds it at every start. The package index has torchvision for GPUs alone: its
compiled part does not load with a torch for CPUs, and without two operators that it would bring its Python part cannot
be imported. Dynamo imports it for pictures, which no benchmark has; declaring the operators is enough.
"""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

OPERATORS = ("nms", "qnms")
# Declarations last as long as their library.
DECLARED = []


class Declares(MetaPathFinder):
    """Declares the operators before torchvision is looked for, and finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and not DECLARED:
            import torch

            DECLARED.append(torch.library.Library("torchvision", "DEF"))
            for operator in OPERATORS:
                DECLARED[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    import sysconfig

    site = Path(sysconfig.get_path("purelib"))
    (site / "cpu_torchvision.py").write_bytes(Path(__file__).read_bytes())
    (site / "cpu_torchvision.pth").write_text("import cpu_torchvision\n")
else:
    sys.meta_path.insert(0, Declares())
