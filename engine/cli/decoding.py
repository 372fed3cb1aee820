"""`specsot compare | sweep | bench | certify | verify-run`; their modules are imported on use."""

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Annotated

from typer import Exit

from ..prepare.options import JSONL, OPTIONS, SESSION, RunOptions
from ..record.run_folder import LATEST
from ..shell import print_json, put
from .completing import benched_of, graph_names_of, peers_of, varied_of
from .options import RUNS_DIR, Json, Runs, Which, argument, option, takes

WIDTH = 96  # of the list of experiments
PROMPTS = replace(
    OPTIONS["prompts"], help=f".txt (one per line) or .jsonl {JSONL} [ten packaged ones]."
)
TablesDir = Annotated[
    Path | None, option("Keep tables there, and go on where it was left.", "--out", metavar="DIR")
]


@takes("as_json", *SESSION, prompts=PROMPTS)
def compare(
    options: RunOptions,
    sides: Annotated[
        list[str],
        argument(
            "Shipped graphs or graph files; GRAPH@PATH=VALUE,... with settings of its own.",
            metavar="GRAPH GRAPH...",
            autocompletion=graph_names_of,
        ),
    ],
    out: TablesDir = None,
) -> None:
    """Compare graphs: whether their tokens are equal where they must be, and what each costs.

    Examples: `specsot compare bim_plain bim_eagle`,
    `specsot compare bim_eagle bim_eagle@layout.kind=batching,drafter.num_draft_tokens=8`,
    `specsot compare graphs/bim_eagle.yaml mine.yaml --prompts questions.txt --json`.
    """
    from ..bench.command import compare_command

    raise Exit(compare_command(tuple(sides), replace(options, argv=tuple(sys.argv)), out))


@takes("as_json", *SESSION, prompts=PROMPTS)
def sweep(
    options: RunOptions,
    graph: Annotated[
        str,
        argument(
            "A shipped graph or a graph file.", metavar="GRAPH", autocompletion=graph_names_of
        ),
    ],
    vary: Annotated[
        list[str],
        option(
            "Values of a setting; may be repeated.",
            metavar="PATH=VALUE,...",
            autocompletion=varied_of,
        ),
    ],
    out: TablesDir = None,
) -> None:
    """Vary settings of a graph: every combination, compared as `specsot compare` does.

    Examples: `specsot sweep bim_eagle --vary drafter.num_draft_tokens=4,8,16`,
    `specsot sweep bim_eagle --vary drafter.top_k=2,4 --vary layout.kind=bim,batching --out swept`.
    """
    from ..bench.command import sweep_command

    session_options = replace(options, argv=tuple(sys.argv))
    raise Exit(sweep_command(graph, tuple(vary), session_options, out))


