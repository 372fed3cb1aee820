"""The structural gates: what broke earlier systems, tried on the graph's own layout and drafter.

The expected answers of most runs follow from those of the first one, which has no stop ids. After
every phase the pools are checked, and the drafter's rows: a stale one changes no token, so that no
comparison of answers can find it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, takewhile
from typing import Any

import torch

from ...ops.kv.pool import KVCache
from ...states.admission import request_slots
from ...states.drafter import Drafter
from ...states.machine import Event, OpRan, Run
from ...states.request import Branch, Finish, Request, Stage
from ...states.yaml.source import number_of
from ..bench.experiment import outline_of
from ..bench.sides import Side
from ..errors import is_told, message_of
from ..models import new_pool
from ..prepare.inputs import Prompt
from ..run.core import EngineCore
from ..run.scoring import context_segments, contexts, full_prefill
from .reference import Bench, Check, Repeat, judged

MOST_STEPS = 100_000  # transitions after which a run counts as hanging
COMPARED = 60  # branches of a probe whose drafter rows are computed again
TITLES = ("Goal", "Main parts", "Risks", "Summary", "Steps", "Time", "Cost", "Place")


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of `parts` branches, of one given outline or of as many requests; greedy without
    `sets`. tokens: the budget of every branch. stops: stop ids; None for the model's own, and then
    it writes the outlines itself. expected: the length of parts in the outline."""

    sets: tuple[str, ...] = ()
    parts: int = 4
    tokens: int | None = None
    stops: frozenset[int] | None = frozenset()
    prompts: tuple[Prompt, ...] = ()
    expected: int = 60
    dtype: str = ""


@dataclass(frozen=True)
class ProbedRun:
    """A trial's finished run."""

    bench: Bench
    trial: Trial
    side: Side
    run: EngineCore
    requests: Sequence[Request]

    @property
    def branches(self) -> list[Branch]:
        """All but the outlines."""
        return [branch for request in self.requests for branch in request.branches]

    def answers(self) -> Iterator[tuple[Branch, list[int]]]:
        for request in self.requests:
            yield from contexts(request, self.side.session.prompts)

    def again(self) -> "ProbedRun":
        return Rig(self.bench).probe(replace(self.trial, dtype="float64"))

    @cached_property
    def repeat(self) -> Repeat:
        return self.bench.repeat(self.side, lambda: self.again().requests)

    def agree(self, expected: Sequence[Sequence[int]]) -> list[str]:
        """What is wrong with answers that should be these; in doubt transformers decides."""
        if len(self.branches) != len(expected):
            return [f"{len(self.branches)} branches, expected were {len(expected)}"]
        tally = self.bench.tally()
        ids = dict(self.answers())
        for branch, tokens in zip(self.branches, expected, strict=True):
            if branch not in ids or branch.finish not in (Finish.STOP, Finish.LENGTH):
                tally.wrong.append(f"{branch.name} is {branch.finish}: {branch.note}")
            elif branch.tokens != list(tokens):
                tally.hold_branch(branch, ids[branch], self.repeat)
        return tally.wrong


# Of a drafter's row from the same row computed again.
ROWS_OFF = {"float32": 1e-3, "float64": 1e-9, "bfloat16": 0.05, "float16": 0.01}


