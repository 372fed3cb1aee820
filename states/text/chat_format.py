"""Conversations in a model's own chat format, cut into literal text and slots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..yaml.codes import ProblemCode
from ..yaml.source import Problem
from .template import Piece, Template, TemplateError, Turns, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids = list[int]
RULES = "said_rules"  # the slot of what a conversation begins with
Message = dict[str, str]
NO_THINKING: dict[str, Any] = {"enable_thinking": False, "thinking": False}  # both names for it


def leading_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The beginning-of-text token that this tokenizer puts before every text; None if it does not.

    A chunk is prefilled behind it, so that it has the attention sink that the model expects.
    """
    first = tokenizer.encode("a")[:1]
    bos = tokenizer.bos_token
    return first[0] if bos and first == tokenizer.encode(str(bos))[:1] else None


@dataclass(frozen=True, slots=True)
class PastTurn:
    """What was asked and answered before; tokens: the answer's ids, if they are known."""

    question: str
    answer: str
    tokens: tuple[int, ...] = ()


def past_slots(turns: int) -> list[str]:
    """Names of the slots of as many turns, a question's and an answer's in turn; letters only."""
    digits = str.maketrans("0123456789", "abcdefghij")
    return [f"past_{what}_{str(n).translate(digits)}" for n in range(turns) for what in ("q", "a")]


class ChatWriter:
    """Writes conversations in the model's chat format, with marks for slots, and cuts them up.

    examples: turns that stand before the question where they are asked for.
    past: so many turns stand before every first question; each text is a slot (`past_slots`).
    rules: so does what the conversation is told at its beginning (`RULES`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: Template,
        examples: Sequence[Message] = (),
        past: int = 0,
        *,
        rules: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._past = past_slots(past)
        self._rules = [RULES] if rules else []
        self._template = template
        self._examples = [*examples]
        chat = template.chat and bool(tokenizer.chat_template)
        self._turns: Turns | None = None if chat else template.turns
        if self._turns is None and not chat:
            raise self._error("the model has no chat format, and the template no 'turns'")
        # Any text will do that no text of ours and no chat format contains.
        texts = f"{template.model_dump()}{tokenizer.chat_template}"
        self._mark = next(m for n in range(10**6) if (m := f"Slot{n}Mark") not in texts)

    def opening(self, text: str, *, system: bool = True, examples: bool = False) -> list[Piece]:
        """A conversation that begins with this user turn, up to the start of the answer."""
        messages = self._conversation(text, system=system, examples=examples, past=True)
        return self._cut(text, messages, slots=[*self._rules, *self._past])

    def following(self, text: str) -> list[Piece]:
        """What follows an answer when this is the next user turn: from the end of its turn on."""
        answer = f"{self._mark}Answer"
        before = self._conversation("Question")
        turns = [*before, {"role": "assistant", "content": answer}]
        turn = self._cut(text, [*turns, {"role": "user", "content": text}], answer)
        if not turn or turn[0][1]:
            raise self._error("in the model's chat format nothing stands behind an answer")
        return turn

    def _conversation(
        self, text: str, *, system: bool = True, examples: bool = False, past: bool = False
    ) -> list[Message]:
        """Rules, earlier turns and examples, if they are asked for, and a user's turn."""
        messages = [*(self._earlier() if past else ()), *(self._examples if examples else ())]
        messages.append({"role": "user", "content": text})
        own = [self._template.system.strip()] if system and self._template.system else []
        said = [f"{self._mark}{name}Mark" for name in self._rules if past]
        if not (rules := "\n\n".join([*own, *said])):
            return messages
        with_rules = [{"role": "system", "content": rules}, *messages]
        try:
            if rules in self._render(with_rules):
                return with_rules
        except Exception:  # chat formats raise what they like for roles that they do not know
            pass
        first = messages[0] | {"content": f"{rules}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]

    def _earlier(self) -> Iterator[Message]:
        """The turns before, each text a mark; a question stands in the words of a plain one."""
        plain = pieces(self._template.plain)
        for number, name in enumerate(self._past):
            mark = f"{self._mark}{name}Mark"
            asked = "".join(mark if is_slot else piece for piece, is_slot in plain)
            is_question = number % 2 == 0
            role = "user" if is_question else "assistant"
            yield {"role": role, "content": asked if is_question else mark}

    def _cut(
        self, text: str, messages: list[Message], after: str = "", slots: Sequence[str] = ()
    ) -> list[Piece]:
        """Write the conversation with marks in the last turn, and cut it at them."""
        cut = pieces(text)
        marked = "".join(f"{self._mark}{piece}Mark" if is_slot else piece for piece, is_slot in cut)
        last = messages[-1]["content"].removesuffix(text) + marked
        rendered = self._render([*messages[:-1], {"role": "user", "content": last}])
        if after:
            rendered = rendered.partition(after)[2]
        parts = re.split(f"{self._mark}([a-z_]+)Mark", rendered)
        if parts[1::2] != [*slots, *(name for name, is_slot in cut if is_slot)]:
            raise self._error("the model's chat format drops or moves text of a user's turn")
        return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]

    def _render(self, messages: list[Message]) -> str:
        if self._turns is None:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **NO_THINKING
            )
            return str(text)
        turns: Mapping[str, str] = self._turns.model_dump()
        beginning = "" if leading_id(self._tokenizer) is None else str(self._tokenizer.bos_token)
        texts = [self._one(turns[m["role"]], m["content"]) for m in messages]
        return "".join([beginning, *texts, self._one(turns["generation"], "")])

    def _one(self, turn: str, content: str) -> str:
        return "".join(content if is_slot else piece for piece, is_slot in pieces(turn))

    def _error(self, message: str) -> TemplateError:
        return TemplateError(
            [Problem(self._template.name, 0, 0, "template", message, ProblemCode.TEXTS)]
        )
