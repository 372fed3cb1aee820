"""A request from outside: its events, its answer, and how to wait for them in any style."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Condition
from time import monotonic
from typing import Protocol

from ...states.blend import Reused
from ...states.phases.outline_ops import Answer
from ...states.request import Request
from ..prepare.inputs import Prompt
from ..prepare.request_settings import AS_THE_GRAPH, RequestSettings
from ..record.text_stream import Decode
from .events import AnswerReady, Noted, Notes, StreamEvent, StreamReader


class Driver(Protocol):
    """What a handle knows of its engine."""

    threaded: bool

    @property
    def decode(self) -> Decode: ...
    def step(self) -> bool: ...
    def cancel(self, handle: "Handle") -> None: ...


class EngineError(RuntimeError):
    """The engine has closed, or died of an error of its own."""


class Handle:
    """One submitted request.

    Attributes:
        prompt, settings: what was submitted. request: what became of it; another one if it had to
            be run again. deadline: moment of `time.monotonic` at which it is ended.
    """

    def __init__(
        self,
        engine: Driver,
        prompt: Prompt,
        deadline: float | None,
        settings: RequestSettings = AS_THE_GRAPH,
    ) -> None:
        self.engine = engine
        self.prompt = prompt
        self.deadline = deadline
        self.settings = settings
        self.request: Request | None = None
        self._changed = Condition()
        self._noted: list[Noted] = []
        self._notes = Notes(settings.contexts)
        self._error: BaseException | None = None
        self._wakers: set[Callable[[], None]] = set()

    @property
    def key(self) -> str:
        return self.prompt.key

    @property
    def done(self) -> bool:
        """The answer is there, or will never be."""
        return self._error is not None or (
            bool(self._noted) and isinstance(self._noted[-1], AnswerReady)
        )

    @property
    def finish(self) -> str | None:
        """Why the request ended: the worst reason of its branches; None while it goes on."""
        last = self._noted[-1] if self._noted else None
        return last.finish if isinstance(last, AnswerReady) else None

    def cancel(self) -> None:
        """End it at the next step; what it has written until then is kept."""
        self.engine.cancel(self)

    # -- what the engine tells --------------------------------------------------------------------

    def update(self, request: Request, step: int, reused: Mapping[int, Reused]) -> None:
        """Note what is new; called by the engine alone."""
        self._note(list(self._notes.of(request, step, reused)))

    def deliver(self, ready: AnswerReady) -> None:
        self._note([ready])

    def since(self, count: int) -> list[Noted]:
        """What has been noted behind the first so many; never waits."""
        return self._noted[count:]

    def fail(self, error: BaseException) -> None:
        """There will be no answer."""
        self._error = error
        self._note(())

    def _note(self, noted: Iterable[Noted]) -> None:
        with self._changed:
            before = len(self._noted)
            self._noted += noted
            if len(self._noted) == before and self._error is None:
                return
            self._changed.notify_all()
            wakers = [*self._wakers]
        for wake in wakers:
            with suppress(RuntimeError):  # a loop that has been closed
                wake()

    # -- waiting ----------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Answer:
        """The answer, once it is there.

        Raises:
            TimeoutError: it is not there after so many seconds; the request goes on.
            EngineError: the engine died.
        """
        until = None if timeout is None else monotonic() + timeout
        self._await(None, until)
        return self._answer()

    def stream(self) -> Iterator[StreamEvent]:
        """All events from the first on; may be read by many, and also after the end."""
        reader = StreamReader(self.engine.decode)
        taken = 0
        while True:
            self._await(taken, None)
            noted = self._noted[taken:]
            taken += len(noted)
            yield from reader.events(noted)
            if self.done and taken == len(self._noted):
                self._answer()
                return

    async def aresult(self) -> Answer:
        """The same as `result`, awaited."""
        async for _ in self._anotes():
            pass
        return self._answer()

    async def astream(self) -> AsyncIterator[StreamEvent]:
        """The same as `stream`, for `async for`."""
        reader = StreamReader(self.engine.decode)
        async for noted in self._anotes():
            for event in reader.events(noted):
                yield event
        self._answer()

    async def _anotes(self) -> AsyncIterator[list[Noted]]:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        taken = 0

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._woken(wake):
            while True:
                changed.clear()
                noted = self._noted[taken:]
                taken += len(noted)
                if noted:
                    yield noted
                if self.done and taken == len(self._noted):
                    return
                if self.engine.threaded:
                    await changed.wait()
                else:
                    self.engine.step()
                    await asyncio.sleep(0)

    @contextmanager
    def _woken(self, wake: Callable[[], None]) -> Iterator[None]:
        with self._changed:
            self._wakers.add(wake)
        try:
            yield
        finally:
            with self._changed:
                self._wakers.discard(wake)

    def _await(self, known: int | None, until: float | None) -> None:
        """Until more than so many notes are there, or the end."""

        def holds() -> bool:
            return self.done or (known is not None and len(self._noted) > known)

        if not self.engine.threaded:
            while not holds():
                if until is not None and monotonic() >= until:
                    raise TimeoutError(f"request {self.key}: no answer yet")
                self.engine.step()
            return
        with self._changed:
            left = None if until is None else max(until - monotonic(), 0)
            if not self._changed.wait_for(holds, left):
                raise TimeoutError(f"request {self.key}: no answer yet")

    def _answer(self) -> Answer:
        last = self._noted[-1] if self._noted else None
        if isinstance(last, AnswerReady):
            return last.answer
        raise EngineError(f"request {self.key}: {self._error}") from self._error