@dataclass
class Rig:
    """Runs of one graph, and what was seen after every phase; worst: the largest `off_by`."""

    bench: Bench
    seen: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)

    @cached_property
    def free(self) -> ProbedRun:
        """The run without stop ids."""
        return self.probe(Trial())

    def look(self, run: Run) -> None:
        """Pools are consistent, and hold what their branches need: nothing else, nothing less."""
        self.seen["phases"] += 1
        self.seen["joined"] += run.state == "continuous_decode"
        manager = run.board["branches"]
        target = run.board["kv"]
        for pool in manager.pools:
            try:
                pool.check_integrity()
            except AssertionError as error:
                self.wrong.setdefault("integrity", f"{run.state}: {error}")
        if manager.beams is not None:
            return  # a search's rows are a tree, which has tests of its own
        expected = sum(_rows(manager, request) for request in manager.requests)
        expected += manager.kv_cache.num_cached_rows
        if (used := target.current_length) != expected:
            self.wrong.setdefault("rows", f"{run.state}: {used} slots in use for {expected} rows")
        for branch in manager.active:
            positions = target.position[_slots(manager, target, branch)].tolist()
            # It must see the rows of its prefix, those of parts that it reads, and its own.
            ranges = [range(0, branch.request.prefix_length)]
            ranges += [range(part.start, part.length) for part in (*branch.reads, branch)]
            if sorted(positions) != sorted(chain.from_iterable(ranges)):
                self.wrong.setdefault("gap", f"{run.state}: {branch.name} has a gap among its rows")

    def probe(self, trial: Trial) -> ProbedRun:
        """Run a trial, checked after each phase; raises RuntimeError if it does not end."""
        bench = self.bench
        greedy = () if bench.graph.beam is not None else ("sampling.temperature=0",)
        tokens = bench.extent.gate_tokens
        job = bench.changed(*greedy, *trial.sets, tokens=tokens, dtype=trial.dtype or bench.dtype)
        skeleton = job.program.graph.skeleton
        if skeleton is not None and trial.stops is not None:
            titles = TITLES[: min(trial.parts, skeleton.max_branches)]
            job = replace(job, outline=outline_of(titles, trial.expected))
        side = bench.side(job)
        prompts = trial.prompts or bench.job.prompts[: trial.parts if skeleton is None else 1]
        requests = [side.session.request(prompt) for prompt in prompts]
        for request in requests:
            request.budget = request.budget if trial.tokens is None else trial.tokens
            request.stop_ids = request.stop_ids if trial.stops is None else trial.stops
        ops: list[str] = []

        def sink(event: Event) -> None:
            if isinstance(event, OpRan):
                ops.append(event.op)
                if event.op == "schedule.plan_":
                    self.seen["chunks"] += len(run.board["step"].chunks)

        run = side.session.start(requests, sink)
        pools = run.manager.pools
        places = [pool.data.data_ptr() for pool in pools]
        most = self.seen["compared"] + COMPARED if run.board["kv_draft"] is not None else 0
        while not run.finished:
            if run.steps >= MOST_STEPS:
                raise RuntimeError(f"no end after {MOST_STEPS} transitions")
            ops.clear()
            run.advance()
            self.seen["forwards"] += ops.count("target.forward_")
            self.look(run)
            if "draft.expand_root_" in ops and self.seen["compared"] < most:
                parts = run.board["drafter"].parts
                for drafter in (part for part in parts if part.kv is not None and not part.waits):
                    for branch in (branch for branch in drafter.active if not branch.reads):
                        self.seen["compared"] += 1
                        self.worst = max(self.worst, off_by(side, run, drafter, branch))
        self.seen["runs"] += 1
        self.seen["reads"] += run.board["host"].reads
        self.seen["forked"] += sum(pool.ledger.bytes["fork"] for pool in pools)
        if places != [pool.data.data_ptr() for pool in pools]:
            self.wrong.setdefault("moved", "a pool was allocated anew during a run")
        for used in filter(None, (pool.current_length - pool.idle_length for pool in pools)):
            self.wrong.setdefault("left", f"{used} slots are in use after the end of a run")
        return ProbedRun(bench, trial, side, run, requests=requests)


def _rows(manager: Any, request: Request) -> int:
    there = [b for b in request.branches if b.stage is Stage.RUNNING or b.retained]
    count = 0 if request.finished else sum(b.row_count for b in there)
    if request.stage in (Stage.PREFILL, Stage.OUTLINE, Stage.RUNNING, Stage.MERGING):
        count += request.prefix_length * len(manager.layout.rows_of(request.prefix_owner))
        count -= request.shared
    if request.stage is Stage.OUTLINE and request.root is not None:
        count += request.root.row_count
    return int(count)


def _slots(manager: Any, pool: KVCache, branch: Branch) -> list[int]:
    (row,) = manager.layout.rows_of(branch.owner)
    path = reversed(manager.table.segments.lineage(branch.owner))
    return [slot for owner in path for slot in pool.slots_of(owner, row).tolist()]


