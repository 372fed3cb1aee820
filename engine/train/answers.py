"""Answers that the target writes itself, greedily: what a drafter has to foresee."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track

from .chats import ChatCoder, Conversation, Turn
from .settings import DrafterTraining
from .teacher import Teacher

TOGETHER = 16  # conversations that are answered in one batch


class Regeneration:
    """Every assistant's turn is written anew, batch by batch; RUN/answers.jsonl keeps them.

    A killed run goes on with the first batch that is not whole: the batches are always the same
    ones, so the answers are too.
    """

    def __init__(self, settings: DrafterTraining, teacher: Teacher, coder: ChatCoder) -> None:
        self.teacher, self.coder, self.length = teacher, coder, settings.length
        self.file = settings.run_folder / "answers.jsonl"

    def answered(self, conversations: list[Conversation]) -> list[Conversation]:
        """The conversations with the target's answers; without those that are too long."""
        questions = [
            question
            for question in map(_unanswered, conversations)
            if len(self.coder.prompt(question.head(question.user_turns[0] + 1))) < self.length
        ]
        done = self._already(questions)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("".join(map(_line, done)), encoding="utf-8")
        starts = range(len(done), len(questions), TOGETHER)
        screen, hidden = Console(stderr=True), not sys.stderr.isatty()
        with self.file.open("a", encoding="utf-8") as file:
            for start in track(starts, "answers", console=screen, disable=hidden):
                batch = self._answer(questions[start : start + TOGETHER])
                file.write("".join(map(_line, batch)))
                file.flush()
                done += batch
        return done

    def _already(self, questions: list[Conversation]) -> list[Conversation]:
        """What an earlier run of the same prompts has answered, in whole batches."""
        if not self.file.exists():
            return []
        lines = self.file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        done: list[Conversation] = []
        for line, conversation in zip(lines, questions, strict=False):
            if (again := _read(line, conversation)) is None:
                break
            done.append(again)
        return done if len(done) == len(questions) else done[: len(done) // TOGETHER * TOGETHER]

    def _answer(self, batch: list[Conversation]) -> list[Conversation]:
        """All turns of a few conversations, one turn of each at a time."""
        done = list(batch)
        for number in range(max(len(c.user_turns) for c in batch)):
            prompts: dict[int, list[int]] = {}
            for index, conversation in enumerate(done):
                if number < len(conversation.user_turns):
                    place = conversation.user_turns[number]
                    ids = self.coder.prompt(conversation.head(place + 1))
                    if len(ids) < self.length:
                        prompts[index] = ids
                    else:
                        done[index] = conversation.head(place)
            if prompts:
                room = self.length - min(map(len, prompts.values()))
                answers = self.teacher.answer([*prompts.values()], room)
                for index, ids in zip(prompts, answers, strict=True):
                    done[index] = self._with(done[index], number, ids)
        return done

    def _with(self, conversation: Conversation, number: int, ids: list[int]) -> Conversation:
        """The conversation with an answer to user turn ``number``."""
        ended = ids[-1] in self.teacher.stops
        ids = ids[:-1] if ended else ids
        text = self.teacher.tokenizer.decode(ids, skip_special_tokens=True)
        answer = Turn("assistant", str(text), tuple(ids), ended)
        place, turns = conversation.user_turns[number], conversation.turns
        return replace(conversation, turns=(*turns[: place + 1], answer, *turns[place + 2 :]))


def _unanswered(conversation: Conversation) -> Conversation:
    """Every user turn followed by an empty answer."""
    turns: list[Turn] = []
    for turn in conversation.turns:
        if turn.role == "user":
            turns += [turn, Turn("assistant", "")]
        elif turn.role == "system":
            turns.append(turn)
    return replace(conversation, turns=tuple(turns))


def _line(conversation: Conversation) -> str:
    """Messages as any trainer reads them, and for ours the exact ids."""
    turns = conversation.turns
    value = {
        "messages": [{"role": turn.role, "content": turn.text} for turn in turns],
        "ids": [list(turn.ids) for turn in turns if turn.ids is not None],
        "ended": [turn.ended for turn in turns if turn.ids is not None],
    }
    return json.dumps(value, ensure_ascii=False) + "\n"


def _read(line: str, question: Conversation) -> Conversation | None:
    """A line of `_line`, if it answers these questions."""
    turns: list[Turn] = []
    try:
        value: dict[str, Any] = json.loads(line)
        answers = iter(zip(value["ids"], value["ended"], strict=True))
        for message in value["messages"]:
            role, text = message["role"], message["content"]
            ids, ended = next(answers) if role == "assistant" else (None, True)
            turns.append(Turn(role, text, None if ids is None else tuple(ids), ended))
    except (ValueError, KeyError, TypeError, StopIteration):
        return None
    own = [(turn.role, turn.text) for turn in turns if turn.role != "assistant"]
    wanted = [(turn.role, turn.text) for turn in question.turns if turn.role != "assistant"]
    return replace(question, turns=tuple(turns)) if own == wanted[: len(own)] else None
