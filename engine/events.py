"""The events of a request, from the commit of a round to every reader, in order. The engine emits
token events. A `Detokenizer` turns them into text events (`StreamEvent`), whose texts hold complete
characters only. `ReadingOrder` puts them into the order of the answer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from ..states.graph.graph import Graph
from ..states.request import Branch, Finish, Request, Stage

if TYPE_CHECKING:  # these import torch, which the HTTP process of a server does without
    from ..states.blend import Reused
    from ..states.phases.merge import Answer

OUTLINE = -1  # the index of the root branch, which writes the outline
HALF = "\ufffd"  # a tokenizer's text of an incomplete byte sequence
MAX_TOKENS_PER_CHARACTER = 8  # after that the bytes are wrong, not incomplete

Decode = Callable[[Sequence[int]], str]


class Origin(StrEnum):
    """Where a token comes from: sampled after a prompt, an accepted draft, forced by a grammar, or
    the target's own token after the accepted drafts."""

    PROMPT = "p"
    DRAFT = "d"
    FORCED = "f"
    TARGET = "t"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a request; cached: of the prompt, from the prefix cache."""

    prompt: int = 0
    cached: int = 0
    outline: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class OutlineRead:
    titles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BranchOpened:
    """A branch starts; index: its place in the answer, or OUTLINE."""

    index: int
    title: str


@dataclass(frozen=True, slots=True)
class BranchContext:
    """The token ids before a branch's answer (see `StreamEvents.contexts`)."""

    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokensReused:
    """A branch's prompt holds cached rows: its runs of token ids in order, each "r" (reused), "c"
    (recomputed) or "n" (new)."""

    index: int
    runs: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class PromptReused:
    index: int
    runs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The tokens that one round committed to one branch. request: its key. branch: its index.
    round: the engine's step. origins: an `Origin` for each token. final: the branch has ended."""

    request: str
    branch: int
    tokens: tuple[int, ...]
    round: int
    origins: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class TextWritten:
    """The text that became complete with one `Committed`; step: its round."""

    index: int
    text: str
    step: int


@dataclass(frozen=True, slots=True)
class BranchFinished:
    """A branch has ended: stop, length, refused, cancelled, timeout or failed, with the reason."""

    index: int
    finish: str
    note: str


@dataclass(frozen=True, slots=True)
class AnswerReady:
    answer: "Answer"
    finish: str
    usage: TokenUsage = field(default_factory=TokenUsage, compare=False)


CommonEvent = OutlineRead | BranchOpened | BranchFinished | AnswerReady
StreamEvent = CommonEvent | PromptReused | TextWritten
TokenEvent = CommonEvent | BranchContext | TokensReused | Committed


@dataclass(slots=True)
class StreamEvents:
    """Emits the token events of one request as its branches grow. A request that is computed again
    commits the same tokens again; they are emitted once. contexts: emit `BranchContext` too."""

    contexts: bool = False
    _sent: dict[int, int] = field(default_factory=dict)
    _rounds: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _outlined: bool = False

    def new(
        self, request: Request, step: int, reused: "Mapping[int, Reused]"
    ) -> Iterator[TokenEvent]:
        """The events since the last call. reused: cached rows by owner."""
        if request.outline is not None and not self._outlined:
            self._outlined = True
            yield OutlineRead(tuple(point.title for point in request.outline.points))
        for branch in request.all_branches():
            index = branch.index
            if branch.stage is Stage.WAITING or index in self._ended:
                continue
            if index not in self._sent:
                self._sent[index] = 0
                yield BranchOpened(index, branch.title)
            sent = self._sent[index]
            # A stop token that comes first ends a branch without tokens.
            if self.contexts and not sent and (branch.tokens or branch.finish is Finish.STOP):
                yield BranchContext(index, tuple(branch.before))
            begins = branch.tokens and not sent
            if begins and reused and (runs := tuple(_prompt_runs(branch, reused))):
                yield TokensReused(index, runs)
            if len(branch.tokens) > sent or branch.ended:
                tokens = tuple(branch.tokens[sent:])
                before = self._rounds.get(index, 0)
                kinds = origins(branch, before if before <= len(branch.accepted) else 0)
                kinds = kinds[len(kinds) - len(tokens) :]
                self._sent[index] = max(len(branch.tokens), sent)
                self._rounds[index] = len(branch.accepted)
                yield Committed(request.key, index, tokens, step, origins=kinds, final=branch.ended)
            if branch.ended:
                self._ended.add(index)
                yield BranchFinished(index, str(branch.finish), branch.note)


@dataclass(slots=True)
class TextStream:
    """The text of one branch: only new tokens are decoded, incomplete characters wait. text: of the
    first `decoded` of the tokens. The last piece is decoded again each time, because the text of a
    token can depend on the token before it."""

    decode: Decode
    text: str = ""
    decoded: int = 0
    tokens: list[int] = field(default_factory=list)
    _base: int = field(default=0, init=False)

    def feed(self, *new: int, final: bool = False) -> str:
        """The text that becomes complete with more tokens; `final`: the last."""
        self.tokens += new
        tokens = self.tokens
        if len(tokens) <= self.decoded:
            return ""
        before = self.decode(tokens[self._base : self.decoded]) if self.decoded > self._base else ""
        whole = self.decode(tokens[self._base :])
        waits = len(tokens) - self.decoded <= MAX_TOKENS_PER_CHARACTER
        if whole.endswith(HALF) and waits and not final:
            return ""
        piece = whole[len(before) :]
        self.text += piece
        self._base = self.decoded
        self.decoded = len(tokens)
        return piece


