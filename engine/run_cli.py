"""The options of `specsot run`. What they do is imported only when the command runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import RunOptions


def _env(name: str) -> str:
    return f"SPECSOT_{name}"


def run(
    graph: Annotated[
        str | None,
        typer.Argument(
            envvar=_env("GRAPH"),
            help="A shipped graph, a graph file, or a run.yaml to repeat. [specsot.yaml's graph]",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            envvar=_env("PROMPT"),
            help="The question; - reads it from standard input. [specsot.yaml's prompt]",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            envvar=_env("PROMPTS"),
            help="Many questions: .txt (one per line) or .jsonl (id, prompt|question|turns|task, "
            "seed, max_new_tokens).",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar=_env("JSON"), help="One JSON document on stdout.")
    ] = False,
    no_tui: Annotated[
        bool, typer.Option("--no-tui", envvar=_env("NO_TUI"), help="Plain lines, no live view.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(envvar=_env("MODEL"), help="Target: folder or Hub id.")
    ] = None,
    drafter_model: Annotated[
        str | None, typer.Option(envvar=_env("DRAFTER_MODEL"), help="Drafter: folder or Hub id.")
    ] = None,
    seed: Annotated[int | None, typer.Option(envvar=_env("SEED"))] = None,
    device: Annotated[
        str | None, typer.Option(envvar=_env("DEVICE"), help="cpu, cuda, cuda:0 ...")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(envvar=_env("DTYPE"), help="float32 (lossless), float64, bfloat16, float16."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(envvar=_env("THREADS"), help="CPU threads; at most 4 by default.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(envvar=_env("MAX_NEW_TOKENS"), help="Budget of each branch.")
    ] = None,
    outline: Annotated[
        Path | None,
        typer.Option(envvar=_env("OUTLINE"), help="A given outline instead of writing one."),
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", envvar=_env("STEP"), help="Halt before each transition.")
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a setting, e.g. drafter.kind=none."
        ),
    ] = None,
    expect_digest: Annotated[
        str | None,
        typer.Option(
            envvar=_env("EXPECT_DIGEST"), help="Exit 5 unless the output has this digest."
        ),
    ] = None,
    runs_dir: Annotated[
        Path, typer.Option(envvar=_env("RUNS_DIR"), help="Where run folders go.")
    ] = Path("runs"),
    trace: Annotated[
        str | None,
        typer.Option(
            envvar=_env("TRACE"), metavar="kv", help="kv: one trace line per KV operation too."
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", envvar=_env("QUIET"), help="Only the answer.")
    ] = False,
) -> None:
    """Answer a prompt: outline, parallel branches, speculative decoding, live.

    Examples: `specsot run`, `specsot run graphs/bim_eagle.yaml "How do bees make honey?"`,
    `specsot run eagle --prompts questions.jsonl --json`, `specsot run runs/latest/run.yaml`.
    """
    from .run_command import run_command

    options = RunOptions(
        graph,
        prompt,
        prompts,
        as_json,
        no_tui,
        model,
        drafter_model,
        seed,
        device,
        dtype,
        threads,
        max_new_tokens,
        outline,
        step,
        tuple(sets or ()),
        expect_digest,
        runs_dir,
        trace,
        quiet,
        tuple(sys.argv),
    )
    raise typer.Exit(run_command(options))
