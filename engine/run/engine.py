"""The engine that stays: one machine of one graph, fed from any thread, for as long as it lives."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import Lock, Thread, current_thread
from time import monotonic
from typing import Self, Unpack

from ...models.sharded import RankLost
from ...states.machine import Run
from ...states.manager import BranchStateManager
from ...states.phases.outline_ops import Answer
from ...states.policies import PolicyError
from ...states.request import Finish, Request, reason_of
from ...states.round import RoundSummary
from ...states.scheduler import Inbox
from ...states.text.documents import Document
from ...states.trace import Event, OpRan, Sink
from ..prepare.inputs import Prompt
from ..prepare.request_settings import AS_THE_GRAPH, Fit, RequestSettings
from ..record.report import finish_of
from ..record.run_view import PoolView, pool_view
from .events import StreamEvent, ready
from .handle import EngineError, Handle
from .opening import EngineOptions, opened
from .session import Session
from .stats import EngineStats, Tally


class Engine:
    """Owns models, pools and one machine; forgets what has ended.

    One request can only fail itself: where an op raises and nobody knows for whom, the requests
    that had begun are run again one by one, which gives the same tokens, and the one that raises
    alone ends with the reason.

    Args:
        graph: as for `open_session`, or a session that is there already.
        threaded: a thread of its own drives it; else whoever waits does, or calls `step`.
        sink: is called with every event of the machine. rounds: with what every forward committed.
        options: as for `open_session`.
    """

    def __init__(
        self,
        graph: str | Session | None = None,
        *,
        threaded: bool = True,
        sink: Sink | None = None,
        rounds: Callable[[RoundSummary], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if isinstance(graph, Session):
            if options:
                raise TypeError(f"a session has its options already: {', '.join(options)}")
            self.session = graph
        else:
            self.session = opened(graph, options)
        self.threaded = threaded
        self.decode = self.session.prompts.decode
        self._inbox = Inbox(stays=True, serves=True, sleeps=threaded)
        self.machine = Run(self.session.program, self.session.board(self._inbox), self._happened)
        self.branches: BranchStateManager = self.machine.board["branches"]
        self._sink = sink
        self._rounds = rounds
        self._last: EngineStats | None = None
        self._handles: dict[Request, Handle] = {}
        self._again: set[Handle] = set()
        self._lock = Lock()
        self._keys = count(1)
        self._tally = Tally()
        self._died: BaseException | None = None
        self._thread: Thread | None = None
        if threaded:
            self._thread = Thread(target=self._serve, name="specsot-engine", daemon=True)
            self._thread.start()

    # -- requests ---------------------------------------------------------------------------------

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
        """Hand a prompt over, from any thread; it is taken in at the next step.

        Args:
            prompt: a text, or a `Prompt` that says everything itself.
            key: a stable name, from which the seed follows; by default 1, 2, 3 …
            timeout: seconds after which the request is ended, finished or not.
            cache_salt: requests of different ones never share what is kept of prompts and answers.
            settings: what it asks for instead of what the graph says.

        Raises:
            PromptError: the text cannot be a prompt.
            GrammarError: no answer can be held to its schema.
            EngineError: the engine takes no more requests.
        """
        if isinstance(prompt, str):
            name = key or str(next(self._keys))
            own = seed, max_new_tokens, tuple(documents), cache_salt
            prompt = Prompt(name, prompt, *own)
        deadline = None if timeout is None else monotonic() + timeout
        handle = Handle(self, prompt, deadline, settings)
        request = self._request(handle)
        with self._lock:
            self._handles[request] = handle
        if not self._inbox.submit([request]):
            with self._lock:
                self._handles.pop(request, None)
            raise EngineError("the engine takes no more requests") from self._died
        self._tally.submitted += 1
        return handle

    def stream(self, handle: Handle) -> Iterator[StreamEvent]:
        """The events of a request, from its first on."""
        return handle.stream()

    def cancel(self, handle: Handle) -> None:
        """End a request at the next step; what it has written until then is kept."""
        with self._lock:
            if handle.request is not None:
                self._inbox.end(handle.request, Finish.CANCELLED)

    def generate(self, prompt: str | Prompt, *, timeout: float | None = None) -> Answer:
        """Submit one prompt and wait for its answer."""
        return self.submit(prompt, timeout=timeout).result()

    def stats(self) -> EngineStats:
        """What the engine has done and holds, in host integers."""
        return self._last or self._tally.stats(self.branches)

    def why_not(self, prompt: Prompt, settings: RequestSettings = AS_THE_GRAPH) -> str:
        """Why a prompt, or its answer behind it, can never fit; nothing if it can."""
        return self.fit(prompt, settings).why

    def fit(self, prompt: Prompt, settings: RequestSettings = AS_THE_GRAPH) -> Fit:
        """Whether a prompt and its answer can ever fit; raises what `submit` raises."""
        request = self.session.request(prompt, settings)
        limit = self.session.models.target.max_positions
        admission = self.branches.admission
        size = request.prompt_size
        needed = request.prompt_size + request.left
        room = min(limit, admission.room.capacity - admission.room.tree_slots(1)) - size
        if needed > limit:
            why = f"{needed} tokens with the answer, the model takes {limit}"
        else:
            why = admission.why_never(request)
        return Fit(size, max(room, 0), why)

    # -- what can be seen -------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state of the graph that the machine is in."""
        return self.machine.state

    def pool(self) -> PoolView:
        """What the target's pool holds; between two steps, on the thread that drives them."""
        return pool_view(self.machine.board)

    def _request(self, handle: Handle) -> Request:
        request = self.session.request(handle.prompt, handle.settings)
        request.deadline = handle.deadline
        handle.request = request
        return request

    # -- the machine ------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step by hand, from `schedule` to `schedule`; whether anybody is still there.

        Raises:
            EngineError: the engine has a thread of its own, or has died.
        """
        if self.threaded:
            raise EngineError("this engine drives itself: threaded=False for steps by hand")
        before = self._tally.steps
        while self._tally.steps == before and not self.machine.finished:
            if self._died is not None:
                raise EngineError(f"the engine died: {reason_of(self._died)}") from self._died
            self._advance()
        return bool(self._handles)

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests and end: when all have their answers, or at once (cancel)."""
        self._inbox.close()
        if cancel:
            with self._lock:
                live = [*self._handles]
            for request in live:
                self._inbox.end(request, Finish.CANCELLED)
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join()
        while not self.threaded and not self.machine.finished and self._died is None:
            self._advance()
        if self._last is None:
            self._last = self.stats()
            del self.branches  # whoever keeps a handle does not keep the pools
        self.machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(cancel=kind is not None)

    def _serve(self) -> None:
        while not self.machine.finished and self._died is None:
            self._advance()

    def _advance(self) -> None:
        """One transition; what goes wrong in it ends one request, or the engine."""
        try:
            self.machine.advance()
        except Exception as error:
            try:
                self._recover(error)
            except Exception as another:
                another.__context__ = error
                self._die(another)

    def _happened(self, event: Event) -> None:
        if isinstance(event, OpRan):
            if "step" in event.results:
                self._tally.steps += 1
                self._publish()
            if "committed" in event.results:
                summary: RoundSummary = self.machine.board["committed"]
                self._tally.count(summary)
                if self._rounds is not None:
                    self._rounds(summary)
            if "answers" in event.results:
                self._deliver()
        if self._sink is not None:
            self._sink(event)

    def _publish(self) -> None:
        """Tell of everything that open requests have written since the last step."""
        for request in self.branches.table.open.values():
            if handle := self._handles.get(request):
                handle.update(request, self._tally.steps, self.branches.reused)

    def _deliver(self) -> None:
        """Hand over what has ended; nothing of it stays here."""
        answers = self.machine.board["answers"]
        ended = self.branches.table.forget_finished()
        for request, answer in zip(ended, answers, strict=True):
            with self._lock:
                handle = self._handles.pop(request, None)
            self._tally.ended[finish_of(answer)] += 1
            if handle is not None:
                self._again.discard(handle)
                handle.update(request, self._tally.steps, self.branches.reused)
                handle.request = None
                handle.deliver(ready(answer, request))

    # -- what goes wrong --------------------------------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """An op raised: everybody who had begun is run again, alone; who raises alone has failed.

        Raises:
            Exception: the error itself, if no request can be to blame.
        """
        table = self.branches.table
        lifecycle = self.branches.lifecycle
        begun = [*table.open.values()]
        if not begun or isinstance(error, PolicyError | RankLost):
            raise error
        self.machine.restart()
        if len(begun) == 1:
            table.end(begun[0], Finish.FAILED, reason_of(error))
            lifecycle.abandon_()
            return
        for request in begun:
            lifecycle.forget_(request)
        lifecycle.abandon_()
        for request in begun:
            with self._lock:
                handle = self._handles.pop(request)
                again = self._request(handle)
                again.alone = True
                again.arrival = request.arrival
                self._handles[again] = handle
            self.branches.submit(again)
            if request.cancelled:
                table.end(again, request.finish, request.why)
        self._tally.recovered += 1

    def _die(self, error: BaseException) -> None:
        """Nothing can be decoded any more: whoever waits is told."""
        self._died = error
        self._inbox.close()
        with self._lock:
            handles = [*self._handles.values()]
            self._handles = {}
        for handle in handles:
            handle.fail(error)
