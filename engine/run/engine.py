"""The engine: texts in, events out, from any thread, for as long as it lives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from threading import Condition, Lock, Thread, current_thread
from time import monotonic
from typing import Any, Self

from ...models.sharded import RankLost
from ...states.machine import Event, OpRan, Sink
from ...states.manager import BranchStateManager
from ...states.phases.merge import Answer
from ...states.policies import PolicyError
from ...states.request import Finish, Request, reason_of
from ...states.round import RoundSummary
from ...states.scheduler import Inbox
from ...states.text.documents import Document
from ..events import AnswerReady, Detokenizer, StreamEvent, StreamEvents, TokenEvent, answer_ready
from ..prepare.inputs import AS_THE_GRAPH, Fit, Prompt, RequestSettings
from .core import EngineCore
from .session import Session, open_session


class EngineError(RuntimeError):
    """The engine is closed, or has stopped after an error of its own."""


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters of an engine since its start, and its figures at one moment. ended: requests by
    finish reason. waiting, running: requests not started, and started. branches: running.
    recovered: recomputations after an error of an op. slots, peak_slots: of the target's pool in
    use, now and at most. prefix_asked, prefix_reused: prompt tokens looked up in the prefix cache,
    and found there. preempted: branches and requests."""

    submitted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    branches: int = 0
    recovered: int = 0
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    slots: int = 0
    peak_slots: int = 0
    capacity: int = 0
    prefix_asked: int = 0
    prefix_reused: int = 0
    seconds: float = 0.0
    preempted: int = 0


