"""One request of a server in the engine process: from its message to the engine, and back to text.

Stop texts and log-probabilities belong to a request; nothing of a stop text is ever sent, wherever
tokens and steps cut it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...ops.sampling.settings import SamplingRules
from ...states.text.documents import Document
from ...states.text.grammar import GrammarError
from ...states.text.prompts import PastTurn
from ...states.text.tokens import Encoder, check_question, leading_id
from ..events import (
    AnswerReady,
    BranchContext,
    BranchFinished,
    BranchOpened,
    Committed,
    OutlineRead,
    ReadingOrder,
    TokenEvent,
    TokensReused,
)
from ..prepare.inputs import Prompt, RequestSettings
from ..run.engine import Engine, Handle
from ..run.scoring import Scorer, TokenScore
from ..run.session import derive_seed
from ..text_stream import TextStream
from .protocol import Encode, Ended, Message, Submit, Wrote

FIRST_KEY = "1"  # of the only prompt of a run, from which its coins follow
TOO_LONG = "context_length_exceeded"
NATURAL_ENDS = ("stop", "length")


class Refusal(ValueError):
    """A request that cannot run; param: the field to blame, code: for clients."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """Arguments of `Engine.submit`."""

    prompt: Prompt
    settings: RequestSettings
    prompt_tokens: int


class RequestBuilder:
    """Builds requests for one engine, checked against its model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.session = engine.session
        self._encoder = Encoder(self.session.models.tokenizer)
        first = leading_id(self.session.models.tokenizer)
        self._leading = () if first is None else (first,)

    def build(self, message: Submit) -> ReadyRequest:
        """Prompt and settings of a request.

        Raises:
            Refusal, PromptError, GrammarError: the request cannot run.
        """
        prompt = self._prompt(message)
        settings = self._settings(message)
        try:
            fit = self.engine.fit(prompt, settings)
        except GrammarError as error:
            raise Refusal(str(error), "response_format", "invalid_schema") from None
        plain = settings.plain or self.session.program.graph.skeleton is None
        if fit.why and message.max_tokens is None and plain and fit.remaining > 0:
            prompt = replace(prompt, max_new_tokens=fit.remaining)
            fit = self.engine.fit(prompt, settings)
        if fit.why:
            budget = message.max_tokens or self.session.budget
            sizes = f"{fit.prompt} tokens of prompt and {budget} to be written: {fit.why}"
            limit = fit.prompt + fit.remaining
            raise Refusal(f"{sizes} (at most {limit} together)", "messages", TOO_LONG)
        return ReadyRequest(prompt, settings, fit.prompt)

    def encode(self, message: Encode) -> list[int]:
        """The ids of a text, or of the whole prompt with it; raises PromptError."""
        if not message.chat:
            return self._raw(message.text)
        past = _turns(message.past)
        prompt = Prompt(FIRST_KEY, message.text, past=past, rules=message.rules)
        request = self.session.request(prompt, RequestSettings(skeleton=False))
        return [*request.prefix, *request.tail]

    def _raw(self, text: str) -> list[int]:
        """A text's ids after the tokenizer's leading token; the text may be blank."""
        check_question(f"{text}.")
        return [*self._leading, *self._encoder.text(text)]

    def _prompt(self, message: Submit) -> Prompt:
        budget = None if message.max_tokens is None else max(message.max_tokens, 1)
        return Prompt(
            key=message.id,
            text=message.question if message.text is None else message.text,
            seed=derive_seed(message.seed, FIRST_KEY),
            max_new_tokens=budget,
            documents=tuple(Document(title, body) for title, body in message.documents),
            cache_salt=message.cache_salt,
            past=_turns(message.past),
            rules=message.rules,
        )

    def _settings(self, message: Submit) -> RequestSettings:
        size = self.session.models.target.vocab_size
        ids = tuple(message.token_ids)
        _check_ids("prompt", ids, size)
        _check_ids("stop_token_ids", message.stop_ids, size)
        if message.text is not None:
            ids = tuple(self._raw(message.text))
        plain = bool(ids) or not message.skeleton or message.schema is not None
        sampling = self._sampling(message, size)
        self._check_skeleton(message, plain=plain)
        return RequestSettings(
            sampling=sampling,
            token_ids=ids,
            skeleton=message.skeleton,
            stop_ids=tuple(message.stop_ids),
            ignore_eos=message.ignore_eos,
            schema=message.schema,
            contexts=message.logprobs >= 0,
            resumed={index: tuple(tokens) for index, tokens in self._resumed(message)},
        )

    def _resumed(self, message: Submit) -> Sequence[Sequence[Any]]:
        """Tokens that another engine has written, if an engine can continue behind them; else the
        request starts anew."""
        graph = self.session.program.graph
        merges = graph.skeleton is not None and graph.skeleton.merge != "concat"
        single = graph.beam is None and graph.blend is None and graph.limits.n == 1
        return message.resumed if single and not merges else ()

    def _sampling(self, message: Submit, size: int) -> SamplingRules | None:
        if not message.sampling:
            return None
        values = dict(message.sampling)
        if bias := values.get("logit_bias"):
            _check_ids("logit_bias", [token for token, _ in bias], size)
            values["logit_bias"] = tuple((int(token), float(add)) for token, add in bias)
        return replace(self.session.sampling, **values)

    def _check_skeleton(self, message: Submit, *, plain: bool) -> None:
        """Refuse what only a plain answer can have."""
        graph = self.session.program.graph
        if graph.beam is not None and (message.sampling or message.schema):
            param = "response_format" if message.schema else next(iter(message.sampling))
            raise Refusal(f"graph {graph.name!r} searches with beams: no {param}", param)
        if plain or graph.skeleton is None:
            return
        if message.logprobs >= 0 and graph.skeleton.merge == "attend":
            what = f"graph {graph.name!r} merges parts in place, which no plain forward repeats"
            raise Refusal(f"logprobs: {what} (specsot.skeleton: false)", "logprobs")


