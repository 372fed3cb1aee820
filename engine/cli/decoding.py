"""`specsot compare | sweep | bench | certify | simulate`; their modules are imported on use."""

import re
from pathlib import Path
from textwrap import fill
from typing import Literal

from ..errors import Code, UsageError
from ..prepare.files import open_graph
from ..prepare.options import AXIS, JSONL, SESSION, VALUES, BenchOptions, RunOptions
from ..record.run_folder import find_run
from ..shell import complain, print_json, put
from .completing import settings_of
from .options import RUNS_DIR, SETS, flag, graph_argument, option, show_result, takes

WIDTH = 96  # of the list of experiments
PROMPTS = f".txt (one per line) or .jsonl {JSONL} [ten packaged ones]."
OUT = option("Folder for tables; an interrupted command continues there.", "--out", metavar="DIR")
SIDES = "Shipped graphs or graph files; GRAPH@PATH=VALUE,... with settings of its own."


@takes("as_json", *SESSION, prompts=PROMPTS)
def compare(
    options: RunOptions,
    sides: list[str] = graph_argument(SIDES, ..., metavar="GRAPH GRAPH..."),
    out: Path | None = OUT,
) -> int:
    """Compare the tokens and the cost of graphs.

    Examples: `specsot compare bim_plain bim_eagle`,
    `specsot compare bim_eagle bim_eagle@layout.kind=batching,drafter.num_draft_tokens=8`,
    `specsot compare graphs/bim_eagle.yaml mine.yaml --prompts questions.txt --json`."""
    from ..bench.command import compare_command

    return compare_command(tuple(sides), options, out)


@takes("as_json", *SESSION, prompts=PROMPTS)
def sweep(
    options: RunOptions,
    graph: str = graph_argument("A shipped graph or a graph file.", ..., metavar="GRAPH"),
    vary: list[str] = option(VALUES, default=..., metavar=AXIS, autocompletion=settings_of),
    out: Path | None = OUT,
) -> int:
    """Vary settings of a graph: every combination, compared as `specsot compare` does.

    Examples: `specsot sweep bim_eagle --vary drafter.num_draft_tokens=4,8,16`,
    `specsot sweep bim_eagle --vary drafter.top_k=2,4 --vary layout.kind=bim,batching --out swept`.
    """
    from ..bench.command import compare_command

    return compare_command((graph,), options, out, vary)


