"""Options that the commands of `specsot train` share, and what they mean together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..prepare.environment import model_folder, set_up_torch

Out = Annotated[Path, typer.Option("--out", help="Folder of the finished model.")]
Run = Annotated[
    Path | None, typer.Option("--run", help="Folder of checkpoints and the log; default OUT.run.")
]
Minutes = Annotated[float, typer.Option(min=0.01, help="Stop after this much training.")]
Tokens = Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
Seed = Annotated[int, typer.Option(help="Another seed gives other samples and weights.")]
Target = Annotated[
    str, typer.Option("--target", help="`embedded`, a checkpoint folder or a Hub id.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="JSONL: {'prompt': ...} or {'messages': [{'role', 'content'}, ...]} (or ShareGPT's"
        " 'conversations') per line. Default: texts generated for the embedded family.",
    ),
]
Regenerate = Annotated[
    bool,
    typer.Option(
        "--regenerate",
        help="The target writes all answers itself, greedily; kept in RUN/answers.jsonl.",
    ),
]
HeldOut = Annotated[
    int,
    typer.Option(
        min=0,
        help="Prompts kept for measuring acceptance as training goes: of each kind of the corpus,"
        " or of the file (a tenth of it at most). 0: none.",
    ),
]
SomeMinutes = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        show_default=False,
        help="Stop after this much training; the learning rate then follows the clock, so two runs"
        " differ. Default 25, unless --tokens or --steps is given.",
    ),
]
SomeTokens = Annotated[
    int | None,
    typer.Option(
        min=1, show_default=False, help="Stop after this many tokens; a resumed run is exact."
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, show_default=False, help="Stop after this many updates; a resumed run is exact."
    ),
]
Rate = Annotated[float, typer.Option("--lr", min=0.0, help="Peak learning rate of the layers.")]
BatchTokens = Annotated[int, typer.Option(min=16, help="Tokens of an update.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of a row; longer samples are cut.")]
SaveMinutes = Annotated[float, typer.Option(min=0.0, help="Training between two checkpoints.")]
MeasureMinutes = Annotated[
    float, typer.Option(min=0.0, help="Training between two looks at held-out prompts.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, show_default=False, help="Threads of a CPU; another number, other sums."),
]
Intermediate = Annotated[int, typer.Option(min=1, help="Width of the MLP.")]


def run_folder(run: Path | None, out: Path) -> Path:
    return run or out.with_name(f"{out.name}.run")


def limits_of(minutes: float | None, tokens: int | None, steps: int | None) -> dict[str, float]:
    """What ends the training; nothing given: the defaults of the kind."""
    if minutes is None and tokens is None and steps is None:
        return {}
    found = {"minutes": minutes, "tokens": tokens, "updates": steps}
    return {name: math.inf if value is None else value for name, value in found.items()}


def set_up(target: str, device: str, threads: int | None) -> Path:
    """Set torch up; the target's folder."""
    import torch

    set_up_torch(threads or torch.get_num_threads(), device)
    return model_folder(target, "target")


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text}: numbers with commas between them, such as 1,3,5")
    return tuple(int(part) for part in parts)