def off_by(side: Side, run: Run, drafter: Drafter, branch: Branch) -> float:
    """The largest difference of a branch's rows in a drafter's pool from those computed anew, as a
    share of the largest number. Valid right after that drafter read what was committed."""
    pool = drafter.kv
    models = side.session.models
    ids = [*dict(contexts(branch.request, side.session.prompts))[branch], *branch.tokens]
    rows = branch.length + drafter.reads_root
    slots = _slots(run.board["branches"], pool, branch)
    if pool.position[slots].tolist() != list(range(rows)):
        return float("inf")
    with torch.inference_mode():
        fresh = new_pool(drafter.model, rows, 1, models)
        features_QF = None
        if taps := getattr(drafter.model, "tap_ids", ()):
            place = (models.dtype, models.device)
            features_QF = full_prefill(models.target, ids[:rows], *place, taps=taps)[0].taps_QF
        ids_1Q = torch.tensor([ids[: rows + 1]], device=models.device)
        drafter.write_rows_(ids_1Q, rows, features_QF, fresh)
        expected = fresh.data[:, :, :, :rows]
        off = (pool.data[:, :, :, slots] - expected).abs().max() / expected.abs().max()
    return float(off.nan_to_num(nan=torch.inf))


def memory_checks(rig: Rig) -> Iterator[Check]:
    figures = {"runs": rig.seen["runs"], "phases": rig.seen["phases"], "faults": len(rig.wrong)}
    text = f"pools and book agree after each of {rig.seen['phases']} phases"
    text += f" of {number_of(rig.seen['runs'], 'run')}, and pools are empty at the end"
    yield judged("memory/integrity", text, figures, [*rig.wrong.values()])
    reads = {name: rig.seen[name] for name in ("reads", "forwards")}
    text = "{reads} host reads for {forwards} forwards of the target".format_map(reads)
    few = reads["reads"] <= reads["forwards"]
    yield Check("memory/one host read per forward", few, reads, text)
    forked = rig.seen["forked"]
    copied = rig.bench.graph.layout.kind == "batching" or forked == 0
    yield Check("memory/forks", copied, {"bytes": forked}, f"{forked} bytes copied by forks")
    if compared := rig.seen["compared"]:
        limit = ROWS_OFF[rig.bench.dtype]
        rows = {"branches": compared, "worst": rig.worst, "tolerance": limit}
        text = f"the drafter's rows of {compared} branches in mid-run, newcomers among them,"
        text += f" are those of their text computed again: at most {rig.worst:.1e} apart"
        yield Check("memory/the drafter's rows", rig.worst <= limit, rows, text)


BUDGETS = (1, 2, 3, 7)
SCHEDULES = (  # policy, rows of a forward, prefix cache, block size, and whether rows run out
    ("fcfs", 7, True, 16, False),
    ("max_throughput", 64, False, 64, True),
    ("sot_priority", 1024, True, 1, True),
)
SPARE = (1, 8, 16, 32, 64)  # slots, one after another, until rows run out while branches run
LONG = 12  # times a prompt's own text
TWO_AT_A_TIME = "layout.max_num_branches=2"
NEUTRAL = (
    *("repetition_penalty=1.0", "presence_penalty=0.0", "frequency_penalty=0.0", "min_p=0.0"),
    *("logit_bias={}", "banned=[]", "forced=[]", "min_new_tokens=0", "top_k=0", "top_p=1.0"),
)
FILTER_HEAT = 3.0
FILTERS: Mapping[str, Any] = {"top_k": 3, "top_p": 0.5}
EDGE = 1e-3  # of a score: float noise may move equally likely tokens over a border

GateResult = tuple[str, Mapping[str, float], list[str]]  # what was tried, figures, what is wrong


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
            check = judged(f"gates/{name}", *gate())
        except Exception as error:
            if is_told(error):
                raise
            check = Check(f"gates/{name}", False, {}, f"the run died: {message_of(error)}")
        yield check
    yield from memory_checks(rig)


def _comparison(title: str, run: ProbedRun) -> GateResult:
    tally = run.bench.tally()
    for request in run.requests:
        tally.hold(run.side, request, run.repeat)
    return f"{title}: {tally.words}", tally.figures, tally.wrong


def _end_inside(rig: Rig) -> GateResult:
    """The stop id is one that is drafted and accepted, with further accepted drafts behind it."""
    branches = rig.free.branches
    early = next(filter(None, map(_early, branches)), None)
    run, wrong = _stopped(rig, branches[0].tokens[2] if early is None else early)
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


def _stopped(rig: Rig, stop: int, *sets: str) -> tuple[ProbedRun, list[str]]:
    """The run in which this token ends branches, and what is wrong with its answers."""
    run = rig.probe(Trial(sets, stops=frozenset([stop])))
    return run, run.agree([_cut(branch.tokens, stop) for branch in rig.free.branches])


