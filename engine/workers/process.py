"""The process of a worker: the engines of a server, or those of a run. Graphs of a server share one
target, which is loaded once. One thread reads messages, one tokenizes, one drives all engines."""

import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import inf
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from ...models.load.weights import model_hash
from ...states.machine import Event as TraceEvent
from ...states.machine import Moved
from ...states.round import RoundSummary
from ...states.text.grammar import GrammarError
from ...states.text.tokens import Encoder, PromptError, check_question, leading_id
from .. import events
from ..errors import Code, code_of, message_of
from ..models import Models, with_drafter
from ..prepare.inputs import Prompt, RequestSettings
from ..prepare.job import model_folders, prepare_graphs
from ..prepare.options import RunOptions
from ..record.run_view import pool_view, runs_of
from ..run.engine import Engine, Handle
from ..run.scoring import Scorer
from ..run.session import Session, derive_seed, load, tie
from ..shell import complain
from . import protocol
from .worker_loop import OpenRequest, Send, WorkerEngine, WorkerLoop, load_job

REPORT_INTERVAL = 0.25  # seconds between two `Counts`
PICTURE_INTERVAL = 0.125  # seconds
HEARTBEAT_INTERVAL = 0.5  # seconds
MAX_MOVES = 24  # of a picture


@dataclass(slots=True)
class StopTexts:
    """Lets text through up to the first of the stop texts, none of them empty, however tokens cut
    these. pending: text that may start a stop. match: the stop that was found."""

    stops: Sequence[str]
    pending: str = ""
    match: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain to precede any stop."""
        if self.match is not None:
            return ""
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


@dataclass(slots=True)
class ScoreRows:
    """Log-probabilities of tokens, each branch after its own context. top: alternatives per token;
    -1: no scores. echo: score the prompt too. silent: not what is written. rows: unsent ones."""

    engine: Engine
    top: int
    echo: bool = False
    silent: bool = False
    rows: list[list[Any]] = field(default_factory=list)
    _scorers: dict[int, Scorer] = field(default_factory=dict)

    def start(self, index: int, context: Sequence[int]) -> None:
        if self.top < 0:
            return
        models = self.engine.session.models
        scorer = self._scorers[index] = Scorer(models, models.target.max_positions)
        scorer.read(context[:1] if self.echo else context)
        if self.echo:
            self.rows.append([index, context[0], self.engine.decode([context[0]]), None, []])
            self._add(index, context[1:])

    def score(self, index: int, tokens: Sequence[int]) -> None:
        if self.top >= 0 and not self.silent:
            self._add(index, tokens)

    def _add(self, index: int, tokens: Sequence[int]) -> None:
        decode = self.engine.decode
        for score in self._scorers[index].score(tokens, self.top):
            top = [[token, decode([token]), logprob] for token, logprob in score.top]
            self.rows.append([index, score.token, decode([score.token]), score.logprob, top])


class ServedRequest(OpenRequest):
    """The output of one `Submit`. rounds: tokens accepted and drafted in each of its rounds.
    rejected: texts by branch name, of the rounds since the last output, if it is traced."""

    def __init__(self, message: protocol.Submit, handle: Handle) -> None:
        super().__init__(handle)
        engine = handle.engine
        self.message = message
        self.rounds: list[tuple[int, int]] = []
        self.rejected: dict[str, str] = {}
        self._decode = engine.decode
        asked = message.settings
        raw = message.raw or bool(asked.token_ids or asked.prefill or asked.grammar)
        self._order = events.ReadingOrder.of(engine.session.program.graph, raw=raw)
        self._stops = StopTexts(message.stop)
        self._parts: dict[int, events.TextStream] = {}
        self._ids: dict[int, list[int]] = {}  # of branches, not sent yet
        silent = message.prompt.max_new_tokens == 0
        self._scores = ScoreRows(engine, message.logprobs, message.echo, silent)
        self._text = ""
        self._tokens_to_stop: int | None = None  # of the branch that wrote the stop text

    def output(self, new: Sequence[events.TokenEvent]) -> Iterator[protocol.Message]:
        branch_events: list[list[Any]] = []
        text = ""
        step = 0
        for event in new:
            step = event.round if isinstance(event, events.Committed) else step
            if self._stops.match is None:  # else it was cancelled, and the last step brought more
                text += self._read(event, branch_events)
        self._text += text
        scores = self._scores.rows
        self._scores.rows = []
        if text or branch_events or scores:
            tokens = sum(len(part.tokens) for part in self._parts.values())
            output = protocol.Wrote(self.message.id, text, branch_events, step, tokens=tokens)
            request = self.handle.request
            rejected = [
                ["rejected", branch.index, drafts]
                for branch in (request.all_branches() if request is not None else ())
                if (drafts := self.rejected.get(branch.name))
            ]
            yield output._replace(scores=scores, ids=[*self._ids.items()], rejected=rejected)
            self._ids = {}
            self.rejected = {}
        if new and isinstance(ready := new[-1], events.AnswerReady):
            answer = ready.answer
            stop = self._stops.match
            usage = asdict(ready.usage)
            plain = len(answer.sections) == 1 and not answer.outline_finish
            if plain and self._tokens_to_stop is not None:
                usage["answer"] = self._tokens_to_stop
            verbatim = self._order.raw or self.message.stop
            whole = ready.finish in ("stop", "length") and not verbatim
            yield protocol.Ended(
                self.message.id,
                answer.text if whole else self._text,
                finish=ready.finish if stop is None else "stop",
                usage=usage,
                stop=stop,
                note="; ".join(part.note for part in answer.sections if part.note),
                accepted=[accepted for accepted, _ in self.rounds],
                drafted=[drafted for _, drafted in self.rounds],
            )

    def _read(self, event: events.TokenEvent, branch_events: list[list[Any]]) -> str:
        """The readable text of a token event; appends it as `Wrote.events` has it."""
        match event:
            case events.OutlineRead():
                branch_events.append(["outline", -1, list(event.titles)])
                return self._stops.feed(self._order.read(event))
            case events.BranchOpened():
                branch_events.append(["opened", event.index, event.title])
            case events.TokensReused():
                runs = [[self._decode(ids), how] for ids, how in event.runs]
                branch_events.append(["reused", event.index, runs])
            case events.BranchContext():
                self._scores.start(event.index, event.tokens)
            case events.Committed():
                return self._written(event, branch_events)
            case events.BranchFinished():
                branch_events.append(["ended", event.index, event.finish])
                return self._stops.feed(self._order.read(event))
            case events.AnswerReady():
                return self._stops.pending
        return ""

    def _written(self, event: events.Committed, branch_events: list[list[Any]]) -> str:
        """The same of tokens; with a stop text complete, the request is cancelled."""
        part = self._parts.setdefault(event.branch, events.TextStream(self._decode))
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
        if new := part.tokens[before:]:
            self._ids.setdefault(event.branch, []).extend(new)
            self._scores.score(event.branch, new)
        if event.final and (rest := part.feed(final=True)) and self._stops.match is None:
            pieces.append([rest, event.origins[-1:] or "t"])
            text += self._stops.feed(self._order.written(event.branch, rest))
        if pieces:
            branch_events.append(["wrote", event.branch, pieces])
        return text


@dataclass(eq=False)
class Refusal(ValueError):
    """A request that cannot run; param: the field to blame, code: for clients."""

    message: str
    param: str | None = None
    code: str | None = None


class ServedGraph(WorkerEngine):
    """One graph's engine and its open requests. watched: record the transitions for `picture`.
    busy: seconds of its steps since it last had no requests."""

    def __init__(self, session: Session, send: Send) -> None:
        engine = Engine(session, threaded=False, rounds=self._round_done, sink=self._happened)
        super().__init__(engine, send)
        self.name = session.program.graph.name
        self.watched = False
        self.busy = 0.0
        self.progress_time = 0.0
        self.moves = deque[list[Any]](maxlen=MAX_MOVES)
        self.positions = Counter[int]()  # drafts accepted at each depth
        self._encoder = Encoder(session.models.tokenizer)
        self._leading = leading_id(session.models.tokenizer)

    def _happened(self, event: TraceEvent) -> None:
        self.progress_time = monotonic()
        if self.watched and isinstance(event, Moved):
            self.moves.append([event.source, event.target, event.guard or "", event.nanos / 1e6])

    def _round_done(self, summary: RoundSummary) -> None:
        for tree in summary.trees:
            drafted = sum(token >= 0 for token in tree.tokens[1:])
            accepted = len(tree.path) - 1
            self.positions.update(range(accepted))
            request = self.requests.get(tree.branch.rpartition("/")[0])
            if isinstance(request, ServedRequest):
                request.rounds.append((accepted, drafted))
                if request.message.trace:
                    request.rejected[tree.branch] = self.engine.decode(tree.rejected)

    def step(self) -> None:
        start_time = monotonic()
        busy = self.busy if self.requests else 0.0
        super().step()
        self.busy = busy + monotonic() - start_time

    def submit(self, message: protocol.Submit) -> None:
        try:
            prompt, settings, prompt_tokens = self.build(message)
        except Refusal as error:
            self.send(protocol.Refused(message.id, error.message, error.param, error.code))
        except Exception as error:  # also of a model's tokenizer
            text = "prompt" if message.raw else "messages"
            param = text if isinstance(error, PromptError) else None
            self.send(protocol.Refused(message.id, message_of(error), param))
        else:
            self.send(protocol.Admitted(message.id, prompt_tokens))
            handle = self.engine.submit(prompt, timeout=message.timeout, settings=settings)
            self.requests[message.id] = ServedRequest(message, handle)

    def encode(self, message: protocol.Encode) -> None:
        """Send the tokens of a text, or of the whole prompt with it; or the text of tokens."""
        decode = self.engine.decode
        try:
            if message.token_ids is not None:
                self.send(protocol.Encoded(message.id, text=decode(message.token_ids)))
                return
            if message.chat:
                request = self.session.request(message.prompt, RequestSettings(skeleton=False))
                ids = [*request.prefix, *request.tail]
            else:
                ids = self._raw(message.prompt.text)
            pieces = {token: decode([token]) for token in {*ids}}
            self.send(protocol.Encoded(message.id, ids, [pieces[token] for token in ids]))
        except Exception as error:  # also of a model's tokenizer
            param = "prompt" if isinstance(error, PromptError) else None
            self.send(protocol.Refused(message.id, message_of(error), param))

    def build(self, message: protocol.Submit) -> tuple[Prompt, RequestSettings, int]:
        """Prompt, settings and number of prompt tokens. Raises Refusal, PromptError."""
        limit = message.prompt.max_new_tokens
        prompt = replace(
            message.prompt,
            seed=derive_seed(message.prompt.seed or 0, "1"),  # as the only prompt of a run
            max_new_tokens=None if limit is None else max(limit, 1),
        )
        settings = self._settings(message)
        try:
            fit = self.engine.fit(prompt, settings)
        except GrammarError as error:
            raise Refusal(str(error), protocol.GRAMMAR, "invalid_schema") from None
        plain = settings.plain or self.session.program.graph.skeleton is None
        if fit.why and limit is None and plain and fit.remaining > 0:
            prompt = replace(prompt, max_new_tokens=fit.remaining)
            fit = self.engine.fit(prompt, settings)
        if fit.why:
            # The words are OpenAI's, by which clients recognise the error.
            text = "prompt" if message.raw or settings.token_ids else "messages"
            asked = fit.prompt + fit.answer
            why = (
                f"However, you requested {asked} tokens ({fit.prompt} in the {text}, "
                f"{fit.answer} in the completion). Please reduce the length of the {text} "
                "or completion."
            )
            longest = f"This model's maximum context length is {fit.longest} tokens."
            why = why if asked > fit.longest else f"The request {fit.why}."
            raise Refusal(f"{longest} {why}", text, "context_length_exceeded")
        return prompt, settings, fit.prompt

    def _raw(self, text: str) -> list[int]:
        """A text's ids after the tokenizer's leading token; the text may be blank."""
        check_question(f"{text}.")
        return ([] if self._leading is None else [self._leading]) + self._encoder.text(text)

    def _settings(self, message: protocol.Submit) -> RequestSettings:
        graph = self.session.program.graph
        skeleton = graph.skeleton
        settings = message.settings
        sampling = dict(message.sampling)
        self._check_ids("prompt", settings.token_ids)
        self._check_ids("stop_token_ids", settings.stop_ids)
        if message.raw:
            settings = replace(settings, token_ids=tuple(self._raw(message.prompt.text)))
        if bias := sampling.get("logit_bias"):
            self._check_ids("logit_bias", [token for token, _ in bias])
            sampling["logit_bias"] = tuple((int(token), float(add)) for token, add in bias)
        if graph.beam is not None and (sampling or settings.grammar):
            param = protocol.GRAMMAR if settings.grammar else next(iter(sampling))
            raise Refusal(f"graph {graph.name!r} searches with beams: no {param}", param)
        scores = message.logprobs >= 0
        if scores and skeleton is not None and skeleton.merge == "attend" and not settings.plain:
            what = f"graph {graph.name!r} merges parts in place, which no plain forward repeats"
            raise Refusal(f"logprobs: {what} (specsot.skeleton: false)", "logprobs")
        # Where an engine cannot continue behind what another one wrote, the request starts anew.
        single = graph.beam is None and graph.blend is None and graph.limits.n == 1
        continues = single and (skeleton is None or skeleton.merge == "concat")
        return replace(
            settings,
            sampling=replace(self.session.sampling, **sampling) if sampling else None,
            contexts=scores,
            resumed=settings.resumed if continues else {},
        )

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        size = self.session.models.target.vocab_size
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise Refusal(f"{param}: no token {wrong[0]}: the model has {size} of them", param)

    def picture(self) -> protocol.Picture:
        pool = pool_view(self.engine.core.board)
        stats = self.engine.stats()
        moves = [*self.moves]
        self.moves.clear()
        return protocol.Picture(
            graph=self.name,
            state=self.engine.core.state,
            runs=runs_of(pool.codes),
            used=pool.used,
            capacity=pool.codes.size,
            moves=moves,
            running=stats.running,
            waiting=stats.waiting,
            busy=self.busy,
        )

    def facts(self, model: str, digest: str) -> dict[str, Any]:
        """What the HTTP side knows of the graph. states, ways: of its machine. longest: tokens of
        prompt and answer together. budget: default tokens of an answer, or of each part."""
        session = self.session
        graph = session.program.graph
        target = session.models.target
        return {
            "name": graph.name,
            "doc": graph.doc,
            "model": model,
            "model_hash": digest,
            "layout": graph.layout.kind,
            "drafter": graph.drafter.kind,
            "skeleton": graph.skeleton is not None,
            "initial": graph.initial,
            "states": [*graph.states],
            "ways": [(s, e.to, e.when or "") for s in graph.states for e in graph.edges_from(s)],
            "longest": min(target.max_positions, graph.layout.kv_slots),
            "vocabulary": target.vocab_size,
            "budget": session.budget,
            "stop_ids": [*session.prompts.stop_ids],
            "sampling": {"temperature": graph.sampling.temperature},
        }


class EngineProcess:
    """Engines of several graphs over one target, fed through a socket until it is closed."""

    def __init__(self, pipe: protocol.WorkerSocket, start: protocol.Start) -> None:
        self._pipe = pipe
        self._wake = Event()
        self._graphs: dict[str, ServedGraph] = {}
        self._turn_time = inf  # none while models are loaded
        Thread(target=_send_heartbeats, args=(pipe, lambda: self.stuck), daemon=True).start()
        models: Models | None = None
        facts = {}  # of the graphs by name; the first one loads the target
        for job in prepare_graphs(start.graphs, RunOptions(**{**start.options, "graph": None})):
            target_folder, drafter_folder = model_folders(job)
            if models is None:
                session = load(job)
                models = replace(session.models, drafter=None)
            elif drafter_folder is None:
                session = tie(job, models)
            else:
                kind = job.program.graph.drafter.kind
                session = tie(job, with_drafter(models, drafter_folder, kind))
            graph = ServedGraph(session, pipe.send)
            self._graphs[graph.name] = graph
            facts[graph.name] = graph.facts(job.options.model, model_hash(target_folder))
        pipe.send(protocol.Ready(facts))

    def serve(self) -> None:
        """Make steps of every engine that has requests; send pictures and counts in time."""
        Thread(target=self._listen, name="specsot-listen", daemon=True).start()
        graphs = self._graphs.values()
        report_time = 0.0
        picture_time = 0.0
        while not self._pipe.closed:
            now = self._turn_time = monotonic()
            due = now - picture_time >= PICTURE_INTERVAL
            picture_time = now if due else picture_time
            for graph in graphs:
                before = len(graph.requests)
                graph.step()
                ended = before and not graph.requests  # its last picture is sent at once
                if graph.watched and graph.moves and (due or ended):
                    self._pipe.send(graph.picture())
            if now - report_time >= REPORT_INTERVAL:
                report_time = now
                counts = {
                    graph.name: asdict(graph.engine.stats())
                    | {"positions": [*graph.positions.values()]}
                    for graph in graphs
                }
                self._pipe.send(protocol.Counts(counts))
            if not any(graph.requests for graph in graphs):
                self._wake.wait(REPORT_INTERVAL)
            self._wake.clear()

    @property
    def stuck(self) -> float:
        """Seconds since the engines made progress: a turn of `serve`, a transition, or an op."""
        times = [graph.progress_time for graph in [*self._graphs.values()]]
        return max(monotonic() - max([self._turn_time, *times]), 0.0)

    def _listen(self) -> None:
        """Tokenizes prompts on this thread, so that a long one does not delay the engines."""
        with ThreadPoolExecutor(1, "specsot-tokenize") as others:  # they delay no request
            for message in self._pipe:
                match message:
                    case protocol.Encode():
                        others.submit(self._graphs[message.graph].encode, message)
                    case protocol.Submit():
                        self._graphs[message.graph].submit(message)
                        self._wake.set()
                    case protocol.SnapshotRequest():
                        for graph in self._graphs.values():
                            graph.watched = message.on
                    case protocol.Cancel():
                        for graph in self._graphs.values():
                            if (request := graph.requests.get(message.id)) is not None:
                                request.handle.cancel()
            self._wake.set()


class WorkerProcess:
    """A worker's process: serves one connection after another, with the models of a run loaded."""

    loop: WorkerLoop | None = None

    def serve(self, connection: socket.socket) -> int:
        """Serve a connection until it is closed; the exit code. Raises ProtocolError."""
        pipe = protocol.WorkerSocket(connection)
        with closing(pipe):
            start = next(iter(pipe), None)
            if not isinstance(start, protocol.Start | protocol.Load):
                kind = type(start).__name__
                raise protocol.ProtocolError(f"the first message is not a Start: {kind}")
            try:
                if isinstance(start, protocol.Load):
                    Thread(target=_send_heartbeats, args=(pipe,), daemon=True).start()
                    self.loop = self.loop or WorkerLoop(load_job(start))
                    self.loop.serve(pipe)
                    return int(Code.OK)
                engines = EngineProcess(pipe, start)
            except Exception as error:
                pipe.send(protocol.Failed(int(code_of(error)), message_of(error)))
                self.loop = None
                return int(code_of(error))
            engines.serve()
        return int(Code.OK)


def _send_heartbeats(pipe: protocol.WorkerSocket, stuck: Callable[[], float] = lambda: 0.0) -> None:
    while not pipe.closed:
        pipe.send(protocol.Heartbeat(stuck()))
        sleep(HEARTBEAT_INTERVAL)


def main() -> None:
    """Entry of a child process: its only argument is the number of its end of the socket."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = int(Code.FAILED)
    try:
        code = WorkerProcess().serve(socket.socket(fileno=int(sys.argv[1])))
    except Exception as error:
        complain(f"the engine's process ends: {message_of(error)}")
    finally:
        os._exit(code)  # a thread may still be reading
