"""From questions, outlines and results to token ids, and back to text.

A template is rendered once, with marks where its slots are, through the model's own chat format.
What stands between the marks is encoded with special tokens, what is filled in is encoded as plain
text, results of other branches are quoted by their ids, and the ids are joined. So no text that a
user or a model wrote can become a special token or part of the template: it never meets either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from .outline import Outline, Point, render_outline
from .prompt_tokens import PromptTokens
from .template import OF_A_BRANCH, ChatWriter, Ids, Piece, Template, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Share = Literal["outline", "prompt"]

MAX_CHARACTERS = 200_000
NOTHING = PromptTokens()


class PromptError(ValueError):
    """A text that cannot be a prompt, with the reason."""


def check_question(text: str, what: str = "prompt") -> None:
    """Refuse what cannot be a prompt, or ``what`` else it is; needs no tokenizer.

    Raises:
        PromptError: longer than MAX_CHARACTERS, empty, blank, or with a NUL or a lone surrogate.
    """
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"the {what} has {len(text)} characters, at most {MAX_CHARACTERS} fit")
    if not text.strip():
        raise PromptError(f"the {what} is {'blank' if text else 'empty'}")
    if "\x00" in text:
        raise PromptError(f"the {what} has a NUL character at {text.index(chr(0))}")
    if lone := re.search("[\ud800-\udfff]", text):
        raise PromptError(f"the {what} has a lone surrogate at {lone.start()}: not valid Unicode")


class PromptBook:
    """The prompts of a run: one template, one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        template: the texts.
        share: what the branches of a request share, the outline or the prompt.
        stop_ids: tokens that end a turn, beside those that tokenizer and template name.
        max_branches, tools: told to the model where the template has slots for them.

    Raises:
        TemplateError: the model's chat format and the template do not go together.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: Template,
        share: Share = "outline",
        stop_ids: Sequence[int] = (),
        *,
        max_branches: int = 8,
        tools: Sequence[str] = (),
    ) -> None:
        self.share: Share = share
        self._template = template
        self._tokenizer = tokenizer
        self._encoder = _Encoder(tokenizer)
        self._facts = {"max_branches": str(max_branches), "tools": ", ".join(tools) or "none"}
        writer = ChatWriter(tokenizer, template)
        texts: dict[str, list[Piece]] = {
            "plain": writer.opening(template.plain, system=False),
            "skeleton": writer.opening(template.skeleton),
            "outline.branch": writer.following(template.outline.branch),
            "outline.direct": writer.following(template.outline.direct),
            "outline.combine": writer.following(template.combine),
            "prompt.branch": writer.opening(template.prompt.branch),
            "prompt.direct": writer.opening(template.prompt.direct),
            "outline.shared": writer.following(f"{{documents}}{template.outline.branch}"),
            "outline.found": writer.following(f"{template.outline.direct}{{documents}}"),
            "prompt.found": writer.opening(f"{template.prompt.direct}{{documents}}"),
            "dependency": pieces(template.dependency),
            "document": pieces(template.document),
            "document_gap": pieces(template.document_gap),
        }
        self._turns = {name: self._encoder.literals(cut) for name, cut in texts.items()}
        self.gap = self._fill(self._turns["document_gap"])
        self.stop_ids = self._stop_ids(tokenizer, stop_ids)

    def plain(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        """The whole prompt of a plain answer; documents stand right before the question."""
        return self._fill(self._turns["plain"], question=documents + self._question(question))

    def skeleton(
        self, question: str, documents: PromptTokens = NOTHING
    ) -> tuple[PromptTokens, PromptTokens]:
        """The prompt that asks for an outline: up to and including the question, and the rest.

        Documents stand right before the question.
        """
        before, after = self._split("skeleton")
        text = documents + self._question(question)
        return self._fill(before, question=text), self._fill(after)

    def branch(
        self,
        point: Point,
        outline: Outline,
        dep_ids: Sequence[tuple[int, Sequence[int]]],
        shared: PromptTokens = NOTHING,
        own: PromptTokens = NOTHING,
    ) -> tuple[PromptTokens, PromptTokens]:
        """The prompt of one part: what all branches of the request have in common, and the rest.

        It continues after the outline's generated ids without their stop token (share: outline;
        it begins with the end of that turn) or after the first half of `skeleton` (share: prompt).

        Args:
            dep_ids: id and generated ids of each point that this one depends on.
            shared: documents of all branches, before everything that the turn says (share:
                outline) or right behind the question (share: prompt).
            own: those of this branch, right before what it quotes of others.
        """
        turn = self._turns["outline.shared" if shared.ids else "outline.branch"]
        if self.share == "prompt":
            turn = [*(["documents"] if shared.ids else []), *self._split("prompt.branch")[1]]
        deps = own + [i for dep, ids in dep_ids for i in self._quote(dep, ids)]
        return self._part(turn, point, outline, shared, deps)

    def _part(
        self,
        turn: list[Ids | str],
        point: Point,
        outline: Outline,
        shared: PromptTokens,
        deps: PromptTokens,
    ) -> tuple[PromptTokens, PromptTokens]:
        """A turn that asks for a part, cut before the first slot that differs between parts."""
        first = next(i for i, piece in enumerate(turn) if str(piece) in OF_A_BRANCH)
        plan = "\n".join(
            self._template.plan_line.format(id=p.id, title=p.title) for p in outline.points
        )
        plan_ids = self._encoder.text(plan)
        values = {"id": str(point.id), "title": point.title, "length": str(point.length)}
        filled = {name: self._encoder.text(value) for name, value in values.items()}
        hoist = self._fill(turn[:first], plan=plan_ids, documents=shared)
        return hoist, self._fill(turn[first:], plan=plan_ids, deps=deps, **filled)

    def next_part(self, point: Point, outline: Outline) -> tuple[PromptTokens, PromptTokens]:
        """What asks for a part behind another part's answer, cut where `branch` cuts it.

        Neither documents nor other parts' results stand in it.
        """
        return self._part(self._turns["outline.branch"], point, outline, NOTHING, NOTHING)

    def combine(self) -> PromptTokens:
        """What asks for one answer behind the finished parts."""
        return self._fill(self._turns["outline.combine"])

    def direct(self, share: Share | None = None, documents: PromptTokens = NOTHING) -> PromptTokens:
        """What follows when there is no outline to follow; continues where `branch` does.

        Documents stand behind it, each behind its gap.
        """
        name = "found" if documents.ids else "direct"
        whole = (share or self.share) == "outline"
        turn = self._turns[f"outline.{name}"] if whole else self._split(f"prompt.{name}")[1]
        return self._fill(turn, documents=documents)

    def document(self, title: str, text: str) -> Ids:
        """A document as it stands in a prompt, without what separates it from its neighbours."""
        values = {"title": self._encoder.text(title), "text": self._encoder.text(text)}
        return list(self._fill(self._turns["document"], **values))

    def outline_ids(self, points: Sequence[Point]) -> Ids:
        """A given outline as the model would write it, without the end of its turn."""
        return self._encoder.text(render_outline(points))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def _question(self, question: str) -> Ids:
        check_question(question)
        return self._encoder.text(question)

    def _quote(self, dep: int, ids: Sequence[int]) -> Ids:
        text = [i for i in ids if i not in self._encoder.special and i not in self.stop_ids]
        number = self._encoder.text(str(dep))
        return list(self._fill(self._turns["dependency"], id=number, text=text))

    def _split(self, name: str) -> tuple[list[Ids | str], list[Ids | str]]:
        """A turn cut behind its question."""
        turn = self._turns[name]
        cut = turn.index("question") + 1
        return turn[:cut], turn[cut:]

    def _fill(self, turn: Iterable[Ids | str], **values: Ids | PromptTokens) -> PromptTokens:
        prompt = NOTHING
        for piece in turn:
            if not isinstance(piece, str):
                prompt += piece
            elif piece in self._facts:
                prompt += self._encoder.text(self._facts[piece])
            else:
                prompt += values[piece]
        return prompt

    def _stop_ids(self, tokenizer: PreTrainedTokenizerFast, more: Sequence[int]) -> tuple[int, ...]:
        """The tokenizer's end, the template's end of turn, and what the model's files add."""
        stops = {int(i) for i in (*more, tokenizer.eos_token_id) if i is not None}
        end = self._turns["outline.direct"][0][:1]
        return tuple(sorted(stops | self._encoder.special.intersection(end)))


class _Encoder:
    """Text to ids, in two ways that are never mixed up."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(tokenizer.all_special_ids) | {
            i for i, token in added.items() if token.special
        }
        # Some control tokens (`<think>`, `<tool_call>`) are added tokens that are not special.
        self._control = self.special | {i for i, t in added.items() if str(t).strip()}

    def literals(self, cut: Sequence[Piece]) -> list[Ids | str]:
        """A template's pieces: literals as ids, special tokens included; slots by their names."""
        return [
            piece if is_slot else self._encode(piece, split_special_tokens=False)
            for piece, is_slot in cut
        ]

    def text(self, text: str) -> Ids:
        """Text that somebody wrote; no part of it becomes a control token."""
        ids = self._encode(text, split_special_tokens=True)
        if self._control.isdisjoint(ids):
            return ids
        ids = self._without_added_tokens(text)
        if not self.special.isdisjoint(ids):
            raise PromptError("the text holds a control token that this tokenizer cannot write out")
        return ids

    def _encode(self, text: str, **options: bool) -> Ids:
        # Not verbose: whether a prompt is too long is counted elsewhere, in whole prompts.
        more = {"add_special_tokens": False, "verbose": False}
        return list(self._tokenizer.encode(text, **more, **options))

    def _without_added_tokens(self, text: str) -> Ids:
        """The tokenizer's own steps, without the one that looks for added tokens."""
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]
