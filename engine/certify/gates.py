"""The structural gates: what broke earlier systems, tried on the graph's own layout and drafter.

All runs are greedy unless a gate says otherwise, on a given outline of four parts, or on four
requests where a graph has no skeleton. The first run has no stop ids; what the others must say
follows from its answers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile

from ...states.admission import request_slots
from ...states.request import Branch, Finish
from ..errors import is_told, message_of
from .drawn import FILTERS, filter_gate
from .probe import ProbedRun, Trial, Watch, memory_checks, probe
from .reference import SHOWN, Bench, Check

BUDGETS = (1, 2, 3, 7)
SCHEDULES = (  # policy, rows of a forward, prefix cache, block size, and whether rows run out
    ("fcfs", 7, True, 16, False),
    ("max_throughput", 64, False, 64, True),
    ("sot_priority", 1024, True, 1, True),
)
LONG = 12  # times a prompt's own text
UNENDED = "branches that nothing ends but their budget"


@dataclass
class Rig:
    """What the gates share."""

    bench: Bench
    watch: Watch = field(default_factory=Watch)

    @cached_property
    def free(self) -> ProbedRun:
        """The run without stop ids."""
        return self.probe(Trial())

    def probe(self, trial: Trial) -> ProbedRun:
        return probe(self.bench, trial, self.watch)


GateResult = tuple[str, Mapping[str, float], list[str]]
"""What was tried, figures, and what is wrong."""


def gate_checks(bench: Bench) -> Iterator[Check]:
    """One finding for each gate; a run that dies fails the gate that it is part of."""
    rig = Rig(bench)
    gates: dict[str, Callable[[], GateResult]] = {}
    if bench.graph.beam is None:
        gates |= {name: partial(gate, rig) for name, gate in GATES.items()}
        gates |= {f"{name} is applied": partial(filter_gate, bench, name) for name in FILTERS}
    gates["a run to the end"] = partial(_to_the_end, rig)
    for name, gate in gates.items():
        bench.tell(f"gate: {name} ...")
        try:
            text, figures, wrong = gate()
        except Exception as error:
            if is_told(error):
                raise
            yield Check(f"gates/{name}", False, {}, f"the run died: {message_of(error)}")
        else:
            text = "; ".join([text, *wrong[:SHOWN]])
            yield Check(f"gates/{name}", not wrong, figures, text)
    yield from memory_checks(bench, rig.watch)


def _comparison(title: str, run: ProbedRun) -> GateResult:
    tally = run.hold()
    return f"{title}: {tally.words}", tally.figures, tally.wrong


def _end_inside(rig: Rig) -> GateResult:
    """The stop id is one that is drafted and accepted, with further accepted drafts behind it."""
    branches = rig.free.branches
    early = next(filter(None, map(_early, branches)), None)
    stop = branches[0].tokens[2] if early is None else early
    run = rig.probe(Trial(stops=frozenset([stop])))
    wrong = run.agree([_cut(branch.tokens, stop) for branch in branches])
    stopped = [branch for branch in run.branches if branch.finish is Finish.STOP]
    within = sum(bool(b.accepted) and b.accepted[-1] > b.emitted[-1] for b in stopped)
    text = f"{len(stopped)} of {len(run.branches)} branches end at a token that a longer answer has"
    path = f", {within} of them inside an accepted path"
    text += "; no path had two drafts" if early is None else path
    return text, {"ended": len(stopped), "inside": within}, wrong


def _early(branch: Branch) -> int | None:
    """A token that first occurs as an accepted draft which another one follows."""
    depths = [0]  # how deep in its tree each token was drafted, 0 if the target drew it
    for accepted, emitted in zip(branch.accepted, branch.emitted, strict=True):
        depths += [depth if depth <= accepted else 0 for depth in range(1, emitted + 1)]
    for place, token in enumerate(branch.tokens[:-1]):
        if 0 < depths[place] < depths[place + 1] and branch.tokens.index(token) == place:
            return token
    return None


def _cut(tokens: list[int], stop: int) -> list[int]:
    """An answer up to its stop token."""
    return list(takewhile(lambda token: token != stop, tokens))


def _budgets(rig: Rig) -> GateResult:
    wrong: list[str] = []
    for budget in BUDGETS:
        run = rig.probe(Trial(tokens=budget))
        wrong += run.agree([branch.tokens[:budget] for branch in rig.free.branches])
        lengths = {len(branch.tokens) for branch in run.branches} - {budget}
        wrong += [f"a budget of {budget} gave {length} tokens" for length in sorted(lengths)]
    return f"max_new_tokens counts tokens: {BUDGETS}", {"budgets": len(BUDGETS)}, wrong


def _same_round(rig: Rig) -> GateResult:
    active = max(rig.bench.graph.layout.max_num_branches, 4)
    run = rig.probe(Trial((f"layout.max_num_branches={active}",), tokens=2))
    wrong = run.agree([branch.tokens[:2] for branch in rig.free.branches])
    rounds = {branch.name: len(branch.accepted) for branch in run.branches}
    wrong += [f"{name} had {count} rounds" for name, count in rounds.items() if count != 1]
    return f"{len(run.branches)} branches end in one round", {"ended": len(run.branches)}, wrong


def _newcomers(rig: Rig) -> GateResult:
    """The stop id is one that ends answers at different places, so that others join them."""
    answers = [branch.tokens for branch in rig.free.branches]
    before = rig.watch.joined

    def ends(token: int) -> int:
        return len({len(_cut(answer, token)) for answer in answers})

    stop = max(sorted(set().union(*answers)), key=ends)
    two = ("layout.max_num_branches=2", "layout.order=fcfs")
    run = rig.probe(Trial(two, stops=frozenset([stop])))
    wrong = run.agree([_cut(answer, stop) for answer in answers])
    joined = rig.watch.joined - before
    return f"two at a time: {joined} rounds with newcomers", {"joined": joined}, wrong


def _endless(rig: Rig) -> GateResult:
    """One of the first two branches never meets the stop id that ends others."""
    branches = rig.free.branches
    best = (0, -1, -1)
    for number, branch in enumerate(branches[:2]):
        others = [set(other.tokens) for other in branches if other is not branch]
        for token in set().union(*others) - set(branch.tokens):
            best = max(best, (sum(token in tokens for tokens in others), number, token))
    ends, number, token = best
    if not ends:
        return "no token ends some branches and not others", {"ended": 0}, []
    run = rig.probe(Trial(("layout.max_num_branches=2",), stops=frozenset([token])))
    wrong = run.agree([_cut(branch.tokens, token) for branch in branches])
    if run.branches[number].finish is not Finish.LENGTH:
        wrong.append(f"{run.branches[number].name} was to run to its budget")
    return f"{ends} others end beside one endless branch, two at a time", {"ended": ends}, wrong


def _least(free: ProbedRun) -> tuple[int, tuple[str, ...]]:
    """The slots that a run's largest request or branch needs alone, and what so few need set."""
    capacity = free.run.board["branches"].capacity
    needs = [request_slots(replace(r, branches=[])) + capacity.tree_slots(1) for r in free.requests]
    needs += [capacity.slots_alone(b.start, len(b.prompt), b.budget) for b in free.branches]
    small: tuple[str, ...] = (f"limits.max_new_tokens={free.bench.extent.gate_tokens}",)
    if free.side.job.program.graph.skeleton is not None:
        small += ("skeleton.direct_tokens=1",)  # no answer here is direct
    return max(needs), small


