"""Make a small random Qwen3-like model that a real engine loads without a network: weights, configuration, tokenizer.

    python benchmarks/journey_real/model.py FOLDER

Runs where transformers and tokenizers are installed. What a pass costs does not depend on the values of the weights.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 8192
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: Path) -> None:
    """Write the model. Raises `FileExistsError`: the folder is there, and may be of another model."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
