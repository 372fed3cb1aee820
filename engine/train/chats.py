"""Conversations for a drafter's training: a JSONL file, a chat format, and what of it counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.files import ModelError
from ...states.text.prompts import NO_THINKING
from ...states.text.tokens import PromptError, check_question
from ..errors import UsageError
from ..prepare.inputs import json_object
from .data import GOLD, Tokens

KEYS = ("prompt", "messages", "conversations")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
MARK = re.compile(r"Turn(\d+)Mark")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message.

    ids: an answer as the target wrote it, without the end of its turn; None for a text of a file.
    ended: the end of the turn belongs to the answer.
    """

    role: str
    text: str
    ids: tuple[int, ...] | None = None
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """place: file and line. turns: perhaps a system turn, then user and assistant in turn."""

    place: str
    turns: tuple[Turn, ...]

    @property
    def user_turns(self) -> list[int]:
        return [i for i, turn in enumerate(self.turns) if turn.role == "user"]

    @property
    def question(self) -> Conversation:
        """Everything up to the last user turn."""
        return self.head(self.user_turns[-1] + 1)

    def head(self, count: int) -> Conversation:
        """The first turns."""
        return Conversation(self.place, self.turns[:count])

    @property
    def text(self) -> str:
        """All that the user says."""
        return "\n".join(self.turns[at].text for at in self.user_turns)

    @property
    def asked(self) -> Conversation:
        """Every user turn followed by an empty answer."""
        pairs = [(t, Turn("assistant", "")) if t.role == "user" else (t,) for t in self.turns]
        kept = [pair for pair in pairs if pair[0].role != "assistant"]
        return Conversation(self.place, tuple(turn for pair in kept for turn in pair))


def read_conversations(file: Path, *, questions: bool) -> list[Conversation]:
    """One conversation per line.

    Args:
        questions: only what the user says is wanted; answers may be missing.

    Raises:
        UsageError: with the file and the line.
    """
    try:
        conversations = list(_lines(file, questions))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from None
    if not conversations:
        raise UsageError(f"{file}: no prompts in it")
    return conversations


def _lines(file: Path, questions: bool) -> Iterator[Conversation]:
    with file.open("rb") as stream:
        for number, data in enumerate(stream, 1):
            place = f"{file}:{number}"
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise UsageError(f"{place}: not UTF-8") from None
            if not line.strip():
                continue
            turns = tuple(_turns(json_object(line.rstrip("\r\n"), place, KEYS), place))
            _check_order(turns, place)
            if turns[-1].role == "user" and not questions:
                raise UsageError(
                    f"{place}: the last user turn has no answer; with `specsot train answers` the"
                    " target writes it"
                )
            yield Conversation(place, turns)


def _turns(value: Mapping[str, Any], place: str) -> Iterator[Turn]:
    keys = [key for key in KEYS if value.get(key) is not None]
    if len(keys) != 1:
        which = f"has {' and '.join(keys)}" if keys else "has none"
        raise UsageError(f"{place}: needs one of {', '.join(KEYS)}; it {which}")
    content = value[keys[0]]
    if keys[0] == "prompt":
        yield _turn("user", content, f"{place}: 'prompt'")
        return
    if not isinstance(content, list) or not content:
        raise UsageError(f"{place}: {keys[0]!r} must be a list of messages")
    role, text = ("role", "content") if keys[0] == "messages" else ("from", "value")
    for number, message in enumerate(content, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict) or not {role, text} <= message.keys():
            raise UsageError(f"{where} must be an object with {role!r} and {text!r}")
        yield _turn(message[role], message[text], where)