@takes("as_json", *SESSION, prompts=PROMPTS)
def bench(
    options: RunOptions,
    refs: Annotated[
        list[str] | None,
        argument(
            "A shipped experiment or its file; or graphs (GRAPH@PATH=VALUE,...), hf, hf-assisted.",
            metavar="EXPERIMENT | GRAPH...",
            show_default=False,
            autocompletion=benched_of,
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(
            "Sides that do not vary: graphs, hf, hf-assisted, hf-lookup. Ratios are to the first.",
            metavar="SIDE,...",
            autocompletion=peers_of,
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        option(
            "Values of a setting; may be repeated. parts=1,2,4: parts of a given outline.",
            metavar="PATH=VALUE,...",
            autocompletion=varied_of,
        ),
    ] = None,
    repeats: Annotated[int | None, option("Of every prompt [3].", min=1, max=1000)] = None,
    count: Annotated[int | None, option("Only so many of the prompts.", min=1, max=1024)] = None,
    out: Annotated[
        Path | None, option("Keep rounds, tables and pictures there.", metavar="DIR")
    ] = None,
    resume: Annotated[Path | None, option("Go on with what was kept there.", metavar="DIR")] = None,
    baseline: Annotated[
        Path | None, option("A kept result.json; exit 6 where a figure got worse.", metavar="FILE")
    ] = None,
    plot: Annotated[bool, option("Pictures too, SVG and PNG, into --out.", "--plot")] = False,
    tune: Annotated[
        bool,
        option(
            "Instead: find the tree sizes, draft lengths or blocks of GRAPH that pay here, and"
            " print a profile (kept as profile.yaml in --out).",
            "--tune",
        ),
    ] = False,
    listed: Annotated[bool, option("Instead: the shipped experiments.", "--list")] = False,
) -> None:
    """Measure experiments: paired, repeated, with intervals, beside transformers.

    Examples: `specsot bench --list`, `specsot bench drafters --out drafters --plot`,
    `specsot bench eagle dflash --against hf,hf-assisted --repeats 5`,
    `specsot bench drafters --baseline docs/benchmarks/drafters.json`,
    `specsot bench --tune bim_eagle --profile smollm2 --out tuned`.
    """
    if listed:
        _list_experiments(options.as_json)
        return
    from ..bench.command import bench_command, tune_command
    from ..bench.experiment import BenchOptions

    bench_options = BenchOptions(
        refs=tuple(refs or ()),
        against=against,
        vary=tuple(vary or ()),
        repeats=repeats,
        count=count,
        out=out,
        baseline=baseline,
        plot=plot,
    )
    options = replace(options, argv=tuple(sys.argv))
    if tune:
        raise Exit(tune_command(bench_options, options))
    raise Exit(bench_command(bench_options, options, resume))


def _list_experiments(as_json: bool) -> None:
    """The shipped experiments: what each reproduces, and what the original reported."""
    from ..bench.experiment import experiment_names, find_experiment, read_experiment

    files = (find_experiment(name) for name in experiment_names())
    experiments = [read_experiment(file)[0] for file in files if file is not None]
    if as_json:
        fields = {"doc", "reproduces", "reported", "sides", "against", "vary"}
        print_json(experiments={one.name: one.model_dump(include=fields) for one in experiments})
        return
    for one in experiments:
        notes = [f"reproduces: {one.reproduces}"] if one.reproduces else []
        notes += [f"{each.source}: {each.says}" for each in one.reported]
        put(f"{one.name}: {one.doc}\n")
        for note in notes:
            text = " ".join(note.split())
            put(fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ") + "\n")
        put("\n")


@takes("as_json", *SESSION, "workers", "cluster", prompts=PROMPTS)
def certify(
    options: RunOptions,
    graphs: Annotated[
        list[str] | None,
        argument(
            "Shipped graphs or graph files.",
            metavar="GRAPH...",
            show_default=False,
            autocompletion=graph_names_of,
        ),
    ] = None,
    quick: Annotated[
        bool, option("Fewer prompts, seeds and tokens.", "--quick", envvar="SPECSOT_QUICK")
    ] = False,
    every: Annotated[bool, option("All shipped graphs.", "--all")] = False,
    out: Annotated[
        Path | None, option("Write DIR/GRAPH.md and .json, print no page.", metavar="DIR")
    ] = None,
) -> None:
    """Certify graphs: whether their text is the target's own, compared with transformers.

    Examples: `specsot certify bim_eagle --quick`,
    `specsot certify graphs/bim_eagle.yaml --dtype float64 --set drafter.num_draft_tokens=12`,
    `specsot certify --all --out docs/certificates`, `specsot certify bim_eagle --workers 2`.
    """
    from ..certify.certificate import certify_command

    names = tuple(graphs or ())
    raise Exit(certify_command(names, options, quick=quick, out=out, every=every))


def verify_run(
    run: Which = LATEST,
    runs_dir: Runs = RUNS_DIR,
    as_json: Json = False,
    threads: Annotated[
        int | None, option("CPU threads [the run's].", envvar="SPECSOT_THREADS")
    ] = None,
) -> None:
    """Hold the tokens of a finished run to plain transformers, and to nothing of specsot's.

    Example: `specsot run bim_eagle`, then `specsot verify-run latest`.
    """
    from ..certify.verify_run import verify_command

    raise Exit(verify_command(run, runs_dir, as_json, threads))
