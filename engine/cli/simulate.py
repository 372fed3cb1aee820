"""`specsot simulate`: what a policy does to waiting times, on arrivals, without a model."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

from ..errors import UsageError
from ..prepare.files import open_graph
from ..record.run_folder import find_run
from ..shell import complain, print_json
from .completing import graph_names_of
from .options import RUNS_DIR, Runs, Sets, argument, option

POLICIES = "fcfs,max_throughput,sot_priority"


def simulate(
    graph: Annotated[
        str,
        argument(
            "Whose scheduler and pool: a path or a shipped name, layout bim.",
            autocompletion=graph_names_of,
        ),
    ] = "bim_eagle",
    arrivals: Annotated[
        str, option("poisson:RATE or bursts:RATE:SIZE a second, or a file of JSON lines.")
    ] = "poisson:4",
    requests: Annotated[int, option("How many arrivals are made up.", min=1)] = 1000,
    policies: Annotated[str, option("Which policies, with commas.")] = POLICIES,
    costs: Annotated[
        Path | None, option("Costs of steps, as --fit saves them.", metavar="FILE")
    ] = None,
    fit: Annotated[
        str | None, option("Instead: fit costs to a kept run, save them in --costs.", metavar="RUN")
    ] = None,
    prompt: Annotated[str, option("Tokens of a prompt, from-to.")] = "20-120",
    answer: Annotated[str, option("Tokens of an answer, or of a part.")] = "16-256",
    outline: Annotated[str, option("Tokens of an outline.")] = "20-60",
    parts: Annotated[str, option("Parts of an answer; 0-0: no outlines.")] = "0-0",
    shared: Annotated[
        str, option("NxTOKENS: N beginnings that prompts share, of so many tokens.")
    ] = "0x0",
    cluster: Annotated[
        str | None, option("Workers of a cluster; several, with commas, are compared.")
    ] = None,
    tp: Annotated[
        str, option("Of a cluster: workers that write an outline together, with commas.")
    ] = "1",
    link: Annotated[
        str, option("Of a cluster: loopback, 10gbe, 100gbe, nvlink, or US:GB_PER_S; commas.")
    ] = "nvlink",
    shape: Annotated[
        str, option("Of a cluster's target: llama-8b, llama-70b, or a folder.")
    ] = "llama-8b",
    together: Annotated[
        bool, option("In a cluster: parts stay with their outline.", "--together")
    ] = False,
    seed: Annotated[int, option("Of arrivals and lengths.")] = 0,
    sets: Sets = None,
    as_json: Annotated[bool, option("One JSON document.", "--json")] = False,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Serve arrivals with the real scheduler on a clock of its own, and compare policies.

    Examples: `specsot simulate --fit latest --costs costs.json`,
    `specsot simulate bim_eagle --costs costs.json --arrivals bursts:8:40 --parts 2-6`,
    `specsot simulate bim_eagle --cluster 8,64 --tp 1,4 --link nvlink --policies sot_priority`.
    """
    from ..record.trace import records_of
    from ..simulate import command
    from ..simulate.arrivals import Workload
    from ..simulate.arrivals import arrivals as arrivals_of
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
    stems, tokens = _numbers("--shared", shared, "x")
    parts_of = _numbers("--parts", parts)
    ranges = (_numbers("--prompt", prompt), _numbers("--answer", answer))
    work = Workload(*ranges, _numbers("--outline", outline), parts_of, stems, tokens)
    cost = StepCost() if costs is None else StepCost.load(costs)
    program = open_graph(graph, sets or ())
    names = [name for name in policies.split(",") if name]
    source = partial(arrivals_of, arrivals, requests, work, seed)
    if cluster is not None:
        setups = command.cluster_setups(cluster, tp, link, shape=shape, together=together)
        results = command.simulate_clusters(
            program.graph, cost, names, source, setups=setups, seed=seed
        )
    else:
        results = command.simulate(program.graph, cost, names, source, seed=seed)
    if as_json:
        print_json(**{"policies" if cluster is None else "clusters": results})
    elif cluster is None:
        print(command.described(results))
    else:
        print(command.clusters_described(results))


def _numbers(option: str, text: str, between: str = "-") -> tuple[int, int]:
    """Two numbers of an option; of a range the first is not larger."""
    match = re.fullmatch(rf"(\d{{1,9}}){between}(\d{{1,9}})", text)
    first, last = map(int, match.groups()) if match else (1, 0)
    if match is None or (between == "-" and first > last):
        raise UsageError(f"{option} {text}: two numbers, as in 3{between}8")
    return first, last
