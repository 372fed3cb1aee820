"""`specsot chat`: several turns in the terminal. torch is imported when a conversation starts."""

import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...states.text.prompts import PastTurn
from ...states.text.tokens import PromptError
from ..errors import Code
from ..events import text_pieces
from ..prepare.inputs import Prompt
from ..prepare.job import prepare
from ..prepare.options import MODELS, RunOptions
from ..shell import aligned, complain, printable, put, working
from ..signals import handling
from .options import graph_argument, takes

if TYPE_CHECKING:
    from ..run.engine import Engine

GRAPH = "A shipped graph or a graph file [specsot.yaml's]."
COMMANDS = {
    "/help": "this list",
    "/clear": "forget what was said",
    "/graph": "the graph, the drafter and the model",
    "/quit": "end; so does Ctrl-D",
}
FINISH_NOTES = {"stop": "", "length": "cut at the budget", "cancelled": "stopped"}


@takes(*MODELS)
def chat(options: RunOptions, graph: str | None = graph_argument(GRAPH, metavar="GRAPH")) -> int:
    """Talk with the model: answers come as they are written, parts in reading order.

    Ctrl-C stops an answer; Ctrl-D or /quit ends, /clear forgets what was said, /help lists the
    commands. Without a terminal every line of standard input is a turn. Examples: `specsot chat`,
    `specsot chat eagle`, `specsot chat eagle --profile smollm2`."""
    from ..run.engine import Engine
    from ..run.session import load

    job = prepare(replace(options, graph=graph) if graph is not None else options)
    model = job.options.model
    with working(f"loading {model} ...") if sys.stderr.isatty() else nullcontext():
        loaded = load(job)
    with Engine(loaded) as engine:
        session = ChatSession(engine, model=model)
        if sys.stdin.isatty():
            complain(f"{session.facts}; /help lists the commands")
        for line in _lines():
            text = line.strip()
            if text == "/quit":
                break
            if text.startswith("/") and text.isascii() and text[1:].isalpha():
                session.command(text)
            elif text:
                session.turn(text)
    return Code.FAILED if session.failed else Code.OK


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (makes `input` edit lines and remember them)
    while True:
        try:
            with handling(signal.default_int_handler, signal.SIGINT):
                line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)", file=sys.stderr)
        else:
            yield line


@dataclass(slots=True)
class ChatSession:
    """A conversation over an engine. model: its name; past: turns that still fit; dropped: how many
    do not."""

    engine: "Engine"
    model: str = ""
    past: list[PastTurn] = field(default_factory=list)
    dropped: int = 0
    failed: bool = False
    turns: int = 0

    @property
    def facts(self) -> str:
        program = self.engine.session.program
        drafter = program.graph.drafter.kind
        return f"graph {program.graph.name}, drafter {drafter}, model {self.model}"

    def command(self, text: str) -> None:
        """Perform one of COMMANDS but /quit."""
        match text:
            case "/clear":
                self.past.clear()
            case "/graph":
                complain(f"{self.facts}. {self.engine.session.program.graph.doc}")
            case "/help":
                for line in aligned(COMMANDS.items()):
                    print(line, file=sys.stderr)
            case _:
                complain(f"no command {text}; /help lists them")

    def turn(self, text: str) -> None:
        """Submit a question, print the answer while it arrives, remember both; Ctrl-C ends it."""
        self.turns += 1
        try:
            handle = self.engine.submit(self._prompt(text))
        except PromptError as error:
            complain(str(error))
            self.failed = True
            return
        streamed = False
        with handling(lambda *_: handle.cancel(), signal.SIGINT):
            for piece in text_pieces(handle.stream(), self.engine.session.program.graph):
                put(printable(piece))
                streamed = True
        answer = handle.result()
        if answer.text.strip() and not streamed:
            put(printable(answer.text))
        put("\n\n")
        notes = {section.note for section in answer.sections}
        reasons = "; ".join(filter(None, (handle.finish, *notes)))
        if reason := FINISH_NOTES.get(str(handle.finish), reasons):
            complain(reason)
        self.failed |= handle.finish in ("refused", "failed")
        if answer.text.strip():
            self.past.append(answer.turn)

    def _prompt(self, text: str) -> Prompt:
        """The question after as many earlier turns as fit with it."""
        before = len(self.past)
        prompt = Prompt(str(self.turns), text, past=tuple(self.past))
        while self.past and self.engine.fit(prompt).why:
            self.past.pop(0)
            prompt = replace(prompt, past=tuple(self.past))
        if dropped := before - len(self.past):
            self.dropped += dropped
            turns = f"the first {self.dropped} turns" if self.dropped > 1 else "the first turn"
            complain(f"{turns} no longer fit and are left out")
        return prompt
