"""The options of `specsot certify`. What they do is imported only when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from ..prepare.options import SESSION, RunOptions
from .compare import PROMPTS
from .options import takes

Graphs = Annotated[
    list[str] | None,
    typer.Argument(metavar="GRAPH...", help="Shipped graphs or graph files.", show_default=False),
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


@takes("as_json", *SESSION, prompts=PROMPTS)
def certify(
    options: RunOptions,
    graphs: Graphs = None,
    quick: Quick = False,
    every: Every = False,
    out: Out = None,
) -> None:
    """Certify graphs: whether their text is the target's own, held to transformers.

    Examples: `specsot certify bim_eagle --quick`,
    `specsot certify graphs/bim_eagle.yaml --dtype float64 --set drafter.nodes=12`,
    `specsot certify --all --out docs/certificates`.
    """
    from ..certify.command import certify_command

    names = tuple(graphs or ())
    raise typer.Exit(certify_command(names, options, quick=quick, out=out, every=every))
