"""`specsot run | compare | sweep | certify`; their modules are imported on use."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..prepare.options import JSONL, OPTIONS, SESSION, RunOptions
from ..record.run_folder import LATEST
from .completing import graph_names_of, varied_of
from .options import RUNS_DIR, Json, Runs, Which, takes

PROMPTS = replace(
    OPTIONS["prompts"], help=f".txt (one per line) or .jsonl {JSONL} [ten packaged ones]."
)
Sides = Annotated[
    list[str],
    typer.Argument(
        metavar="GRAPH GRAPH...",
        help="Shipped graphs or graph files; GRAPH@PATH=VALUE,... with settings of its own.",
        autocompletion=graph_names_of,
    ),
]
Graphs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="GRAPH...",
        help="Shipped graphs or graph files.",
        show_default=False,
        autocompletion=graph_names_of,
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", envvar="SPECSOT_QUICK", help="Fewer prompts, seeds and tokens."),
]
Every = Annotated[bool, typer.Option("--all", help="All shipped graphs.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write DIR/GRAPH.md and .json, print no page."),
]
TablesDir = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Keep tables there, and go on where it was left."),
]
Varied = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH", help="A shipped graph or a graph file.", autocompletion=graph_names_of
    ),
]
Vary = Annotated[
    list[str],
    typer.Option(
        "--vary",
        metavar="PATH=VALUE,...",
        help="Values of a setting; may be repeated.",
        autocompletion=varied_of,
    ),
]


@takes(*OPTIONS)
def run(options: RunOptions) -> None:
    """Answer a prompt: outline, parallel branches, speculative decoding, live.

    Examples: `specsot run`, `specsot run graphs/bim_eagle.yaml "How do bees make honey?"`,
    `specsot run eagle --prompts questions.jsonl --json`, `specsot run runs/latest/run.yaml`.
    """
    from .run_command import run_command

    raise typer.Exit(run_command(replace(options, argv=tuple(sys.argv))))


@takes("as_json", *SESSION, prompts=PROMPTS)
def compare(options: RunOptions, sides: Sides, out: TablesDir = None) -> None:
    """Compare graphs: whether their tokens are equal where they must be, and what each costs.

    Examples: `specsot compare bim_plain bim_eagle`,
    `specsot compare bim_eagle bim_eagle@layout.kind=batching,drafter.num_draft_tokens=8`,
    `specsot compare graphs/bim_eagle.yaml mine.yaml --prompts questions.txt --json`.
    """
    from ..bench.compare import compare_command

    session_options = replace(options, argv=tuple(sys.argv))
    raise typer.Exit(compare_command(tuple(sides), session_options, out))


@takes("as_json", *SESSION, prompts=PROMPTS)
def sweep(options: RunOptions, graph: Varied, vary: Vary, out: TablesDir = None) -> None:
    """Vary settings of a graph: every combination, compared as `specsot compare` does.

    Examples: `specsot sweep bim_eagle --vary drafter.num_draft_tokens=4,8,16`,
    `specsot sweep bim_eagle --vary drafter.top_k=2,4 --vary layout.kind=bim,batching --out swept`.
    """
    from ..bench.compare import sweep_command

    session_options = replace(options, argv=tuple(sys.argv))
    raise typer.Exit(sweep_command(graph, tuple(vary), session_options, out))


@takes("as_json", *SESSION, "workers", "cluster", prompts=PROMPTS)
def certify(
    options: RunOptions,
    graphs: Graphs = None,
    quick: Quick = False,
    every: Every = False,
    out: Out = None,
) -> None:
    """Certify graphs: whether their text is the target's own, compared with transformers.

    Examples: `specsot certify bim_eagle --quick`,
    `specsot certify graphs/bim_eagle.yaml --dtype float64 --set drafter.num_draft_tokens=12`,
    `specsot certify --all --out docs/certificates`, `specsot certify bim_eagle --workers 2`.
    """
    from ..certify.certificate import certify_command

    names = tuple(graphs or ())
    raise typer.Exit(certify_command(names, options, quick=quick, out=out, every=every))


def verify_run(
    run: Which = LATEST,
    runs_dir: Runs = RUNS_DIR,
    as_json: Json = False,
    threads: Annotated[
        int | None, typer.Option(envvar="SPECSOT_THREADS", help="CPU threads [the run's].")
    ] = None,
) -> None:
    """Hold the tokens of a finished run to plain transformers, and to nothing of specsot's.

    Example: `specsot run bim_eagle`, then `specsot verify-run latest`.
    """
    from ..certify.verify_run import verify_command

    raise typer.Exit(verify_command(run, runs_dir, as_json, threads))
