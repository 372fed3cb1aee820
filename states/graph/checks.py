"""Checks of a graph as a whole: names, blocks, sizes, paths, dataflow, progress.

Each check yields all its problems; a later stage runs only if the earlier ones found none, so that
one typo is one message.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from ...ops.registry import OpEntry, OpSetting, OpTable, RegistryError
from ...ops.sampling.settings import Draws, fitting_rules
from ..yaml.source import KeyPath, Problem, ProblemCode, Source, hint, quoted
from .drafter_settings import DrafterSettings, largest, nodes_for
from .graph import (
    RENAMED_KEYS,
    SETTING_BLOCKS,
    TOP_SETTINGS,
    BeamBlock,
    BlendBlock,
    Call,
    Graph,
    Sampling,
    Skeleton,
)
from .plugins import named_function
from .program import LINEAR_KEYS, OpStep
from .schema import kind_of

MISSING = object()
OPTIONAL_BLOCKS = [name for name, field in Graph.model_fields.items() if field.default is None]


def with_named_functions(
    graph: Graph, src: Source, table: OpTable
) -> tuple[OpTable, list[Problem]]:
    """The table with the functions that the graph names as `package.module:function`.

    Later checks treat such a name as any other. Also returns a problem for each missing function.
    """
    ops = dict(table.ops)
    guards = dict(table.guards)
    problems = []
    for at, kind, name in _named_functions(graph, table):
        try:
            entry = named_function(kind, name)
        except RegistryError as error:
            problems.append(src.problem(at, str(error), ProblemCode.NO_FUNCTION))
            continue
        if kind == "op":
            ops[name] = (entry,)
        else:
            guards[name] = entry
    return OpTable(ops, guards, table.faults), problems


def _named_functions(graph: Graph, table: OpTable) -> Iterator[tuple[KeyPath, str, str]]:
    for at, call, _ in graph.calls(table):
        if ":" in call.op:
            yield (*at, "op"), "op", call.op
    for i, edge in enumerate(graph.transitions):
        if edge.when is not None and ":" in edge.when:
            yield ("transitions", i, "when"), "guard", edge.when


def check_names(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """States, ops, guards, settings and `$refs` must exist."""
    states = graph.states
    if graph.initial not in states:
        message = _no("state", graph.initial, states)
        yield src.problem(("initial",), message, ProblemCode.NO_STATE)
    for at, call, entry in graph.calls(table):
        yield from _check_call(graph, src, table, at, call, entry)
    for i, edge in enumerate(graph.transitions):
        for end, name in (("from", edge.from_), ("to", edge.to)):
            if name not in states:
                message = _no("state", name, states)
                yield src.problem(("transitions", i, end), message, ProblemCode.NO_STATE)
        if edge.when is not None and edge.when not in table.guards and ":" not in edge.when:
            message = _no("guard", edge.when, table.guards, table.faults)
            yield src.problem(("transitions", i, "when"), message, ProblemCode.NO_GUARD)
    yield from _check_needs(graph, src, table)


def _no(what: str, name: str, known: Mapping[str, Any], faults: Iterable[str] = ()) -> str:
    return "; ".join([f"no {what} {quoted(name)}{hint(name, known)}", *faults])


def _check_call(
    graph: Graph, src: Source, table: OpTable, at: KeyPath, call: Call, entry: OpEntry | None
) -> Iterator[Problem]:
    if call.op not in table.ops:
        if ":" not in call.op:
            message = _no("op", call.op, table.ops, table.faults)
            yield src.problem((*at, "op"), message, ProblemCode.NO_OP)
        return
    if entry is None:
        kinds = f"layout {graph.layout.kind!r} with drafter {graph.drafter.kind!r}"
        message = f"op {call.op!r} does not run under {kinds}"
        message = "; ".join([message, *table.faults])
        yield src.problem((*at, "op"), message, ProblemCode.NO_VARIANT)
        return
    settings = {s.name: s for s in entry.settings}
    for key, value in call.with_.items():
        if key not in settings:
            message = f"{call.op!r} has no setting {quoted(key)}{hint(key, settings)}"
            yield src.problem((*at, "with", key), message, ProblemCode.NO_SETTING, key=True)
        elif wrong := _wrong_value(graph, settings[key], value):
            yield src.problem((*at, "with", key), *wrong)
    if any(getattr(graph, block, None) is None for block in entry.declared.needs):
        return  # their block is missing, which is another problem
    for name in (s.name for s in entry.settings if s.required and s.name not in call.with_):
        if find_setting(graph, call, name) is MISSING:
            message = f"{call.op!r} needs the setting {name!r}: no block gives it"
            yield src.problem(at, f"{message}, nor does `with`", ProblemCode.NEEDS_SETTING)


def find_setting(graph: Graph, call: Call, name: str) -> Any:
    """A setting's value from `with`, the blocks or the top level of the graph, else MISSING.

    Raises:
        KeyError: a `$ref` to a setting that does not exist.
    """
    if name in call.with_:
        value = call.with_[name]
        return graph.refer(value[1:]) if _is_ref(value) else value
    for block in SETTING_BLOCKS:
        spec = getattr(graph, block)
        for key in (name, RENAMED_KEYS.get((block, name), name)):
            if spec is not None and key != "kind" and key in type(spec).model_fields:
                return getattr(spec, key)
    return getattr(graph, name) if name in TOP_SETTINGS else MISSING


def _is_ref(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _wrong_value(graph: Graph, setting: OpSetting, value: Any) -> tuple[str, ProblemCode] | None:
    if _is_ref(value):
        try:
            value = graph.refer(value[1:])
        except KeyError:
            known = _references(graph)
            message = f"{quoted(value)} names no setting of this graph{hint(value, known)}"
            return message, ProblemCode.NO_REFERENCE
    kinds = {k.strip() for k in setting.kind.split("|")}
    if not kinds <= _KINDS.keys() or any(_KINDS[k][1](value) for k in kinds):
        return None
    types = " or ".join(_KINDS[k][0] for k in sorted(kinds))
    message = f"{setting.name!r} must be {types}, not {kind_of(value)}"
    return message, ProblemCode.SETTING_VALUE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": ("a number", _is_number),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "str": ("a string", lambda v: isinstance(v, str)),
    "None": ("null", lambda v: v is None),
}


def _references(graph: Graph) -> list[str]:
    blocks = ((b, getattr(graph, b)) for b in SETTING_BLOCKS)
    return [f"${b}.{f}" for b, spec in blocks if spec is not None for f in type(spec).model_fields]


def _check_needs(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """Every optional block needs an op that reads it, and every op needs its block."""
    needed: set[str] = set()
    for at, call, entry in graph.calls(table):
        for block in entry.declared.needs if entry else ():
            needed.add(block)
            if getattr(graph, block, None) is None:
                message = f"{call.op!r} needs the block {block!r} in this graph"
                yield src.problem(at, message, ProblemCode.NEEDS_BLOCK)
    for block in OPTIONAL_BLOCKS:
        users = {e.name for es in table.ops.values() for e in es if block in e.declared.needs}
        if users and block not in needed and getattr(graph, block) is not None:
            message = f"no state runs an op that reads this block: {', '.join(sorted(users))}"
            yield src.problem((block,), message, ProblemCode.UNUSED_BLOCK, key=True)


def check_sizes(graph: Graph, src: Source) -> Iterator[Problem]:
    """Sizes that cannot hold for any prompt."""
    drafter = graph.drafter
    layout = graph.layout
    outline = graph.skeleton
    most = largest(drafter.offered)
    max_nodes, reason = drafter.largest_tree
    first = _drafted(drafter, 1, 1)
    if most > max_nodes:
        message = f"{most} nodes are too many: {reason}"
        yield src.problem(("drafter", "num_draft_tokens"), message, ProblemCode.TREE_SIZE)
    budgets = {("limits", "max_new_tokens"): graph.limits.max_new_tokens}
    if outline is not None:
        budgets[("skeleton", "max_tokens")] = outline.max_tokens
        budgets[("skeleton", "direct_tokens")] = outline.direct_tokens
    for path, budget in budgets.items():
        need = 1 + budget + first + 1  # one prompt token, the answer, one tree with its root
        if need > layout.kv_slots:
            size = f"1 prompt token + {budget} new ones + {first} nodes + 1 = {need} slots"
            message = f"{size}, but layout.kv_slots is {layout.kv_slots}"
            yield src.problem(path, message, ProblemCode.BUDGET)
    side = nodes_for(drafter.offered, layout.max_num_branches)
    rows = 1 if layout.kind == "batching" else layout.max_num_branches  # trees in a row of the pool
    together = 1 if layout.kind == "paged" else rows  # trees that share a round's rows
    drafted = rows // together * _drafted(drafter, layout.max_num_branches, together)
    need = 2 * rows + drafted
    if need > layout.kv_slots:
        separate = drafter.shared is None or drafter.shared >= together * side
        trees = f"{side} nodes each" if separate else f"{drafter.shared} nodes together"
        message = f"{layout.max_num_branches} branches with {trees} need {need} slots"
        message = f"{message}, layout.kv_slots is {layout.kv_slots}"
        yield src.problem(("layout", "max_num_branches"), message, ProblemCode.ROWS)
    if layout.kind != "batching" and layout.block_size > layout.kv_slots:
        message = f"a block of {layout.block_size} slots, but layout.kv_slots is {layout.kv_slots}"
        yield src.problem(("layout", "block_size"), message, ProblemCode.BLOCK_SIZE)


def _drafted(drafter: DrafterSettings, active: int, trees: int) -> int:
    """Maximum drafted tokens of `trees` trees when `active` branches are active."""
    most = trees * nodes_for(drafter.offered, active)
    return most if drafter.shared is None else min(most, drafter.shared)


FOLD = "branch.fold_"
PLAN = "schedule.plan_"
STEP = "step"


def check_blocks(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """Checks of `sampling`, `limits`, `skeleton`, `blend` and `beam` within the graph."""
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
    """A graph whose ops read the step plan needs a state that makes it; one problem if not."""
    entries = [entry for _, _, entry in graph.calls(table) if entry is not None]
    planned = any(STEP in entry.declared.writes for entry in entries)
    users = sorted({entry.name for entry in entries if STEP in entry.reads})
    if users and not planned:
        message = (
            f"no state runs {PLAN!r}, which decides what {', '.join(users)} start: write "
            f"`initial: schedule`, the states `schedule: {{ops: [{PLAN}]}}` and "
            "`idle: {ops: [schedule.wait]}`, and let every state that commits, parses or merges "
            "return to schedule, with the transitions of graphs/machines/decode.yaml"
        )
        yield src.problem(("states",), message, ProblemCode.NO_SCHEDULE, key=True)


def _check_beam(graph: Graph, beam: BeamBlock, src: Source) -> Iterator[Problem]:
    """A beam search neither drafts nor draws; its rows must fit."""
    if graph.drafter.kind != "none":
        message = f"beam search takes no drafter: the kind must be none, not {graph.drafter.kind}"
        yield src.problem(("drafter", "kind"), message, ProblemCode.BEAM_ALONE)
    if graph.skeleton is not None:
        message = "beam search writes one answer: a graph with the block `beam` has no skeleton"
        yield src.problem(("skeleton",), message, ProblemCode.BEAM_ALONE, key=True)
    for name, default in Sampling.model_validate({}):
        if getattr(graph.sampling, name) != default:
            message = f"beam search draws no tokens: {name} must be {default}"
            yield src.problem(("sampling", name), message, ProblemCode.BEAM_ALONE)
    tokens = graph.limits.max_new_tokens
    slots = 2 + beam.num_beams * tokens
    if slots > graph.layout.kv_slots:
        size = f"1 prompt token + {beam.num_beams} beams with {tokens} tokens + 1 = {slots} slots"
        message = f"{size}, but layout.kv_slots is {graph.layout.kv_slots}"
        yield src.problem(("beam", "num_beams"), message, ProblemCode.BUDGET)


def _foreign_ops(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """Other ops that commit tokens cannot be part of a beam search."""
    for at, call, entry in graph.calls(table):
        if entry and "batch" in entry.declared.drops and "beam" not in entry.declared.needs:
            message = f"{call.op!r} cannot be part of a beam search: it commits single tokens"
            yield src.problem(at, message, ProblemCode.BEAM_OP)


def _check_blend(graph: Graph, blend: BlendBlock, src: Source) -> Iterator[Problem]:
    """Check layers and ratios must fit each other and the rest of the graph."""
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
        message = (
            "beam search cannot reuse documents: a graph has one of the blocks `beam`, `blend`"
        )
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
    """Documents for branches need the tool Search, and combined parts an op that folds them."""
    if skeleton.documents == "branches" and "Search" not in skeleton.tools:
        message = "branches search for documents, but skeleton.tools has no 'Search'"
        yield src.problem(("skeleton", "documents"), message, ProblemCode.NO_SEARCH)
    at = ("skeleton", "merge")
    merge = skeleton.merge
    if merge == "concat":
        return
    if all(call.op != FOLD for state in graph.states.values() for call in state.ops):
        message = f"{merge}, but no state runs the op {FOLD!r} that folds the parts"
        yield src.problem(at, message, ProblemCode.NO_FOLD)
    if merge == "blend" and graph.blend is None:
        message = "blend needs the block `blend`, which says which rows are recomputed"
        yield src.problem(at, message, ProblemCode.NO_FOLD)


def _check_sampling(graph: Graph, src: Source) -> Iterator[Problem]:
    """A rule of rejection sampling is exact only for drafts drawn as it assumes.

    Draws selected by their probability no longer follow their distribution. Draft sizes that depend
    on measured times cannot be repeated.
    """
    drafter = graph.drafter
    rule = graph.sampling.rule
    if drafter.chooses and getattr(drafter, "costs", None) is None and not graph.sampling.exact:
        message = (
            "under accept: rejection the text depends on the draft sizes, which depend on measured "
            "costs: give `costs`, so that runs can be repeated"
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
    """Several answers to one prompt need random draws and share one prompt."""
    if (count := graph.limits.n) == 1:
        return
    reasons = {
        "`skeleton` answers each prompt once: give the prompt several times": graph.skeleton,
        "`beam` draws no tokens": graph.beam,
        "temperature 0 gives the same answer every time": not graph.sampling.temperature,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        message = f"{count} samples, but {reason}"
        yield src.problem(("limits", "n"), message, ProblemCode.SAMPLES)


def _check_two_drafters(graph: Graph, outlines: DrafterSettings, src: Source) -> Iterator[Problem]:
    """Settings that are not possible with different drafters for outlines and parts."""
    at = ("skeleton", "drafter")
    code = ProblemCode.TWO_DRAFTERS
    for place, drafter in ((at, outlines), (("drafter",), graph.drafter)):
        for name in ("rows_per_round", "filler_top_k"):
            if (getattr(drafter, name, None) or 1) > 1:
                message = "must be omitted if outlines have another drafter"
                yield src.problem((*place, name), message, code, key=True)
    if graph.sampling.accept == "rejection":
        yield src.problem(at, "a second drafter needs `sampling.accept: match`", code, key=True)
    if graph.blend is not None:
        yield src.problem(at, "cached documents (`blend`) allow one drafter only", code, key=True)


Steps = dict[str, tuple[OpStep, ...]]
Targets = dict[str, list[str]]  # state -> states one transition away
Keys = frozenset[str]  # of the blackboard


def check_shape(graph: Graph, src: Source) -> Iterator[Problem]:
    """Every state can be reached and left, and a final state can be reached from each."""
    targets = _targets((e.from_, e.to) for e in graph.transitions)
    finals = [name for name, state in graph.states.items() if state.final]
    reachable = _reach([graph.initial], targets).keys()
    ending = _reach(finals, _targets((e.to, e.from_) for e in graph.transitions))
    yield from _never_taken(graph, src)
    for name, state in graph.states.items():
        here = ("states", name)
        out = graph.edges_from(name)
        if state.final and out:
            yield src.problem(
                here, "final, but a transition leaves it", ProblemCode.FINAL_LEFT, key=True
            )
        elif not state.final and not out:
            message = "not final, but no transition leaves it"
            yield src.problem(here, message, ProblemCode.DEAD_END, key=True)
        elif not state.final and name not in ending and reachable & finals:
            message = "no final state can be reached from here"
            yield src.problem(here, message, ProblemCode.NO_WAY_OUT, key=True)
        if out and out[-1].when is not None and all(e.when is not None for e in out):
            last = max(i for i, e in enumerate(graph.transitions) if e is out[-1])
            message = f"the last transition from {name!r} must have no `when`"
            yield src.problem(_place(src, last), message, ProblemCode.GUARDED_LAST)
        if name not in reachable:
            yield src.problem(here, "cannot be reached", ProblemCode.UNREACHABLE, key=True)
    if not reachable & finals:
        which = f"none of {', '.join(finals)} can be reached" if finals else "no state is final"
        message = f"{which}: a run would never end"
        yield src.problem(("states",), message, ProblemCode.NO_END, key=True)


def _never_taken(graph: Graph, src: Source) -> Iterator[Problem]:
    unguarded: dict[str, int] = {}  # state -> its transition without a guard
    guards: dict[tuple[str, str], int] = {}
    for i, edge in enumerate(graph.transitions):
        if edge.from_ in unguarded:
            message = f"never taken: {src.where(_place(src, unguarded[edge.from_]))} has no guard"
            yield src.problem(_place(src, i), message, ProblemCode.NEVER_TAKEN)
        elif edge.when is None:
            unguarded[edge.from_] = i
        elif (edge.from_, edge.when) in guards:
            same = src.where(_place(src, guards[edge.from_, edge.when]))
            message = f"never taken: {same} has the same guard"
            yield src.problem(_place(src, i), message, ProblemCode.NEVER_TAKEN)
        else:
            guards[edge.from_, edge.when] = i


def _place(src: Source, i: int) -> KeyPath:
    """The path of an edge, or of its source state if the file has several in one line."""
    at = ("transitions", i, "from")
    return at if at in src.origins else at[:2]


def _targets(pairs: Iterable[tuple[str, str]]) -> Targets:
    targets: Targets = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    return targets


def _reach(first: Iterable[str], targets: Targets) -> dict[str, str]:
    """Every state reachable from these, with its predecessor on a shortest path."""
    before = dict.fromkeys(first, "")
    todo = list(before)
    for name in todo:
        for target in targets.get(name, []):
            if target not in before:
                before[target] = name
                todo.append(target)
    return before


def check_dataflow(
    graph: Graph, src: Source, table: OpTable, steps: Steps, given: frozenset[str]
) -> Iterator[Problem]:
    """Keys that an op or a guard reads are set on *every* path that leads to it.

    Where an op writes a linear key, no earlier value exists on *any* path, unless the op reads it.
    Both are forward fixpoints; an op's drops happen before its writes. No op runs twice on
    unchanged input.
    """
    anywhere = given.union(*(s.entry.declared.writes for ops in steps.values() for s in ops))
    upper = dict.fromkeys(graph.states, anywhere) | {graph.initial: given}
    lower = dict.fromkeys(graph.states, Keys()) | {graph.initial: given}
    always = _fixpoint(graph, steps, upper, frozenset.intersection)
    sometimes = _fixpoint(graph, steps, lower, frozenset.union)
    for name in graph.states:
        keys = always[name]
        possible = sometimes[name]
        for i, step in enumerate(steps[name]):
            at = ("states", name, "ops", i)
            yield from _missing_reads(src, at, step.entry, keys, anywhere)
            lost = [*_lost_values(src, at, step.entry, possible)]
            yield from lost or _done_already(src, at, steps[name][: i + 1])
            keys = _after(step, keys.union(step.entry.reads))  # one missing key, one problem
            possible = _after(step, possible)
        for i, edge in enumerate(graph.transitions):
            if edge.from_ == name and edge.when is not None:
                here = ("transitions", i, "when")
                yield from _missing_reads(src, here, table.guards[edge.when], keys, anywhere)


def _missing_reads(
    src: Source, at: KeyPath, entry: OpEntry, keys: Keys, anywhere: Keys
) -> Iterator[Problem]:
    for key in entry.reads:
        if key not in keys:
            why = (
                "unset on some path here" if key in anywhere else "which no op of this graph writes"
            )
            yield src.problem(at, f"{entry.name!r} reads {key!r}, {why}", ProblemCode.UNSET)


def _lost_values(src: Source, at: KeyPath, entry: OpEntry, possible: Keys) -> Iterator[Problem]:
    unread = possible.difference(entry.reads, entry.declared.drops)
    for key in entry.declared.writes:
        if key in LINEAR_KEYS and key in unread:
            message = f"{entry.name!r} writes {key!r} while an earlier one is still unread"
            yield src.problem(at, message, ProblemCode.UNREAD)


def _done_already(src: Source, at: KeyPath, steps: tuple[OpStep, ...]) -> Iterator[Problem]:
    """The last of a state's steps, if it ran there before and its input cannot have changed."""
    *earlier, last = steps
    same = [
        i for i, s in enumerate(earlier) if (s.entry, s.settings) == (last.entry, last.settings)
    ]
    if not same:
        return
    since = earlier[same[-1] :]
    written = {key for step in since for key in step.entry.declared.writes}
    in_place = any(step.entry.name.endswith("_") for step in since[1:])
    if written.isdisjoint(last.entry.reads) and not in_place:
        reason = f"has just run ({since[0].at}) on the same values"
        yield src.problem(at, f"{last.entry.name!r} {reason}", ProblemCode.REPEATED)


