"""`specsot train`: drafters for any target, and how the embedded models were made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..shell import user_errors
from ..train.options import (
    BatchTokens,
    Device,
    HeldOut,
    Intermediate,
    Length,
    MeasureMinutes,
    Minutes,
    Out,
    Prompts,
    Rate,
    Regenerate,
    Resume,
    Run,
    SaveMinutes,
    Seed,
    SomeMinutes,
    SomeTokens,
    Steps,
    Target,
    Threads,
    Tokens,
    limits_of,
    numbers,
    run_folder,
    set_up,
)

train = typer.Typer(
    help="Train drafters for any target; train the embedded target.", no_args_is_help=True
)


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
    from ..train.target import TargetTraining, train_target

    config = TargetTraining(
        out=out,
        run=run_folder(run, out),
        minutes=minutes,
        tokens=tokens,
        seed=seed,
        resume=resume,
    )
    typer.echo(train_target(config))


@train.command()
def eagle3(
    out: Out,
    target: Target = "embedded",
    run: Run = None,
    prompts: Prompts = None,
    regenerate: Regenerate = False,
    held_out: HeldOut = 8,
    minutes: SomeMinutes = None,
    tokens: SomeTokens = None,
    steps: Steps = None,
    lr: Rate = 3e-3,
    batch_tokens: BatchTokens = 3072,
    length: Length = 768,
    intermediate: Intermediate = 2048,
    draft_vocabulary: Annotated[int, typer.Option(min=1, help="Ids that it can draft.")] = 2048,
    unroll: Annotated[int, typer.Option(min=1, help="Drafted steps per token.")] = 4,
    seed: Seed = 5,
    resume: Resume = False,
    save_minutes: SaveMinutes = 3.0,
    measure_minutes: MeasureMinutes = 3.0,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train an EAGLE-3 drafter. The defaults are those of the embedded one."""
    with user_errors():
        folder = set_up(target, device, threads)
        from ..train.eagle3 import Eagle3Training, train_eagle3

        limits: dict[str, Any] = limits_of(minutes, tokens, steps)
        config = Eagle3Training(
            target=folder,
            out=out,
            run=run_folder(run, out),
            prompts=prompts,
            regenerate=regenerate,
            held_out=held_out,
            lr=lr,
            batch_tokens=batch_tokens,
            length=length,
            intermediate=intermediate,
            draft_vocabulary=draft_vocabulary,
            steps=unroll,
            seed=seed,
            resume=resume,
            save_minutes=save_minutes,
            measure_minutes=measure_minutes,
            device=device,
            **limits,
        )
        typer.echo(train_eagle3(config))


@train.command()
def dflash(
    out: Out,
    target: Target = "embedded",
    run: Run = None,
    prompts: Prompts = None,
    regenerate: Regenerate = False,
    held_out: HeldOut = 8,
    minutes: SomeMinutes = None,
    tokens: SomeTokens = None,
    steps: Steps = None,
    lr: Rate = 3e-3,
    batch_tokens: BatchTokens = 3072,
    length: Length = 768,
    layers: Annotated[int, typer.Option(min=1, help="Layers; published drafters: 5.")] = 2,
    intermediate: Intermediate = 1536,
    block_size: Annotated[
        int, typer.Option(min=2, help="Rows of a block, the anchor included; published: 16.")
    ] = 8,
    num_anchors: Annotated[int, typer.Option(min=1, help="Blocks per row.")] = 128,
    loss_decay_gamma: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            show_default=False,
            help="Row k counts exp(-(k - 1) / gamma). Default: 7, 5, 4 for blocks of 16, 10, 8.",
        ),
    ] = None,
    target_layer_ids: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Layers of the target (from 0) that it reads, e.g. 1,5. Default: evenly from 1 to"
            " the last but two, one per layer of the drafter.",
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Default: the tokenizer's mask token, else an unused row of the embedding.",
        ),
    ] = None,
    seed: Seed = 5,
    resume: Resume = False,
    save_minutes: SaveMinutes = 3.0,
    measure_minutes: MeasureMinutes = 3.0,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train a DFlash drafter. The defaults are those of the embedded one."""
    with user_errors():
        folder = set_up(target, device, threads)
        from ..train.dflash import DFlashTraining, train_dflash

        limits: dict[str, Any] = limits_of(minutes, tokens, steps)
        config = DFlashTraining(
            target=folder,
            out=out,
            run=run_folder(run, out),
            prompts=prompts,
            regenerate=regenerate,
            held_out=held_out,
            lr=lr,
            batch_tokens=batch_tokens,
            length=length,
            layers=layers,
            intermediate=intermediate,
            block_size=block_size,
            num_anchors=num_anchors,
            loss_decay_gamma=loss_decay_gamma,
            target_layer_ids=numbers(target_layer_ids, "--target-layer-ids"),
            mask_token_id=mask_token_id,
            seed=seed,
            resume=resume,
            save_minutes=save_minutes,
            measure_minutes=measure_minutes,
            device=device,
            **limits,
        )
        typer.echo(train_dflash(config))


@train.command()
def vanilla(
    out: Out,
    target: Target = "embedded",
    run: Run = None,
    prompts: Prompts = None,
    regenerate: Regenerate = False,
    held_out: HeldOut = 8,
    minutes: SomeMinutes = None,
    tokens: SomeTokens = None,
    steps: Steps = None,
    lr: Rate = 3e-3,
    batch_tokens: BatchTokens = 3072,
    length: Length = 768,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    hidden: Annotated[int, typer.Option(min=2, help="Width.")] = 128,
    intermediate: Intermediate = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    distillation: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of the loss that compares with the target's distribution."
        ),
    ] = 0.5,
    gamma: Annotated[int, typer.Option(min=1, help="Chain for held-out acceptance.")] = 4,
    seed: Seed = 5,
    resume: Resume = False,
    save_minutes: SaveMinutes = 3.0,
    measure_minutes: MeasureMinutes = 3.0,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train a small language model as a drafter. The defaults are those of the embedded one."""
    with user_errors():
        folder = set_up(target, device, threads)
        from ..train.vanilla import VanillaTraining, train_vanilla

        limits: dict[str, Any] = limits_of(minutes, tokens, steps)
        config = VanillaTraining(
            target=folder,
            out=out,
            run=run_folder(run, out),
            prompts=prompts,
            regenerate=regenerate,
            held_out=held_out,
            lr=lr,
            batch_tokens=batch_tokens,
            length=length,
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            distillation=distillation,
            gamma=gamma,
            seed=seed,
            resume=resume,
            save_minutes=save_minutes,
            measure_minutes=measure_minutes,
            device=device,
            **limits,
        )
        typer.echo(train_vanilla(config))


@train.command()
def quality(
    target: Annotated[Path, typer.Option("--target", help="Folder of the target.")],
    limit: Annotated[int, typer.Option(min=4, help="Prompts of each kind.")] = 100,
    examples: Annotated[int, typer.Option(min=0, help="Texts to print of each kind.")] = 2,
) -> None:
    """Measure a target on held-out prompts, without a grammar."""
    from ..train import quality as checks

    results = checks.evaluate(target, limit)
    if examples:
        typer.echo(checks.examples(results, examples) + "\n")
    typer.echo(checks.table(results))
