"""`python3 -m dynamo.vllm` where torch is built for CPUs and torchvision is not.

The package index has torchvision for GPUs alone. Its compiled part does not load with a torch for CPUs, and without the
operator that it would bring its Python part cannot be imported. Dynamo imports it for pictures, which no benchmark has;
declaring the operator is enough. Processes that the engine spawns run this file as well, before anything else.
"""

import torch

# The declaration lasts as long as this object.
DECLARED = torch.library.Library("torchvision", "DEF")
DECLARED.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    from dynamo.vllm.main import main

    main()
