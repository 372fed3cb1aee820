"""What an answer is made of while it comes: typed, frozen, in order. Texts never end in half a
character."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from operator import itemgetter

from ...states.blend import Reused
from ...states.phases.outline_ops import Answer
from ...states.request import Branch, Request, Stage
from ..record.report import finish_of
from ..record.text_stream import Decode, TextStream

OUTLINE = -1  # the index of the branch that writes the outline


class Origin(StrEnum):
    """How a token came: drawn behind a prompt, drafted and accepted, all that a grammar left, or
    the target's own behind the drafts that it took."""

    PROMPT = "p"
    DRAFT = "d"
    FORCED = "f"
    TARGET = "t"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request: of its prompt, `cached` of them kept from others; written in the
    outline, and in the answer."""

    prompt: int = 0
    cached: int = 0
    outline: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class OutlineRead:
    """The outline is written and read; titles: of its parts, none if there are no parts."""

    titles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BranchOpened:
    """A branch begins; index: its place in the answer, OUTLINE for the outline's own."""

    index: int
    title: str


@dataclass(frozen=True, slots=True)
class PromptReused:
    """A branch's prompt holds what was read before: its runs of tokens, in order.

    Each is the text of a run, and how its K and V came: "r" reused, "c" recomputed, "n" new.
    """

    index: int
    runs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TextWritten:
    """What a branch wrote in one step. step: the engine's number of it."""

    index: int
    text: str
    step: int


@dataclass(frozen=True, slots=True)
class BranchFinished:
    """A branch has ended: stop, length, refused, cancelled, timeout or failed, and why."""

    index: int
    finish: str
    note: str


@dataclass(frozen=True, slots=True)
class AnswerReady:
    """The last event of a request."""

    answer: Answer
    finish: str
    usage: TokenUsage = field(default_factory=TokenUsage, compare=False)


StreamEvent = OutlineRead | BranchOpened | PromptReused | TextWritten | BranchFinished | AnswerReady


@dataclass(frozen=True, slots=True)
class TokensWritten:
    """What the engine's thread notes; whoever reads the stream makes text of it.

    last: nothing more will come of this branch. origins: an `Origin` for each token.
    """

    index: int
    tokens: tuple[int, ...]
    step: int
    last: bool
    origins: str = ""


@dataclass(frozen=True, slots=True)
class ContextKnown:
    """The tokens that a branch's answer stands behind; noted where somebody wants to know."""

    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokensReused:
    """What `PromptReused` is made of."""

    index: int
    runs: tuple[tuple[tuple[int, ...], str], ...]


Noted = (
    OutlineRead
    | BranchOpened
    | ContextKnown
    | TokensReused
    | TokensWritten
    | BranchFinished
    | AnswerReady
)
NOTHING: Mapping[int, Reused] = {}


@dataclass(slots=True)
class Notes:
    """What has been noted of one request, as its branches grow.

    A request that is run again writes the same tokens again: they are noted once.

    contexts: what a branch stands behind is noted too.
    """

    contexts: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    outlined: bool = False

    def of(
        self, request: Request, step: int, reused: Mapping[int, Reused] = NOTHING
    ) -> Iterator[Noted]:
        """What is new since the last call. reused: by owner, rows that came from the cache."""
        if request.outline is not None and not self.outlined:
            self.outlined = True
            yield OutlineRead(tuple(point.title for point in request.outline.points))
        for branch in request.all_branches():
            index = branch.index
            done = branch.ended
            if branch.stage is Stage.WAITING or index in self.ended:
                continue
            if index not in self.sent:
                self.sent[index] = 0
                yield BranchOpened(index, branch.title)
            known = self.sent[index]
            if not known and branch.tokens:
                yield from self._began(branch, reused)
            if len(branch.tokens) > known or done:
                self.sent[index] = max(len(branch.tokens), known)
                new = tuple(branch.tokens[known:])
                at = self.rounds.get(index, 0)
                how = origins(branch, at if at <= len(branch.accepted) else 0)
                yield TokensWritten(index, new, step, done, how[len(how) - len(new) :])
                self.rounds[index] = len(branch.accepted)
            if done:
                self.ended.add(index)
                yield BranchFinished(index, str(branch.finish), branch.note)

    def _began(self, branch: Branch, reused: Mapping[int, Reused]) -> Iterator[Noted]:
        """What is known of a branch when its first tokens are there."""
        if self.contexts:
            yield ContextKnown(branch.index, tuple(branch.before))
        if reused and (runs := tuple(runs_of(branch, reused))):
            yield TokensReused(branch.index, runs)


class StreamReader:
    """Makes events of notes: tokens become text as soon as their characters are whole."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, tuple[TextStream, list[int]]] = {}

    def events(self, noted: Iterable[Noted]) -> Iterator[StreamEvent]:
        for one in noted:
            if isinstance(one, TokensReused):
                runs = tuple((self._decode(list(ids)), how) for ids, how in one.runs)
                yield PromptReused(one.index, runs)
            elif not isinstance(one, TokensWritten | ContextKnown):
                yield one
            elif isinstance(one, TokensWritten) and (text := self._text(one)):
                yield TextWritten(one.index, text, one.step)

    def _text(self, one: TokensWritten) -> str:
        stream, tokens = self._texts.setdefault(one.index, (TextStream(self._decode), []))
        tokens += one.tokens
        before = len(stream.text)
        return stream.update(tokens, final=one.last)[before:]


def runs_of(branch: Branch, reused: Mapping[int, Reused]) -> Iterator[tuple[tuple[int, ...], str]]:
    """A branch's prompt as runs of tokens that came the same way; nothing if none was reused.

    The prefix that all branches share stands before that of the outline, or of the only branch.
    """
    request = branch.request
    rows = [(branch.owner, list(branch.prompt), branch.start)]
    if branch.is_root or (request.root is None and branch.index == 0):
        rows.insert(0, (request.prefix_owner, request.context, 0))
    for owner, ids, start in rows:
        mark = reused.get(owner)
        if mark is None or not mark.cached:
            continue
        steps = range(start, start + len(ids))
        how = ["c" if at in mark.picked else "r" if at in mark.cached else "n" for at in steps]
        for kind, run in groupby(zip(how, ids, strict=True), itemgetter(0)):
            yield tuple(token for _, token in run), kind


def origins(branch: Branch, first: int = 0) -> str:
    """How the last tokens of a branch came: those of its rounds from number `first` on, behind the
    one that was drawn at its prompt."""
    text = ""
    for at in range(first, len(branch.accepted)):
        drafted = min(branch.accepted[at], branch.emitted[at])
        kind = Origin.FORCED if branch.forced[at] else Origin.DRAFT
        text += kind * drafted + Origin.TARGET * (branch.emitted[at] - drafted)
    before = len(branch.tokens) - len(text)
    return Origin.PROMPT * min(before, 1) + Origin.TARGET * (before - 1) + text


def ready(answer: Answer, request: Request | None = None) -> AnswerReady:
    """The end of a request, with what it took."""
    usage = TokenUsage()
    if request is not None:
        written = len(request.root.tokens) if request.root is not None else 0
        parts = sum(len(branch.tokens) for branch in request.branches)
        usage = TokenUsage(request.prompt_size, request.reused, written, parts)
    return AnswerReady(answer, finish_of(answer), usage)