def _cut(tokens: list[int], stop: int) -> list[int]:
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
    before = rig.seen["joined"]
    tokens = sorted(set().union(*answers))
    stop = max(tokens, key=lambda token: len({len(_cut(answer, token)) for answer in answers}))
    _, wrong = _stopped(rig, stop, TWO_AT_A_TIME, "layout.order=fcfs")
    joined = rig.seen["joined"] - before
    return f"two at a time: {number_of(joined, 'round')} with newcomers", {"joined": joined}, wrong


def _endless(rig: Rig) -> GateResult:
    """One of the first two branches never meets the stop id that ends others."""
    branches = rig.free.branches
    candidates = [(0, -1, -1)]
    for number, branch in enumerate(branches[:2]):
        others = [set(other.tokens) for other in branches if other is not branch]
        for token in set().union(*others) - set(branch.tokens):
            candidates.append((sum(token in tokens for tokens in others), number, token))
    ends, number, token = max(candidates)
    if not ends:
        return "no token ends some branches and not others", {"ended": 0}, []
    run, wrong = _stopped(rig, token, TWO_AT_A_TIME)
    if run.branches[number].finish is not Finish.LENGTH:
        wrong.append(f"{run.branches[number].name} was to run to its budget")
    return f"{ends} others end next to one endless branch, two at a time", {"ended": ends}, wrong


def _least(free: ProbedRun) -> tuple[int, tuple[str, ...]]:
    """The slots that the largest request or branch needs alone, and what so few need set."""
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
        wrong.append(f"{slots - 1} slots refused no request")
    text = f"{slots} slots are enough for all, one fewer refuses by name"
    return text, {"slots": slots, "refused": len(refused)}, wrong


def _schedules(rig: Rig) -> GateResult:
    """Long prompts, each twice, under settings for which rows are reused and evicted, prompts read
    in chunks, and branches or requests preempted. What can happen must happen."""
    graph = rig.bench.graph
    some = rig.bench.job.prompts[: 1 if graph.blend is not None else 2]
    prompts = tuple(replace(prompt, text=" ".join([prompt.text] * LONG)) for prompt in some)
    prompts += tuple(replace(prompt, key=f"{prompt.key} again") for prompt in prompts)
    trial = Trial(prompts=prompts, expected=1)  # short parts are expected, long ones are decoded
    free = rig.probe(trial)
    text, figures, wrong = _comparison("long prompts twice", free)
    chunks = rig.seen["chunks"]
    counts = Counter({"chunks": 0})
    slots, small = _crowded(free)
    for policy, rows, cache, block, runs_out in SCHEDULES:
        sets = [f"scheduler.policy={policy}", f"scheduler.max_num_batched_tokens={rows}"]
        sets.append(f"scheduler.prefix_cache={str(cache).lower()}")
        if graph.layout.kind != "batching":
            sets.append(f"layout.block_size={block}")
        if runs_out:
            sets += ["scheduler.admission=optimistic", *small]
        for more in SPARE if runs_out else SPARE[:1]:
            size = [f"layout.kv_slots={-(-(slots + more) // block) * block}"] if runs_out else []
            run = rig.probe(replace(trial, sets=(*sets, *size)))
            wrong += run.agree([branch.tokens for branch in free.branches])
            counts.update(_scheduled(run))
            if not run.run.manager.admission.optimistic or counts["preemptions"]:
                break
    if graph.skeleton is not None and graph.skeleton.drafter is not None:
        # Without an outline to draft, its drafter has no rows of the prompt that can be reused.
        own = rig.probe(Trial(prompts=prompts, stops=None))
        wrong += _comparison("", own)[2]
        counts.update(_scheduled(own))
    counts["chunks"] = rig.seen["chunks"] - chunks
    text += f"; the same under {len(SCHEDULES)} settings of policy, chunks, prefix cache, blocks "
    text += f"and admission: {', '.join(f'{count} {name}' for name, count in counts.items())}"
    wrong += [f"no {name}" for name, count in counts.items() if not count]
    return text, {**figures, **counts}, wrong


