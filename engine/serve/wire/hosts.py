"""Where an engine's process runs, and how it is reached."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from .protocol import MOST

ENTRY = "from specsot.engine.serve.worker.process import main; main()"
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HostError(RuntimeError):
    """A process that cannot be started; says why."""


class EngineHost(Protocol):
    """Starts an engine's process, one life after another."""

    @property
    def pid(self) -> int | None:
        """Of the process, where it is one of this machine."""

    async def start(self) -> Pipe:
        """Another life, and the way to it; raises HostError."""

    def end(self) -> None:
        """Ask it to end."""

    async def reap(self) -> None:
        """Make sure that nothing of it is left."""


class LocalProcess:
    """A process of its own beside this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[Any] | None = None
        # Whoever starts a process hands on its rank, and other threads give way.
        self._starter = ThreadPoolExecutor(1)
        self._starter.submit(os.getpid).result()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> Pipe:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        start: Callable[[], subprocess.Popen[Any]] = partial(
            subprocess.Popen,
            [sys.executable, "-c", ENTRY, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = await asyncio.get_running_loop().run_in_executor(self._starter, start)
        theirs.close()
        return await asyncio.open_connection(sock=ours, limit=MOST)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def reap(self) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            if process.poll() is None:
                process.kill()
        await asyncio.to_thread(process.wait)
