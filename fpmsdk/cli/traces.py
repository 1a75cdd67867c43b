"""What subcommands that read traces share: the options that say how a file is to be read."""

from typing import Annotated, Literal

import typer

from fpmsdk.replay.formats.reader import ReadOptions

FORMATS = "mooncake, mooncake-delta, dynamo, aiperf, azure, burstgpt, guidellm, weka, recorded or parquet"

FormatOption = Annotated[str | None, typer.Option("--format", help=f"{FORMATS}; otherwise the file shows it.")]
BlockTokensOption = Annotated[
    int | None, typer.Option("--block-tokens", help="Prompt tokens per hash id of a Mooncake trace; 512 by default.")
]
TimeUnitOption = Annotated[
    Literal["ms", "s"] | None,
    typer.Option("--time-unit", help="Unit of the times in a Mooncake trace; ms by default."),
]
BenchmarkOption = Annotated[
    int | None, typer.Option("--benchmark", help="Which benchmark of a GuideLLM report, from 0.")
]
NestedOption = Annotated[
    Literal["auto", "absolute", "relative"] | None,
    typer.Option("--nested-timestamps", help="Whether requests of a Weka subagent count from its start."),
]


def read_options(
    block_tokens: int | None, time_unit: str | None, benchmark: int | None, nested_timestamps: str | None
) -> ReadOptions:
    """The options as the readers take them."""
    return ReadOptions(block_tokens, time_unit, benchmark, nested_timestamps)
