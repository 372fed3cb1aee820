"""One request of a server in the engine process: from its message to the engine, and back to text.

Nothing of a stop text is ever sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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
    TextStream,
    TokenEvent,
    TokensReused,
)
from ..prepare.inputs import Prompt, RequestSettings
from ..run.engine import Engine, Handle
from ..run.scoring import Scorer
from ..run.session import derive_seed
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


class RequestBuilder:
    """Builds requests for one engine, checked against its model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.session = engine.session
        self._encoder = Encoder(self.session.models.tokenizer)
        self._leading = leading_id(self.session.models.tokenizer)

    def build(self, message: Submit) -> tuple[Prompt, RequestSettings, int]:
        """Prompt and settings of a request, and the number of its prompt's tokens. Raises Refusal,
        PromptError: the request cannot run."""
        prompt = Prompt(
            key=message.id,
            text=message.question if message.text is None else message.text,
            seed=derive_seed(message.seed, FIRST_KEY),
            max_new_tokens=None if message.max_tokens is None else max(message.max_tokens, 1),
            documents=tuple(Document(title, body) for title, body in message.documents),
            cache_salt=message.cache_salt,
            past=_turns(message.past),
            rules=message.rules,
        )
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
        return prompt, settings, fit.prompt

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
        leading = [] if self._leading is None else [self._leading]
        return leading + self._encoder.text(text)

    def _settings(self, message: Submit) -> RequestSettings:
        graph = self.session.program.graph
        skeleton = graph.skeleton
        ids = tuple(message.token_ids)
        sampling = dict(message.sampling)
        bias = sampling.get("logit_bias", ())
        self._check_ids("prompt", ids)
        self._check_ids("stop_token_ids", message.stop_ids)
        if message.text is not None:
            ids = tuple(self._raw(message.text))
        if bias:
            self._check_ids("logit_bias", [token for token, _ in bias])
            sampling["logit_bias"] = tuple((int(token), float(add)) for token, add in bias)
        if graph.beam is not None and (sampling or message.schema):
            param = "response_format" if message.schema else next(iter(sampling))
            raise Refusal(f"graph {graph.name!r} searches with beams: no {param}", param)
        # Where an engine cannot continue behind what another one wrote, the request starts anew.
        single = graph.beam is None and graph.blend is None and graph.limits.n == 1
        continues = single and (skeleton is None or skeleton.merge == "concat")
        settings = RequestSettings(
            sampling=replace(self.session.sampling, **sampling) if sampling else None,
            token_ids=ids,
            skeleton=message.skeleton,
            stop_ids=tuple(message.stop_ids),
            ignore_eos=message.ignore_eos,
            schema=message.schema,
            contexts=message.logprobs >= 0,
            resumed={index: tuple(ids) for index, ids in message.resumed if continues},
        )
        merges = skeleton is not None and skeleton.merge == "attend"
        if merges and settings.contexts and not settings.plain:
            what = f"graph {graph.name!r} merges parts in place, which no plain forward repeats"
            raise Refusal(f"logprobs: {what} (specsot.skeleton: false)", "logprobs")
        return settings

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        size = self.session.models.target.vocab_size
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise Refusal(f"{param}: no token {wrong[0]}: the model has {size} of them", param)


def _turns(past: Sequence[Sequence[str]]) -> tuple[PastTurn, ...]:
    return tuple(PastTurn(question, answer) for question, answer in past)


# -- from the engine to text ----------------------------------------------------------------------


@dataclass(slots=True)
class StopTexts:
    """Lets text through up to the first of the stop texts, however tokens and steps cut these.

    stops: none of them empty. pending: text that may start a stop. match: the stop that was found;
    nothing comes through after it.
    """

    stops: Sequence[str]
    pending: str = ""
    match: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain to precede any stop."""
        if self.match is not None:
            return ""
        if not (self.stops and text):
            return text
        text = self.pending + text
        matches = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:  # of stops with the same start, the one that ends first is complete first
            at, self.match = min(matches, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self.pending = ""
            return text[:at]
        starts = (stop[:size] for stop in self.stops for size in range(1, len(stop)))
        open_size = max((len(start) for start in starts if text.endswith(start)), default=0)
        certain = len(text) - open_size
        self.pending = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        pending = self.pending
        self.pending = ""
        return pending


@dataclass(slots=True)
class ScoreRows:
    """Log-probabilities of tokens, each branch after its own context.

    top: alternatives per token; -1: no scores. echo: score the prompt's tokens too, the first of
    which has no score. silent: do not score what is written. rows: as of `Wrote.scores`, those that
    were not sent.
    """

    engine: Engine
    top: int
    echo: bool = False
    silent: bool = False
    rows: list[list[Any]] = field(default_factory=list)
    _scorers: dict[int, Scorer] = field(default_factory=dict)

    def start(self, index: int, context: Sequence[int]) -> None:
        """A branch will continue these tokens."""
        if self.top < 0:
            return
        models = self.engine.session.models
        scorer = self._scorers[index] = Scorer(models, models.target.max_positions)
        if not self.echo:
            scorer.read(context)
            return
        self.rows.append([index, context[0], self.engine.decode([context[0]]), None, []])
        scorer.read(context[:1])
        self._add(index, context[1:])

    def score(self, index: int, tokens: Sequence[int]) -> None:
        """The next tokens of a branch."""
        if self.top >= 0 and tokens and not self.silent:
            self._add(index, tokens)

    def _add(self, index: int, tokens: Sequence[int]) -> None:
        decode = self.engine.decode
        for score in self._scorers[index].score(tokens, self.top):
            top = [[token, decode([token]), logprob] for token, logprob in score.top]
            self.rows.append([index, score.token, decode([score.token]), score.logprob, top])


@dataclass(slots=True)
class PartText(TextStream):
    """A branch's text, token by token. num_sent: its tokens that were sent."""

    num_sent: int = 0


