"""Architectures whose graphs this package builds, and what sets each apart from its family.

A registry only; each family's graph is in the file that `spec.py` names for it. Source: op-level.md section 4.1.
"""

import difflib
from typing import NamedTuple

from fpmsdk.errors import UnsupportedModelError

LLAMA, MOE, DEEPSEEK = "LLAMA", "MOE", "DEEPSEEK"
HYBRID_MOE, STEP, GEMMA4, MUSE, NAS = "HYBRIDMOE", "STEP3P7", "GEMMA4MIX", "MUSEGLIMMER", "NEMOTRONNAS"

# Families whose layers differ, so that the checkpoint describes them in groups.
GROUPED = (HYBRID_MOE, STEP, GEMMA4, MUSE, NAS)


class Architecture(NamedTuple):
    """Family of the graph, and the deviations inside the family.

    `alternating_window` is the number of tokens that every second layer attends to, 0 when all attend to everything;
    `sliding_window` says that every layer attends to the window that the checkpoint declares, if it does.
    `text_config` is the key below which multimodal checkpoints keep their language model. `calibrated` says
    whether the activation memory of the family was measured on this architecture.
    """

    family: str
    use_qk_norm: bool = False
    alternating_window: int = 0
    sliding_window: bool = False
    text_config: str = ""
    calibrated: bool = True


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(LLAMA),
    "MistralForCausalLM": Architecture(LLAMA, sliding_window=True),
    "Qwen2ForCausalLM": Architecture(LLAMA),
    "Qwen3ForCausalLM": Architecture(LLAMA, use_qk_norm=True),
    "MiMoForCausalLM": Architecture(LLAMA),
    "Mistral3ForConditionalGeneration": Architecture(
        LLAMA, sliding_window=True, text_config="text_config", calibrated=False
    ),
    "Qwen3VLForConditionalGeneration": Architecture(LLAMA, text_config="text_config", calibrated=False),
    "MixtralForCausalLM": Architecture(MOE),
    "GptOssForCausalLM": Architecture(MOE, alternating_window=128),
    "Qwen2MoeForCausalLM": Architecture(MOE),
    "Qwen3MoeForCausalLM": Architecture(MOE, use_qk_norm=True),
    "MiniMaxM2ForCausalLM": Architecture(MOE, use_qk_norm=True),
    "Qwen3VLMoeForConditionalGeneration": Architecture(MOE, text_config="text_config", calibrated=False),
    "DeepseekV3ForCausalLM": Architecture(DEEPSEEK),
    "DeepSeekForCausalLM": Architecture(DEEPSEEK),
    "KimiK25ForConditionalGeneration": Architecture(DEEPSEEK, text_config="text_config"),
    "Llama4ForConditionalGeneration": Architecture(HYBRID_MOE, text_config="text_config", calibrated=False),
    "MiMoV2FlashForCausalLM": Architecture(HYBRID_MOE, calibrated=False),
    "Step3p7ForConditionalGeneration": Architecture(STEP, use_qk_norm=True, text_config="text_config"),
    "Step3p7FlashForCausalLM": Architecture(STEP, use_qk_norm=True, text_config="text_config"),
    "Step3p5ForCausalLM": Architecture(STEP, use_qk_norm=True),
    "Step3p5FlashForCausalLM": Architecture(STEP, use_qk_norm=True),
    "Gemma4ForConditionalGeneration": Architecture(GEMMA4, text_config="text_config"),
    "MuseGlimmerForConditionalGeneration": Architecture(MUSE, use_qk_norm=True, text_config="text_config"),
    "DeciLMForCausalLM": Architecture(NAS, calibrated=False),
}


def find_architecture(name: str) -> Architecture:
    """Entry of an architecture as a checkpoint names it.

    Raises `UnsupportedModelError` with the most similar supported names otherwise.

    >>> find_architecture("Qwen3MoeForCausalLM").family
    'MOE'
    """
    if entry := ARCHITECTURES.get(name):
        return entry
    nearest = difflib.get_close_matches(name, ARCHITECTURES, n=3, cutoff=0.0)
    raise UnsupportedModelError(
        f"architecture {name!r} has no operator graph; the nearest supported ones are {', '.join(nearest)}", "model"
    )
