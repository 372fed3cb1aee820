"""A conversation over an engine: turns, what is kept of them, and how an answer is shown."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...states.phases.outline_ops import Answer
from ...states.text.chat_format import PastTurn
from ...states.text.encoder import PromptError
from ..errors import Code
from ..prepare.inputs import Prompt
from ..prepare.job import prepare
from ..prepare.options import RunOptions
from ..record.text_stream import printable
from ..run.answer_text import pieces_of
from ..run.engine import Engine
from ..run.handle import Handle
from ..run.opening import load
from ..shell import complain, exit_code, put

QUIT = ("/quit", "/exit")
NEW = "/new"
TOLD = {"stop": "", "length": "cut at the budget", "cancelled": "stopped"}


@exit_code
def chat_command(options: RunOptions, graph: str | None, lines: Iterator[str]) -> int:
    """Turn after turn, until there are no more; 1 if one of them failed."""
    job = prepare(replace(options, graph=graph) if graph is not None else options)
    with Engine(load(job)) as engine:
        talk = Talk(engine)
        for line in lines:
            text = line.strip()
            if text in QUIT:
                break
            if text == NEW:
                talk.past.clear()
            elif text:
                talk.turn(text)
    return Code.FAILED if talk.failed else Code.OK


@dataclass(slots=True)
class Talk:
    """Turns behind each other. past: those that still fit; left_out: how many no longer do."""

    engine: Engine
    past: list[PastTurn] = field(default_factory=list)
    left_out: int = 0
    failed: bool = False
    asked: int = 0

    def turn(self, text: str) -> None:
        """Ask, show the answer while it comes, remember both."""
        self.asked += 1
        try:
            handle = self.engine.submit(self._prompt(text))
        except PromptError as error:
            complain(str(error))
            self.failed = True
            return
        shown = self._show(handle)
        answer = handle.result()
        self._tell(handle, answer, shown)
        if answer.text.strip():
            alone = answer.sections[0].tokens if not _is_outlined(answer) else ()
            self.past.append(PastTurn(text, answer.text, alone))

    def _prompt(self, text: str) -> Prompt:
        """The question behind as many turns as fit with it."""
        before = len(self.past)
        while True:
            prompt = Prompt(str(self.asked), text, past=tuple(self.past))
            if not self.past or not self.engine.why_not(prompt):
                break
            self.past.pop(0)
        if len(self.past) < before:
            self.left_out += before - len(self.past)
            turns = f"the first {self.left_out} turns" if self.left_out > 1 else "the first turn"
            complain(f"{turns} no longer fit and are left out")
        return prompt

    def _show(self, handle: Handle) -> bool:
        """Text as it comes; whether there was any. Ctrl-C stops the answer."""
        shown = False
        try:
            for piece in pieces_of(handle.stream(), self.engine.session.program.graph):
                put(printable(piece))
                shown = True
        except KeyboardInterrupt:
            handle.cancel()
        return shown

    def _tell(self, handle: Handle, answer: Answer, shown: bool) -> None:
        """The end of an answer, and why it ended if it was not by itself."""
        if answer.text.strip() and not shown:
            put(printable(answer.text))
        put("\n\n")
        notes = {section.note for section in answer.sections if section.note}
        why = TOLD.get(str(handle.finish), "; ".join(filter(None, (handle.finish, *notes))))
        if why:
            complain(why)
        self.failed |= handle.finish in ("refused", "failed")


def _is_outlined(answer: Answer) -> bool:
    return answer.outline is not None and bool(answer.outline.points)
