"""Requests and their branches: host state between two forwards, and the lifecycle of both.

`move` sets the `stage` of a request or a branch by one table of transitions. A transition that is
not in the table is a defect of the engine. None is taken per token or per round."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ..ops.sampling.settings import SamplingRules
from .text.documents import Document
from .text.outline import Outline, Point
from .text.tokens import PromptTokens

if TYPE_CHECKING:  # a slow import
    from .text.grammar import OutlineMatcher


class Stage(StrEnum):
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

Transition = tuple[tuple[Stage, ...], Stage]  # the stages that have it, and the one it leads to
_NEW = (*WAITING_STAGES, Stage.PREFILL)
_LIVE_BRANCH = (*WAITING_STAGES, Stage.RUNNING)


def _endings(live: tuple[Stage, ...]) -> dict[str, Transition]:
    return {
        "refuse": (live, Stage.REFUSED),  # it does not fit, alone or next to the others
        "cancel": (live, Stage.CANCELLED),  # cancelled by the client, or timed out
        "fail": ((*live, Stage.DONE), Stage.FAILED),  # an error ended it alone
    }


LIFECYCLES: Mapping[str, Mapping[str, Transition]] = {
    "request": {
        "read": (_NEW, Stage.PREFILL),  # a chunk of its prompt is prefilled
        "outline": (_NEW, Stage.OUTLINE),  # its root branch writes the outline
        "run": ((*_NEW, Stage.OUTLINE), Stage.RUNNING),  # its branches decode
        "merge": ((*_NEW, Stage.RUNNING), Stage.MERGING),  # a last branch combines the others
        "preempt": (OPEN_STAGES, Stage.PREEMPTED),  # rows ran out, and it is the youngest
        "finish": ((Stage.RUNNING, Stage.MERGING), Stage.DONE),  # all its branches ended
        **_endings(LIVE_STAGES),
    },
    "branch": {
        "run": (WAITING_STAGES, Stage.RUNNING),  # its prompt, or its freed rows, are prefilled
        "preempt": ((Stage.RUNNING,), Stage.PREEMPTED),  # rows ran out, it is the youngest
        "finish": (_LIVE_BRANCH, Stage.DONE),  # a stop token or its budget
        **_endings(_LIVE_BRANCH),
    },
}


class Finish(StrEnum):
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


class StageError(RuntimeError):
    """A transition that the stage of a request or a branch does not have: a defect."""


def move(item: "Request | Branch", transition: str) -> None:
    """Take a transition of the item's lifecycle; StageError if its stage has no such one."""
    sources, target = LIFECYCLES["branch" if isinstance(item, Branch) else "request"][transition]
    if item.stage not in sources:
        raise StageError(f"{item.name} is {item.stage}, where it cannot {transition}")
    item.stage = target


@dataclass(eq=False, slots=True)
class Branch:
    """One independently decoded continuation; the root branch (index -1) writes the outline.

    owner: segment id of its rows in every pool. prompt: its token ids after the shared prefix;
    empty until they are known. start, length: positions of its first and of its next row. tokens:
    its answer so far, the pending root token included, stop tokens excluded; the first
    `num_cached_tokens` have rows in the target's pool. accepted, emitted: drafted tokens accepted
    and tokens appended in each round; forced: whether the drafts of the round were the grammar's
    only continuation. combines: it writes one answer after the finished parts. reads: parts that it
    attends to in place. retained: it ended, and its rows stay for that answer, whose pool row is
    shared (`in_shared_row`). rows_released: it ended, and the prefix cache owns its rows.
    first_own_row: after cached rows of its own, if it resumed; else 0. preempted: how often."""

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
    matcher: "OutlineMatcher | None" = None
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
        return len(self.request.context) + sum(part.num_tokens for part in (*self.reads, self))

    @property
    def before(self) -> list[int]:
        return self.context()[: self.size - len(self.tokens)]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def first_position(self) -> int:
        ends = (part.start + part.num_tokens for part in self.reads)
        return max(ends, default=self.request.prefix_length)

    @property
    def ends_part(self) -> bool:
        """Whether it is a finished part that can be combined with others."""
        return self.point is not None and self.finish in COMPLETE

    @property
    def stays(self) -> bool:
        """Whether its rows are to be attended to in place after its end."""
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
        return self.tokens[self.num_cached_tokens :]

    @property
    def name(self) -> str:
        part = "outline" if self.is_root else "combined" if self.combines else self.index + 1
        return f"{self.request.key}/{part}"

    @property
    def title(self) -> str:
        if self.point is not None:
            return self.point.title
        if self.request.samples > 1:
            return "sample"
        return "outline" if self.is_root else "combined" if self.combines else "answer"

    def continue_(self, tokens: Sequence[int]) -> None:
        """Begin with tokens that were decoded elsewhere; the last one has no row yet."""
        self.tokens = list(tokens)
        self.num_cached_tokens = max(len(tokens) - 1, 0)

    def end(self, finish: Finish, note: str = "") -> None:
        move(self, ENDING_OF[finish])
        self.finish = finish
        self.note = note


