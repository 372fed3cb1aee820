"""`specsot train target | eagle3`: how the embedded models were made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

train = typer.Typer(help="Train the embedded models.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", help="Folder of the finished model.")]
Run = Annotated[
    Path | None, typer.Option("--run", help="Folder of checkpoints and the log; default OUT.run.")
]
Minutes = Annotated[float, typer.Option(min=0.01, help="Stop after this much training.")]
Tokens = Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
Seed = Annotated[int, typer.Option(help="Another seed gives other samples and weights.")]


def _run_folder(run: Path | None, out: Path) -> Path:
    return run or out.with_name(f"{out.name}.run")


@train.command()
def target(
    out: Out,
    run: Run = None,
    minutes: Minutes = 60.0,
    tokens: Tokens = 16_000_000,
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Train tokenizer and target on texts generated from the almanac."""
    from .train_target import TargetTraining, train_target

    config = TargetTraining(
        out=out,
        run=_run_folder(run, out),
        minutes=minutes,
        tokens=tokens,
        seed=seed,
        resume=resume,
    )
    typer.echo(train_target(config))


@train.command()
def eagle3(
    target: Annotated[Path, typer.Option("--target", help="Folder of the target.")],
    out: Out,
    run: Run = None,
    minutes: Minutes = 18.0,
    tokens: Tokens = 6_000_000,
    seed: Seed = 5,
    resume: Resume = False,
) -> None:
    """Train an EAGLE-3 drafter for a target."""
    from .train_eagle3 import Eagle3Training, train_eagle3

    config = Eagle3Training(
        target=target,
        out=out,
        run=_run_folder(run, out),
        minutes=minutes,
        tokens=tokens,
        seed=seed,
        resume=resume,
    )
    typer.echo(train_eagle3(config))


@train.command()
def quality(
    target: Annotated[Path, typer.Option("--target", help="Folder of the target.")],
    limit: Annotated[int, typer.Option(min=4, help="Prompts of each kind.")] = 100,
    examples: Annotated[int, typer.Option(min=0, help="Texts to print of each kind.")] = 2,
) -> None:
    """Measure a target on held-out prompts, without a grammar."""
    from . import quality as checks

    results = checks.evaluate(target, limit)
    if examples:
        typer.echo(checks.examples(results, examples) + "\n")
    typer.echo(checks.table(results))
