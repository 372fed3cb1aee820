"""Checks of a graph as a whole, in stages: one typo is one message."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ...ops.registry import OpEntry, OpSetting, OpTable, RegistryError
from ...ops.sampling.settings import Draws, fitting_rules
from ..yaml.source import GraphError, KeyPath, Problem, ProblemCode, Source, hint, quoted
from ..yaml.spec import kind_of
from . import graph as graphs
from .drafter_settings import DrafterSettings, largest, most_offered, nodes_for
from .plugins import named_function

MISSING = object()
FOLD = "branch.fold_"
PLAN = "schedule.plan_"
STEP = "step"

Steps = dict[str, tuple[graphs.OpStep, ...]]
Targets = dict[str, list[str]]  # state -> states one transition away
Keys = frozenset[str]  # of the blackboard


def checked_program(
    graph: graphs.Graph, source: Source, table: OpTable, given: Keys | None = None
) -> graphs.Program:
    """The program of a graph; raises GraphError with the problems of the first stage with any.
    given: initial blackboard keys; by default those of a run, or of a cluster if ops read it."""
    checks = _Checks(graph, source, table)
    checks.schedule()
    checks.names()
    checks.sizes()
    checks.blocks()
    checks.end_stage()
    checks.shape()
    checks.end_stage()
    steps = checks.steps()
    if given is None:
        read = {key for ops in steps.values() for step in ops for key in step.entry.reads}
        given = graphs.CLUSTER_KEYS if "cluster" in read else graphs.RUN_KEYS
    checks.dataflow(steps, given)
    checks.end_stage()
    checks.progress(steps)
    checks.end_stage()
    guards = {e.when: checks.table.guards[e.when] for e in graph.transitions if e.when is not None}
    return graphs.Program(graph=graph, source=source, steps=steps, guards=guards, given=given)


def with_drafters(
    program: graphs.Program, drafter: DrafterSettings, outline_drafter: DrafterSettings | None
) -> graphs.Program:
    """The program with these drafter settings; GraphError: too small a pool for their trees."""
    graph = program.graph
    if (drafter, outline_drafter) == (graph.drafter, graph.outline_drafter):
        return program
    skeleton = graph.skeleton
    if skeleton is not None:
        skeleton = skeleton.model_copy(update={"drafter": outline_drafter})
    graph = graph.model_copy(update={"drafter": drafter, "skeleton": skeleton})
    checks = _Checks(graph, program.source, OpTable({}, program.guards))
    checks.sizes()
    checks.end_stage()
    return replace(program, graph=graph)


class _Checks:
    """table: with the functions that the graph names. problems: those of the present stage."""

    def __init__(self, graph: graphs.Graph, source: Source, table: OpTable) -> None:
        self.graph = graph
        self.source = source
        self.problems: list[Problem] = []
        self.targets = _targets((e.from_, e.to) for e in graph.transitions)
        entries = {"op": dict(table.ops), "guard": dict(table.guards)}
        names = [((*at, "op"), "op", call.op) for at, call, _ in graph.calls(table)]
        for i, edge in enumerate(graph.transitions):
            names.append((("transitions", i, "when"), "guard", edge.when or ""))
        for at, kind, name in names:
            try:
                if ":" in name:
                    entries[kind][name] = named_function(kind, name)
            except RegistryError as error:
                self.report(at, str(error), ProblemCode.NO_FUNCTION)
        self.table = OpTable(entries["op"], entries["guard"], table.faults)
        self.calls = [*graph.calls(self.table)]

    def report(self, at: KeyPath, message: str, code: ProblemCode, *, key: bool = False) -> None:
        self.problems.append(self.source.problem(at, message, code, key=key))

    def end_stage(self) -> None:
        if self.problems:
            raise GraphError(self.problems)

    def schedule(self) -> None:
        """A graph whose ops read the step plan needs a state that makes it; one problem if not."""
        entries = [entry for _, _, entry in self.calls if entry is not None]
        users = sorted({entry.name for entry in entries if STEP in entry.reads})
        if users and not any(STEP in entry.declared.writes for entry in entries):
            message = (
                f"no state runs {PLAN!r}, which decides what {', '.join(users)} start: write "
                f"`initial: schedule`, the states `schedule: {{ops: [{PLAN}]}}` and "
                "`idle: {ops: [schedule.wait]}`, and let every state that commits, parses or "
                "merges return to schedule, with the transitions of graphs/machines/decode.yaml"
            )
            code = ProblemCode.NO_SCHEDULE
            raise GraphError([self.source.problem(("states",), message, code, key=True)])

    def names(self) -> None:
        """States, ops, guards, settings, `$refs` and blocks must exist."""
        graph = self.graph
        table = self.table
        states: list[tuple[KeyPath, str]] = [(("initial",), graph.initial)]
        for i, edge in enumerate(graph.transitions):
            at = ("transitions", i)
            states += [((*at, "from"), edge.from_), ((*at, "to"), edge.to)]
            if edge.when is not None:
                self._known((*at, "when"), "guard", edge.when, table.guards)
        for path, name in states:
            if name not in graph.states:
                message = f"no state {quoted(name)}{hint(name, graph.states)}"
                self.report(path, message, ProblemCode.NO_STATE)
        for path, call, entry in self.calls:
            self._call(path, call, entry)
        needed = {block for _, _, entry in self.calls if entry for block in entry.declared.needs}
        for block in graphs.OPTIONAL_BLOCKS:
            users = {e.name for e in table.ops.values() if block in e.declared.needs}
            if users and block not in needed and getattr(graph, block) is not None:
                message = f"no state runs an op that reads this block: {', '.join(sorted(users))}"
                self.report((block,), message, ProblemCode.UNUSED_BLOCK, key=True)

    def _known(self, at: KeyPath, kind: str, name: str, known: Mapping[str, OpEntry]) -> None:
        if name not in known and ":" not in name:
            message = f"no {kind} {quoted(name)}{hint(name, known)}"
            code = ProblemCode.NO_OP if kind == "op" else ProblemCode.NO_GUARD
            self.report(at, "; ".join([message, *self.table.faults]), code)

    def _call(self, at: KeyPath, call: graphs.Call, entry: OpEntry | None) -> None:
        graph = self.graph
        self._known((*at, "op"), "op", call.op, self.table.ops)
        if entry is None:
            return
        settings = {s.name: s for s in entry.settings}
        for key, value in call.with_.items():
            if key in settings:
                self._value((*at, "with", key), settings[key], value)
            else:
                message = f"{call.op!r} has no setting {quoted(key)}{hint(key, settings)}"
                self.report((*at, "with", key), message, ProblemCode.NO_SETTING, key=True)
        absent = [b for b in entry.declared.needs if getattr(graph, b, None) is None]
        for block in absent:
            message = f"{call.op!r} needs the block {block!r} in this graph"
            self.report(at, message, ProblemCode.NEEDS_BLOCK)
        for name in (s.name for s in entry.settings if s.required and s.name not in call.with_):
            if not absent and _find_setting(graph, call, name) is MISSING:
                message = f"{call.op!r} needs the setting {name!r}: no block gives it"
                self.report(at, f"{message}, nor does `with`", ProblemCode.NEEDS_SETTING)

    def _value(self, at: KeyPath, setting: OpSetting, value: Any) -> None:
        """The type of a value under `with`, or that of the setting to which it refers."""
        if isinstance(value, str) and value.startswith("$"):
            try:
                value = self.graph.refer(value[1:])
            except KeyError:
                blocks = {name: getattr(self.graph, name) for name in graphs.SETTING_BLOCKS}
                known = [f"${b}.{f}" for b, x in blocks.items() if x for f in type(x).model_fields]
                message = f"{quoted(value)} names no setting of this graph{hint(value, known)}"
                self.report(at, message, ProblemCode.NO_REFERENCE)
                return
        kinds = {k.strip() for k in setting.kind.split("|")}
        if kinds <= _KINDS.keys() and not any(_KINDS[k][1](value) for k in kinds):
            types = " or ".join(_KINDS[k][0] for k in sorted(kinds))
            message = f"{setting.name!r} must be {types}, not {kind_of(value)}"
            self.report(at, message, ProblemCode.SETTING_VALUE)

    def sizes(self) -> None:
        """Sizes that cannot hold for any prompt."""
        drafter = self.graph.drafter
        layout = self.graph.layout
        outline = self.graph.skeleton
        most = largest(drafter.offered)
        max_nodes, reason = drafter.largest_tree
        if most > max_nodes:
            message = f"{most} nodes are too many: {reason}"
            self.report(("drafter", "num_draft_tokens"), message, ProblemCode.TREE_SIZE)
        limit = f"layout.kv_slots is {layout.kv_slots}"
        first = _drafted(drafter, 1, 1)
        budgets = {("limits", "max_new_tokens"): self.graph.limits.max_new_tokens}
        if outline is not None:
            budgets[("skeleton", "max_tokens")] = outline.max_tokens
            budgets[("skeleton", "direct_tokens")] = outline.direct_tokens
        for path, budget in budgets.items():
            need = 1 + budget + first + 1  # one prompt token, the answer, one tree with its root
            if need > layout.kv_slots:
                size = f"1 prompt token + {budget} new ones + {first} nodes + 1 = {need} slots"
                self.report(path, f"{size}, but {limit}", ProblemCode.BUDGET)
        side = _drafted(drafter, layout.max_num_branches, 1, shared=False)
        rows = 1 if layout.kind == "batching" else layout.max_num_branches  # trees in a pool's row
        together = 1 if layout.kind == "paged" else rows  # trees that share a round's rows
        drafted = rows // together * _drafted(drafter, layout.max_num_branches, together)
        need = 2 * rows + drafted
        if need > layout.kv_slots:
            separate = drafter.shared is None or drafter.shared >= together * side
            trees = f"{side} nodes each" if separate else f"{drafter.shared} nodes together"
            message = f"{layout.max_num_branches} branches with {trees} need {need} slots, {limit}"
            self.report(("layout", "max_num_branches"), message, ProblemCode.ROWS)
        if layout.kind != "batching" and layout.block_size > layout.kv_slots:
            message = f"a block of {layout.block_size} slots, but {limit}"
            self.report(("layout", "block_size"), message, ProblemCode.BLOCK_SIZE)

    def blocks(self) -> None:
        """Values of `sampling`, `limits`, `skeleton`, `blend` and `beam` that exclude others."""
        graph = self.graph
        outline = graph.skeleton
        self._sampling()
        if (count := graph.limits.n) > 1:  # random draws that share one prompt
            reasons = {
                "`skeleton` answers each prompt once: give the prompt several times": outline,
                "`beam` draws no tokens": graph.beam,
                "temperature 0 gives the same answer every time": not graph.sampling.temperature,
            }
            for reason in (reason for reason, holds in reasons.items() if holds):
                self.report(("limits", "n"), f"{count} samples, but {reason}", ProblemCode.SAMPLES)
        if graph.outline_drafter is not None:
            self._two_drafters(graph.outline_drafter)
        if outline is not None:
            self._skeleton(outline)
        if graph.blend is not None:
            self._blend(graph.blend)
        if graph.beam is not None:
            self._beam(graph.beam)

    def _sampling(self) -> None:
        """A rule of rejection sampling is exact only for drafts drawn as it assumes: not selected
        by their probability, and of sizes that do not depend on measured times."""
        drafter = self.graph.drafter
        sampling = self.graph.sampling
        if drafter.takes_turns and not sampling.exact:
            message = (
                "under accept: rejection the text depends on the drafter, which `or` chooses by "
                "measured times: omit it"
            )
            self.report(("drafter", "or"), message, ProblemCode.CHOICE)
        if drafter.chooses and getattr(drafter, "costs", None) is None and not sampling.exact:
            message = (
                "under accept: rejection the text depends on the draft sizes, which depend on "
                "measured costs: give `costs`, so that runs can be repeated"
            )
            self.report(("drafter", "kind"), message, ProblemCode.CHOICE)
        if sampling.accept != "rejection" or not drafter.drafts:
            return
        if drafter.shared is not None and drafter.draws_as is not Draws.BEST:
            message = "under accept: rejection, drafts that are drawn cannot be ranked: draws: best"
            self.report(("drafter", "rows_per_round"), message, ProblemCode.RANKED_DRAWS)
        fitting = fitting_rules(drafter.draws_as, drafter.is_chain)
        if sampling.rule is not None and sampling.rule not in fitting:
            which = {"best": "of the best tokens", "sampled": "of independent draws"}
            made = which.get(drafter.draws_as, "of draws without replacement")
            drafts = f"{drafter.kind} drafts {'chains' if drafter.is_chain else 'trees'} {made}"
            message = f"rule {sampling.rule!r} does not fit: {drafts}, which takes"
            self.report(("sampling", "rule"), f"{message} {' or '.join(fitting)}", ProblemCode.RULE)

    def _two_drafters(self, outlines: DrafterSettings) -> None:
        """Settings that are not possible with different drafters for outlines and parts."""
        at = ("skeleton", "drafter")
        code = ProblemCode.TWO_DRAFTERS
        for place, drafter in ((at, outlines), (("drafter",), self.graph.drafter)):
            if getattr(drafter, "rows_per_round", None) is not None:
                message = "must be omitted if outlines have another drafter"
                self.report((*place, "rows_per_round"), message, code, key=True)
        if getattr(outlines, "filler_top_k", 1) > 1:
            message = "the target's candidates (filler_top_k) are for the graph's drafter only"
            self.report(at, message, code, key=True)
        if self.graph.sampling.accept == "rejection":
            self.report(at, "a second drafter needs `sampling.accept: match`", code, key=True)
        if self.graph.blend is not None:
            self.report(at, "cached documents (`blend`) allow one drafter only", code, key=True)

    def _skeleton(self, skeleton: graphs.Skeleton) -> None:
        """Documents for branches need the tool Search, and combined parts an op that folds them."""
        if skeleton.documents == "branches" and "Search" not in skeleton.tools:
            message = "branches search for documents, but skeleton.tools has no 'Search'"
            self.report(("skeleton", "documents"), message, ProblemCode.NO_SEARCH)
        at = ("skeleton", "merge")
        if skeleton.merge != "concat" and all(call.op != FOLD for _, call, _ in self.calls):
            message = f"{skeleton.merge}, but no state runs the op {FOLD!r} that folds the parts"
            self.report(at, message, ProblemCode.NO_FOLD)
        if skeleton.merge == "blend" and self.graph.blend is None:
            message = "blend needs the block `blend`, which says which rows are recomputed"
            self.report(at, message, ProblemCode.NO_FOLD)

    def _blend(self, blend: graphs.BlendBlock) -> None:
        """Check layers and ratios must fit each other and the rest of the graph."""
        layers = ("blend", "check_layers")
        ratios = ("blend", "ratios")
        if not blend.check_layers:
            self.report(layers, "must not be empty", ProblemCode.BLEND_LAYERS)
            return
        for i, (before, after) in enumerate(pairwise(blend.check_layers), 1):
            if after <= before:
                message = f"check layers must increase, but {after} follows {before}"
                self.report((*layers, i), message, ProblemCode.BLEND_LAYERS)
        if (count := len(blend.ratios)) != len(blend.check_layers):
            message = f"one share per check layer: {count} for {len(blend.check_layers)}"
            self.report(ratios, message, ProblemCode.BLEND_RATIOS)
        for i, (more, less) in enumerate(pairwise(blend.ratios), 1):
            if less > more:
                message = f"shares must not grow, but {less} follows {more}"
                self.report((*ratios, i), message, ProblemCode.BLEND_RATIOS)
        if self.graph.beam is not None:
            reason = "a graph has one of the blocks `beam`, `blend`"
            message = f"beam search cannot reuse documents: {reason}"
            self.report(("blend",), message, ProblemCode.BEAM_ALONE, key=True)
        one_sequence = self.graph.layout.kind == "bim" and self.graph.layout.max_num_branches == 1
        if blend.mask == "bottom_right" and not (one_sequence and self.graph.skeleton is None):
            needs = "layout bim with max_num_branches 1, and no skeleton"
            message = f"bottom_right is for one sequence: {needs}"
            self.report(("blend", "mask"), message, ProblemCode.BLEND_MASK)

    def _beam(self, beam: graphs.BeamBlock) -> None:
        """A beam search neither drafts nor draws, its rows must fit, and its ops are its own."""
        graph = self.graph
        if (kind := graph.drafter.kind) != "none":
            message = f"beam search takes no drafter: the kind must be none, not {kind}"
            self.report(("drafter", "kind"), message, ProblemCode.BEAM_ALONE)
        if graph.skeleton is not None:
            message = "beam search writes one answer: a graph with the block `beam` has no skeleton"
            self.report(("skeleton",), message, ProblemCode.BEAM_ALONE, key=True)
        for name, default in graphs.Sampling.model_validate({}):
            if getattr(graph.sampling, name) != default:
                message = f"beam search draws no tokens: {name} must be {default}"
                self.report(("sampling", name), message, ProblemCode.BEAM_ALONE)
        beams = beam.num_beams
        tokens = graph.limits.max_new_tokens
        slots = 2 + beams * tokens
        if slots > graph.layout.kv_slots:
            need = f"1 prompt token + {beams} beams with {tokens} tokens + 1 = {slots} slots"
            message = f"{need}, but layout.kv_slots is {graph.layout.kv_slots}"
            self.report(("beam", "num_beams"), message, ProblemCode.BUDGET)
        for at, call, entry in self.calls:
            if entry and "batch" in entry.declared.drops and "beam" not in entry.declared.needs:
                message = f"{call.op!r} cannot be part of a beam search: it commits single tokens"
                self.report(at, message, ProblemCode.BEAM_OP)

    def shape(self) -> None:
        """Every state can be reached and left, and a final state can be reached from each."""
        graph = self.graph
        finals = [name for name, state in graph.states.items() if state.final]
        reachable = _reach([graph.initial], self.targets).keys()
        ending = _reach(finals, _targets((e.to, e.from_) for e in graph.transitions))
        first: dict[tuple[str, str | None], int] = {}  # of each state and guard
        last: dict[str, int] = {}  # transition of each state
        for i, edge in enumerate(graph.transitions):
            last[edge.from_] = i
            unguarded = first.get((edge.from_, None))
            same = first.setdefault((edge.from_, edge.when), i) if unguarded is None else unguarded
            if same != i:
                why = "the same guard" if unguarded is None else "no guard"
                message = f"never taken: {self.source.where(self._edge(same))} has {why}"
                self.report(self._edge(i), message, ProblemCode.NEVER_TAKEN)
        for name, state in graph.states.items():
            here = ("states", name)
            if state.final and name in last:
                message = "final, but a transition leaves it"
                self.report(here, message, ProblemCode.FINAL_LEFT, key=True)
            elif not state.final and name not in last:
                message = "not final, but no transition leaves it"
                self.report(here, message, ProblemCode.DEAD_END, key=True)
            elif not state.final and name not in ending and reachable & finals:
                message = "no final state can be reached from here"
                self.report(here, message, ProblemCode.NO_WAY_OUT, key=True)
            if name in last and (name, None) not in first:
                message = f"the last transition from {name!r} must have no `when`"
                self.report(self._edge(last[name]), message, ProblemCode.GUARDED_LAST)
            if name not in reachable:
                self.report(here, "cannot be reached", ProblemCode.UNREACHABLE, key=True)
        if not reachable & finals:
            which = f"none of {', '.join(finals)} can be reached" if finals else "no state is final"
            message = f"{which}: a run would never end"
            self.report(("states",), message, ProblemCode.NO_END, key=True)

    def _edge(self, i: int) -> KeyPath:
        """The path of an edge, or of its source state if the file has several in one line."""
        at = ("transitions", i, "from")
        return at if at in self.source.origins else at[:2]

    def steps(self) -> Steps:
        """Every state's ops with their settings."""
        steps: Steps = dict.fromkeys(self.graph.states, ())
        for at, call, entry in self.calls:
            assert entry is not None, "the check of names has refused unknown ops"
            values = {s.name: _find_setting(self.graph, call, s.name) for s in entry.settings}
            settings = {k: v for k, v in values.items() if v is not MISSING}
            state = str(at[1])
            steps[state] += (graphs.OpStep(state, entry, settings, self.source.at(at)),)
        return steps

    def dataflow(self, steps: Steps, given: Keys) -> None:
        """Keys that an op or a guard reads are set on *every* path that leads to it. Where an op
        writes a linear key, no earlier value exists on *any* path, unless the op reads it. An op's
        drops happen before its writes. No op runs twice on unchanged input."""
        anywhere = given.union(*(s.entry.declared.writes for ops in steps.values() for s in ops))

        def check_reads(at: KeyPath, entry: OpEntry, keys: Keys) -> None:
            for key in entry.reads:
                if key not in keys:
                    nowhere = "which no op of this graph writes"
                    why = "unset on some path here" if key in anywhere else nowhere
                    self.report(at, f"{entry.name!r} reads {key!r}, {why}", ProblemCode.UNSET)

        for name, (keys, possible) in self._keys_at_entry(steps, given).items():
            for i, step in enumerate(steps[name]):
                at = ("states", name, "ops", i)
                entry = step.entry
                check_reads(at, entry, keys)
                unread = possible.difference(entry.reads, entry.declared.drops) & graphs.LINEAR_KEYS
                lost = [key for key in entry.declared.writes if key in unread]
                for key in lost:
                    message = f"{entry.name!r} writes {key!r} while an earlier one is still unread"
                    self.report(at, message, ProblemCode.UNREAD)
                if not lost and (place := _done_already(steps[name][: i + 1])):
                    message = f"{entry.name!r} has just run ({place}) on the same values"
                    self.report(at, message, ProblemCode.REPEATED)
                keys = _after(step, keys.union(entry.reads))  # one missing key, one problem
                possible = _after(step, possible)
            for i, edge in enumerate(self.graph.transitions):
                if edge.from_ == name and edge.when is not None:
                    check_reads(("transitions", i, "when"), self.table.guards[edge.when], keys)

    def _keys_at_entry(self, steps: Steps, given: Keys) -> dict[str, tuple[Keys, Keys]]:
        """By state the keys that are set on every path to it, and those set on any."""
        at_entry = {self.graph.initial: (given, given)}
        todo = [self.graph.initial]
        while todo:
            name = todo.pop()
            always, sometimes = at_entry[name]
            for step in steps[name]:
                always = _after(step, always)
                sometimes = _after(step, sometimes)
            for target in self.targets.get(name, []):
                before = at_entry.get(target, (always, sometimes))
                joint = (before[0] & always, before[1] | sometimes)
                if at_entry.get(target) != joint:
                    at_entry[target] = joint
                    todo.append(target)
        return at_entry

    def progress(self, steps: Steps) -> None:
        """Every cycle has an op that commits something; else a run could stay in it forever."""
        idle = {n for n, ops in steps.items() if not any(s.entry.declared.commits for s in ops)}
        edges = {i: e for i, e in enumerate(self.graph.transitions) if {e.from_, e.to} <= idle}
        targets = _targets((e.from_, e.to) for e in edges.values())
        reported: set[str] = set()
        for i, edge in edges.items():
            before = _reach([edge.to], targets)
            if edge.from_ not in before or reported & {edge.from_, edge.to}:
                continue
            path = [edge.from_]
            while before[path[-1]]:
                path.append(before[path[-1]])
            reported.update(path)
            cycle = " > ".join((edge.from_, *reversed(path)))
            message = f"the cycle {cycle} commits no token: a run could stay in it forever"
            self.report(self._edge(i), message, ProblemCode.IDLE_CYCLE)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": (
        "a number",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e300,
    ),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "str": ("a string", lambda v: isinstance(v, str)),
    "None": ("null", lambda v: v is None),
}