def _turn(role: Any, text: Any, where: str) -> Turn:
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where} is from {role!r}, which is none of {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise UsageError(f"{where} must be a text")
    try:
        check_question(text)
    except PromptError as error:
        raise UsageError(f"{where}: {str(error).replace('the prompt', 'the text')}") from None
    return Turn(ROLES[role], text)


def _check_order(turns: Sequence[Turn], place: str) -> None:
    first = 1 if turns[0].role == "system" else 0
    if len(turns) == first:
        raise UsageError(f"{place}: no user turn")
    for number, turn in enumerate(turns[first:]):
        wanted = ("user", "assistant")[number % 2]
        if turn.role != wanted:
            where = f"{place}: message {number + first + 1}"
            raise UsageError(f"{where} is from {turn.role!r}; it is the turn of {wanted!r}")


Part = tuple[int, list[int], bool]
"""The turn, or -1 for what the format adds; ids; whether the model has to write them."""


class ChatCoder:
    """Conversations as ids, in the target's own chat format.

    What the format adds and what a turn says are encoded apart, as in a run; so a text never
    becomes a control token.

    Raises:
        ModelError: the tokenizer has no chat format.
    """

    def __init__(self, folder: Path, tokenizer: Any, stops: Sequence[int]) -> None:
        if not tokenizer.chat_template:
            raise ModelError(folder, "the tokenizer has no chat template to write conversations in")
        self._tokenizer = tokenizer
        self._stops = frozenset(stops)

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids up to the start of the answer that comes next."""
        return [i for _, ids in self._cut(conversation, generation=True) for i in ids]

    def samples(self, conversation: Conversation, length: int) -> Iterator[Tokens]:
        """One sample, or one per answer where the format writes earlier turns in another way.

        Those without two tokens to be written within ``length`` are left out.
        """
        answers = [i for i, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        if not answers:
            return
        whole = self._until(conversation, answers[-1])
        prompts = [self.prompt(conversation.head(i)) for i in answers]
        if all(_starts(whole, i, ids) for i, ids in zip(answers, prompts, strict=True)):
            samples = [whole]
        else:
            samples = [
                [(-1, prompt, False), *(p for p in self._until(conversation, i) if p[0] == i)]
                for i, prompt in zip(answers, prompts, strict=True)
            ]
        for parts in samples:
            weights = [GOLD * counts for _, ids, counts in parts for _ in ids]
            if sum(weight >= GOLD for weight in weights[:length]) > 1:
                yield Tokens.linear([i for _, ids, _ in parts for i in ids], weights)

    def _until(self, conversation: Conversation, last: int) -> list[Part]:
        """All up to the end of turn ``last``."""
        turns = conversation.turns[: last + 1]
        parts: list[Part] = []
        for turn, ids in self._cut(conversation.head(last + 1), generation=False):
            before = turns[parts[-1][0]] if turn < 0 and parts else None
            if before is None or before.role != "assistant":
                parts.append((turn, ids, turn >= 0 and turns[turn].role == "assistant"))
            else:
                end = next((i + 1 for i, token in enumerate(ids) if token in self._stops), 0)
                parts += [(parts[-1][0], ids[:end], before.ended), (-1, ids[end:], False)]
        return parts

    def _cut(
        self, conversation: Conversation, *, generation: bool
    ) -> Iterator[tuple[int, list[int]]]:
        """(turn, ids) of what is said, (-1, ids) of what the format adds."""
        pieces = MARK.split(self._render(conversation, generation))
        if [int(number) for number in pieces[1::2]] != list(range(len(conversation.turns))):
            message = "the target's chat format drops or moves a turn"
            raise UsageError(f"{conversation.place}: {message}")
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                yield -1, self._encode(piece, split_special_tokens=False)
                continue
            turn = conversation.turns[int(piece)]
            ids = self._encode(turn.text, split_special_tokens=True)
            yield int(piece), ids if turn.ids is None else list(turn.ids)

    def _render(self, conversation: Conversation, generation: bool) -> str:
        marked = [
            {"role": turn.role, "content": f"Turn{number}Mark"}
            for number, turn in enumerate(conversation.turns)
        ]
        options = {"add_generation_prompt": generation, **NO_THINKING}
        try:
            return str(self._tokenizer.apply_chat_template(marked, tokenize=False, **options))
        except Exception as error:  # chat formats raise what they like
            reason = str(error).strip().split("\n", 1)[0]
            raise UsageError(
                f"{conversation.place}: the target's chat format refuses it: {reason}"
            ) from None

    def _encode(self, text: str, **options: bool) -> list[int]:
        encode = self._tokenizer.encode
        return list(encode(text, add_special_tokens=False, verbose=False, **options))


def _starts(whole: list[Part], turn: int, prompt: list[int]) -> bool:
    """Whether the conversation up to this turn is what the turn's prompt would be."""
    end = next(i for i, (number, _, _) in enumerate(whole) if number == turn)
    return [i for _, ids, _ in whole[:end] for i in ids] == prompt
