"""`specsot bench`; what it does is imported when it is called."""

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from ..prepare.options import SESSION, RunOptions
from ..shell import exit_code, print_json, put
from .completing import benched_of, peers_of, varied_of
from .decoding import PROMPTS
from .options import takes

WIDTH = 96

Refs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="EXPERIMENT | GRAPH...",
        help="A shipped experiment or its file; or graphs (GRAPH@PATH=VALUE,...), hf, hf-assisted.",
        show_default=False,
        autocompletion=benched_of,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="SIDE,...",
        help="Sides that do not vary: graphs, hf, hf-assisted, hf-lookup. Ratios are to the first.",
        autocompletion=peers_of,
    ),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        metavar="PATH=VALUE,...",
        help="Values of a setting; may be repeated. parts=1,2,4: parts of a given outline.",
        autocompletion=varied_of,
    ),
]
Repeats = Annotated[int | None, typer.Option(min=1, max=1000, help="Of every prompt [3].")]
Number = Annotated[
    int | None, typer.Option("--count", min=1, max=1024, help="Only so many of the prompts.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Keep rounds, tables and pictures there."),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Go on with what was kept there.")
]
Baseline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A kept result.json; exit 6 where a figure got worse."),
]
Pictures = Annotated[bool, typer.Option("--plot", help="Pictures too, SVG and PNG, into --out.")]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        help="Instead: find the tree sizes, draft lengths or blocks of GRAPH that pay here, and"
        " print a profile (kept as profile.yaml in --out).",
    ),
]
List = Annotated[bool, typer.Option("--list", help="Instead: the shipped experiments.")]


@takes("as_json", *SESSION, prompts=PROMPTS)
def bench(
    options: RunOptions,
    refs: Refs = None,
    against: Against = None,
    vary: Vary = None,
    repeats: Repeats = None,
    count: Number = None,
    out: Out = None,
    resume: Resume = None,
    baseline: Baseline = None,
    plot: Pictures = False,
    tune: Tune = False,
    listed: List = False,
) -> None:
    """Measure experiments: paired, repeated, with intervals, beside transformers.

    Examples: `specsot bench --list`, `specsot bench drafters --out drafters --plot`,
    `specsot bench eagle dflash --against hf,hf-assisted --repeats 5`,
    `specsot bench drafters --baseline docs/benchmarks/drafters.json`,
    `specsot bench --tune bim_eagle --profile smollm2 --out tuned`.
    """
    if listed:
        raise typer.Exit(list_experiments(options.as_json))
    from ..bench.command import bench_command
    from ..bench.experiment import BenchOptions

    asked = BenchOptions(
        tuple(refs or ()), against, tuple(vary or ()), repeats, count, out, baseline, plot
    )
    own = replace(options, argv=tuple(sys.argv))
    if tune:
        from ..bench.tune import tune_command

        raise typer.Exit(tune_command(asked, own))
    raise typer.Exit(bench_command(asked, own, resume))


@exit_code
def list_experiments(as_json: bool) -> int:
    """What ships: what each reproduces, and what the original reported."""
    from ..bench.experiment import experiment_names, find_experiment, read_experiment

    files = (find_experiment(name) for name in experiment_names())
    known = [read_experiment(file)[0] for file in files if file is not None]
    if as_json:
        fields = {"doc", "reproduces", "reported", "sides", "against", "vary"}
        print_json(experiments={one.name: one.model_dump(include=fields) for one in known})
        return 0
    for one in known:
        lines = [f"{one.name}: {one.doc}"]
        lines += [_told(f"reproduces: {one.reproduces}")] if one.reproduces else []
        lines += [_told(f"{each.source}: {each.says}") for each in one.reported]
        put("\n".join(lines) + "\n\n")
    return 0


def _told(text: str) -> str:
    return fill(" ".join(text.split()), WIDTH, initial_indent="  ", subsequent_indent="    ")