def _check_ids(param: str, ids: Sequence[int], size: int) -> None:
    if wrong := [token for token in ids if not 0 <= token < size]:
        raise Refusal(f"{param}: no token {wrong[0]}: the model has {size} of them", param)


def _turns(past: Sequence[Sequence[str]]) -> tuple[PastTurn, ...]:
    return tuple(PastTurn(question, answer) for question, answer in past)


# -- from the engine to text ----------------------------------------------------------------------


@dataclass(slots=True)
class StopTexts:
    """Lets text through up to the first of the stop texts.

    Attributes:
        stops: none of them empty. pending: text that may start a stop. match: the stop that was
            found; nothing comes through after it.
    """

    stops: Sequence[str]
    pending: str = ""
    match: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain to precede any stop."""
        if self.match is not None:
            return ""
        if not self.stops:
            return text
        text = self.pending + text
        matches = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:  # of stops with the same start, the one that ends first is complete first
            at, self.match = min(matches, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self.pending = ""
            return text[:at]
        size = self._open_size(text)
        self.pending = text[len(text) - size :]
        return text[: len(text) - size]

    def rest(self) -> str:
        """The pending text, as no further text comes."""
        pending = self.pending
        self.pending = ""
        return pending

    def _open_size(self, text: str) -> int:
        """Characters at the end of a text that a stop may start with."""
        longest = max(map(len, self.stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops if len(stop) > size):
                return size
        return 0


@dataclass(slots=True)
class ScoreRows:
    """Log-probabilities of tokens, each branch after its own context.

    Args:
        top: alternatives per token; -1: no scores. echo: score the prompt's tokens too, the first
            of which has no score. silent: do not score what is written.
    """

    engine: Engine
    top: int
    echo: bool = False
    silent: bool = False
    _scorers: dict[int, Scorer] = field(default_factory=dict)
    _rows: list[list[Any]] = field(default_factory=list)

    def start(self, index: int, context: Sequence[int]) -> None:
        """A branch will continue these tokens."""
        if self.top < 0:
            return
        models = self.engine.session.models
        scorer = self._scorers[index] = Scorer(models, models.target.max_positions)
        if not self.echo:
            scorer.read(context)
            return
        self._rows.append([index, context[0], self.engine.decode([context[0]]), None, []])
        scorer.read(context[:1])
        self._add(index, scorer.score(context[1:], self.top))

    def score(self, index: int, tokens: Sequence[int]) -> None:
        """The next tokens of a branch."""
        if self.top >= 0 and tokens and not self.silent:
            self._add(index, self._scorers[index].score(tokens, self.top))

    def pop(self) -> list[list[Any]]:
        """Rows since the last call."""
        rows = self._rows
        self._rows = []
        return rows

    def _add(self, index: int, scores: Sequence[TokenScore]) -> None:
        decode = self.engine.decode
        for score in scores:
            top = [[token, decode([token]), logprob] for token, logprob in score.top]
            self._rows.append([index, score.token, decode([score.token]), score.logprob, top])


@dataclass(slots=True)
class Speculation:
    """Tokens accepted and drafted in each round of a request."""

    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PartText:
    """A branch's text, token by token."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)

    def add(self, token: int) -> str:
        """Text that becomes certain with this token."""
        self.tokens.append(token)
        return self._update(final=False)

    def finish(self) -> str:
        return self._update(final=True) if self.tokens else ""

    def _update(self, *, final: bool) -> str:
        before = len(self.stream.text)
        return self.stream.update(self.tokens, final=final)[before:]