def _find_setting(graph: graphs.Graph, call: graphs.Call, name: str) -> Any:
    """A setting's value from `with`, the blocks or the top level of the graph, else MISSING."""
    if name in call.with_:
        value = call.with_[name]
        is_reference = isinstance(value, str) and value.startswith("$")
        return graph.refer(value[1:]) if is_reference else value
    for block in graphs.SETTING_BLOCKS:
        spec = getattr(graph, block)
        for key in (name, graphs.RENAMED_KEYS.get((block, name), name)):
            if spec is not None and key != "kind" and key in type(spec).model_fields:
                return getattr(spec, key)
    return getattr(graph, name) if name in graphs.TOP_SETTINGS else MISSING


def _drafted(drafter: DrafterSettings, active: int, trees: int, *, shared: bool = True) -> int:
    """Maximum drafted tokens of `trees` trees when `active` branches are active."""
    most = trees * nodes_for(most_offered(drafter.alternatives, active), active)
    return most if drafter.shared is None or not shared else min(most, drafter.shared)


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


def _done_already(steps: tuple[graphs.OpStep, ...]) -> str:
    """Where the last of a state's steps ran before, if its input cannot have changed since."""
    *earlier, last = steps
    for step in reversed(earlier):
        if not set(step.entry.declared.writes).isdisjoint(last.entry.reads):
            return ""
        if (step.entry, step.settings) == (last.entry, last.settings):
            return step.at
        if step.entry.name.endswith("_"):  # changes an argument in place
            return ""
    return ""


def _after(step: graphs.OpStep, keys: Keys) -> Keys:
    return keys.difference(step.entry.declared.drops).union(step.entry.declared.writes)