@takes("as_json", *SESSION, prompts=PROMPTS)
def bench(options: RunOptions, experiment: BenchOptions) -> int:
    """Measure experiments: paired, repeated, with intervals, against transformers.

    Examples: `specsot bench --list`, `specsot bench drafters --out drafters --plot`,
    `specsot bench eagle dflash --against hf,hf-assisted --repeats 5`,
    `specsot bench drafters --baseline docs/benchmarks/drafters.json`,
    `specsot bench eagle recycle --set-of gsm8k --prompts test.jsonl`,
    `specsot bench --tune bim_eagle --profile smollm2 --out tuned`."""
    if not experiment.listed:
        from ..bench.command import bench_command, tune_command

        return (tune_command if experiment.tune else bench_command)(experiment, options)
    # The shipped experiments: what each reproduces, and what the original reported.
    from ..bench.experiment import experiment_names, find_experiment, read_experiment

    files = (find_experiment(name) for name in experiment_names())
    experiments = [read_experiment(file)[0] for file in files if file is not None]
    if options.as_json:
        fields = {"doc", "reproduces", "reported", "sides", "against", "vary"}
        print_json(experiments={one.name: one.model_dump(include=fields) for one in experiments})
        return Code.OK
    for one in experiments:
        notes = [f"reproduces: {one.reproduces}"] if one.reproduces else []
        notes += [f"{each.source}: {each.says}" for each in one.reported]
        put(f"{one.name}: {one.doc}\n")
        for note in notes:
            text = " ".join(note.split())
            put(fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ") + "\n")
        put("\n")
    return Code.OK


@takes("as_json", *SESSION, "workers", "cluster", prompts=PROMPTS)
def certify(
    options: RunOptions,
    graphs: list[str] | None = graph_argument("Shipped graphs or graph files.", metavar="GRAPH..."),
    quick: bool = flag("Fewer prompts, seeds and tokens.", "--quick", envvar="SPECSOT_QUICK"),
    every: bool = flag("All shipped graphs.", "--all"),
    out: Path | None = option("Write DIR/GRAPH.json, and DIR/README.md's table.", metavar="DIR"),
) -> int:
    """Check against transformers that the text of graphs is the target's own.

    Examples: `specsot certify bim_eagle --quick`,
    `specsot certify graphs/bim_eagle.yaml --dtype float64 --set drafter.num_draft_tokens=12`,
    `specsot certify --all --out docs/certificates`, `specsot certify bim_eagle --workers 2`."""
    from ..certify.certificate import certify_command

    return certify_command(tuple(graphs or ()), options, quick=quick, out=out, every=every)


POLICIES = "fcfs,max_throughput,sot_priority"
ARRIVALS = "poisson:RATE or bursts:RATE:SIZE a second, or a file of JSON lines."
POOL = "Whose scheduler and pool: a path or a shipped name, layout bim."
TP = "Of a cluster: workers that write an outline together, with commas."
LINK = "Of a cluster: loopback, 10gbe, 100gbe or nvlink, with commas."


def simulate(
    graph: str = graph_argument(POOL, "bim_eagle"),
    arrivals: str = option(ARRIVALS, default="poisson:4"),
    requests: int = option("Number of random arrivals.", default=1000, min=1),
    policies: str = option("Policies, with commas.", default=POLICIES),
    costs: Path | None = option("Costs of steps, as --fit saves them.", metavar="FILE"),
    fit: str | None = option(
        "Instead: fit costs to a recorded run, save them in --costs.", metavar="RUN"
    ),
    prompt: str = option("Tokens of a prompt, from-to.", default="20-120"),
    answer: str = option("Tokens of an answer, or of a part.", default="16-256"),
    outline: str = option("Tokens of an outline.", default="20-60"),
    parts: str = option("Parts of an answer; 0-0: no outlines.", default="0-0"),
    shared: str = option("NxTOKENS: N shared prefixes of TOKENS tokens.", default="0x0"),
    cluster: str | None = option("Workers of a cluster; several, with commas, are compared."),
    tp: str = option(TP, default="1"),
    link: str = option(LINK, default="nvlink"),
    shape: Literal["llama-8b", "llama-70b"] = option("Of a cluster's target.", default="llama-8b"),
    together: bool = flag("In a cluster: parts stay with their outline.", "--together"),
    seed: int = option("Of arrivals and lengths.", default=0),
    sets: list[str] | None = SETS,
    as_json: bool = flag("One JSON document.", "--json"),
    runs_dir: Path = RUNS_DIR,
) -> None:
    """Run the scheduler on simulated arrivals and a simulated clock, and compare policies.

    Examples: `specsot simulate --fit latest --costs costs.json`,
    `specsot simulate bim_eagle --costs costs.json --arrivals bursts:8:40 --parts 2-6`,
    `specsot simulate bim_eagle --cluster 8,64 --tp 1,4 --link nvlink --policies sot_priority`."""
    from ..record.replay import records_of
    from ..simulate import command, world
    from ..simulate.cluster import ClusterSimulation
    from ..simulate.costs import StepCost
    from ..simulate.costs import fit as fit_costs

    if fit is not None:
        if costs is None:
            raise UsageError("--fit saves what it finds: where? --costs FILE")
        fitted = fit_costs(records_of(find_run(fit, runs_dir)))
        fitted.save(costs)
        share = f"{100 * fitted.error:.0f} % off in the mean"
        complain(f"{costs}: costs of steps, from {fitted.steps} of them, {share}")
        return
    texts = {"prompt": prompt, "answer": answer, "outline": outline, "parts": parts}
    ranges = {name: _numbers(f"--{name}", text) for name, text in texts.items()}
    stems, tokens = _numbers("--shared", shared, "x")
    work = world.Workload(**ranges, stems=stems, shared=tokens)
    cost = StepCost() if costs is None else StepCost.load(costs)
    program = open_graph(graph, sets or ())
    names = [name for name in policies.split(",") if name]
    if "sot_priority" in names and not work.parts[1] and ":" in arrivals:
        complain("note: sot_priority ranks plain answers as fcfs; --parts gives answers parts")
    results = {}
    if cluster is None:
        for name in names:
            one = world.Simulation(program.graph, cost, name, seed)
            results[name] = command.served_by(one, world.arrivals(arrivals, requests, work, seed))
        lines = command.table(results, command.POLICIES, command.POLICY_COST)
        show_result(as_json, lines, policies=results)
        return
    if len(names) != 1:
        raise UsageError("--cluster compares clusters under one policy: --policies NAME")
    for setup in command.setups(cluster, tp, link, shape=shape, together=together):
        clusters = ClusterSimulation(program.graph, cost, names[0], setup, seed=seed)
        come = world.arrivals(arrivals, requests, work, seed)
        results[setup.name] = command.served_by(clusters, come)
    lines = command.table(results, command.CLUSTERS, command.CLUSTER_COST)
    show_result(as_json, lines, clusters=results)


def _numbers(option: str, text: str, between: str = "-") -> tuple[int, int]:
    """Two numbers of an option; of a range the first is not larger."""
    match = re.fullmatch(rf"(\d{{1,9}}){between}(\d{{1,9}})", text)
    first, last = map(int, match.groups()) if match else (1, 0)
    if match is None or (between == "-" and first > last):
        raise UsageError(f"{option} {text}: two numbers, as in 3{between}8")
    return first, last
