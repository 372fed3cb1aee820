"""The sides of a comparison: their models, one run of a prompt by each, its costs, and whether they
gave the same tokens where they promise to. Only branches after the same token ids are compared:
another context follows from a difference that is counted where it first occurs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import chain, count, product
from pathlib import Path
from random import Random
from string import ascii_uppercase
from time import monotonic
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, PlainValidator

from ...models.codes import is_exact
from ...states.request import Branch, Finish
from ...states.yaml.source import number_of
from ..limits import cpu_share
from ..models import load_models, with_drafter
from ..prepare.inputs import Prompt
from ..prepare.job import Job, set_up_torch, threads_of
from ..record.metrics import Marks, Meter
from ..run.core import Status, StopSignal
from ..run.scoring import contexts, next_scores
from ..run.session import Session, perform, tie
from ..run.writer import answers_of, output_digest, refusals
from ..shell import shortened

WARM_UP = 16  # rounds of the first prompt

# In JSON a meter is its counts.
SavedMeter = Annotated[Meter, PlainValidator(Meter.of), PlainSerializer(lambda meter: meter.counts)]


@dataclass(frozen=True, slots=True)
class SideRun:
    """One prompt answered by one side, with its later turns. first_token, last_token: nanoseconds
    from the start, 0 if there is none, added up over turns; decoded: tokens after the first of each
    turn. kv: bytes of all pools, `held` at most, `moved`, and `allocated`, of the largest turn;
    empty for a peer. problems: why the answer is not complete; scores: of its text; requests: by
    turn, empty for a run that was read from a folder."""

    meter: SavedMeter
    first_token: int = 0
    last_token: int = 0
    decoded: int = 0
    host_reads: int = 0
    kv: Mapping[str, int] = field(default_factory=dict)
    problems: Sequence[str] = ()
    digest: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    requests: Annotated[tuple[Any, ...], Field(exclude=True)] = ()

    def followed_by(self, turn: "SideRun") -> "SideRun":
        """Both turns together."""
        self.meter.add(turn.meter)
        return SideRun(
            self.meter,
            first_token=self.first_token + turn.first_token,
            last_token=self.last_token + turn.last_token,
            decoded=self.decoded + turn.decoded,
            host_reads=self.host_reads + turn.host_reads,
            kv={name: max(count, turn.kv[name]) for name, count in self.kv.items()},
            problems=(*self.problems, *turn.problems),
            digest=self.digest + turn.digest,
            requests=self.requests + turn.requests,
        )


class BranchAnswer(StrEnum):
    EQUAL = "equal"
    TIE = "tie"
    DIFFERENT = "different"
    FOLLOWS = "follows"  # its context differs because of a difference elsewhere
    UNFINISHED = "unfinished"  # refused or stopped on one side


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers first differ; position: tokens before it; before: text that ends there.
    reference, other: token ids, END or CUT. margin: of their scores (`scoring.next_scores`) by the
    target alone; None where one side has no token."""

    position: int
    before: str
    reference: int
    other: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class BranchComparison:
    """One branch of one prompt on two sides; tokens: of the reference's answer."""

    branch: str
    result: BranchAnswer
    tokens: int
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """A prompt, its runs and branches by the sides' letters. cpu_share: of a busy loop before."""

    prompt: Annotated[Prompt, Field(exclude=True)]
    runs: Mapping[str, SideRun]
    cpu_share: float = 1.0
    results: dict[str, list[BranchComparison]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program. answer: decodes a prompt within a budget. codes: of its own weights."""

    name: str
    answer: "Callable[[Side, Prompt, int | None], SideRun]"
    codes: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """One graph; sets: settings that not all have; peer: answers instead of the graph."""

    letter: str
    job: Job
    session: Session
    target: Path
    sets: tuple[str, ...] = ()
    peer: Peer | None = None

    @property
    def title(self) -> str:
        return self.peer.name if self.peer is not None else self.job.program.graph.name

    @property
    def name(self) -> str:
        return f"{self.title}@{','.join(self.sets)}" if self.sets else self.title

    @property
    def blends(self) -> bool:
        return self.peer is None and self.job.program.graph.blend is not None


class SharedModels:
    """Models that are loaded when a graph first needs them and shared by all that do."""

    def __init__(self) -> None:
        self._target = cache(load_models)
        self._drafted = cache(with_drafter)

    def side(
        self, letter: str, job: Job, target: Path, drafter: Path | None, sets: tuple[str, ...] = ()
    ) -> Side:
        """A job with the models of these folders; raises UsageError, ModelError, GraphError."""
        options = replace(job.options, threads=threads_of(job))
        job = replace(job, options=options)
        set_up_torch(threads_of(job), options.device)
        place = {"device": options.device, "dtype": options.dtype, "weights": options.weights}
        models = self._target(target, None, **place)
        if drafter is not None:
            models = self._drafted(models, drafter, job.program.graph.drafter.kind)
        return Side(letter, job, tie(job, models), target, sets=sets)


def letters() -> Iterator[str]:
    """A to Z, AA, AB and so on."""
    lengths = (product(ascii_uppercase, repeat=length) for length in count(1))
    return map("".join, chain.from_iterable(lengths))


def warm_up(sides: Sequence[Side], prompts: Sequence[Prompt], halt: StopSignal) -> None:
    """Run rounds that no figure counts: of the first prompt, or of all where chunks are reused."""
    for side in sides if prompts else ():
        set_up_torch(threads_of(side.job), side.job.options.device)
        if side.peer is not None:
            side.peer.answer(side, prompts[0], WARM_UP)
            continue
        for prompt in dict.fromkeys(prompts) if side.blends else prompts[:1]:
            perform(side.session, [prompt], stop=halt, max_rounds=WARM_UP)[0].close()


def answer_all(
    sides: Sequence[Side],
    prompts: Mapping[int, Prompt],
    halt: StopSignal,
    show: Callable[[str, float], None],
    *,
    later: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[ComparedPrompt]:
    """Every prompt through every graph, by the numbers of the rounds; each draws an order of sides,
    so that a slower machine favours none. One that a stop signal interrupts is omitted. later: the
    user's next turns, by the prompts' keys."""
    start_time = monotonic()
    done = 0
    every = len(prompts) * len(sides)
    for place, (number, prompt) in enumerate(prompts.items(), 1):
        runs = {}
        share = cpu_share()
        for side in Random(number).sample(sides, len(sides)):
            remaining = ""
            if done:
                seconds = (monotonic() - start_time) / done * (every - done)
                left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
                remaining = f", about {left} left"
            title = f"prompt {place} of {len(prompts)}{remaining}: {side.letter} {side.name} ..."
            show(title, done / every)
            runs[side.letter] = _converse(side, prompt, later.get(prompt.key, ()), halt)
            if halt.status is not None:
                return
            done += 1
        yield ComparedPrompt(prompt, {side.letter: runs[side.letter] for side in sides}, share)


def _converse(side: Side, prompt: Prompt, later: Sequence[str], halt: StopSignal) -> SideRun:
    """A prompt and the user's next turns, each of which follows the side's own answers."""
    run = _answer(side, prompt, halt)
    key = prompt.key
    for number, text in enumerate(later, 2):
        (answer,) = answers_of(run.requests[-1:], side.session.prompts)
        past = (*prompt.past, answer.turn)
        prompt = replace(prompt, key=f"{key} turn {number}", text=text, past=past)
        run = run.followed_by(_answer(side, prompt, halt))
    return run


def _answer(side: Side, prompt: Prompt, halt: StopSignal) -> SideRun:
    set_up_torch(threads_of(side.job), side.job.options.device)
    if side.peer is not None:
        return side.peer.answer(side, prompt, None)
    run, recorder, status = perform(side.session, [prompt], stop=halt)
    (request,) = run.requests
    meter = recorder.meter
    answers = answers_of([request], side.session.prompts)
    problems = refusals(answers)
    if status is Status.LIMIT:
        most = number_of(side.job.program.graph.limits.max_rounds, "round")
        problems.append(f"request {prompt.key} stopped after {most} (limits.max_rounds)")
    pools = [run.board[key] for key in ("kv", "kv_draft") if run.board[key] is not None]
    marks = next(iter(meter.marks.values()), Marks())
    answered = SideRun(
        meter,
        first_token=marks.first_token or 0,
        last_token=marks.last_token or 0,
        decoded=max(meter.tokens - 1, 0),
        host_reads=run.board["host"].reads,
        kv={
            "held": sum(pool.peak_length * pool.slot_bytes for pool in pools),
            "moved": sum(pool.ledger.bytes.total() for pool in pools),
            "allocated": sum(pool.slots * pool.slot_bytes for pool in pools),
        },
        problems=[f"{side.letter} {side.name}: {problem}" for problem in problems],
        digest=output_digest(answers),
        requests=(request,),
    )
    run.close()
    return answered


# -- equal tokens ------------------------------------------------------------------------------

TIE = 1e-4  # logits nearer than this may come out in either order in float32
END = -1  # instead of a token: the answer stopped here
CUT = -2  # the answer is not longer
SHOWN = 24  # tokens before a difference that are shown with it


@dataclass(frozen=True, slots=True)
class GraphPair:
    """why_not: why the answers of the two are not compared; empty if they are."""

    reference: Side
    other: Side
    why_not: str = ""

    @property
    def promised(self) -> bool:
        options = self.other.job.options
        return not self.why_not and is_exact(options.dtype, options.weights)


def pairs_of(sides: Sequence[Side]) -> list[GraphPair]:
    """Every graph with the first one that promises the same; first ones with all before them."""
    firsts: list[Side] = []
    pairs: list[GraphPair] = []
    for side in sides:
        candidates = [GraphPair(first, side, _reason(first, side)) for first in firsts]
        same = [pair for pair in candidates if not pair.why_not]
        pairs += same[:1] or candidates
        firsts += [] if same else [side]
    return pairs


def _reason(first: Side, second: Side) -> str:
    sides = (first, second)
    samplings = [side.job.program.graph.sampling for side in sides]
    without = [side.letter for side in sides if side.job.program.graph.skeleton is None]
    if len(without) == 1:
        return f"{without[0]} has no skeleton: its answers have another context"
    drawn = any(sampling.temperature for sampling in samplings)
    if drawn and any(side.peer is not None for side in sides):
        return "transformers draws with coins of its own"
    if not all(sampling.exact for sampling in samplings):
        return "accept: rejection keeps the distribution, not the tokens"
    facts, others = map(_facts, sides)
    unlike = [key for key in facts if facts[key] != others[key]]
    pairs = {key: [shortened(each[key], 40) for each in (facts, others)] for key in unlike}
    return ", ".join(f"{key}: {' and '.join(texts)}" for key, texts in pairs.items())


def _facts(side: Side) -> dict[str, Any]:
    graph = side.job.program.graph
    codes = side.peer.codes if side.peer is not None else ""
    facts: dict[str, Any] = {
        "model": side.target,
        "dtype": side.job.options.dtype,
        "weights": codes or side.job.options.weights,
        "budget": side.session.budget,
        "beam": graph.beam,
        "blend": graph.blend,
    }
    # How drafts are accepted decides on no token: what is compared is exact.
    sampling = graph.sampling.model_dump(exclude={"accept", "rule"})
    facts |= {f"sampling.{key}": value for key, value in sampling.items()}
    if graph.skeleton is not None:
        facts["outline"] = side.job.outline
        facts |= {f"skeleton.{key}": value for key, value in graph.skeleton.model_dump().items()}
    return facts


def compare_branches(pair: GraphPair, prompt: ComparedPrompt) -> list[BranchComparison]:
    """All branches of a prompt, turn by turn, the outline first."""
    # By name (`outline`, or the number), with the ids before the answer.
    decoded: list[dict[str, tuple[Branch, list[int]]]] = []
    complete = True
    for side in (pair.reference, pair.other):
        named: dict[str, tuple[Branch, list[int]]] = {}
        for turn, request in enumerate(prompt.runs[side.letter].requests, 1):
            complete = complete and all(map(_finished, request.all_branches()))
            for branch, ids in contexts(request, side.session.prompts):
                name = "outline" if branch.is_root else str(branch.index + 1)
                named[name if turn == 1 else f"{name} of turn {turn}"] = (branch, ids)
        decoded.append(named)
    results = []
    for name in dict.fromkeys(chain.from_iterable(decoded)):
        reference, other = (branches.get(name) for branches in decoded)
        result = BranchAnswer.EQUAL
        difference = None
        if not all(_finished(one[0]) for one in (reference, other) if one is not None):
            result = BranchAnswer.UNFINISHED
        elif reference is None or other is None or reference[1] != other[1]:
            result = BranchAnswer.FOLLOWS
        elif difference := _first_difference(pair.reference, reference[0], other[0], reference[1]):
            near = difference.margin is not None and difference.margin < TIE
            result = BranchAnswer.TIE if near else BranchAnswer.DIFFERENT
        tokens = len(reference[0].tokens) if reference is not None else 0
        results.append(BranchComparison(name, result, tokens, difference))
    if any(result.difference for result in results):
        return results
    # Nothing to follow from: contexts differ that must not, unless one side was not finished.
    fault = BranchAnswer.DIFFERENT if complete else BranchAnswer.UNFINISHED
    return [replace(r, result=fault) if r.result is BranchAnswer.FOLLOWS else r for r in results]


def _finished(branch: Branch) -> bool:
    return branch.finish in (Finish.STOP, Finish.LENGTH)


def _first_difference(
    side: Side, reference: Branch, other: Branch, context: Sequence[int]
) -> Difference | None:
    # With how they ended, so that unequal answers differ at some position.
    both = (reference, other)
    mine, theirs = ([*b.tokens, END if b.finish is Finish.STOP else CUT] for b in both)
    if mine == theirs:
        return None
    pairs = enumerate(zip(mine, theirs, strict=False))
    place, tokens = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    before = side.session.prompts.decode([*context, *reference.tokens[:place]][-SHOWN:])
    margin = None
    if CUT not in tokens:
        order_V = next_scores(side.session.models, reference, context, place)
        stops = reference.request.stop_ids
        ends = [order_V[[*stops] if token == END else token].max() for token in tokens]
        margin = abs(float(ends[0]) - float(ends[1]))
    return Difference(place, before, *tokens, margin)


def equality_of(pair: GraphPair, prompts: Sequence[ComparedPrompt]) -> dict[str, Any]:
    """How many branches of a pair are equal, and what differs, as plain data."""
    letter = pair.other.letter
    both = {"reference": pair.reference.letter, "graph": letter}
    if pair.why_not:
        return {**both, "compared": False, "reason": pair.why_not}
    branches = [(one.prompt.key, b) for one in prompts for b in one.results.get(letter, ())]
    differences = []
    for key, branch in branches:
        if branch.result not in (BranchAnswer.DIFFERENT, BranchAnswer.TIE):
            continue
        plain: Any = {"prompt": key, "branch": branch.branch, "result": str(branch.result)}
        if (there := branch.difference) is not None:
            plain |= asdict(there)
            for name, token in (("reference", there.reference), ("graph", plain.pop("other"))):
                end = {END: "stop", CUT: "length"}.get(token)  # how the answer ended instead
                text = pair.reference.session.prompts.decode([token]) if end is None else None
                plain[name] = {"id": None if end else token, "text": text, "end": end}
        differences.append(plain)
    return {
        **both,
        "compared": True,
        "promised": pair.promised,
        **counts([branch for _, branch in branches]),
        "differences": differences,
    }


def counts(branches: Sequence[BranchComparison]) -> dict[str, int]:
    number = Counter(branch.result for branch in branches)
    tokens = sum(branch.tokens for branch in branches if branch.result is BranchAnswer.EQUAL)
    by_result = {str(kind): number[kind] for kind in BranchAnswer}
    return {"branches": len(branches), **by_result, "equal_tokens": tokens}
