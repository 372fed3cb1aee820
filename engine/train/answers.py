"""`specsot train answers`: the target's own answers, through any graph, as training data.

A line of the file is one conversation: its number, the question, and its samples (see `Written`) as
exact ids. Graphs with an outline give the outline and the parts as a run writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
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
from .dataset import ChatCoder, Conversation, Piece, Turn, Written, read_conversations, read_lines


def answer_file(options: RunOptions, prompts: Path, out: Path, at_once: int, length: int) -> int:
    """Answer a file's conversations through a graph; returns how many lines `out` has.

    Raises:
        GraphError, ModelError, UsageError: what cannot be used, and where.
    """
    conversations = read_conversations(prompts, questions=True)
    options = replace(options, graph=options.graph or "autoregressive")
    kind = prepare(options).program.graph.layout.kind
    rows = 1 if kind == "batching" else at_once
    sizes = [f"layout.max_num_branches={at_once}", f"layout.kv_slots={rows * length}"]
    job = prepare(replace(options, sets=(*sizes, *(options.sets or ()))))
    session = load(job)
    target = session.models.target
    coder = ChatCoder(target.config.path.parent, session.models.tokenizer, session.models.stop_ids)
    return Answering(session, coder, out, length).write(conversations)


class Answering:
    """Answers conversations, many at once; each finished one is a line of `out`.

    Lines of the file are kept, so an interrupted run continues.
    """

    def __init__(self, session: Session, coder: ChatCoder, out: Path, length: int) -> None:
        self.session = session
        self.coder = coder
        self.out = out
        self.length = length
        self.outlines = session.program.graph.skeleton is not None
        stops = session.models.stop_ids
        usual = session.models.tokenizer.eos_token_id
        self.end = usual if usual in stops else stops[0]  # the sampled one is not recorded
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
                    self._ask(manager, number, conversations[number].without_answers, 0, [])
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
        for line in text.split("\n")[:-1]:  # an incomplete last line is dropped
            value = json.loads(line)
            number = value["number"]
            if number >= len(conversations) or value["question"] != conversations[number].text:
                raise UsageError(f"{self.out}: holds answers to other prompts; another --out")
            done[number] = line + "\n"
        return done

    def _ask(
        self, manager: Any, number: int, talk: Conversation, turn: int, done: list[Written]
    ) -> None:
        """Submit the next turn of a conversation; with an outline the first one, as in a run."""
        question = talk.turns[talk.user_turns[turn]].text
        request = self.session.request(Prompt(str(number), question))
        if not self.outlines:
            ids = self.coder.prompt(talk.head(talk.user_turns[turn] + 1))
            request = replace(request, prefix=PromptTokens(), tail=PromptTokens(tuple(ids)))
            request.budget = min(request.budget, max(self.length - len(ids), 1))
        self._open[request.key] = talk, turn, done
        manager.lifecycle.submit(request)

    def _take(self, manager: Any, request: Request) -> str | None:
        """After a finished request: submit the next turn, or return the conversation's line."""
        talk, turn, done = self._open.pop(request.key)
        samples = [*done, *self._samples(request)]
        if not self.outlines:
            talk, samples = self._answered(talk, turn, done, request.branches[0])
            if turn + 1 < len(talk.user_turns) and samples is not done:
                self._ask(manager, int(request.key), talk, turn + 1, samples)
                return None
        line = {
            "number": int(request.key),
            "question": talk.text,
            "samples": [asdict(sample) for sample in samples],
        }
        return json.dumps(line, ensure_ascii=False) + "\n"

    def _samples(self, request: Request) -> Iterator[Written]:
        if request.root is not None:
            pieces = self._pieces(request.root)
            yield Written("outline", request.prefix.ids, [pieces])
        parts = [self._pieces(branch) for branch in request.branches if branch.tokens]
        if parts:
            yield Written("parts", request.context, parts)

    def _pieces(self, branch: Branch) -> list[Piece]:
        """A branch's own prompt and its tokens, with the stop token if it ended with one."""
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
        answer_turn = Turn("assistant", text, tuple(branch.tokens), branch.finish is Finish.STOP)
        place = talk.user_turns[turn]
        talk = replace(
            talk, turns=(*talk.turns[: place + 1], answer_turn, *talk.turns[place + 2 :])
        )
        before = [i for part, _ in done[-1].branches[0] for i in part] if done else []
        if done and list(prompt[: len(before)]) == before:
            pieces = [*done[-1].branches[0], (prompt[len(before) :], False), answer]
            return talk, [*done[:-1], Written("answer", (), [pieces])]
        return talk, [*done, Written("answer", (), [[(prompt, False), answer]])]
