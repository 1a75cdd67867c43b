"""Questions for options and profile fields, asked again until there is a value.

Source: onboarding.md section 1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.init_options import OptionFaults, Options, build_request
from fpmsdk.onboard.overrides import CHOICES, is_bytes, read_answer
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.request_sections import (
    CollectionSection,
    ExampleWorkload,
    LatencyTargets,
    RequestIdentity,
    SearchSection,
)
from fpmsdk.onboard.talk import Talk


def _sizes(answer: str) -> list[int]:
    return [int(word) for word in answer.split()]


Read = Callable[[str], Any]

# What a setup without options asks for, in this order.
_FIRST = {
    "model": "Model name or path",
    "model_revision": "Pinned model revision, no branch",
    "model_kind": "Model kind (dense/moe)",
    "gpu": "GPU system name, such as h200_sxm",
    "interconnect": "GPU interconnect, such as nvswitch, pcie or none",
    "tensor_parallel": "Attention tensor-parallel size",
}
_QUESTIONS: dict[str, tuple[str, Read]] = {
    **{name: (question, int if name == "tensor_parallel" else str) for name, question in _FIRST.items()},
    "framework": ("Runtime (vllm)", str),
    "framework_version": ("Version label of the data", str),
    "sm": ("SM version of the GPU", int),
    "tokenizer_revision": ("Pinned tokenizer revision", str),
    "chat_template_revision": ("Pinned chat template revision", str),
    "aisimulate_revision": ("Pinned simulator revision", str),
    "worker_type": ("Serving role (aggregated/prefill/decode)", str),
    "attention_data_parallel": ("Attention data-parallel size", int),
    "moe_tensor_parallel": ("Expert tensor-parallel size", int),
    "moe_expert_parallel": ("Expert-parallel size", int),
    "context_length": ("Context limit of one request in tokens", int),
    "max_num_tokens": ("Scheduled tokens of one rank", int),
    "max_batch_size": ("Scheduled sequences of one rank", int),
    "gpu_memory_utilization": ("Fraction of GPU memory, above 0 and at most 1", float),
    "prefill_cudagraph_policy": ("Prefill graph policy (runtime/explicit)", str),
    "max_prefill_cudagraph_size": ("Largest prefill capture in tokens", int),
    "cudagraph_mode": ("CUDA graph mode of this role", str),
    "cudagraph_capture_sizes": ("Capture sizes of this role, separated by blanks", _sizes),
    "max_cudagraph_capture_size": ("Largest capture of this role", int),
    "input_tokens": ("Input tokens of an example request", int),
    "output_tokens": ("Output tokens of an example request", int),
    "concurrency": ("Concurrent example requests", int),
    "request_count": ("Example requests", int),
    "ttft_ms": ("Target time to first token in ms", float),
    "tpot_ms": ("Target time per output token in ms", float),
    "objective": ("Objective of a recommendation", str),
    "seed": ("Seed of a recommendation", int),
}
_SECTIONS: tuple[type[BaseModel], ...] = (
    RequestIdentity,
    ExampleWorkload,
    LatencyTargets,
    SearchSection,
    CollectionSection,
)


def ask_option(talk: Talk, options: Options, name: str) -> None:
    """Ask for an option until its answer reads; an empty answer takes the default that is shown."""
    question, read = _QUESTIONS[name]
    default = options.get(name)
    if default is None and name != "context_length":  # the cap of a context is no default
        default = _default(name)
    shown = question if default is None else f"{question} [{default}]"
    while True:
        answer = talk.ask(shown)
        if not answer and default is None:
            talk.tell("A value is needed.")
            continue
        try:
            options[name] = read(answer) if answer else default
        except ValueError:
            talk.tell(f"Not {'an integer' if read is int else 'a number' if read is float else 'integers'}: {answer}")
            continue
        break
    # Each of the two settles the other.
    if name == "prefill_cudagraph_policy" and options[name] == "runtime":
        options["max_prefill_cudagraph_size"] = None
    elif name == "max_prefill_cudagraph_size":
        options["prefill_cudagraph_policy"] = "explicit"


def _default(name: str) -> Any:
    for section in _SECTIONS:
        field = section.model_fields.get(name)
        if field is not None and not field.is_required():
            return field.default
    return None


def guided_request(talk: Talk, options: Options, *, with_topology: bool) -> SupportRequest:
    """Ask for what is missing of a request, then for corrections until it is valid."""
    talk.tell("Set up the measurement of one worker; Enter takes a value shown in brackets, Ctrl-C cancels.")
    talk.tell("Engines are launched by the collection itself; no server has to run.")
    for name in _FIRST:
        if options.get(name) is None and (with_topology or name != "tensor_parallel"):
            ask_option(talk, options, name)
    if options.get("context_length") is None and not options.get("fpm_profile"):
        ask_option(talk, options, "context_length")
    return valid_request(talk, options)


def valid_request(talk: Talk, options: Options) -> SupportRequest:
    """The request that options make, after as many corrections as it takes."""
    while True:
        try:
            return build_request(options)
        except OptionFaults as fault:
            correct(talk, options, *fault.faults[0])


def correct(talk: Talk, options: Options, name: str, reason: str) -> None:
    """Tell what is wrong and ask for the option again, or first for which one."""
    talk.tell(f"{name or 'request'}: {reason}")
    while name not in _QUESTIONS:
        name = talk.ask("Option to correct, such as --tensor-parallel").removeprefix("--").replace("-", "_")
        if name not in _QUESTIONS:
            talk.tell("Known options: " + ", ".join(known.replace("_", "-") for known in _QUESTIONS))
    ask_option(talk, options, name)


def is_option(name: str) -> bool:
    """Whether a field can be asked for as an option.

    >>> is_option("tensor_parallel"), is_option("cache_groups")
    (True, False)
    """
    return name in _QUESTIONS


def ask_field(talk: Talk, name: str) -> Any:
    """Ask for a profile field until its answer is a value."""
    hint = ""
    if name in CHOICES:
        hint = f" ({', '.join(CHOICES[name])})"
    elif is_bytes(name):
        hint = " (of one rank; bytes, or with a unit such as MiB or GiB)"
    elif name == "cache_groups":
        hint = " (JSON list; page_size_bytes of all layers of a group on one rank, with padding)"
    elif name == "cache_block_sizes":
        hint = " (JSON object: tokens of a block by group)"
    while True:
        answer = talk.ask(f"{name}{hint}")
        if not answer:
            talk.tell("A value is needed.")
            continue
        try:
            return read_answer(name, answer)
        except OnboardError as fault:
            talk.tell(str(fault))
