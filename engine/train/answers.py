"""Answers that the target writes itself, through any graph: what a drafter has to foresee.

A line of the file is one conversation: its number among those that were asked, the question, and
its samples (see `Written`) as exact ids. Graphs with an outline give the outline and the parts in
the very form that they have in a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ...states.request import Branch, Finish, Request
from ...states.text.tokens import PromptTokens
from ..errors import UsageError
from ..prepare.inputs import Prompt
from ..prepare.job import prepare
from ..prepare.options import RunOptions
from ..run.session import Session, load
from ..terminal import working
from .chats import ChatCoder, Conversation, Turn, read_conversations
from .data import GOLD, Tokens

Piece = tuple[Sequence[int], bool]
"""Ids, and whether the target wrote them."""


@dataclass(frozen=True, slots=True)
class Written:
    """kind: answer, outline or parts. trunk: what all branches go on from. branches: of each its
    pieces, one after another."""

    kind: str
    trunk: Sequence[int]
    branches: Sequence[Sequence[Piece]]

    def tokens(self) -> Tokens:
        """As a sample to be trained on; the trunk is read only."""
        ids = list(self.trunk)
        size = len(self.trunk)
        weights = [0.0] * size
        segments = [0] * size
        positions = list(range(size))
        for number, pieces in enumerate(self.branches, 1):
            own = [(token, GOLD * written) for part, written in pieces for token in part]
            ids += [token for token, _ in own]
            weights += [weight for _, weight in own]
            segments += [number] * len(own)
            positions += range(size, size + len(own))
        return Tokens(ids, weights, segments, positions)


def answer_file(options: RunOptions, prompts: Path, out: Path, at_once: int, length: int) -> int:
    """Answer a file's conversations through a graph; returns how many lines `out` has.

    Raises:
        GraphError, ModelError, UsageError: what cannot be used, and where.
    """
    conversations = read_conversations(prompts, questions=True)
    options = replace(options, graph=options.graph or "autoregressive")
    kind = prepare(options).program.graph.layout.kind
    rows = 1 if kind == "batching" else at_once
    room = [f"layout.max_num_branches={at_once}", f"layout.kv_slots={rows * length}"]
    job = prepare(replace(options, sets=(*room, *(options.sets or ()))))
    session = load(job)
    target = session.models.target
    coder = ChatCoder(target.config.path.parent, session.models.tokenizer, session.models.stop_ids)
    return Answering(session, coder, out, length).write(conversations)


class Answering:
    """Conversations that a session answers, many at once; every one that ended is a line of `out`.

    What the file holds already is not asked again, so a killed run goes on where it was.
    """

    def __init__(self, session: Session, coder: ChatCoder, out: Path, length: int) -> None:
        self.session = session
        self.coder = coder
        self.out = out
        self.length = length
        self.outlines = session.program.graph.skeleton is not None
        stops = session.models.stop_ids
        usual = session.models.tokenizer.eos_token_id
        self.end = usual if usual in stops else stops[0]  # which one it was, nobody kept
        self._open: dict[str, tuple[Conversation, int, list[Written]]] = {}

    def write(self, conversations: Sequence[Conversation]) -> int:
        """Answer them all; returns how many lines the file has.

        Raises:
            UsageError: the file holds other questions.
        """
        done = self._already(conversations)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text("".join(done.values()), encoding="utf-8")
        waiting = iter([n for n in range(len(conversations)) if n not in done])
        count = len(done)
        total = len(conversations)
        run = self.session.start([], lambda event: None)
        manager = run.manager
        most = 2 * self.session.program.graph.layout.max_num_branches
        title = f"{self.out.name}: {{}} of {total} answers"
        with self.out.open("a", encoding="utf-8") as file, working(title.format(count)) as tell:
            while True:
                for number in islice(waiting, most - len(manager.unfinished)):
                    self._ask(manager, number, conversations[number].asked, 0, [])
                if not manager.unfinished:
                    break
                run.step()
                for request in manager.table.forget_finished():
                    if line := self._take(manager, request):
                        file.write(line)
                        file.flush()
                        count += 1
                        tell(title.format(count))
        run.close()
        return len(read_lines(self.out))

    def _already(self, conversations: Sequence[Conversation]) -> dict[int, str]:
        """Whole lines of an earlier run, by the numbers of their conversations."""
        done: dict[int, str] = {}
        text = self.out.read_text(encoding="utf-8") if self.out.exists() else ""
        for line in text.split("\n")[:-1]:  # what stands behind the last end of a line was cut off
            value = json.loads(line)
            number = value["number"]
            if number >= len(conversations) or value["question"] != conversations[number].text:
                raise UsageError(f"{self.out}: holds answers to other prompts; another --out")
            done[number] = line + "\n"
        return done

    def _ask(
        self, manager: Any, number: int, talk: Conversation, turn: int, done: list[Written]
    ) -> None:
        """The next turn of a conversation; with an outline its first one, as a run asks it."""
        question = talk.turns[talk.user_turns[turn]].text
        request = self.session.request(Prompt(str(number), question))
        if not self.outlines:
            ids = self.coder.prompt(talk.head(talk.user_turns[turn] + 1))
            request = replace(request, prefix=PromptTokens(), tail=PromptTokens(tuple(ids)))
            request.budget = min(request.budget, max(self.length - len(ids), 1))
        self._open[request.key] = talk, turn, done
        manager.submit(request)

    def _take(self, manager: Any, request: Request) -> str | None:
        """A request that ended: the next turn is asked, or the conversation's line is made."""
        talk, turn, done = self._open.pop(request.key)
        samples = [*done, *self._samples(request)]
        if not self.outlines:
            talk, samples = self._answered(talk, turn, done, request.branches[0])
            if turn + 1 < len(talk.user_turns) and samples is not done:
                self._ask(manager, int(request.key), talk, turn + 1, samples)
                return None
        own = [asdict(sample) for sample in samples]
        line = {"number": int(request.key), "question": talk.text, "samples": own}
        return json.dumps(line, ensure_ascii=False) + "\n"

    def _samples(self, request: Request) -> Iterator[Written]:
        if request.root is not None:
            pieces = self._pieces(request.root)
            yield Written("outline", request.prefix.ids, [pieces])
        parts = [self._pieces(branch) for branch in request.branches if branch.tokens]
        if parts:
            yield Written("parts", request.context, parts)

    def _pieces(self, branch: Branch) -> list[Piece]:
        """A branch's own prompt, and what it wrote; its end too, unless its budget was the end."""
        end = (self.end,) if branch.finish is Finish.STOP else ()
        return [(branch.prompt.ids, False), ([*branch.tokens, *end], True)]

    def _answered(
        self, talk: Conversation, turn: int, done: list[Written], branch: Branch
    ) -> tuple[Conversation, list[Written]]:
        """The conversation with this turn's answer, and its samples; `done` itself where the prompt
        alone was too long. One sample holds all turns while each prompt goes on from the last."""
        if branch.finish is Finish.REFUSED or len(branch.prompt) >= self.length:
            return talk, done
        (prompt, _), answer = self._pieces(branch)
        text = self.session.prompts.decode(branch.tokens)
        said = Turn("assistant", text, tuple(branch.tokens), branch.finish is Finish.STOP)
        place = talk.user_turns[turn]
        talk = replace(talk, turns=(*talk.turns[: place + 1], said, *talk.turns[place + 2 :]))
        before = [i for part, _ in done[-1].branches[0] for i in part] if done else []
        if done and list(prompt[: len(before)]) == before:
            pieces = [*done[-1].branches[0], (prompt[len(before) :], False), answer]
            return talk, [*done[:-1], Written("answer", (), [pieces])]
        return talk, [*done, Written("answer", (), [[(prompt, False), answer]])]


def read_lines(file: Path) -> list[list[Written]]:
    """The samples of every conversation in a file of answers, in the order of their numbers.

    Raises:
        UsageError: a line is none that `Answering` wrote.
    """
    found: dict[int, list[Written]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            value = json.loads(line)
            found[value["number"]] = [Written(**sample) for sample in value["samples"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}:{number}: not a line of answers ({error})") from None
    return [found[number] for number in sorted(found)]


def is_answers(file: Path) -> bool:
    """Whether a file's first line is one of answers."""
    with file.open("rb") as stream:
        return stream.readline(1 << 16).startswith(b'{"number": ')
