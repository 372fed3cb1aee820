"""The options of `specsot compare`. What they do is imported only when the command runs."""

from dataclasses import replace
from typing import Annotated

import typer

from ..prepare.options import JSONL, OPTIONS, SESSION, RunOptions
from .options import takes

PROMPTS = replace(
    OPTIONS["prompts"], help=f".txt (one per line) or .jsonl {JSONL} [ten packaged ones]."
)
Sides = Annotated[
    list[str],
    typer.Argument(
        metavar="GRAPH GRAPH...",
        help="Shipped graphs or graph files; GRAPH@PATH=VALUE,... with settings of its own.",
    ),
]


@takes("as_json", *SESSION, prompts=PROMPTS)
def compare(options: RunOptions, sides: Sides) -> None:
    """Compare graphs: whether their tokens are equal where they must be, and what each costs.

    Examples: `specsot compare bim_plain bim_eagle`,
    `specsot compare bim_eagle bim_eagle@layout.kind=batching,drafter.nodes=8`,
    `specsot compare graphs/bim_eagle.yaml mine.yaml --prompts questions.txt --json`.
    """
    from ..bench.command import compare_command

    raise typer.Exit(compare_command(tuple(sides), options))