@dataclass(eq=False, slots=True)
class Request:
    """One prompt with its settings.

    key: stable name (given id or line number); `seed` keys its coins, never arrival order.
    prefix: token ids shared by all branches at admission; `tail`: prompt of the root branch, the
        first `borrowed_rows` of which are in the prefix for now. `prefix_parts` joined it later.
        common_prompt: how all branch prompts begin, until it joins the prefix; `opening`: the part
        of it that is known before the outline.
    prefix_length: rows of the shared prefix; `context`: their token ids. The first `shared` rows
        belong to the prefix cache; `reused` of them were cached on arrival.
    first_branch: resumes first after a preemption. resumed_tokens: decoded elsewhere, by branch.
    requested_tokens: the budget that the user set; a budget of 0 ends it after its outline.
    answer_tokens: most tokens of its outline and all parts together; by default without a bound.
    given_outline: of `--outline FILE`, prefilled as `given_ids`. documents: searched for branches.
    cancelled: it ends at the next step with `finish` and the reason `why`. step: the first one that
        considered it. deadline: of `time.monotonic()`. exclusive: it runs alone.
    drafted: whether drafters with a pool read its rows (`Drafter.reads`).
    cache_salt: only requests with the same salt share cached rows. closing_ids: end a text under a
        grammar, as `stop_ids` do otherwise. combine: prompt of the answer that combines parts in
        place; most_parts: upper bound of their number; isolated: why they are not combined."""

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
    answer_tokens: int = sys.maxsize
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
    new_matcher: "Callable[[], OutlineMatcher] | None" = None
    cancelled: bool = False
    documents: tuple[Document, ...] = ()
    finish: Finish = Finish.STOP
    why: str = ""
    arrival: int = -1
    step: int = 0
    deadline: float | None = None
    exclusive: bool = False
    drafted: bool = True
    cache_salt: str = ""
    closing_ids: frozenset[int] = frozenset()
    samples: int = 1
    combine: PromptTokens | None = None
    most_parts: int = 0
    isolated: str = ""

    @property
    def parts(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in self.branches if branch.ends_part)

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
        return self.stage is Stage.OUTLINE and self.root is not None and self.root.ended

    @property
    def prompt_size(self) -> int:
        """Number of tokens before its first branch can start or resume."""
        if self.first_branch is not None:
            return self.body_size + len(self.common_prompt) + len(self.first_branch.rows)
        return len(self.prefix) + len(self.tail) + len(self.given_ids)

    @property
    def body(self) -> PromptTokens:
        return sum(self.prefix_parts, self.prefix)

    @property
    def body_size(self) -> int:
        return len(self.prefix) + sum(map(len, self.prefix_parts))

    def extend_prefix(self, ids: Sequence[int]) -> None:
        """Record rows with these ids at the end of the prefix."""
        end = self.prefix_length + len(ids)
        self.context[self.prefix_length : end] = ids
        self.prefix_length = end

    def borrow_tail(self, rows: int) -> None:
        """Let the prefix have `rows` ids; the root branch's prompt gives the missing ones."""
        if (count := rows - self.body_size) > 0:
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
    def spare_tokens(self) -> int:
        """The part of `answer_tokens` that its branches have not used."""
        return self.answer_tokens - sum(len(branch.tokens) for branch in self.all_branches())

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that it may still decode, as far as known."""
        if not self.branches:
            written = 0 if self.root is None else len(self.root.tokens)
            return min(self.outline_budget + self.budget - written, self.spare_tokens)
        return sum(b.budget - len(b.tokens) for b in self.branches if not b.ended)


@contextmanager
def failing(branch: Branch) -> Iterator[None]:
    """End this branch alone when the block raises: a grammar, a template or a tokenizer."""
    try:
        yield
    except Exception as error:
        branch.end(Finish.FAILED, reason_of(error))


def reason_of(error: BaseException) -> str:
    message = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@dataclass(frozen=True, slots=True)
class MigratedBranch:
    """A branch to continue: its prompt after the prefix, its tokens so far, its whole budget."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int

    def of(self, request: Request) -> Branch:
        branch = Branch(request, self.index, -1, self.budget, prompt=PromptTokens(self.prompt))
        branch.continue_(self.tokens)
        return branch


@dataclass(frozen=True, slots=True)
class MigratedRequest:
    """The part of a request that one of several engines decodes. branches: to continue, all after
    `prefix`; without any the engine writes the outline only. outline: its tokens so far. arrival:
    number of the request among those of all engines; below 0: the engine numbers it."""

    prefix: tuple[int, ...] = ()
    branches: tuple[MigratedBranch, ...] = ()
    outline: tuple[int, ...] = ()
    arrival: int = -1


def limit_to_part_(request: Request, part: MigratedRequest) -> None:
    """Reduce a request that has not started to the part that is decoded here."""
    request.arrival = part.arrival
    if not part.branches:
        request.budget = 0
        resume_(request, {-1: part.outline})
        return
    request.prefix = PromptTokens(part.prefix)
    request.tail = PromptTokens()
    request.opening = PromptTokens()
    request.given_outline = None
    request.given_ids = []
    request.branches = [branch.of(request) for branch in part.branches]


def resume_(request: Request, tokens: Mapping[int, Sequence[int]]) -> None:
    """Let a new request continue tokens of another engine, which may end anywhere; tokens: by
    branch index, the outline's at -1."""
    request.resumed_tokens = {index: tuple(ids) for index, ids in tokens.items()}
    outlined = request.outline_budget > 0
    index, budget = (-1, request.outline_budget) if outlined else (0, request.budget)
    if ids := request.resumed_tokens.pop(index, ())[: budget - 1]:
        first = MigratedBranch(index, request.tail.ids, ids, budget).of(request)
        if request.new_matcher is not None:
            first.matcher = request.new_matcher()
            for token in ids:
                first.matcher.advance(token)
        request.root = first if outlined else None
        request.branches = [] if outlined else [first]
