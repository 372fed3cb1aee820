"""A model's chat format. Its template is a program of the checkpoint: one expression may take any
time and memory. So a child process renders it, with limits, and the parent keeps the results."""

import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import RLock
from typing import Any

from ..files import ModelError, cause_of

SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_SECONDS = 5.0  # for one conversation
MEMORY = 1 << 29  # bytes that the child may take more than its parent has
MAX_TEXT = 1 << 22  # characters of a rendered conversation
MAX_KEPT = 1024  # conversations
NO_THINKING = {"enable_thinking": False, "thinking": False}  # both names for it

Turns = Sequence[Mapping[str, str]]


class ChatFormat:
    """The chat format of one tokenizer. Each conversation (texts are marks) is rendered once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = RLock()
        self._kept: dict[str, tuple[bool, str]] = {}
        self._child: tuple[int, Connection] | None = None
        self._users = 0

    @property
    def path(self) -> Path:
        folder = Path(str(self._tokenizer.name_or_path))
        return folder / (TEMPLATE if (folder / TEMPLATE).exists() else SETTINGS)

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Conversations that are rendered in this block share one child."""
        with self._lock:
            self._users += 1
            try:
                yield
            finally:
                self._users -= 1
                if not self._users:
                    self._end_child()

    def text(self, turns: Turns, *, generation: bool = True) -> str:
        """A conversation as text, with `generation` up to an answer's start; raises ModelError."""
        request = json.dumps([[dict(turn) for turn in turns], generation])
        key = f"{self._tokenizer.chat_template}{request}"
        with self.rendering():
            if key not in self._kept:
                if len(self._kept) == MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = self._ask(request)
            succeeds, text = self._kept[key]
        if not succeeds:
            raise self._failed(text)
        return text

    def _failed(self, why: str) -> ModelError:
        return ModelError(self.path, f"the chat template fails on a plain conversation: {why}")

    def _ask(self, request: str) -> tuple[bool, str]:
        """Whether the template succeeds, and its text or error."""
        try:
            self._child = self._child or self._fork()
            connection = self._child[1]
            connection.send_bytes(request.encode())
            if connection.poll(TEMPLATE_SECONDS):
                succeeds, text = json.loads(connection.recv_bytes())
                return bool(succeeds), str(text)
            failure = f"TimeoutError: not done after {TEMPLATE_SECONDS:g} s"
        except (EOFError, OSError) as error:
            failure = f"its process has ended: {cause_of(error)}"
        self._end_child()
        raise self._failed(failure)

    def _fork(self) -> tuple[int, Connection]:
        """A child that renders what it is sent: a fork, which needs no time for imports."""
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: the child uses none of their locks
            pid = os.fork()
        if pid == 0:
            try:
                self._serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return pid, ours

    def _serve(self, connection: Connection) -> None:
        gc.freeze()  # what was inherited may belong to threads that a fork does not have
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with suppress(FileNotFoundError):  # without /proc only the time is limited
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        while True:
            turns, generation = json.loads(connection.recv_bytes())
            try:
                options = {"add_generation_prompt": generation, **NO_THINKING}
                text = self._tokenizer.apply_chat_template(turns, tokenize=False, **options)
                if len(text) > MAX_TEXT:
                    raise MemoryError(f"it writes {len(text)} characters, at most {MAX_TEXT}")
                reply = [True, str(text)]
            except BaseException as error:  # chat templates raise any kind
                reply = [False, cause_of(error)]
            connection.send_bytes(json.dumps(reply).encode())

    def _end_child(self) -> None:
        if self._child is None:
            return
        pid, connection = self._child
        self._child = None
        connection.close()
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@lru_cache(8)
def chat_format(tokenizer: Any) -> ChatFormat:
    """The chat format of a tokenizer, the same at each call."""
    return ChatFormat(tokenizer)