def _full_pool(rig: Rig) -> GateResult:
    """As many slots as the largest request or branch needs alone, and then one fewer."""
    free = rig.free
    slots, more = _least(free)
    small = ("layout.max_num_branches=1", *more)
    run = rig.probe(Trial((*small, f"layout.kv_slots={slots}")))
    wrong = run.agree([branch.tokens for branch in free.branches])
    short = rig.probe(Trial((*small, f"layout.kv_slots={slots - 1}")))
    refused = [branch for branch in short.branches if branch.finish is Finish.REFUSED]
    if not refused or not all("slots" in branch.note for branch in refused):
        wrong.append(f"{slots - 1} slots refused nobody")
    text = f"{slots} slots are enough for everybody, one fewer refuses by name"
    return text, {"slots": slots, "refused": len(refused)}, wrong


def _schedules(rig: Rig) -> GateResult:
    """Long prompts, each of them twice, under other settings of the scheduler than the graph's;
    parts are said to be short, so that rows run out where they are not reserved."""
    graph = rig.bench.graph
    preempted = 0
    reused = 0
    some = rig.bench.job.prompts[: 1 if graph.skeleton is not None else 2]
    prompts = tuple(replace(prompt, text=" ".join([prompt.text] * LONG)) for prompt in some)
    if graph.blend is None:  # the reused documents depend on the requests before
        prompts += tuple(replace(prompt, key=f"{prompt.key} again") for prompt in prompts)
    free = rig.probe(Trial(prompts=prompts, expected=1))
    text, figures, wrong = _comparison("long prompts twice", free)
    slots, small = _least(free)
    for policy, rows, cache, block, runs_out in SCHEDULES:
        sets = [f"scheduler.policy={policy}", f"scheduler.max_num_batched_tokens={rows}"]
        sets.append(f"scheduler.prefix_cache={str(cache).lower()}")
        if graph.layout.kind != "batching":
            sets.append(f"layout.block_size={block}")
        if runs_out:
            kv_slots = -(-slots // block) * block
            sets += ["scheduler.admission=optimistic", f"layout.kv_slots={kv_slots}", *small]
        run = rig.probe(Trial(tuple(sets), prompts=prompts, expected=1))
        wrong += run.agree([branch.tokens for branch in free.branches])
        branches = run.run.board["branches"]
        preempted += branches.lifecycle.preemptions
        reused += 0 if branches.prefixes is None else branches.prefixes.figures.reused
    text += f"; the same under {len(SCHEDULES)} settings of policy, chunks, prefix cache, blocks "
    text += f"and admission: {preempted} times somebody made way, {reused} tokens were found again"
    return text, {**figures, "preempted": preempted, "reused": reused}, wrong


def _odd_tokens(rig: Rig) -> GateResult:
    """Token 0 and the pad token begin every answer, as any other token would."""
    tokenizer = rig.free.side.session.models.tokenizer
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    run = rig.probe(Trial((f"sampling.forced=[0, {pad}]",)))
    which = f"the tokens 0 and {pad}" if pad else "token 0, which is the pad token or there is none"
    text, figures, wrong = _comparison(f"answers that begin with {which}", run)
    others = [branch.name for branch in run.branches if branch.tokens[:2] != [0, pad]]
    return text, figures, wrong + [f"{name} does not begin with them" for name in others]


def _to_the_end(rig: Rig) -> GateResult:
    """Two concurrent requests, two branches at a time, until the model stops by itself."""
    pair = rig.bench.job.prompts[:2]
    run = rig.probe(Trial(("layout.max_num_branches=2",), stops=None, prompts=pair))
    text = f"{len(run.requests)} requests beside each other, two branches at a time"
    if rig.bench.graph.beam is not None:
        wrong = [f"{r.key} never ended" for r in run.requests if not r.finished]
        return text, {"requests": len(run.requests)}, wrong
    return _comparison(text, run)


GATES: dict[str, Callable[[Rig], GateResult]] = {
    "nothing but the budget": lambda rig: _comparison(UNENDED, rig.free),
    "an end inside an accepted path": _end_inside,
    "budgets": _budgets,
    "one branch": lambda rig: _comparison("one branch alone", rig.probe(Trial(parts=1))),
    "all end in the same round": _same_round,
    "newcomers": _newcomers,
    "one endless branch": _endless,
    "an exactly full pool": _full_pool,
    "the scheduler's settings": _schedules,
    "token 0 and the pad token": _odd_tokens,
}
