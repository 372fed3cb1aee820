"""What only the whole graph can tell about its blocks `beam`, `blend`, `skeleton`, `sampling`."""

from collections.abc import Iterator
from itertools import pairwise

from ...ops.registry import OpTable
from ...ops.sampling.settings import Draws, fitting_rules
from ..yaml.codes import ProblemCode
from ..yaml.source import Problem, Source
from .blocks import BeamBlock, BlendBlock, Sampling
from .drafter_settings import DrafterSettings
from .graph import Graph, Skeleton

FOLD = "branch.fold_"
PLAN = "schedule.plan_"
STEP = "step"


def check_blocks(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """Every check of this module."""
    yield from _check_sampling(graph, src)
    yield from _check_samples(graph, src)
    if graph.outline_drafter is not None:
        yield from _check_two_drafters(graph, graph.outline_drafter, src)
    if graph.skeleton is not None:
        yield from _check_skeleton(graph, graph.skeleton, src)
    if graph.blend is not None:
        yield from _check_blend(graph, graph.blend, src)
    if graph.beam is not None:
        yield from _check_beam(graph, graph.beam, src)
        yield from _foreign_ops(graph, src, table)


def check_schedule(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """Whoever starts is decided by the state `schedule`: a graph from before there was one says
    so in one problem."""
    entries = [entry for _, _, entry in graph.calls(table) if entry is not None]
    planned = any(STEP in entry.declared.writes for entry in entries)
    users = sorted({entry.name for entry in entries if STEP in entry.reads})
    if users and not planned:
        message = (
            f"no state runs {PLAN!r}, which decides what {', '.join(users)} start: write "
            f"`initial: schedule`, the states `schedule: {{ops: [{PLAN}]}}` and "
            "`idle: {ops: [schedule.wait]}`, and let every state that commits, parses or merges "
            "return to schedule, whose ways out are those of graphs/machines/decode.yaml"
        )
        yield src.problem(("states",), message, ProblemCode.NO_SCHEDULE, key=True)


def _check_beam(graph: Graph, beam: BeamBlock, src: Source) -> Iterator[Problem]:
    """A search writes whole answers, undrafted and undrawn; its rows must fit."""
    if graph.drafter.kind != "none":
        message = f"beam search takes no drafter: the kind must be none, not {graph.drafter.kind}"
        yield src.problem(("drafter", "kind"), message, ProblemCode.BEAM_ALONE)
    if graph.skeleton is not None:
        message = "beam search writes one answer: a graph with the block `beam` has no skeleton"
        yield src.problem(("skeleton",), message, ProblemCode.BEAM_ALONE, key=True)
    for name, usual in Sampling.model_validate({}):
        if getattr(graph.sampling, name) != usual:
            message = f"beam search draws nothing: {name} must be {usual}"
            yield src.problem(("sampling", name), message, ProblemCode.BEAM_ALONE)
    tokens = graph.limits.max_new_tokens
    slots = 2 + beam.num_beams * tokens
    if slots > graph.layout.kv_slots:
        size = f"1 prompt token + {beam.num_beams} beams with {tokens} tokens + 1 = {slots} slots"
        message = f"{size}, but layout.kv_slots is {graph.layout.kv_slots}"
        yield src.problem(("beam", "num_beams"), message, ProblemCode.BUDGET)


def _foreign_ops(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """Whatever else commits tokens knows nothing of hypotheses."""
    for at, call, entry in graph.calls(table):
        if entry and "batch" in entry.declared.drops and "beam" not in entry.declared.needs:
            message = f"{call.op!r} has no place in a beam search: it commits single tokens"
            yield src.problem(at, message, ProblemCode.BEAM_OP)


def _check_blend(graph: Graph, blend: BlendBlock, src: Source) -> Iterator[Problem]:
    """Check layers and ratios go together; what the rest of the graph allows."""
    if not blend.check_layers:
        yield src.problem(("blend", "check_layers"), "must not be empty", ProblemCode.BLEND_LAYERS)
        return
    for i, (before, after) in enumerate(pairwise(blend.check_layers), 1):
        if after <= before:
            message = f"check layers must increase, but {after} follows {before}"
            yield src.problem(("blend", "check_layers", i), message, ProblemCode.BLEND_LAYERS)
    if len(blend.ratios) != len(blend.check_layers):
        message = f"one share per check layer: {len(blend.ratios)} for {len(blend.check_layers)}"
        yield src.problem(("blend", "ratios"), message, ProblemCode.BLEND_RATIOS)
    for i, (more, less) in enumerate(pairwise(blend.ratios), 1):
        if less > more:
            message = f"shares must not grow, but {less} follows {more}"
            yield src.problem(("blend", "ratios", i), message, ProblemCode.BLEND_RATIOS)
    if graph.beam is not None:
        message = "beam search reuses nothing: a graph with the block `beam` has no block `blend`"
        yield src.problem(("blend",), message, ProblemCode.BEAM_ALONE, key=True)
    alone = (
        graph.layout.kind == "bim" and graph.layout.max_num_branches == 1 and graph.skeleton is None
    )
    if blend.mask == "bottom_right" and not alone:
        message = (
            "bottom_right is for one sequence: layout bim with max_num_branches 1, and no skeleton"
        )
        yield src.problem(("blend", "mask"), message, ProblemCode.BLEND_MASK)


def _check_skeleton(graph: Graph, skeleton: Skeleton, src: Source) -> Iterator[Problem]:
    """A branch that gets documents must be able to search for them.

    Parts that are combined must be folded somewhere, and reused as a block says.
    """
    if skeleton.documents == "branches" and "Search" not in skeleton.tools:
        message = "branches get what they search for, but skeleton.tools has no 'Search'"
        yield src.problem(("skeleton", "documents"), message, ProblemCode.NO_SEARCH)
    at = ("skeleton", "merge")
    merge = skeleton.merge
    if merge == "concat":
        return
    if all(call.op != FOLD for state in graph.states.values() for call in state.ops):
        message = f"{merge}, but no state runs the op {FOLD!r} that folds the parts"
        yield src.problem(at, message, ProblemCode.NO_FOLD)
    if merge == "blend" and graph.blend is None:
        message = "blend needs the block `blend`, which says what is recomputed"
        yield src.problem(at, message, ProblemCode.NO_FOLD)


def _check_sampling(graph: Graph, src: Source) -> Iterator[Problem]:
    """A rule of rejection sampling is exact only for drafts that were drawn as it assumes.

    Draws that are kept for how probable they are do not follow the law they were drawn from. What
    is drafted by what a clock says cannot be drawn again.
    """
    drafter = graph.drafter
    rule = graph.sampling.rule
    if drafter.chooses and getattr(drafter, "costs", None) is None and not graph.sampling.exact:
        message = (
            "under accept: rejection the text depends on how much is drafted, which is chosen by "
            "what forwards cost: give `costs`, or no run could be repeated"
        )
        yield src.problem(("drafter", "kind"), message, ProblemCode.CHOICE)
    if graph.sampling.accept != "rejection" or not drafter.drafts:
        return
    if drafter.shared is not None and drafter.draws_as is not Draws.BEST:
        message = "under accept: rejection, drafts that are drawn cannot be ranked: draws: best"
        yield src.problem(("drafter", "rows_per_round"), message, ProblemCode.RANKED_DRAWS)
    fitting = fitting_rules(drafter.draws_as, drafter.is_chain)
    if rule is not None and rule not in fitting:
        how = f"{drafter.kind} drafts {'chains' if drafter.is_chain else 'trees'}"
        which = {"best": "of the best tokens", "sampled": "of independent draws"}
        made = which.get(drafter.draws_as, "of draws without replacement")
        message = f"rule {rule!r} does not fit: {how} {made}, which takes {' or '.join(fitting)}"
        yield src.problem(("sampling", "rule"), message, ProblemCode.RULE)


def _check_samples(graph: Graph, src: Source) -> Iterator[Problem]:
    """Several answers to one prompt are drawn, each behind the same rows."""
    if (count := graph.limits.n) == 1:
        return
    reasons = {
        "`skeleton` answers each prompt once: give the prompt several times": graph.skeleton,
        "`beam` draws nothing": graph.beam,
        "temperature 0 draws the same one every time": not graph.sampling.temperature,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        message = f"{count} samples, but {reason}"
        yield src.problem(("limits", "n"), message, ProblemCode.SAMPLES)


def _check_two_drafters(graph: Graph, outlines: DrafterSettings, src: Source) -> Iterator[Problem]:
    """What outlines and parts that are drafted for by different drafters cannot have."""
    at = ("skeleton", "drafter")
    code = ProblemCode.TWO_DRAFTERS
    for place, drafter in ((at, outlines), (("drafter",), graph.drafter)):
        for name in ("rows_per_round", "filler_top_k"):
            if (getattr(drafter, name, None) or 1) > 1:
                message = "must be left out where outlines have a drafter of their own"
                yield src.problem((*place, name), message, code, key=True)
    if graph.sampling.accept == "rejection":
        yield src.problem(at, "a second drafter takes `sampling.accept: match`", code, key=True)
    if graph.blend is not None:
        yield src.problem(at, "cached documents (`blend`) take one drafter", code, key=True)
