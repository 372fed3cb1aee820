"""From questions, outlines and results to token ids, and back to text.

A template is rendered once, with marks where its slots are, through the model's own chat format.
What stands between the marks is encoded with special tokens, what is filled in is encoded as plain
text, results of other branches are quoted by their ids, and the ids are joined. So no text that a
user or a model wrote can become a special token or part of the template: it never meets either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from .chat_format import RULES, ChatWriter, Ids, Message, PastTurn, past_slots
from .encoder import Encoder, check_question
from .outline import Outline, OutlineFormat, Point, parse_outline, render_outline
from .outline_list import USUAL_LENGTH, parse_list, render_list
from .prompt_tokens import PromptTokens
from .template import OF_A_BRANCH, Piece, Template, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Share = Literal["outline", "prompt"]

NOTHING = PromptTokens()


class PromptBook:
    """The prompts of a run: one template, one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        template: the texts.
        share: what the branches of a request share, the outline or the prompt.
        stop_ids: tokens that end a turn, beside those that tokenizer and template name.
        max_branches, tools: told to the model where the template has slots for them.
        past: turns that stand before every question. rules: what the conversation is told before
            the first of them; nothing if empty.

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
        past: Sequence[PastTurn] = (),
        rules: str = "",
    ) -> None:
        self.share: Share = share
        self._more_stops = tuple(stop_ids)
        self._limits = (max_branches, tuple(tools))
        self._template = template
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._facts = {"max_branches": str(max_branches), "tools": ", ".join(tools) or "none"}
        said = [ids for turn in past for ids in self._said(turn)]
        self._past = dict(zip(past_slots(len(past)), said, strict=True))
        if rules:
            self._past[RULES] = self._question(rules)
        more = {"rules": bool(rules)}
        writer = ChatWriter(tokenizer, template, self._examples(), len(past), **more)
        texts: dict[str, list[Piece]] = {
            "plain": writer.opening(template.plain, system=False),
            "skeleton": writer.opening(template.skeleton, examples=True),
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

    def behind(self, past: Sequence[PastTurn], rules: str = "") -> PromptBook:
        """The same for a question that follows these turns, under these rules."""
        most, tools = self._limits
        return PromptBook(
            self._tokenizer,
            self._template,
            self.share,
            self._more_stops,
            max_branches=most,
            tools=tools,
            past=past,
            rules=rules,
        )

    def plain(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        """The whole prompt of a plain answer; documents stand right before the question."""
        return self._fill(self._turns["plain"], question=documents + self._question(question))

    def skeleton(
        self, question: str, documents: PromptTokens = NOTHING
    ) -> tuple[PromptTokens, PromptTokens]:
        """The prompt that asks for an outline: what parts' prompts share with it, and the rest.

        They share all up to and including the question; under a template with examples, which stand
        before the outline's question only, what the chat format begins with. Documents stand right
        before the question.
        """
        before, after = self._split("skeleton")
        if self._apart:
            first, *rest = before
            before = [first[: self._common]]
            after = [first[self._common :], *rest, *after]
        asked = documents + self._question(question)
        return self._fill(before, question=asked), self._fill(after, question=asked)

    def opening(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        """What stands between the first half of `skeleton` and the prompts of the parts."""
        if not self._apart:
            return NOTHING
        first, *rest = self._split("prompt.branch")[0]
        turn = [first[self._common :], *rest]
        return self._fill(turn, question=documents + self._question(question))

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
        it begins with the end of that turn) or after the first half of `skeleton` and the `opening`
        (share: prompt).

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

    @property
    def form(self) -> OutlineFormat:
        """How outlines look."""
        return self._template.format

    def outline_ids(self, points: Sequence[Point]) -> Ids:
        """A given outline as the model would write it, without the end of its turn."""
        lists = self._template.format == "list"
        return self._encoder.text(render_list(points) if lists else render_outline(points))

    def read_outline(
        self, ids: Sequence[int], *, max_branches: int, tools: Sequence[str]
    ) -> Outline:
        """The outline that a model wrote; never raises."""
        if self._template.format == "list":
            return parse_list(self.decode(ids), max_branches=max_branches)
        return parse_outline(self.decode(ids), max_branches=max_branches, tools=tools)

    def _examples(self) -> list[Message]:
        """The template's examples as turns, in the words in which a question is asked."""
        turns = []
        for example in self._template.examples:
            points = [
                Point(i, USUAL_LENGTH, None, (), title) for i, title in enumerate(example.titles, 1)
            ]
            lists = self._template.format == "list"
            part = points[example.part - 1]
            slots = self._facts | {"question": example.question, "deps": "", "plan": ""}
            slots |= {"id": str(part.id), "title": part.title, "length": str(part.length)}
            turns += [
                self._template.skeleton.format_map(slots),
                render_list(points) if lists else render_outline(points),
                self._template.outline.branch.format_map(slots),
                example.text,
            ]
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text.strip()} for i, text in enumerate(turns)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def _said(self, turn: PastTurn) -> tuple[Ids, Ids]:
        """A turn's question and answer; ids that the model wrote itself stay as they are."""
        return self._question(turn.question), list(turn.tokens) or self._encoder.text(turn.answer)

    def _question(self, question: str) -> Ids:
        check_question(question)
        return self._encoder.text(question)

    def _quote(self, dep: int, ids: Sequence[int]) -> Ids:
        text = [i for i in ids if i not in self._encoder.special and i not in self.stop_ids]
        number = self._encoder.text(str(dep))
        return list(self._fill(self._turns["dependency"], id=number, text=text))

    @property
    def _apart(self) -> bool:
        """Whether the question is asked again for the parts: examples stood before it."""
        return self.share == "prompt" and bool(self._template.examples)

    @property
    def _common(self) -> int:
        """How many ids the prompts of outline and parts begin with alike."""
        firsts = (self._turns[name][0] for name in ("skeleton", "prompt.branch"))
        own = len(self._turns["prompt.branch"][0])
        return next((i for i, (a, b) in enumerate(zip_longest(*firsts)) if a != b), own)

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
            elif piece in self._past:
                prompt += self._past[piece]
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