class ServedRequest:
    """The output of one `Submit`. rounds: tokens accepted and drafted in each of its rounds, which
    others append to. done: it has ended, and `output` has said so."""

    def __init__(self, engine: Engine, message: Submit, handle: Handle) -> None:
        self.message = message
        self.handle = handle
        self.done = False
        self.rounds: list[tuple[int, int]] = []
        self._decode = engine.decode
        raw = message.text is not None or bool(message.token_ids)
        self._order = ReadingOrder.of(engine.session.program.graph, raw=raw)
        self._stops = StopTexts(message.stop)
        self._parts: dict[int, PartText] = {}
        silent = message.max_tokens == 0
        self._scores = ScoreRows(engine, message.logprobs, message.echo, silent)
        self._num_read = 0  # events of the handle
        self._text = ""
        self._tokens_to_stop: int | None = None  # of the branch that wrote the stop text

    def output(self) -> Iterator[Message]:
        """What is new since the last call."""
        token_events = self.handle.since(self._num_read)
        self._num_read += len(token_events)
        if not token_events:
            return
        events: list[list[Any]] = []
        text = ""
        step = 0
        for event in token_events:
            step = event.round if isinstance(event, Committed) else step
            if self._stops.match is None:  # else it was cancelled, and the last step brought more
                text += self._read(event, events)
        self._text += text
        scores = self._scores.rows
        self._scores.rows = []
        if text or events or scores:
            ids = []
            for index, part in self._parts.items():
                if new := part.tokens[part.num_sent :]:
                    ids.append([index, new])
                    part.num_sent = len(part.tokens)
            tokens = sum(len(part.tokens) for part in self._parts.values())
            yield Wrote(self.message.id, text, events, step, tokens=tokens, scores=scores, ids=ids)
        if isinstance(token_events[-1], AnswerReady):
            self.done = True
            yield self._ended(token_events[-1])

    def _read(self, event: TokenEvent, events: list[list[Any]]) -> str:
        """The readable text of a token event; appends it as `Wrote.events` has it."""
        match event:
            case OutlineRead():
                events.append(["outline", -1, list(event.titles)])
                return self._stops.feed(self._order.read(event))
            case BranchOpened():
                events.append(["opened", event.index, event.title])
            case TokensReused():
                runs = [[self._decode(ids), how] for ids, how in event.runs]
                events.append(["reused", event.index, runs])
            case BranchContext():
                self._scores.start(event.index, event.tokens)
            case Committed():
                return self._written(event, events)
            case BranchFinished():
                events.append(["ended", event.index, event.finish])
                return self._stops.feed(self._order.read(event))
            case AnswerReady():
                return self._stops.rest()
        return ""

    def _written(self, event: Committed, events: list[list[Any]]) -> str:
        """The same of tokens; with a stop text complete, the request is cancelled."""
        part = self._parts.setdefault(event.branch, PartText(self._decode))
        before = len(part.tokens)
        pieces = []
        text = ""
        for token, origin in zip(event.tokens, event.origins, strict=True):
            piece = part.feed(token)
            pieces.append([piece, origin])
            text += self._stops.feed(self._order.written(event.branch, piece))
            if self._stops.match is not None:
                self._tokens_to_stop = len(part.tokens)
                self.handle.cancel()
                break
        self._scores.score(event.branch, part.tokens[before:])
        if event.final and (rest := part.feed(final=True)) and self._stops.match is None:
            pieces.append([rest, event.origins[-1:] or "t"])
            text += self._stops.feed(self._order.written(event.branch, rest))
        if pieces:
            events.append(["wrote", event.branch, pieces])
        return text

    def _ended(self, ready: AnswerReady) -> Ended:
        answer = ready.answer
        stop = self._stops.match
        usage = asdict(ready.usage)
        plain = len(answer.sections) == 1 and not answer.outline_finish
        if plain and self._tokens_to_stop is not None:
            usage["answer"] = self._tokens_to_stop
        whole = ready.finish in NATURAL_ENDS and not (self._order.raw or self.message.stop)
        return Ended(
            id=self.message.id,
            text=answer.text if whole else self._text,
            finish=ready.finish if stop is None else "stop",
            stop=stop,
            note="; ".join(part.note for part in answer.sections if part.note),
            usage=usage,
            accepted=[accepted for accepted, _ in self.rounds],
            drafted=[drafted for _, drafted in self.rounds],
        )