class ServedRequest:
    """The output of one `Submit`.

    Attributes:
        done: it has ended, and `output` has said so.
    """

    def __init__(
        self, engine: Engine, message: Submit, handle: Handle, speculation: Speculation
    ) -> None:
        self.engine = engine
        self.message = message
        self.handle = handle
        self.speculation = speculation
        raw = message.text is not None or bool(message.token_ids)
        self._order = ReadingOrder.of(engine.session.program.graph, raw=raw)
        self._stops = StopTexts(message.stop)
        self._branches: dict[int, PartText] = {}
        silent = message.max_tokens == 0
        self._scores = ScoreRows(engine, message.logprobs, message.echo, silent)
        self._num_read = 0  # events of the handle
        self._num_tokens = 0
        self._text = ""
        self._tokens_to_stop: list[int] | None = None  # of a plain answer
        self.done = False

    def output(self) -> Iterable[Message]:
        """What is new since the last call."""
        notes = self.handle.since(self._num_read)
        self._num_read += len(notes)
        if not notes:
            return
        events: list[list[Any]] = []
        before = {index: len(branch.tokens) for index, branch in self._branches.items()}
        text = ""
        step = 0
        answer = None
        for note in notes:
            if isinstance(note, AnswerReady):
                answer = note
            else:
                step = note.round if isinstance(note, Committed) else step
                text += self._read(note, events)
        if answer is not None and self._stops.match is None:
            text += self._stops.rest()
        self._text += text
        scores = self._scores.pop()
        if text or events or scores:
            ids = [
                [index, new]
                for index, branch in self._branches.items()
                if (new := branch.tokens[before.get(index, 0) :])
            ]
            yield Wrote(
                id=self.message.id,
                text=text,
                events=events,
                step=step,
                tokens=self._num_tokens,
                scores=scores,
                ids=ids,
            )
        if answer is not None:
            self.done = True
            yield self._ended(answer)

    def _read(self, note: TokenEvent, events: list[list[Any]]) -> str:
        """The readable text of a note; appends its events."""
        if self._stops.match is not None:
            return ""  # it was cancelled, and the last step may have brought more
        match note:
            case OutlineRead():
                events.append(["outline", -1, list(note.titles)])
                return self._stops.feed(self._order.outlined(note.titles))
            case BranchOpened():
                events.append(["opened", note.index, note.title])
            case BranchFinished():
                events.append(["ended", note.index, note.finish])
                return self._feed(self._order.ended(note.index))
            case TokensReused():
                decode = self.engine.decode
                runs = [[decode(ids), how] for ids, how in note.runs]
                events.append(["reused", note.index, runs])
            case BranchContext():
                self._scores.start(note.index, note.tokens)
            case Committed():
                return self._written(note, events)
        return ""

    def _written(self, note: Committed, events: list[list[Any]]) -> str:
        branch = self._branches.setdefault(note.branch, PartText(TextStream(self.engine.decode)))
        pieces = []
        text = ""
        before = len(branch.tokens)
        for token, origin in zip(note.tokens, note.origins, strict=True):
            piece = branch.add(token)
            self._num_tokens += 1
            pieces.append([piece, origin])
            text += self._feed(self._order.written(note.branch, piece))
            if self._stopped_at(branch):
                break
        self._scores.score(note.branch, branch.tokens[before:])
        if note.final and (rest := branch.finish()) and self._stops.match is None:
            pieces.append([rest, note.origins[-1:] or "t"])
            text += self._feed(self._order.written(note.branch, rest))
        if pieces:
            events.append(["wrote", note.branch, pieces])
        return text

    def _feed(self, text: str) -> str:
        return self._stops.feed(text) if text else ""

    def _stopped_at(self, branch: PartText) -> bool:
        """Whether a stop text is complete; then the request is cancelled."""
        if self._stops.match is None:
            return False
        if self._tokens_to_stop is None:
            self._tokens_to_stop = list(branch.tokens)
            self.handle.cancel()
        return True

    def _ended(self, answer: AnswerReady) -> Ended:
        stop = self._stops.match
        usage = asdict(answer.usage)
        plain = len(answer.answer.sections) == 1 and not answer.answer.outline_finish
        if stop is not None and plain and self._tokens_to_stop is not None:
            usage["answer"] = len(self._tokens_to_stop)
        whole = answer.finish in NATURAL_ENDS and not self._order.raw and stop is None
        return Ended(
            id=self.message.id,
            text=answer.answer.text if whole and not self.message.stop else self._text,
            finish=answer.finish if stop is None else "stop",
            stop=stop,
            note="; ".join(part.note for part in answer.answer.sections if part.note),
            usage=usage,
            accepted=self.speculation.accepted,
            drafted=self.speculation.drafted,
        )