def token_texts(decode: Decode) -> Callable[[int], str]:
    """The text of single tokens."""

    @cache
    def text_of(token: int) -> str:
        # Some tokenizers drop the blank of the first token of a text.
        once = decode([token])
        twice = decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else once

    return text_of


@dataclass(slots=True)
class Detokenizer:
    decode: Decode
    _streams: dict[int, TextStream] = field(default_factory=dict)

    def events(self, token_events: Iterable[TokenEvent]) -> Iterator[StreamEvent]:
        for event in token_events:
            if isinstance(event, TokensReused):
                runs = tuple((self.decode(list(ids)), kind) for ids, kind in event.runs)
                yield PromptReused(event.index, runs)
            elif isinstance(event, Committed):
                stream = self._streams.setdefault(event.branch, TextStream(self.decode))
                if text := stream.feed(*event.tokens, final=event.final):
                    yield TextWritten(event.branch, text, event.round)
            elif not isinstance(event, BranchContext):
                yield event


def _prompt_runs(
    branch: Branch, reused: "Mapping[int, Reused]"
) -> Iterator[tuple[tuple[int, ...], str]]:
    """A branch's prompt as runs of tokens with one origin; empty if no row was reused."""
    request = branch.request
    rows = [(branch.owner, list(branch.prompt), branch.start)]
    if branch.is_root or (request.root is None and branch.index == 0):  # it reads the prefix
        rows.insert(0, (request.prefix_owner, request.context, 0))
    for owner, ids, start in rows:
        reuse = reused.get(owner)
        if reuse is None or not reuse.cached:
            continue
        steps = range(start, start + len(ids))
        kinds = ["c" if at in reuse.picked else "r" if at in reuse.cached else "n" for at in steps]
        for kind, run in groupby(zip(kinds, ids, strict=True), itemgetter(0)):
            yield tuple(token for _, token in run), kind


def origins(branch: Branch, first_round: int = 0) -> str:
    """An `Origin` letter for each token of a branch's rounds from `first_round` on; round 0 also
    covers the token that was sampled after the prompt."""
    text = ""
    for at in range(first_round, len(branch.accepted)):
        drafted = min(branch.accepted[at], branch.emitted[at])
        kind = Origin.FORCED if branch.forced[at] else Origin.DRAFT
        text += kind * drafted + Origin.TARGET * (branch.emitted[at] - drafted)
    before = len(branch.tokens) - len(text)
    return Origin.PROMPT * min(before, 1) + Origin.TARGET * (before - 1) + text


def finish_of(answer: "Answer") -> str:
    """The worst finish reason of the sections, and of the combined answer if there is one."""
    reasons = {section.finish for section in answer.sections}
    if answer.combined is not None and answer.combined.finish != "refused":
        reasons.add(answer.combined.finish)
    worst_first = ("failed", "timeout", "refused", "cancelled", "length", "stop")
    return next((reason for reason in worst_first if reason in reasons), "cancelled")


def answer_ready(answer: "Answer", request: Request) -> AnswerReady:
    outline = len(request.root.tokens) if request.root is not None else 0
    written = sum(len(branch.tokens) for branch in request.branches)
    usage = TokenUsage(request.prompt_size, request.reused, outline, written)
    return AnswerReady(answer, finish_of(answer), usage)


@dataclass(slots=True)
class ReadingOrder:
    """The text of an answer in reading order, as soon as each piece of it is certain. The text of
    the first unfinished branch is released, the others' texts wait. The joined pieces are
    `Answer.text`; so blanks at the end of a part wait for the next text. combines: the graph
    combines the parts into one answer, which alone is released. raw: keep all blanks."""

    combines: bool = False
    raw: bool = False
    titles: tuple[str, ...] = ()
    _texts: dict[int, str] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _current: int = 0
    _started: bool = False

    @classmethod
    def of(cls, graph: Graph, *, raw: bool = False) -> "ReadingOrder":
        return cls(graph.skeleton is not None and graph.skeleton.merge != "concat", raw)

    def read(self, event: StreamEvent) -> str:
        if isinstance(event, OutlineRead):
            self.titles = event.titles
            self._current = len(self.titles) if self.combines and len(self.titles) > 1 else 0
        elif isinstance(event, TextWritten):
            return self.written(event.index, event.text)
        elif isinstance(event, BranchFinished) and event.index >= self._current:
            self._ended.add(event.index)
            return self._release()
        return ""

    def written(self, index: int, text: str) -> str:
        if index < self._current:
            return ""
        self._texts[index] = self._texts.get(index, "") + text
        return self._release()

    def _release(self) -> str:
        released = ""
        while (index := self._current) in self._texts or index in self._ended:
            done = index in self._ended
            text = self._texts.pop(index, "")
            if not self.raw:
                if not self._started:
                    text = text.lstrip()
                    self._started = bool(text) or done
                    if self._started and index < len(self.titles):  # as in the whole answer
                        gap = "\n\n" if index > 0 else ""
                        released += f"{gap}{index + 1}. {self.titles[index]}\n\n"
                certain = text.rstrip()
                if not done and certain != text:
                    self._texts[index] = text[len(certain) :]
                text = certain
            released += text
            if not done:
                break
            self._current += 1
            self._started = False
        return released


def text_pieces(events: Iterator[StreamEvent], graph: Graph) -> Iterator[str]:
    return filter(None, map(ReadingOrder.of(graph).read, events))
