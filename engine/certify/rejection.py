"""How drafts are accepted: exact laws on toy models, and chi-square tests with real coins."""

from collections.abc import Iterator

from ...ops.sampling.settings import CHAIN_RULES, Draws, Rule, fitting_rules
from ...states.graph.graph import Graph
from .chi2 import chi2_checks, toys
from .judged import judged_round, judged_rounds
from .laws import exact_laws
from .rounds import Step, rounds
from .toys import Check
from .whole import whole_check
from .workbench import Bench

LAWS = {
    (Rule.CHAIN, Draws.SAMPLED): "chain",
    (Rule.CHAIN, Draws.BEST): "chain of drafts that were not drawn",
    (Rule.BLOCK, Draws.SAMPLED): "block",
    (Rule.BLOCK, Draws.BEST): "block of drafts that were not drawn",
    (Rule.WITH_REPLACEMENT, Draws.SAMPLED): "tree with replacement",
    (Rule.WITHOUT_REPLACEMENT, Draws.DISTINCT): "tree without replacement",
    (Rule.TOPK, Draws.BEST): "top-k tree",
}
"""The exact laws of `certify_laws`, by the rule and the draws that they are about."""
MATCHED = ("target match", "match")


def rule_of(graph: Graph) -> tuple[Rule, Draws] | None:
    """What a graph accepts drafts by; None if they are matched, or there are none."""
    sampling, drafter = graph.sampling, graph.drafter
    if sampling.accept != "rejection" or sampling.temperature == 0 or not drafter.drafts:
        return None
    draws = drafter.draws_as
    rule = sampling.rule or fitting_rules(draws, drafter.is_chain)[0]
    return Rule(rule), draws


def rejection_checks(bench: Bench) -> Iterator[Check]:
    """The graph's own rule; without ``--quick`` every other one too."""
    graph, extent = bench.job.program.graph, bench.extent
    found = rule_of(graph)
    if not graph.sampling.lossless:
        text = "sampling.skip_sample_adjustment: no residual is drawn from after a rejection"
        yield Check("rejection/adjusted", False, {}, text)
    if found is not None:
        yield whole_check(bench)
    only = None if extent.every_rule else [LAWS[found] if found else MATCHED[0]]
    bench.tell("exact laws on toy models ...")
    yield from exact_laws(extent.toys, only=only)
    steps = _steps(graph, found)
    if extent.every_rule:
        steps |= rounds() | judged_rounds()
    for name, step in steps.items():
        bench.tell(f"chi-square: {name} ...")
        for title, toy in toys().items():
            yield from chi2_checks(f"{name}, {title}", step, toy, samples=extent.samples)


def _steps(graph: Graph, found: tuple[Rule, Draws] | None) -> dict[str, Step]:
    """The rounds that are the graph's own."""
    if found is None:
        return {name: step for name, step in rounds().items() if name in MATCHED}
    rule, draws = found
    skipped = graph.sampling.skip_sample_adjustment
    name = f"{rule.value} of {draws.value} drafts" if rule in CHAIN_RULES else f"{rule.value} tree"
    name += ", as run" + (", not adjusted" if skipped else "")
    return {name: judged_round(rule, draws, skip_sample_adjustment=skipped)}
