"""The options of `specsot compare`. What they do is imported only when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from ..prepare.options import RunOptions
from .run import (
    JSONL,
    Budget,
    Device,
    Drafter,
    Dtype,
    Json,
    Model,
    Outline,
    Seed,
    Sets,
    Threads,
    option,
)

Graphs = Annotated[
    list[str], typer.Argument(metavar="GRAPH GRAPH...", help="Shipped graphs or graph files.")
]
Prompts = Annotated[
    Path | None, option("PROMPTS", f".txt (one per line) or .jsonl {JSONL} [ten packaged ones].")
]


def compare(
    graphs: Graphs,
    prompts: Prompts = None,
    as_json: Json = False,
    model: Model = None,
    drafter_model: Drafter = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    max_new_tokens: Budget = None,
    outline: Outline = None,
    sets: Sets = None,
) -> None:
    """Compare graphs: whether their tokens are equal where they must be, and what each costs.

    Examples: `specsot compare bim_plain bim_eagle`,
    `specsot compare graphs/bim_eagle.yaml mine.yaml --prompts questions.txt --json`.
    """
    options = RunOptions(
        prompts=prompts,
        as_json=as_json,
        model=model,
        drafter_model=drafter_model,
        seed=seed,
        device=device,
        dtype=dtype,
        threads=threads,
        max_new_tokens=max_new_tokens,
        outline=outline,
        sets=tuple(sets or ()),
    )
    from ..bench.command import compare_command

    raise typer.Exit(compare_command(tuple(graphs), options))
