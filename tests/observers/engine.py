"""Stands in for `python3 -m dynamo.vllm`: the same flags, Dynamo's scheduler, one process, weights made up.

    python engine.py --model FOLDER --max-model-len 256 ...

Runs where vLLM and ai-dynamo are installed. It ends once the engine is ready, which is when observers have written;
nothing is benchmarked. Where `OBSERVED_OUTPUTS` names a folder it first answers some prompts, and what came out is
there, in a file of the phase.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# One process, nothing from a network, and no minutes of compilation: the cache is the same without it.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    TORCHDYNAMO_DISABLE="1",
    VLLM_USE_AOT_COMPILE="0",
)
# Flags of Dynamo, each with one value.
DYNAMO = (
    *(f"benchmark-{name}" for name in ("mode", "timeout", "warmup-iterations", "output-path")),
    *("prefill-max-new-token-samples", "prefill-max-kv-read-token-samples", "prefix-max-batch-size-samples"),
    *("decode-max-kv-read-token-samples", "decode-max-batch-size-samples", "dump-config-to"),
)


def main() -> None:
    """Start the engine of the command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    dynamo = argparse.ArgumentParser(allow_abbrev=False)
    for name in DYNAMO:
        dynamo.add_argument(f"--{name}")
    dynamo.add_argument("--no-enable-log-requests", action="store_true")
    asked, words = dynamo.parse_known_args()
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    arguments = EngineArgs.from_cli_args(parser.parse_args(words))
    arguments.load_format, arguments.skip_tokenizer_init = "dummy", True
    arguments.distributed_executor_backend = "uni"
    engine = LLMEngine.from_engine_args(arguments)
    if folder := os.environ.get("OBSERVED_OUTPUTS"):
        Path(folder, f"{asked.benchmark_mode}.json").write_text(json.dumps(answers(engine), sort_keys=True))


def answers(engine) -> dict[str, list]:
    """Tokens and their exact log probabilities, of prompts that run together; one is longer than a pass."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    wanted = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, temperature=0.0, logprobs=1)
    for length in (3, 40, 150, 41):
        prompt = TokensPrompt(prompt_token_ids=[3 + (7 * at + length) % 50 for at in range(length)])
        engine.add_request(str(length), prompt, wanted)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (told,) = output.outputs
                chosen = zip(told.token_ids, told.logprobs, strict=True)
                found[output.request_id] = [[token, at[token].logprob.hex()] for token, at in chosen]
    return found


if __name__ == "__main__":
    sys.exit(main())
