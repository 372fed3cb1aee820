"""The options of `specsot certify`. What they do is imported only when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from ..prepare.options import RunOptions
from .compare import Prompts
from .run import Budget, Device, Drafter, Dtype, Json, Model, Outline, Seed, Sets, Threads, option

Graphs = Annotated[
    list[str] | None,
    typer.Argument(metavar="GRAPH...", help="Shipped graphs or graph files.", show_default=False),
]
Quick = Annotated[bool, option("QUICK", "Fewer prompts, seeds and tokens.", "--quick")]
Every = Annotated[bool, typer.Option("--all", help="All shipped graphs.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write DIR/GRAPH.md and .json, print no page."),
]


def certify(
    graphs: Graphs = None,
    prompts: Prompts = None,
    quick: Quick = False,
    every: Every = False,
    out: Out = None,
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
    """Certify graphs: whether their text is the target's own, held to transformers.

    Examples: `specsot certify bim_eagle --quick`,
    `specsot certify graphs/bim_eagle.yaml --dtype float64 --set drafter.nodes=12`,
    `specsot certify --all --out docs/certificates`.
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
    from ..certify.command import certify_command

    names = tuple(graphs or ())
    raise typer.Exit(certify_command(names, options, quick=quick, out=out, every=every))
