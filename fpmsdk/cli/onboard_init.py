"""`fpmsdk onboard init`: declare a model, its hardware, the worker and the limits of its measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fpmsdk.cli.console import INTERRUPTED
from fpmsdk.onboard.choices import GraphMode, GraphPolicy, ModelKind, Objective, WorkerType

_MANY = "--cudagraph-capture-sizes"
_CAPTURE = "Capture sizes of this role, strictly increasing; several may follow the option."


class ManyValuesCommand(TyperCommand):
    """A command in which several capture sizes may follow their option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before every size, then parse as usual."""
        spread: list[str] = []
        taking = False
        for place, word in enumerate(args):
            if word == _MANY:
                taking = True
                # Without a size after it, it is left for the parser to complain of.
                if place + 1 == len(args) or args[place + 1].startswith("-"):
                    spread.append(word)
                continue
            taking = taking and not word.startswith("-")
            spread += [_MANY, word] if taking else [word]
        return super().parse_args(ctx, spread)


def init(
    interactive: Annotated[bool, typer.Option("--interactive", help="Ask at this terminal, and review.")] = False,
    profile: Annotated[str | None, typer.Option(help="Accepted without effect: onboarding.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name or path.")] = None,
    model_revision: Annotated[str | None, typer.Option(help="Pinned revision; no branch.")] = None,
    model_kind: Annotated[ModelKind | None, typer.Option(help="Dense or a mixture of experts.")] = None,
    framework: Annotated[str | None, typer.Option(help="Runtime, vllm.")] = None,
    framework_version: Annotated[str | None, typer.Option(help="Version label of the data.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Described system, such as h200_sxm.")] = None,
    interconnect: Annotated[str | None, typer.Option(help="Such as nvswitch, pcie, none.")] = None,
    worker_type: Annotated[WorkerType | None, typer.Option(help="Serving role.")] = None,
    sm: Annotated[int | None, typer.Option(help="SM version of the GPU.")] = None,
    tokenizer_revision: Annotated[str | None, typer.Option(help="Pinned tokenizer revision.")] = None,
    chat_template_revision: Annotated[str | None, typer.Option(help="Pinned chat template revision.")] = None,
    aisimulate_revision: Annotated[str | None, typer.Option(help="Pinned simulator revision.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Attention TP; no suggestions then.")] = None,
    attention_data_parallel: Annotated[int | None, typer.Option(help="Attention DP, 1.")] = None,
    moe_tensor_parallel: Annotated[int | None, typer.Option(help="TP of experts, that of attention.")] = None,
    moe_expert_parallel: Annotated[int | None, typer.Option(help="EP, 1.")] = None,
    fpm_profile: Annotated[Path | None, typer.Option(help="A profile, YAML or JSON.")] = None,
    model_config: Annotated[Path | None, typer.Option(help="A local config.json.")] = None,
    resource_overrides: Annotated[Path | None, typer.Option(help="Profile fields, flat YAML or JSON.")] = None,
    suggest_parallel: Annotated[
        bool, typer.Option("--suggest-parallel", help="Print suggested topologies as JSON; write nothing.")
    ] = False,
    parallel_configs: Annotated[Path | None, typer.Option(help="A list of workers, YAML or JSON.")] = None,
    input_tokens: Annotated[int | None, typer.Option(help="Of an example request, 1024.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Of an example request, 128.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Of the example, 1.")] = None,
    request_count: Annotated[int | None, typer.Option(help="Of the example, 4.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Limit of a request in tokens.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(help="Scheduled tokens of a rank.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Scheduled sequences of a rank.")] = None,
    prefill_cudagraph_policy: Annotated[GraphPolicy | None, typer.Option(help="Of prefill graphs.")] = None,
    max_prefill_cudagraph_size: Annotated[int | None, typer.Option(help="Explicit capture, tokens.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Fraction of GPU memory, 0.9.")] = None,
    cudagraph_mode: Annotated[GraphMode | None, typer.Option(help="Of this role.")] = None,
    cudagraph_capture_sizes: Annotated[list[int] | None, typer.Option(help=_CAPTURE)] = None,
    max_cudagraph_capture_size: Annotated[int | None, typer.Option(help="Of this role.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Example target, 1000.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Example target, 100.")] = None,
    objective: Annotated[Objective | None, typer.Option(help="Of a recommendation, throughput.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of a recommendation, 42.")] = None,
    output: Annotated[Path | None, typer.Option(help="Request file, support-request.yaml.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="A directory for all workers.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output.")] = False,
) -> None:
    """Declare a model, its hardware, the worker topology and the limits of its measurement.

    With --model-config everything that local files establish is derived; what they do not is stated in
    --resource-overrides or asked for. Nothing is launched and nothing is fetched.
    """
    run_init(dict(locals()))


def run_init(options: dict[str, Any]) -> None:
    """Set up what the options ask for, by field."""
    from fpmsdk.errors import OnboardError
    from fpmsdk.onboard import init as setup
    from fpmsdk.onboard.init_options import check_combinations
    from fpmsdk.onboard.talk import Cancelled, Talk, Terminal

    if options["profile"] not in (None, "onboarding"):
        raise OnboardError(f"--profile must be onboarding, found {options['profile']!r}", "--profile")
    options["cudagraph_capture_sizes"] = options["cudagraph_capture_sizes"] or None
    check_combinations(options)
    if options["suggest_parallel"]:
        typer.echo(json.dumps(setup.suggest(options).document(), sort_keys=True))
        return
    try:
        talk = Terminal() if options["interactive"] else Talk()
        if options["output_dir"] is not None:
            _directory(talk, options)
        else:
            _file(talk, options)
    except (Cancelled, KeyboardInterrupt):
        typer.echo("cancelled; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _directory(talk: Any, options: dict[str, Any]) -> None:
    from fpmsdk.onboard import init as setup
    from fpmsdk.onboard.init_output import INDEX, directory_target, write_directory

    root = directory_target(options["output_dir"])
    index = write_directory(setup.set_up_several(talk, options), root)
    typer.echo("Requests and profiles saved; runtime, data and accuracy are not assessed, nothing was launched.")
    _pairs({"onboarding_index": str(root / INDEX), **index})


def _file(talk: Any, options: dict[str, Any]) -> None:
    from fpmsdk.onboard import init as setup
    from fpmsdk.onboard.init_output import plan_command, request_target, write_request
    from fpmsdk.onboard.request import request_id

    target = options["output"] or "support-request.yaml"
    request_target(target, overwrite=options["overwrite"])
    derived = options["model_config"] is not None
    request = setup.set_up_one(talk, options) if derived else setup.set_up_plain(talk, options)
    path = write_request(request, target, overwrite=options["overwrite"])
    identity = request.identity
    typer.echo(
        f"Scope: {identity.model} ({identity.model_kind}), vLLM {identity.framework_version or 'to be detected'}, "
        f"{identity.gpu}, {identity.interconnect}; {request.parallel_preset} {request.parallelism()}; context "
        f"{request.search.context_length} tokens."
    )
    typer.echo(f"Collection settings: {json.dumps(request.collection_settings(), sort_keys=True)}")
    typer.echo(f"GPUs required: {request.worker_gpus} for one worker; whether they are available is not checked.")
    deployment = request.profile_deployment()
    memory = "not known" if deployment is None else deployment.resources.memory_source
    typer.echo(f"Request saved; memory: {memory}; runtime, data and accuracy are not assessed, nothing was launched.")
    _pairs({"request_id": request_id(request), "request": str(path), "next": plan_command(path)})


def _pairs(values: dict[str, Any]) -> None:
    for name, value in values.items():
        typer.echo(f"{name}: {json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value}")