def _scheduled(run: ProbedRun) -> dict[str, int]:
    """What the scheduler and the prefix cache did in a run, as far as its graph allows it."""
    manager = run.run.manager
    counts = {}
    if manager.admission.optimistic:
        counts["preemptions"] = manager.lifecycle.preemptions
    if manager.prefixes is not None:
        counts["reused tokens"] = manager.prefixes.figures.reused
        counts["evicted rows"] = manager.prefixes.figures.evicted_rows
    return counts


def _crowded(free: ProbedRun) -> tuple[int, tuple[str, ...]]:
    """Slots in which two branches start and cannot both end, and what so few slots need set."""
    slots, small = _least(free)
    capacity = free.run.manager.capacity
    if free.side.job.program.graph.skeleton is None:
        second = min(request.prompt_size for request in free.requests)
    else:
        second = min(len(branch.prompt) for branch in free.branches)
    trees = capacity.tree_slots(min(2, capacity.max_active)) - capacity.tree_slots(1)
    return slots + second + trees, small


def _odd_tokens(rig: Rig) -> GateResult:
    """Token 0 and the pad token begin every answer, as any other token would."""
    pad = getattr(rig.free.side.session.models.tokenizer, "pad_token_id", None) or 0
    run = rig.probe(Trial((f"sampling.forced=[0, {pad}]",)))
    which = f"the tokens 0 and {pad}" if pad else "token 0, which is the pad token or there is none"
    text, figures, wrong = _comparison(f"answers that begin with {which}", run)
    others = [branch.name for branch in run.branches if branch.tokens[:2] != [0, pad]]
    return text, figures, wrong + [f"{name} does not begin with them" for name in others]


def _to_the_end(rig: Rig) -> GateResult:
    """Two concurrent requests, two branches at a time, until the model stops by itself."""
    run = rig.probe(Trial((TWO_AT_A_TIME,), stops=None, prompts=rig.bench.job.prompts[:2]))
    text = f"{len(run.requests)} requests at once, two branches at a time"
    if rig.bench.graph.beam is not None:
        wrong = [f"{r.key} never ended" for r in run.requests if not r.finished]
        return text, {"requests": len(run.requests)}, wrong
    return _comparison(text, run)


def neutral_sampling(*settings: str) -> tuple[str, ...]:
    """Settings with nothing but these that changes a score."""
    return tuple(f"sampling.{setting}" for setting in (*NEUTRAL, *settings))


def filter_gate(bench: Bench, name: str) -> GateResult:
    """Tokens that a filter of transformers cuts away are drawn without the setting only."""
    free, every = _cut_away(bench, name)
    setting = f"{name}={FILTERS[name]}"
    wrong, count = _cut_away(bench, name, setting)
    figures = {"tokens": count, "outside": wrong, "outside_without": free}
    text = f"at temperature {FILTER_HEAT:g}, {wrong} of {count} tokens are outside of"
    text += f" {setting} that were drawn with it, {free} of {every} drawn without it"
    text += "" if free else ": too sure a model for this to tell anything"
    return text, figures, [f"{wrong} tokens should not have been drawn"] if wrong else []


def _cut_away(bench: Bench, name: str, *settings: str) -> tuple[int, int]:
    """(tokens that the filter cuts away, all tokens), of what is drawn with these settings."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    heat = TemperatureLogitsWarper(FILTER_HEAT)
    keep = (TopKLogitsWarper if name == "top_k" else TopPLogitsWarper)(FILTERS[name])
    trial = Trial(neutral_sampling(f"temperature={FILTER_HEAT}", *settings))
    outside = count = 0
    for branch, context in Rig(bench).probe(trial).answers():
        ids = [*context, *branch.tokens]
        logits_QV = bench.reference.logits(ids, bench.dtype, context_segments(branch))
        scores_QV = heat(None, logits_QV[len(context) - 1 : -1].double())
        likely_QV = keep(None, scores_QV.clone())
        least_Q1 = scores_QV.masked_fill(likely_QV.isinf(), torch.inf).amin(1, keepdim=True)
        tokens_Q1 = torch.tensor(branch.tokens, device=logits_QV.device)[:, None]
        outside += int((scores_QV.gather(1, tokens_Q1) < least_Q1 - EDGE).sum())
        count += len(branch.tokens)
    return outside, count


GATES: dict[str, Callable[[Rig], GateResult]] = {
    "nothing but the budget": lambda rig: _comparison(
        "branches that nothing ends but their budget", rig.free
    ),
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
