"""The engine's process: one thread takes messages in, the other drives all engines in turn."""

import os
import socket
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from ....states.round import RoundSummary
from ....states.text.encoder import PromptError
from ...errors import Code, code_of, message_of
from ...prepare.options import RunOptions
from ...run.engine import Engine
from ...shell import complain
from ..wire.protocol import (
    Admitted,
    Cancel,
    Counts,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failed,
    Look,
    Message,
    ProtocolError,
    Ready,
    Refused,
    Start,
    Submit,
    packed,
    unpacked,
)
from .answering import ServedRequest, Speculation
from .asking import Asking, Refusal
from .open_graphs import GraphFacts, open_graphs
from .pictures import PictureTaker

TOLD = 0.25  # seconds between two `Counts`


class Worker:
    """Engines of several graphs over one target, fed through a socket until it is closed."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._sending = Lock()
        self._lines = pipe.makefile("rb")
        self._asked: SimpleQueue[Submit | Cancel | Look] = SimpleQueue()
        self._something = Event()
        self._engines: dict[str, Engine] = {}
        self._asking: dict[str, Asking] = {}
        self._answering: dict[str, ServedRequest] = {}
        self._speculation: dict[str, Speculation] = {}
        self._positions: dict[str, list[int]] = {}
        self._pictures = PictureTaker()
        self._told = 0.0
        self._gone = False

    # -- the beginning ----------------------------------------------------------------------------

    def run(self) -> int:
        """Load, serve, end; the exit code."""
        start = unpacked(self._lines.readline())
        if not isinstance(start, Start):
            raise ProtocolError(f"the first message is a Start, not a {type(start).__name__}")
        try:
            facts = self._open(start)
        except Exception as error:
            self._send(Failed(int(code_of(error)), message_of(error)))
            return int(code_of(error))
        self._send(Ready({name: asdict(one) for name, one in facts.items()}))
        Thread(target=self._listen, name="specsot-listen", daemon=True).start()
        while not self._gone:
            self._turn()
        return int(Code.OK)

    def _open(self, start: Start) -> dict[str, GraphFacts]:
        options = RunOptions(**{**start.options, "graph": None})
        facts: dict[str, GraphFacts] = {}
        for name, session, fact in open_graphs(start.graphs, options):
            rounds = self._rounds_of(name)
            sink = self._pictures.sink(name)
            engine = Engine(session, threaded=False, rounds=rounds, sink=sink)
            self._engines[name], self._asking[name] = engine, Asking(engine)
            self._positions[name] = []
            facts[name] = fact
        self._pictures.watch(self._engines)
        return facts

    def _rounds_of(self, graph: str) -> Any:
        """What takes in the rounds of a graph's engine."""

        def took(summary: RoundSummary) -> None:
            at = self._positions[graph]
            for tree in summary.trees:
                drafted = sum(token >= 0 for token in tree.tokens[1:])
                accepted = len(tree.path) - 1
                at += [0] * (accepted - len(at))
                for place in range(accepted):
                    at[place] += 1
                one = self._speculation.get(tree.branch.rpartition("/")[0])
                if one is not None:
                    one.accepted.append(accepted)
                    one.drafted.append(drafted)

        return took

    # -- messages ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Tokenising is done here, so that nobody's long prompt makes others wait."""
        while line := self._lines.readline():
            message = unpacked(line)
            if isinstance(message, Encode):
                self._send(self._encoded(message))
            elif isinstance(message, Decode):
                text = next(iter(self._engines.values())).decode(message.token_ids)
                self._send(Decoded(message.id, text))
            elif isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel | Look):
                self._asked.put(message)
            self._something.set()
        self._gone = True
        self._something.set()

    def _submit(self, asked: Submit) -> None:
        try:
            ready = self._asking[asked.graph].ready(asked)
        except Refusal as error:
            self._send(Refused(asked.id, str(error), error.param, error.code))
        except PromptError as error:
            self._send(
                Refused(asked.id, str(error), "messages" if asked.text is None else "prompt")
            )
        except Exception as error:  # somebody's tokenizer
            self._send(Refused(asked.id, message_of(error)))
        else:
            self._send(Admitted(asked.id, ready.prompt_tokens))
            self._speculation[asked.id] = spoken = Speculation()
            engine = self._engines[asked.graph]
            time = asked.timeout
            handle = engine.submit(ready.prompt, timeout=time, settings=ready.settings)
            self._answering[asked.id] = ServedRequest(engine, asked, handle, spoken)

    def _encoded(self, asked: Encode) -> Encoded | Refused:
        try:
            ids = self._asking[asked.graph].encode(asked)
        except PromptError as error:
            return Refused(asked.id, str(error), "prompt")
        decode = self._engines[asked.graph].decode
        return Encoded(asked.id, ids, [decode([one]) for one in ids])

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._pipe.sendall(packed(message))
            except OSError:
                self._gone = True

    # -- the engines' thread ----------------------------------------------------------------------

    def _turn(self) -> None:
        """A step of every engine that has something to do."""
        self._take_in()
        busy = False
        ended = set[str]()
        by_graph: dict[str, list[ServedRequest]] = {}
        for one in [*self._answering.values()]:
            by_graph.setdefault(one.asked.graph, []).append(one)
        for graph, some in by_graph.items():
            busy |= self._engines[graph].step()
            self._tell(some)
            if all(one.done for one in some):
                ended.add(graph)
        self._report(ended)
        if not busy and not self._answering:
            self._something.wait(TOLD)
            self._something.clear()

    def _take_in(self) -> None:
        while True:
            try:
                message = self._asked.get_nowait()
            except Empty:
                return
            if isinstance(message, Look):
                self._pictures.on = message.on
            elif isinstance(message, Cancel) and message.id in self._answering:
                self._answering[message.id].handle.cancel()

    def _tell(self, some: Iterable[ServedRequest]) -> None:
        for one in some:
            for message in one.news():
                self._send(message)
            if one.done:
                self._answering.pop(one.asked.id, None)
                self._speculation.pop(one.asked.id, None)

    def _report(self, ended: Collection[str]) -> None:
        now = monotonic()
        for picture in self._pictures.take(now, ended):
            self._send(picture)
        if now - self._told >= TOLD:
            self._told = now
            self._send(Counts({name: self._counts(name) for name in self._engines}))

    def _counts(self, graph: str) -> dict[str, Any]:
        engine = self._engines[graph]
        return asdict(engine.stats()) | {"positions": list(self._positions[graph])}


def main() -> None:
    """The process's own entry: its only argument is the number of its end of the socket."""
    pipe = socket.socket(fileno=int(sys.argv[1]))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = int(Code.FAILED)
    try:
        code = Worker(pipe).run()
    except Exception as error:
        complain(f"the engine's process ends: {message_of(error)}")
    finally:
        os._exit(code)  # a thread may still be reading