def _after(step: OpStep, keys: Keys) -> Keys:
    return keys.difference(step.entry.declared.drops).union(step.entry.declared.writes)


def _fixpoint(
    graph: Graph, steps: Steps, at_entry: dict[str, Keys], meet: Callable[[Keys, Keys], Keys]
) -> dict[str, Keys]:
    """The keys at the entry of every state, `meet` joining those of its predecessors."""
    todo = list(graph.states)
    targets = _targets((e.from_, e.to) for e in graph.transitions)
    while todo:
        name = todo.pop()
        keys = at_entry[name]
        for step in steps[name]:
            keys = _after(step, keys)
        for target in targets.get(name, []):
            joint = meet(at_entry[target], keys)
            if joint != at_entry[target]:
                at_entry[target] = joint
                todo.append(target)
    return at_entry


def check_progress(graph: Graph, src: Source, steps: Steps) -> Iterator[Problem]:
    """Every cycle has an op that commits something; else a run could stay in it forever."""
    idle = {n for n, ops in steps.items() if not any(s.entry.declared.commits for s in ops)}
    edges = {i: e for i, e in enumerate(graph.transitions) if {e.from_, e.to} <= idle}
    targets = _targets((e.from_, e.to) for e in edges.values())
    reported: set[str] = set()
    for i, edge in edges.items():
        if reported & {edge.from_, edge.to}:
            continue
        before = _reach([edge.to], targets)
        if edge.from_ in before:
            path = [edge.from_]
            while before[path[-1]]:
                path.append(before[path[-1]])
            reported.update(path)
            cycle = " > ".join((edge.from_, *reversed(path)))
            message = f"the cycle {cycle} commits no token: a run could stay in it forever"
            yield src.problem(_place(src, i), message, ProblemCode.IDLE_CYCLE)
