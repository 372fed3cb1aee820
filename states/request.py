"""The lives of requests and of branches: two machines, declared in one table.

Whoever takes a way that is not in the table has a fault of ours: `transitions` raises MachineError.
The machines have no models of their own; a request or a branch is moved by `move`, which sets its
`stage`. A way costs some microseconds, and nobody takes one for a token or a round.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from transitions import Machine

from ..ops.sampling.settings import SamplingRules
from .text.documents import Document
from .text.outline import Outline, Point
from .text.tokens import PromptTokens

logging.getLogger("transitions").setLevel(logging.WARNING)  # it tells of each step, at a price


class Stage(StrEnum):
    """Where a request or a branch stands."""

    WAITING = "waiting"
    PREFILL = "prefilling"  # a request whose prompt is read in chunks
    OUTLINE = "outlining"  # a request whose root branch is writing
    RUNNING = "running"
    MERGING = "merging"  # a request whose last branch combines the others
    PREEMPTED = "preempted"  # it had to make way, and goes on where it was once there is room
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


WAITS = (Stage.WAITING, Stage.PREEMPTED)
OPEN = (Stage.PREFILL, Stage.OUTLINE, Stage.RUNNING, Stage.MERGING)
LIVE = (*WAITS, *OPEN)
ENDED = (Stage.DONE, Stage.REFUSED, Stage.CANCELLED, Stage.FAILED)


class Way(NamedTuple):
    """One row of the table: from any of some stages to another."""

    name: str
    sources: tuple[Stage, ...]
    target: Stage
    doc: str


_NEW = (*WAITS, Stage.PREFILL)


def _ends(live: tuple[Stage, ...]) -> tuple[Way, ...]:
    return (
        Way("refuse", live, Stage.REFUSED, "it can never run, or not beside the others"),
        Way("cancel", live, Stage.CANCELLED, "somebody has ended it, or its time was up"),
        Way("fail", (*live, Stage.DONE), Stage.FAILED, "what it met ends it, and nobody else"),
    )


REQUEST_WAYS = (
    Way("read", _NEW, Stage.PREFILL, "a part of its prompt is read"),
    Way("outline", _NEW, Stage.OUTLINE, "its root branch writes the outline"),
    Way("run", (*_NEW, Stage.OUTLINE), Stage.RUNNING, "its branches write"),
    Way("merge", (*_NEW, Stage.RUNNING), Stage.MERGING, "one last branch combines the others"),
    Way("preempt", OPEN, Stage.PREEMPTED, "rows ran out, and it is the youngest"),
    Way("finish", (Stage.RUNNING, Stage.MERGING), Stage.DONE, "all of its branches have ended"),
    *_ends(LIVE),
)
BRANCH_WAYS = (
    Way("run", WAITS, Stage.RUNNING, "its prompt is read, or what is gone of its rows"),
    Way("preempt", (Stage.RUNNING,), Stage.PREEMPTED, "rows ran out, and it is the youngest"),
    Way("finish", (*WAITS, Stage.RUNNING), Stage.DONE, "a stop token, or its budget"),
    *_ends((*WAITS, Stage.RUNNING)),
)
LIFECYCLES = {"request": REQUEST_WAYS, "branch": BRANCH_WAYS}


class Finish(StrEnum):
    """Why a branch ended."""

    STOP = "stop"
    LENGTH = "length"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "failed"


ENDS = {  # which way of its life ends whom
    **dict.fromkeys((Finish.STOP, Finish.LENGTH), "finish"),
    **dict.fromkeys((Finish.CANCELLED, Finish.TIMEOUT), "cancel"),
    Finish.REFUSED: "refuse",
    Finish.FAILED: "fail",
}


class Staged(Protocol):
    """What has a life."""

    stage: Stage


def _machine(ways: Sequence[Way]) -> Machine:
    rows: list[dict[str, Any]] = [
        {"trigger": way.name, "source": list(way.sources), "dest": way.target} for way in ways
    ]
    return Machine(
        model=None,
        states=list(dict.fromkeys(s for way in ways for s in (*way.sources, way.target))),
        transitions=rows,
        initial=Stage.WAITING,
        auto_transitions=False,
        model_attribute="stage",
    )


_EVENTS = {name: _machine(ways).events for name, ways in LIFECYCLES.items()}


def move(kind: str, whom: Staged, way: str) -> None:
    """A request or a branch (`kind`) takes a way of its life.

    Raises:
        transitions.MachineError: there is no such way from where it stands.
    """
    _EVENTS[kind][way].trigger(whom)


class Matcher(Protocol):
    """A grammar's state in one root branch; `states.grammar` has the real one."""

    def is_legal(self, token: int) -> bool: ...
    def advance(self, token: int) -> None: ...
    def forced(self) -> list[int]: ...


class Ends(Protocol):
    """What can be ended."""

    def end(self, finish: Finish, note: str = "") -> None: ...


@contextmanager
def failing(branch: Ends) -> Iterator[None]:
    """What goes wrong inside ends this branch, with the reason, and nobody else."""
    try:
        yield
    except Exception as error:  # a grammar, a template: somebody else's code
        branch.end(Finish.FAILED, reason_of(error))