@dataclass(eq=False, repr=False)
class Handle:
    """One submitted request. request: its state in the engine, replaced if it is computed again.
    deadline: moment of `time.monotonic` at which it is ended."""

    engine: "Engine"
    prompt: Prompt
    deadline: float | None
    settings: RequestSettings = AS_THE_GRAPH
    request: Request | None = None
    _changed: Condition = field(default_factory=Condition)
    _emitted: list[TokenEvent] = field(default_factory=list)
    _error: BaseException | None = None
    _wakers: set[Callable[[], object]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._events = StreamEvents(self.settings.contexts)

    @property
    def done(self) -> bool:
        """True once the answer is ready, or the engine has stopped."""
        return self._error is not None or self._last is not None

    @property
    def finish(self) -> str | None:
        """The worst finish reason of the branches; None before the end."""
        return None if self._last is None else self._last.finish

    @property
    def _last(self) -> AnswerReady | None:
        last = self._emitted[-1] if self._emitted else None
        return last if isinstance(last, AnswerReady) else None

    def cancel(self) -> None:
        self.engine.cancel(self)

    def update(self, request: Request, manager: BranchStateManager, step: int) -> None:
        """Emit what is new in the request's branches."""
        self.emit([*self._events.new(request, step, manager.reused)])

    def emit(self, events: Sequence[TokenEvent], error: BaseException | None = None) -> None:
        """Add events, or the error that has stopped the engine."""
        if not events and error is None:
            return
        with self._changed:
            self._error = self._error or error
            self._emitted += events
            self._changed.notify_all()
            wakers = [*self._wakers]
        for wake in wakers:
            with suppress(RuntimeError):  # a closed event loop
                wake()

    def since(self, count: int) -> list[TokenEvent]:
        """The token events after the first `count`, without waiting."""
        return self._emitted[count:]

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the answer; raises TimeoutError after `timeout` seconds, in which case the
        request continues, EngineError if the engine has stopped."""
        self._await(None, timeout)
        return self._answer()

    def stream(self) -> Iterator[StreamEvent]:
        """All events from the first on; several readers may stream, also after the end."""
        detokenizer = Detokenizer(self.engine.decode)
        position = 0
        while not self._is_read(position):
            self._await(position)
            events = self.since(position)
            position += len(events)
            yield from detokenizer.events(events)
        self._answer()

    async def aresult(self) -> Answer:
        """The same as `result`, awaited."""
        async for _ in self.astream():
            pass
        return self._answer()

    async def astream(self) -> AsyncIterator[StreamEvent]:
        """The same as `stream`, for `async for`."""
        detokenizer = Detokenizer(self.engine.decode)
        changed = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, changed.set)
        with self._changed:
            self._wakers.add(wake)
        position = 0
        try:
            while not self._is_read(position):
                changed.clear()
                if events := self.since(position):
                    position += len(events)
                    for event in detokenizer.events(events):
                        yield event
                elif self.engine.threaded:
                    await changed.wait()
                else:
                    self.engine.step()
                    await asyncio.sleep(0)
        finally:
            with self._changed:
                self._wakers.discard(wake)
        self._answer()

    def _is_read(self, position: int) -> bool:
        """Whether nothing follows the first `position` events."""
        return self.done and position == len(self._emitted)

    def _await(self, count: int | None, timeout: float | None = None) -> None:
        """Wait for more than `count` events, or for the end; raises TimeoutError."""
        until = inf if timeout is None else monotonic() + timeout

        def ready() -> bool:
            return self.done or (count is not None and len(self._emitted) > count)

        if self.engine.threaded:
            with self._changed:
                self._changed.wait_for(ready, timeout)
        else:
            while not ready() and monotonic() < until:
                self.engine.step()
        if not ready():
            raise TimeoutError(f"request {self.prompt.key}: no answer yet")

    def _answer(self) -> Answer:
        if self._last is None:
            raise EngineError(f"request {self.prompt.key}: {self._error}") from self._error
        usage = {f"{name}_tokens": count for name, count in asdict(self._last.usage).items()}
        return replace(self._last.answer, metrics=usage)


class Engine:
    """Models, pools, prefix cache and one machine, as long as it lives; ended requests leave it. A
    failing request ends alone: after an error, the started requests are computed again one by one,
    with the same tokens, and the request that raises alone ends as failed.

    graph, options: as for `open_session`, or an open session. threaded: steps run on a thread of
    the engine; else in `step`, or in a waiting caller. sink: is called with every event of the
    machine. rounds: with the summary of every forward."""

    def __init__(
        self,
        graph: str | Session | None = None,
        *,
        threaded: bool = True,
        sink: Sink | None = None,
        rounds: Callable[[RoundSummary], None] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(graph, Session):
            if options:
                raise TypeError(f"a session has its options already: {', '.join(options)}")
            self.session = graph
        else:
            self.session = open_session(**{"graph": graph, **options})
        self.threaded = threaded
        self.decode = self.session.prompts.decode
        self._inbox = Inbox(stays=True, serves=True, sleeps=threaded)
        board = self.session.board(self._inbox)
        self.core = EngineCore(self.session.program, board, self._on_event)
        self.manager = self.core.manager
        self._sink = sink
        self._rounds = rounds
        self._handles: dict[Request, Handle] = {}
        self._lock = Lock()
        self._keys = count(1)
        self._stats = EngineStats()
        self._start_time = monotonic()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = Thread(target=self._run, name="specsot-engine", daemon=True)
        if threaded:
            self._thread.start()

    def submit(
        self,
        prompt: str | Prompt,
        *,
        key: str | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        documents: Sequence[Document] = (),
        cache_salt: str = "",
        settings: RequestSettings = AS_THE_GRAPH,
    ) -> Handle:
        """Submit a prompt, from any thread; the next step accepts it. Raises PromptError,
        GrammarError if no answer can match its schema, EngineError if the engine is closed.

        prompt: a text, or a `Prompt` with all its settings. key: a stable name, from which the seed
        follows; by default 1, 2, 3 … timeout: seconds after which the request is ended, finished or
        not. settings: replace settings of the graph for this request."""
        if isinstance(prompt, str):
            prompt = Prompt(
                key=key or str(next(self._keys)),
                text=prompt,
                seed=seed,
                max_new_tokens=max_new_tokens,
                documents=tuple(documents),
                cache_salt=cache_salt,
            )
        deadline = None if timeout is None else monotonic() + timeout
        handle = Handle(self, prompt, deadline, settings)
        request = self._request(handle)
        with self._lock:
            self._handles[request] = handle
        if not self._inbox.submit([request]):
            with self._lock:
                self._handles.pop(request, None)
            raise EngineError("the engine takes no more requests") from self._error
        self._stats.submitted += 1
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request at the next step; the tokens written so far stay."""
        with self._lock:
            if handle.request is not None:
                self._inbox.end(handle.request, Finish.CANCELLED)

    def generate(self, prompt: str | Prompt, *, timeout: float | None = None) -> Answer:
        return self.submit(prompt, timeout=timeout).result()

    def stats(self) -> EngineStats:
        """Counters and current figures, in host integers."""
        if self._closed:
            return self._stats
        manager = self.manager
        prefixes = manager.prefixes
        return replace(
            self._stats,
            ended=dict(self._stats.ended),
            waiting=len(manager.table.waiting),
            running=len(manager.table.open),
            branches=len(manager.table.active),
            slots=manager.kv.needed_length,
            peak_slots=manager.kv.peak_length,
            capacity=manager.kv.slots,
            prefix_asked=0 if prefixes is None else prefixes.figures.asked,
            prefix_reused=0 if prefixes is None else prefixes.figures.reused,
            seconds=monotonic() - self._start_time,
            preempted=manager.lifecycle.preemptions,
        )

    def fit(self, prompt: Prompt, settings: RequestSettings = AS_THE_GRAPH) -> Fit:
        """Whether a prompt and its answer can ever fit; raises what `submit` raises."""
        request = self.session.request(prompt, settings)
        max_positions = self.session.models.target.max_positions
        capacity = self.manager.admission.capacity
        size = request.prompt_size
        answer = request.remaining_tokens
        why = self.manager.admission.why_never(request)
        if size + answer > max_positions:
            why = f"{size + answer} tokens with the answer, the model takes {max_positions}"
        longest = min(max_positions, capacity.capacity - capacity.tree_slots(1))
        left = max(longest - size, 0)
        return Fit(prompt=size, remaining=left, why=why, answer=answer, longest=longest)

    def _request(self, handle: Handle) -> Request:
        request = self.session.request(handle.prompt, handle.settings)
        request.deadline = handle.deadline
        handle.request = request
        return request

    def step(self) -> bool:
        """One step, from `schedule` to `schedule`; True while requests are open. Raises EngineError
        if the engine is threaded, or has stopped."""
        if self.threaded:
            raise EngineError("this engine drives itself: threaded=False for steps by hand")
        before = self._stats.steps
        while self._stats.steps == before and not self.core.finished:
            if self._error is not None:
                raise EngineError(f"the engine died: {reason_of(self._error)}") from self._error
            self._step()
        return bool(self._handles)

    def close(self, *, cancel: bool = False) -> None:
        """Accept no more requests and end: after all answers, or at once (`cancel`)."""
        self._inbox.close()
        if cancel:
            with self._lock:
                for request in self._handles:
                    self._inbox.end(request, Finish.CANCELLED)
        if not self.threaded:
            self._run()
        elif self._thread is not current_thread():
            self._thread.join()
        if not self._closed:
            self._stats = self.stats()
            self._closed = True
            del self.manager  # so that a handle does not keep the pools alive
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(cancel=kind is not None)

    def _run(self) -> None:
        while not self.core.finished and self._error is None:
            self._step()

    def _step(self) -> None:
        """One step of the machine; an error in it ends one request, or the engine."""
        try:
            self.core.step()
        except Exception as error:
            try:
                self._recover(error)
            except Exception as fatal:
                fatal.__context__ = error
                self._stop(fatal)

    def _on_event(self, event: Event) -> None:
        """Count steps and forwards, emit what open requests have committed since the last step, and
        deliver the answers of finished requests."""
        results = event.results if isinstance(event, OpRan) else ()
        stats = self._stats
        if "step" in results:
            stats.steps += 1
            for request in self.manager.table.open.values():
                if handle := self._handles.get(request):
                    handle.update(request, self.manager, stats.steps)
        if "committed" in results:
            summary: RoundSummary = self.core.board["committed"]
            if summary.rows:
                stats.forwards += 1
                stats.tokens += sum(summary.committed)
                stats.drafted += summary.drafted
                stats.accepted += sum(max(count, 0) for count in summary.accepted)
            if self._rounds is not None:
                self._rounds(summary)
        if "answers" in results:
            finished = self.manager.table.forget_finished()
            for request, answer in zip(finished, self.core.board["answers"], strict=True):
                with self._lock:
                    done = self._handles.pop(request, None)
                ready = answer_ready(answer, request)
                stats.ended[ready.finish] = stats.ended.get(ready.finish, 0) + 1
                if done is not None:
                    done.update(request, self.manager, stats.steps)
                    done.request = None
                    done.emit([ready])
        if self._sink is not None:
            self._sink(event)

    def _recover(self, error: Exception) -> None:
        """After an error of an op: compute the started requests again, each alone; a request that
        was alone ends as failed. Raises the error itself if no request can be its cause."""
        table = self.manager.table
        lifecycle = self.manager.lifecycle
        started = [*table.open.values()]
        if not started or isinstance(error, PolicyError | RankLost):
            raise error
        self.core.restart()
        if len(started) == 1:
            table.end(started[0], Finish.FAILED, reason_of(error))
            lifecycle.abandon_()
            return
        for request in started:
            lifecycle.forget_(request)
        lifecycle.abandon_()
        for request in started:
            with self._lock:
                handle = self._handles.pop(request)
                again = self._request(handle)
                again.exclusive = True
                again.arrival = request.arrival
                self._handles[again] = handle
            lifecycle.submit(again)
            if request.cancelled:
                table.end(again, request.finish, request.why)
        self._stats.recovered += 1

    def _stop(self, error: BaseException) -> None:
        """Stop after an error that no request has caused; every waiting handle fails with it."""
        self._error = error
        self._inbox.close()
        with self._lock:
            handles = self._handles
            self._handles = {}
        for handle in handles.values():
            handle.emit((), error)
