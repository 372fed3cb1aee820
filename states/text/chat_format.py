"""Conversations in a model's own chat format, cut into literal text and slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from ..yaml.source import Problem
from .template import Piece, Template, TemplateError, Turns, pieces

Ids = list[int]
Message = dict[str, str]


class ChatTokenizer(Protocol):
    """What is used of a fast tokenizer of transformers."""

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def bos_token(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def encode(self, text: str, **options: Any) -> Ids: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ChatWriter:
    """Writes conversations in the model's chat format, with marks for slots, and cuts them up."""

    def __init__(self, tokenizer: ChatTokenizer, template: Template) -> None:
        self._tokenizer = tokenizer
        self._template = template
        chat = template.chat and bool(tokenizer.chat_template)
        self._turns: Turns | None = None if chat else template.turns
        if self._turns is None and not chat:
            raise self._error("the model has no chat format, and the template no 'turns'")
        # Any text will do that no text of ours and no chat format contains.
        taken = f"{template.model_dump()}{tokenizer.chat_template}"
        self._mark = next(m for n in range(10**6) if (m := f"Slot{n}Mark") not in taken)

    def opening(self, text: str, *, system: bool = True) -> list[Piece]:
        """A conversation that begins with this user turn, up to the start of the answer."""
        return self._cut(text, self._conversation(text, system=system))

    def following(self, text: str) -> list[Piece]:
        """What follows an answer when this is the next user turn: from the end of its turn on."""
        answer = f"{self._mark}Answer"
        before = self._conversation("Question", system=True)
        turns = [*before, {"role": "assistant", "content": answer}]
        found = self._cut(text, [*turns, {"role": "user", "content": text}], answer)
        if not found or found[0][1]:
            raise self._error("in the model's chat format nothing stands behind an answer")
        return found

    def _conversation(self, text: str, *, system: bool) -> list[Message]:
        user = {"role": "user", "content": text}
        if not (system and self._template.system):
            return [user]
        rules = self._template.system.strip()
        messages = [{"role": "system", "content": rules}, user]
        try:
            if rules in self._render(messages):
                return messages
        except Exception:  # chat formats raise what they like for roles that they do not know
            pass
        return [{"role": "user", "content": f"{rules}\n\n{text}"}]

    def _cut(self, text: str, messages: list[Message], after: str = "") -> list[Piece]:
        """Write the conversation with marks in the last turn, and cut it at them."""
        slots = [name for name, is_slot in pieces(text) if is_slot]
        marked = "".join(self._marked(p) if slot else p for p, slot in pieces(text))
        last = messages[-1]["content"].removesuffix(text) + marked
        written = self._render([*messages[:-1], {"role": "user", "content": last}])
        if after:
            written = written.partition(after)[2]
        parts = re.split(f"({self._mark}[a-z_]+Mark)", written)
        names = [p.removeprefix(self._mark).removesuffix("Mark") for p in parts[1::2]]
        if names != slots:
            raise self._error("the model's chat format drops or moves text of a user's turn")
        return [
            (names[i // 2], True) if i % 2 else (part, False)
            for i, part in enumerate(parts)
            if part
        ]

    def _marked(self, slot: str) -> str:
        return f"{self._mark}{slot}Mark"

    def _render(self, messages: list[Message]) -> str:
        if self._turns is None:
            options = {"add_generation_prompt": True, "enable_thinking": False}
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        turns: Mapping[str, str] = self._turns.model_dump()
        written = [self._one(turns[m["role"]], m["content"]) for m in messages]
        return "".join([self._beginning(), *written, self._one(turns["generation"], "")])

    def _one(self, turn: str, content: str) -> str:
        return "".join(content if is_slot else piece for piece, is_slot in pieces(turn))

    def _beginning(self) -> str:
        """The beginning-of-text token, if this tokenizer puts it before every text."""
        bos = self._tokenizer.bos_token
        first = self._tokenizer.encode("a")[:1]
        return str(bos) if bos and first == self._tokenizer.encode(bos)[:1] else ""

    def _error(self, message: str) -> TemplateError:
        return TemplateError([Problem(self._template.name, 0, 0, "template", message)])