def reason_of(error: BaseException) -> str:
    """In a line: the kind of error, and what it says."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@dataclass(eq=False, slots=True)
class Branch:
    """One independently decoded continuation; the root branch (index -1) writes the outline.

    Attributes:
        index: BIM number inside the request. owner: id of its rows in every pool.
        prompt: own token ids behind the shared prefix; empty until they are known.
        start: position of its first row; `length` the position of its next row.
        tokens: its answer so far, the pending root token included, stop tokens not.
        kept: how many of `tokens` have rows in the target's pool.
        accepted: drafted tokens accepted in each of its rounds; emitted: tokens appended; forced:
            whether the drafts were all that its grammar left.
        score: of the hypothesis that a beam search chose. documents: what its prompt is to hold.
        combines: whether it writes one answer behind the folded parts. held: it has ended, and its
            rows stay for that one. reads: finished parts that it sees where they lie (`attend`).
        among: it runs in the row of the pools where held parts lie (``batching``).
        settled: it has ended, and its rows are kept ones.
        shared: where the first of its own rows stands, if rows before it are kept ones that it goes
            on behind since it was preempted; else 0. preempted: how often it was.
    """

    request: "Request"
    index: int
    owner: int
    budget: int
    point: Point | None = None
    prompt: PromptTokens = field(default_factory=PromptTokens)
    stage: Stage = Stage.WAITING
    start: int = 0
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    kept: int = 0
    finish: Finish | None = None
    note: str = ""
    matcher: Matcher | None = None
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    score: float | None = None
    documents: tuple[Document, ...] = ()
    combines: bool = False
    reads: "tuple[Branch, ...]" = ()
    held: bool = False
    among: bool = False
    settled: bool = False
    shared: int = 0
    preempted: int = 0

    @property
    def waits(self) -> bool:
        return self.stage in WAITS

    @property
    def ended(self) -> bool:
        return self.stage in ENDED

    @property
    def rows(self) -> PromptTokens:
        """What is read when it starts, or goes on: its prompt, and what it has written by then."""
        return self.prompt + self.tokens[: self.kept]

    @property
    def row_count(self) -> int:
        """Rows of its own that are in the target's pool while it runs, or is held."""
        return self.length - max(self.start, self.shared)

    @property
    def is_root(self) -> bool:
        return self.index < 0

    @property
    def size(self) -> int:
        """Tokens of its whole context, its own included."""
        return len(self.request.context) + sum(one.own for one in (*self.reads, self))

    @property
    def before(self) -> list[int]:
        """The token ids that its answer stands behind."""
        return self.context()[: self.size - len(self.tokens)]

    @property
    def own(self) -> int:
        """Tokens of its prompt and of its answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def begins(self) -> int:
        """Position of its first row: behind the prefix, or behind the longest part that it sees."""
        return max((one.start + one.own for one in self.reads), default=self.request.prefix_length)

    @property
    def ends_part(self) -> bool:
        """Whether it is a part that can be combined with others."""
        return self.point is not None and self.finish in (Finish.STOP, Finish.LENGTH)

    @property
    def stays(self) -> bool:
        """It has ended, and is to be read where it lies."""
        return self.request.combine is not None and self.ends_part and not self.request.apart

    def context(self, first: int = 0) -> list[int]:
        """The token ids that it was decoded behind, and its own, from number `first` on."""
        ids: list[int] = []
        read = (own for one in self.reads for own in (one.prompt, one.tokens))
        for part in (self.request.context, *read, self.prompt, self.tokens):
            ids += part[max(first, 0) :]
            first -= len(part)
        return ids

    @property
    def pending(self) -> list[int]:
        """Tokens of the answer that have no row yet."""
        return self.tokens[self.kept :]

    @property
    def name(self) -> str:
        what = "combined" if self.combines else self.index + 1
        return f"{self.request.key}/{'outline' if self.is_root else what}"

    @property
    def title(self) -> str:
        """What it writes, in a few words."""
        if self.point is not None:
            return self.point.title
        if self.request.samples > 1:
            return "sample"
        return "outline" if self.is_root else "combined" if self.combines else "answer"

    def end(self, finish: Finish, note: str = "") -> None:
        move("branch", self, ENDS[finish])
        self.finish = finish
        self.note = note


@dataclass(eq=False, slots=True)
class Request:
    """One prompt with its settings.

    Attributes:
        key: stable name (given id or line number); `seed` keys its coins, never arrival order.
        prefix: token ids that all branches share at admission; `tail` the root branch's prompt;
            `hoist` what all branches' prompts begin with, until it is a part of the prefix, and
            `opening` what of it is known before there is an outline. So many ids of the tail as
            `lent` says are a part of the prefix for now.
        prefix_length: rows of the shared prefix in the pool; `context` their token ids. The first
            `shared` rows are kept ones, which other requests may go on from as well; `reused` of
            them were there when it came.
        grown: what became a part of the prefix later: the outline, what parts begin with. first:
            the branch that goes on first when it begins again. begun: by index, what branches that
            are not there yet have written elsewhere. sampling: how its tokens are drawn.
        asked: the budget that somebody asked for, if any did. given: outline ids of
            `--outline FILE`, prefilled. documents: those that its branches are searched for.
        cancelled: somebody wants it to end. finish, why: how it ends (budget 0: with its outline).
        arrival: its number in the order of submission; step: the one that first looked at it.
        deadline: moment of `time.monotonic` at which it is ended. alone: nobody runs beside it.
        cache_salt: only requests of the same one share what is kept of prompts and answers.
        closing_ids: end what a grammar bounds, as `stop_ids` do the rest. samples: answers drawn.
        combine: asks for one answer of parts that are read where they lie (`merge: attend`).
    """

    key: str
    seed: int
    question: str
    prefix: PromptTokens
    tail: PromptTokens
    stop_ids: frozenset[int]
    budget: int
    outline_budget: int
    sampling: SamplingRules = field(default_factory=SamplingRules)
    asked: int | None = None
    prefix_owner: int = 0
    root: Branch | None = None
    branches: list[Branch] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    prefix_length: int = 0
    shared: int = 0
    lent: int = 0
    reused: int = 0
    context: list[int] = field(default_factory=list)
    hoist: PromptTokens = field(default_factory=PromptTokens)
    grown: list[PromptTokens] = field(default_factory=list)
    first: Branch | None = None
    begun: dict[int, tuple[int, ...]] = field(default_factory=dict)
    opening: PromptTokens = field(default_factory=PromptTokens)
    outline: Outline | None = None
    given: Outline | None = None
    given_ids: list[int] = field(default_factory=list)
    new_matcher: Callable[[], Matcher] | None = None
    cancelled: bool = False
    documents: tuple[Document, ...] = ()
    finish: Finish = Finish.STOP
    why: str = ""
    arrival: int = -1
    step: int = 0
    deadline: float | None = None
    alone: bool = False
    cache_salt: str = ""
    closing_ids: frozenset[int] = frozenset()
    samples: int = 1
    combine: PromptTokens | None = None
    most_parts: int = 0  # of those that it combines
    apart: str = ""  # why they are not combined after all

    @property
    def parts(self) -> tuple[Branch, ...]:
        """The parts that can be combined, in reading order."""
        return tuple(branch for branch in self.branches if branch.ends_part)

    @property
    def row_waits(self) -> bool:
        """Whether parts are held in a row of the pools (``batching``) where no branch runs."""
        running = any(one.among and one.stage is Stage.RUNNING for one in self.branches)
        return not running and any(one.held for one in self.branches)

    def all_branches(self) -> Iterator[Branch]:
        if self.root is not None:
            yield self.root
        yield from self.branches

    @property
    def waits(self) -> bool:
        return self.stage in WAITS

    @property
    def finished(self) -> bool:
        return self.stage in ENDED

    @property
    def name(self) -> str:
        return self.key

    @property
    def outline_ended(self) -> bool:
        """Its outline is written and has not been read yet."""
        root = self.root
        return self.stage is Stage.OUTLINE and root is not None and root.ended

    @property
    def prompt_size(self) -> int:
        """Tokens that are read before its first branch can begin, or go on."""
        if self.first is not None:
            return self.body_size + len(self.hoist) + len(self.first.rows)
        return len(self.prefix) + len(self.tail) + len(self.given_ids)

    @property
    def body(self) -> PromptTokens:
        """All that its branches share, as far as it is known."""
        return sum(self.grown, self.prefix)

    @property
    def body_size(self) -> int:
        return len(self.prefix) + sum(map(len, self.grown))

    def read(self, ids: Sequence[int]) -> None:
        """More rows of its prefix are there, or on their way, with these ids."""
        end = self.prefix_length + len(ids)
        self.context[self.prefix_length : end] = ids
        self.prefix_length = end

    def widen(self, count: int) -> None:
        """What its first branch would read by itself becomes a part of the prefix, so many ids."""
        self.prefix += self.tail[:count]
        self.tail = PromptTokens(self.tail[count:])
        self.lent += count

    def narrow(self, length: int) -> None:
        """The prefix is so many ids from now on, no more than branches stand behind; what is
        missing of those is read again, as the first of `opening`."""
        ids = PromptTokens((*self.prefix, *self.tail))
        end = len(self.prefix) - self.lent
        self.opening = PromptTokens(ids[length:end]) + self.opening
        self.prefix = PromptTokens(ids[:length])
        self.tail = ids.behind(length)
        self.prefix_length = length
        self.lent = 0
        del self.context[length:]

    @property
    def unread(self) -> int:
        """Tokens of its prompt that have no rows yet, before its first branch begins."""
        return self.prompt_size - self.prefix_length

    @property
    def left(self) -> int:
        """Tokens that it may still write, as far as is known."""
        if not self.branches:
            written = 0 if self.root is None else len(self.root.tokens)
            return self.outline_budget + self.budget - written
        return sum(one.budget - len(one.tokens) for one in self.branches if not one.ended)
