"""Requests and their branches: host state between two forwards, and the lifecycle of both.

The lifecycles are two `transitions` machines without models of their own, declared in one table.
`move` sets the `stage` of a request or a branch; a transition that is not in the table is a defect
of the engine and raises MachineError. No transition is taken per token or per round.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from transitions import Machine

from ..ops.sampling.settings import SamplingRules
from .text.documents import Document
from .text.outline import Outline, Point
from .text.tokens import PromptTokens

# At level INFO the library logs every transition, which costs more than the transition.
logging.getLogger("transitions").setLevel(logging.WARNING)


# -- lifecycles -----------------------------------------------------------------------------------


class Stage(StrEnum):
    """The stage of a request or a branch."""

    WAITING = "waiting"
    PREFILL = "prefilling"  # a request whose prompt is read in chunks
    OUTLINE = "outlining"  # a request whose root branch is writing
    RUNNING = "running"
    MERGING = "merging"  # a request whose last branch combines the others
    PREEMPTED = "preempted"  # its rows were freed; it continues when there is capacity
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


WAITING_STAGES = (Stage.WAITING, Stage.PREEMPTED)
OPEN_STAGES = (Stage.PREFILL, Stage.OUTLINE, Stage.RUNNING, Stage.MERGING)
LIVE_STAGES = (*WAITING_STAGES, *OPEN_STAGES)
ENDED_STAGES = (Stage.DONE, Stage.REFUSED, Stage.CANCELLED, Stage.FAILED)


class Transition(NamedTuple):
    """A row of the table: from any of the source stages to the target stage."""

    name: str
    sources: tuple[Stage, ...]
    target: Stage
    doc: str


_NEW = (*WAITING_STAGES, Stage.PREFILL)


def _endings(live: tuple[Stage, ...]) -> tuple[Transition, ...]:
    return (
        Transition("refuse", live, Stage.REFUSED, "it does not fit, alone or next to the others"),
        Transition("cancel", live, Stage.CANCELLED, "cancelled by the client, or timed out"),
        Transition("fail", (*live, Stage.DONE), Stage.FAILED, "an error ended it alone"),
    )


REQUEST_TRANSITIONS = (
    Transition("read", _NEW, Stage.PREFILL, "a chunk of its prompt is prefilled"),
    Transition("outline", _NEW, Stage.OUTLINE, "its root branch writes the outline"),
    Transition("run", (*_NEW, Stage.OUTLINE), Stage.RUNNING, "its branches decode"),
    Transition("merge", (*_NEW, Stage.RUNNING), Stage.MERGING, "a last branch combines the others"),
    Transition("preempt", OPEN_STAGES, Stage.PREEMPTED, "rows ran out, and it is the youngest"),
    Transition("finish", (Stage.RUNNING, Stage.MERGING), Stage.DONE, "all its branches ended"),
    *_endings(LIVE_STAGES),
)
BRANCH_TRANSITIONS = (
    Transition(
        "run", WAITING_STAGES, Stage.RUNNING, "its prompt, or its freed rows, are prefilled"
    ),
    Transition("preempt", (Stage.RUNNING,), Stage.PREEMPTED, "rows ran out, it is the youngest"),
    Transition(
        "finish", (*WAITING_STAGES, Stage.RUNNING), Stage.DONE, "a stop token or its budget"
    ),
    *_endings((*WAITING_STAGES, Stage.RUNNING)),
)
LIFECYCLES = {"request": REQUEST_TRANSITIONS, "branch": BRANCH_TRANSITIONS}


class Finish(StrEnum):
    """Why a branch ended."""

    STOP = "stop"
    LENGTH = "length"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "failed"


ENDING_OF = {  # the transition of each finish reason
    **dict.fromkeys((Finish.STOP, Finish.LENGTH), "finish"),
    **dict.fromkeys((Finish.CANCELLED, Finish.TIMEOUT), "cancel"),
    Finish.REFUSED: "refuse",
    Finish.FAILED: "fail",
}
COMPLETE = (Finish.STOP, Finish.LENGTH)  # the branch decoded to its end


def _events(transitions: Sequence[Transition]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"trigger": row.name, "source": list(row.sources), "dest": row.target}
        for row in transitions
    ]
    stages = dict.fromkeys(stage for row in transitions for stage in (*row.sources, row.target))
    machine = Machine(
        model=None,
        states=list(stages),
        transitions=rows,
        initial=Stage.WAITING,
        auto_transitions=False,
        model_attribute="stage",
    )
    return dict(machine.events)


_EVENTS = {kind: _events(transitions) for kind, transitions in LIFECYCLES.items()}


def move(item: "Request | Branch", transition: str) -> None:
    """Take a transition of the item's lifecycle.

    Raises:
        transitions.MachineError: the table has no such transition from the item's stage.
    """
    kind = "branch" if isinstance(item, Branch) else "request"
    _EVENTS[kind][transition].trigger(item)


# -- branches and requests ------------------------------------------------------------------------


class Matcher(Protocol):
    """The state of a grammar in one branch; `states.text.grammar` implements it."""

    def is_legal(self, token: int) -> bool: ...
    def advance(self, token: int) -> None: ...
    def forced(self) -> list[int]: ...


@dataclass(eq=False, slots=True)
class Branch:
    """One independently decoded continuation; the root branch (index -1) writes the outline.

    Attributes:
        index: BIM number in the request. owner: segment id of its rows in every pool.
        prompt: its token ids after the shared prefix; empty until they are known.
        start: position of its first row; `length`: position of its next row.
        tokens: its answer so far, the pending root token included, stop tokens excluded.
        num_cached_tokens: number of `tokens` with rows in the target's pool.
        accepted: drafted tokens accepted in each round; emitted: tokens appended in each round;
            forced: whether the drafts of the round were the grammar's only continuation.
        score: of the hypothesis that a beam search chose. documents: quoted in its prompt.
        combines: it writes one answer after the folded parts. retained: it ended, and its rows
            stay for that answer. reads: finished parts that it attends to in place
            (`merge: attend`).
        in_shared_row: it runs in the pool row of the retained parts (``batching``).
        rows_released: it ended, and the prefix cache owns its rows.
        first_own_row: position of its first own row, if it resumed after cached rows of its own;
            0 otherwise. preempted: how often it was preempted.
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
    num_cached_tokens: int = 0
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
    retained: bool = False
    in_shared_row: bool = False
    rows_released: bool = False
    first_own_row: int = 0
    preempted: int = 0

    @property
    def waits(self) -> bool:
        return self.stage in WAITING_STAGES

    @property
    def ended(self) -> bool:
        return self.stage in ENDED_STAGES

    @property
    def rows(self) -> PromptTokens:
        """The tokens prefilled when it starts or resumes: its prompt and its cached answer."""
        return self.prompt + self.tokens[: self.num_cached_tokens]

    @property
    def row_count(self) -> int:
        """Number of its own rows in the target's pool while it runs or is retained."""
        return self.length - max(self.start, self.first_own_row)

    @property
    def is_root(self) -> bool:
        return self.index < 0

    @property
    def size(self) -> int:
        """Number of tokens of its whole context, its own included."""
        return len(self.request.context) + sum(part.num_tokens for part in (*self.reads, self))

    @property
    def before(self) -> list[int]:
        """The token ids before its answer."""
        return self.context()[: self.size - len(self.tokens)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its prompt and its answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def first_position(self) -> int:
        """Position of its first row: after the prefix, or after the longest part that it reads."""
        ends = (part.start + part.num_tokens for part in self.reads)
        return max(ends, default=self.request.prefix_length)

    @property
    def ends_part(self) -> bool:
        """Whether it is a finished part that can be combined with others."""
        return self.point is not None and self.finish in COMPLETE

    @property
    def stays(self) -> bool:
        """Whether it ended and its rows are to be attended to in place."""
        return self.request.combine is not None and self.ends_part and not self.request.isolated

    def context(self, first: int = 0) -> list[int]:
        """The token ids that it attends to, and its own, from number `first` on."""
        ids: list[int] = []
        parts = (text for part in self.reads for text in (part.prompt, part.tokens))
        for text in (self.request.context, *parts, self.prompt, self.tokens):
            ids += text[max(first, 0) :]
            first -= len(text)
        return ids

    @property
    def pending(self) -> list[int]:
        """Tokens of the answer without a row."""
        return self.tokens[self.num_cached_tokens :]

    @property
    def name(self) -> str:
        part = "outline" if self.is_root else "combined" if self.combines else self.index + 1
        return f"{self.request.key}/{part}"

    @property
    def title(self) -> str:
        """A few words that say what it writes."""
        if self.point is not None:
            return self.point.title
        if self.request.samples > 1:
            return "sample"
        return "outline" if self.is_root else "combined" if self.combines else "answer"

    def end(self, finish: Finish, note: str = "") -> None:
        move(self, ENDING_OF[finish])
        self.finish = finish
        self.note = note


@dataclass(eq=False, slots=True)
class Request:
    """One prompt with its settings.

    Attributes:
        key: stable name (given id or line number); `seed` keys its coins, never arrival order.
        prefix: token ids shared by all branches at admission; `tail`: prompt of the root branch.
            `common_prompt`: how all branch prompts begin, until it joins the prefix; `opening`:
            the part of it that is known before the outline. `borrowed_rows`: ids of the tail that
            are part of the prefix for now.
        prefix_length: rows of the shared prefix; `context`: their token ids. The first
            `shared` rows belong to the prefix cache; `reused` of them were cached on arrival.
        prefix_parts: texts that joined the prefix later: the outline, the common prompt.
            first_branch: the branch that resumes first after a preemption. resumed_tokens: by
            branch index, tokens decoded elsewhere of branches that do not exist yet.
        requested_tokens: the budget that the user set. given_outline: outline of
            `--outline FILE`, prefilled as `given_ids`.
        documents: searched for each branch. cancelled: it ends at the next step with the reason
            (`finish`, `why`; a budget of 0 ends it after its outline).
        arrival: number in the order of submission; step: the first step that considered it.
        deadline: `time.monotonic()` at which it times out. exclusive: it runs alone.
        cache_salt: only requests with the same salt share cached rows.
        closing_ids: end a text under a grammar, as `stop_ids` do otherwise. samples: answers to
            draw.
        combine: prompt of the answer that combines parts in place (`merge: attend`);
            most_parts: upper bound of their number; isolated: why they are not combined.
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
    requested_tokens: int | None = None
    prefix_owner: int = 0
    root: Branch | None = None
    branches: list[Branch] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    prefix_length: int = 0
    shared: int = 0
    borrowed_rows: int = 0
    reused: int = 0
    context: list[int] = field(default_factory=list)
    common_prompt: PromptTokens = field(default_factory=PromptTokens)
    prefix_parts: list[PromptTokens] = field(default_factory=list)
    first_branch: Branch | None = None
    resumed_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    opening: PromptTokens = field(default_factory=PromptTokens)
    outline: Outline | None = None
    given_outline: Outline | None = None
    given_ids: list[int] = field(default_factory=list)
    new_matcher: Callable[[], Matcher] | None = None
    cancelled: bool = False
    documents: tuple[Document, ...] = ()
    finish: Finish = Finish.STOP
    why: str = ""
    arrival: int = -1
    step: int = 0
    deadline: float | None = None
    exclusive: bool = False
    cache_salt: str = ""
    closing_ids: frozenset[int] = frozenset()
    samples: int = 1
    combine: PromptTokens | None = None
    most_parts: int = 0
    isolated: str = ""

    @property
    def parts(self) -> tuple[Branch, ...]:
        """The finished parts that can be combined, in reading order."""
        return tuple(branch for branch in self.branches if branch.ends_part)

    @property
    def row_waits(self) -> bool:
        """Whether a pool row (``batching``) holds retained parts and no running branch."""
        running = any(b.in_shared_row and b.stage is Stage.RUNNING for b in self.branches)
        return not running and any(branch.retained for branch in self.branches)

    def all_branches(self) -> Iterator[Branch]:
        if self.root is not None:
            yield self.root
        yield from self.branches

    @property
    def waits(self) -> bool:
        return self.stage in WAITING_STAGES

    @property
    def finished(self) -> bool:
        return self.stage in ENDED_STAGES

    @property
    def name(self) -> str:
        return self.key

    @property
    def outline_ended(self) -> bool:
        """Whether its outline is complete and not parsed yet."""
        root = self.root
        return self.stage is Stage.OUTLINE and root is not None and root.ended

    @property
    def prompt_size(self) -> int:
        """Number of tokens before its first branch can start or resume."""
        if self.first_branch is not None:
            return self.body_size + len(self.common_prompt) + len(self.first_branch.rows)
        return len(self.prefix) + len(self.tail) + len(self.given_ids)

    @property
    def body(self) -> PromptTokens:
        """All token ids that its branches share, as far as they are known."""
        return sum(self.prefix_parts, self.prefix)

    @property
    def body_size(self) -> int:
        return len(self.prefix) + sum(map(len, self.prefix_parts))

    def extend_prefix(self, ids: Sequence[int]) -> None:
        """Record rows with these ids at the end of the prefix."""
        end = self.prefix_length + len(ids)
        self.context[self.prefix_length : end] = ids
        self.prefix_length = end

    def borrow_tail(self, count: int) -> None:
        """Move the first `count` ids of the root branch's prompt into the prefix."""
        self.prefix += self.tail[:count]
        self.tail = PromptTokens(self.tail[count:])
        self.borrowed_rows += count

    def shrink_prefix(self, length: int) -> None:
        """Cut the prefix to `length` ids, those shared by all branches; the ids after them are
        prefilled again as the start of `opening`."""
        ids = PromptTokens((*self.prefix, *self.tail))
        end = len(self.prefix) - self.borrowed_rows
        self.opening = PromptTokens(ids[length:end]) + self.opening
        self.prefix = PromptTokens(ids[:length])
        self.tail = ids.behind(length)
        self.prefix_length = length
        self.borrowed_rows = 0
        del self.context[length:]

    @property
    def num_unread_tokens(self) -> int:
        """Number of prompt tokens without rows before its first branch starts."""
        return self.prompt_size - self.prefix_length

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that it may still decode, as far as known."""
        if not self.branches:
            written = 0 if self.root is None else len(self.root.tokens)
            return self.outline_budget + self.budget - written
        return sum(b.budget - len(b.tokens) for b in self.branches if not b.ended)


# -- errors that end one branch -------------------------------------------------------------------


@contextmanager
def failing(branch: Branch) -> Iterator[None]:
    """End this branch alone, with the reason, when the block raises.

    The block calls code of a user or a plug-in: a grammar, a template, a tokenizer.
    """
    try:
        yield
    except Exception as error:
        branch.end(Finish.FAILED, reason_of(error))


def reason_of(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    message = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


# -- requests that several engines decode ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MigratedBranch:
    """A branch to continue: its index, its prompt after the prefix, its tokens so far, and its
    whole budget."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class MigratedRequest:
    """The part of a request that one of several engines decodes.

    Attributes:
        branches: to continue, all after `prefix`; without any the engine writes the outline only.
        outline: tokens of the outline so far.
        arrival: number of the request among those of all engines; below 0: the engine numbers it.
    """

    prefix: tuple[int, ...] = ()
    branches: tuple[MigratedBranch, ...] = ()
    outline: tuple[int, ...] = ()
    arrival: int = -1


def limit_to_part_(request: Request, part: MigratedRequest) -> None:
    """Reduce a request that has not started to the part that is decoded here."""
    request.arrival = part.arrival
    if not part.branches:
        request.budget = 0
        if part.outline:
            request.root = _first_branch(request, -1, part.outline, request.outline_budget)
        return
    request.prefix = PromptTokens(part.prefix)
    request.tail = PromptTokens()
    request.opening = PromptTokens()
    request.given_outline = None
    request.given_ids = []
    request.branches = [_branch_of(request, branch) for branch in part.branches]


def resume_(request: Request, tokens: Mapping[int, Sequence[int]]) -> None:
    """Let a request that has not started continue the tokens of another engine.

    Args:
        tokens: by branch index, the outline's at -1; they may end anywhere.
    """
    request.resumed_tokens = {index: tuple(ids) for index, ids in tokens.items()}
    outlined = request.outline_budget > 0
    index, budget = (-1, request.outline_budget) if outlined else (0, request.budget)
    if ids := request.resumed_tokens.pop(index, ())[: budget - 1]:
        first = _first_branch(request, index, ids, budget)
        request.root = first if outlined else None
        request.branches = [] if outlined else [first]


def _first_branch(request: Request, index: int, tokens: tuple[int, ...], budget: int) -> Branch:
    """The first branch after a request's prompt, with its grammar advanced if there is one."""
    branch = _branch_of(request, MigratedBranch(index, request.tail.ids, tokens, budget))
    if request.new_matcher is not None:
        branch.matcher = request.new_matcher()
        for token in tokens:
            branch.matcher.advance(token)
    return branch


def _branch_of(request: Request, part: MigratedBranch) -> Branch:
    """A branch whose last token has no row yet, as in every running branch."""
    return Branch(
        request,
        part.index,
        owner=-1,
        budget=part.budget,
        prompt=PromptTokens(part.prompt),
        tokens=list(part.tokens),
        num_cached_tokens=max(len(part.tokens) - 1, 0),
    )
