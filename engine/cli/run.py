"""The options of `specsot run`. What they do is imported only when the command runs."""

import sys
from dataclasses import replace

import typer

from ..prepare.options import OPTIONS, RunOptions
from .options import takes


@takes(*OPTIONS)
def run(options: RunOptions) -> None:
    """Answer a prompt: outline, parallel branches, speculative decoding, live.

    Examples: `specsot run`, `specsot run graphs/bim_eagle.yaml "How do bees make honey?"`,
    `specsot run eagle --prompts questions.jsonl --json`, `specsot run runs/latest/run.yaml`.
    """
    from .run_command import run_command

    raise typer.Exit(run_command(replace(options, argv=tuple(sys.argv))))
