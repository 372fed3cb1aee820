"""Prompt templates; from questions, outlines and results to token ids, and back to text.

A template is rendered once through the model's chat format, with a mark at each slot. The text
between marks is encoded with special tokens, slot values as plain text, results of other branches
are quoted by their ids, and the ids are joined: text of a user or a model becomes neither a special
token nor a part of the template."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from ...models.load.chat_format import chat_format
from ..yaml.source import GraphError, Problem, ProblemCode, Source, decode, hint
from ..yaml.spec import Bool, Int, Name, Spec, check_mapping, validated
from .outline import (
    USUAL_LENGTH,
    Outline,
    OutlineFormat,
    Point,
    parse_list,
    parse_outline,
    render_list,
    render_outline,
)
from .tokens import Encoder, Ids, Piece, PromptTokens, check_question, leading_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FOLDER = Path(__file__).parent / "templates"
SHIPPED = ("embedded", "instruct", "list")
MAX_BYTES = 100_000

Text = Annotated[str, Field(max_length=20_000)]

# Slots that differ between the branches of a request; the text before them is shared.
OF_A_BRANCH = frozenset({"id", "title", "length", "deps"})
# For each text: the slots it must have, and those it may have. Each at most once.
SLOTS = {
    "plain": ("question", ""),
    "skeleton": ("question", "max_branches tools"),
    "outline.branch": ("", "id deps title length plan size"),
    "prompt.branch": ("question", "id deps title length plan size"),
    "prompt.direct": ("question", ""),
    "dependency": ("text", "id"),
    "plan_line": ("title", "id"),
    "document": ("text", "title"),
    **dict.fromkeys(("sizes.short", "sizes.paragraph", "sizes.free"), ("", "length")),
    **dict.fromkeys(("turns.system", "turns.user", "turns.assistant"), ("text", "")),
    **dict.fromkeys(("outline.direct", "combine", "document_gap", "turns.generation"), ("", "")),
}


class TurnPair(Spec):
    """The turn of one part of an outline, and the turn of an answer without an outline."""

    branch: Text
    direct: Text


class Sizes(Spec):
    """What `{size}` is in the turn of a part, by the size that a graph asks for."""

    short: Text
    paragraph: Text
    free: Text


PartSize = Literal["short", "paragraph", "free"]


class Turns(Spec):
    """The format of conversations for a model without a chat template."""

    system: Text = "{text}\n\n"
    user: Text
    assistant: Text
    generation: Text


class Example(Spec):
    """A conversation before the question that shows an outline and a part. short: its text where
    parts are short."""

    question: Text
    titles: Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)]
    part: Annotated[Int, Field(ge=1, le=64)]
    text: Text
    short: Text | None = None


class Template(Spec):
    """The texts of a run's prompts; slots in braces are filled in, `{{` is a brace.

    `plain`, `skeleton` and `prompt` are user turns that begin a conversation, `outline` those after
    the outline, `combine` the one after the finished parts. `system` comes before all but `plain`,
    the `examples` before `skeleton`, as turns with its wording: a question, its outline, one of its
    parts. `document_gap` separates a document from the text before or after it."""

    version: Literal[1]
    name: Name
    doc: str = ""
    chat: Bool = True
    format: OutlineFormat = "fields"
    system: Text = ""
    examples: Annotated[tuple[Example, ...], Field(max_length=16)] = ()
    plain: Text
    skeleton: Text
    outline: TurnPair
    prompt: TurnPair
    sizes: Sizes | None = None
    dependency: Text
    plan_line: Text
    combine: Text = "Combine the parts."
    document: Text = "Document: {text}"
    document_gap: Text = "\n"
    turns: Turns | None = None

    def sized(self, part: PartSize) -> Self:
        """The template with the words for parts of this size; raises GraphError without them."""
        if self.sizes is None and part == "paragraph":
            return self
        if self.sizes is None:
            message = f"it has no 'sizes', the graph says {part!r}"
            raise GraphError([Problem(self.name, "template.sizes", message, ProblemCode.TEXTS)])
        words = getattr(self.sizes, part)
        changed: dict[str, Any] = {"sizes": None}
        for name in ("outline", "prompt"):
            pair = getattr(self, name)
            branch = pair.branch.replace("{size}", words)
            changed[name] = pair.model_copy(update={"branch": branch})
        if part == "short":
            changed["examples"] = tuple(
                example.model_copy(update={"text": example.short or example.text})
                for example in self.examples
            )
        return self.model_copy(update=changed)


def pieces(text: str) -> list[Piece]:
    """Cut a template's text at its slots; ValueError if its braces do not match."""
    cut: list[Piece] = []
    for literal, slot, spec, conversion in Formatter().parse(text):
        if literal and cut and not cut[-1][1]:  # a brace cuts a literal in two
            cut[-1] = (cut[-1][0] + literal, False)
        elif literal:
            cut.append((literal, False))
        if slot is not None:
            if spec or conversion or not slot.isidentifier():
                raise ValueError(f"{{{slot}...}} is not a slot; a slot is a name in braces")
            cut.append((slot, True))
    return cut


def load_template(name: str | Path) -> Template:
    """A shipped template by its name, or a file by its path; raises GraphError."""
    path = FOLDER / f"{name}.yaml" if str(name) in SHIPPED else Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        known = f"there are {', '.join(SHIPPED)}, or give the path of a file"
        message = f"no template {str(name)!r} ({error.strerror}){hint(str(name), SHIPPED)}; {known}"
        problem = Problem(str(name), "template", message, ProblemCode.TEMPLATE_FILE)
        raise GraphError([problem]) from None
    if len(data) > MAX_BYTES:
        message = f"more than {MAX_BYTES} bytes"
        problem = Problem(str(path), "template", message, ProblemCode.TOO_LARGE, line=1, column=1)
        raise GraphError([problem])
    source = Source(decode(data, str(path)), str(path), "template")
    check_mapping(source, "template")
    template = validated(Template, source)
    for check in (_wrong_slots, _wrong_texts):
        if problems := list(check(template, source)):
            raise GraphError(problems)
    return template


def _slots(text: str) -> list[str]:
    return [piece for piece, is_slot in pieces(text) if is_slot]


def _wrong_slots(template: Template, source: Source) -> Iterator[Problem]:
    for name, (must, may) in SLOTS.items():
        where = tuple(name.split("."))
        needed = must.split()
        known = [*needed, *may.split()]
        if where[0] in ("turns", "sizes") and getattr(template, where[0]) is None:
            continue
        try:
            slots = _slots(attrgetter(name)(template))
        except ValueError as error:
            wrong = [str(error).lower()]
        else:
            used = sorted({*slots})
            wrong = [f"no slot {{{s}}} here{hint(s, known)}" for s in used if s not in known]
            wrong += [f"the slot {{{s}}} is used twice here" for s in used if slots.count(s) > 1]
            wrong += [f"the slot {{{s}}} is missing" for s in sorted({*needed} - {*slots})]
        for message in wrong:
            yield source.problem(where, message, ProblemCode.SLOTS)


def _wrong_texts(template: Template, source: Source) -> Iterator[Problem]:
    """A part shows number or title, and dependencies; prompts begin alike; turns have a format."""
    for name in ("outline", "prompt"):
        slots = _slots(getattr(template, name).branch)
        absent = ["{deps}"] if template.format == "fields" and "deps" not in slots else []
        absent += [] if {"id", "title"} & {*slots} else ["{id} or {title}"]
        for slot in absent:
            message = f"the slot {slot} is missing"
            yield source.problem((name, "branch"), message, ProblemCode.SLOTS)
        if ("size" in slots) != (template.sizes is not None):
            message = "the slot {size} and 'sizes' need each other"
            yield source.problem((name, "branch"), message, ProblemCode.SLOTS)
    for at, example in enumerate(template.examples):
        if example.part > len(example.titles):
            message = f"there are {len(example.titles)} titles, no part {example.part}"
            yield source.problem(("examples", at, "part"), message, ProblemCode.TEXTS)
    if not template.chat and template.turns is None:
        message = "without a chat format, 'turns' must give the format of turns"
        yield source.problem(("chat",), message, ProblemCode.TEXTS)
    opening, *others = (
        cut[: cut.index(("question", True))]
        for cut in map(pieces, (template.skeleton, template.prompt.branch, template.prompt.direct))
    )
    for where, other in zip(("branch", "direct"), others, strict=True):
        if other != opening:
            message = "the text before {question} differs from 'skeleton', so nothing is shared"
            yield source.problem(("prompt", where), message, ProblemCode.TEXTS)


RULES = "said_rules"  # the slot of the rules at the beginning of a conversation
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class PastTurn:
    """An earlier question and its answer; tokens: the answer's ids, if they are known."""

    question: str
    answer: str
    tokens: tuple[int, ...] = ()


def _message(number: int, text: str) -> Message:
    """A turn of a conversation in which questions and answers alternate."""
    return {"role": "assistant" if number % 2 else "user", "content": text}


@dataclass
class ChatWriter:
    """Renders conversations in the model's chat format and cuts them at their slots. examples:
    turns before the question; slots: of every first turn: `RULES`, if any, and earlier turns."""

    tokenizer: PreTrainedTokenizerFast
    template: Template
    examples: Sequence[Message]
    slots: Collection[str]

    def __post_init__(self) -> None:
        chat = self.template.chat and bool(self.tokenizer.chat_template)
        self._turns: Turns | None = None if chat else self.template.turns
        if self._turns is None and not chat:
            raise self._error("the model has no chat format, and the template no 'turns'")
        # Any text that occurs neither in the template nor in the chat format.
        texts = f"{self.template.model_dump()}{self.tokenizer.chat_template}"
        self._mark = next(m for n in range(10**6) if (m := f"Slot{n}Mark") not in texts)

    def opening(self, text: str, *, system: bool = True, examples: bool = False) -> list[Piece]:
        """A conversation with this first user turn, up to the start of the answer."""
        marks = {name: f"{self._mark}{name}Mark" for name in self.slots}
        rules = [self.template.system.strip() if system else "", marks.pop(RULES, "")]
        plain = self.template.plain  # earlier questions use the wording of `plain`
        turns = [
            _message(number, mark if number % 2 else plain.format(question=mark))
            for number, mark in enumerate(marks.values())
        ]
        turns += [*(self.examples if examples else ()), _message(0, self._marked(text))]
        return self._cut(self._under_rules(turns, rules))

    def following(self, text: str) -> list[Piece]:
        """The text from the end of an answer's turn, when this is the next user turn."""
        answer = f"{self._mark}Answer"
        turns = self._under_rules([_message(0, "Question")], [self.template.system.strip()])
        turn = self._cut([*turns, _message(1, answer), _message(0, self._marked(text))], answer)
        if not turn or turn[0][1]:
            raise self._error("the model's chat format has no text after an answer")
        return turn

    def _marked(self, text: str) -> str:
        return "".join(f"{self._mark}{p}Mark" if is_slot else p for p, is_slot in pieces(text))

    def _under_rules(self, turns: list[Message], texts: Iterable[str]) -> list[Message]:
        """The turns after a system turn; if the chat format drops it, in the first turn."""
        rules = "\n\n".join(filter(None, texts))
        if not rules:
            return turns
        with_rules = [{"role": "system", "content": rules}, *turns]
        with suppress(Exception):  # chat formats raise various errors for unknown roles
            if rules in self._render(with_rules):
                return with_rules
        return [turns[0] | {"content": f"{rules}\n\n{turns[0]['content']}"}, *turns[1:]]

    def _cut(self, turns: list[Message], after: str = "") -> list[Piece]:
        """The conversation's text, or the part `after` a text, cut at the marks."""
        rendered = self._render(turns)
        rendered = rendered.partition(after)[2] if after else rendered
        mark = re.compile(f"{self._mark}([a-z_0-9]+)Mark")
        parts = mark.split(rendered)
        if parts[1::2] != mark.findall("\n".join(turn["content"] for turn in turns)):
            raise self._error("the model's chat format drops or moves text of a user's turn")
        return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]

    def _render(self, turns: list[Message]) -> str:
        if self._turns is None:
            return chat_format(self.tokenizer).text(turns)
        formats: Mapping[str, str] = self._turns.model_dump()
        beginning = "" if leading_id(self.tokenizer) is None else str(self.tokenizer.bos_token)
        texts = [formats[turn["role"]].format(text=turn["content"]) for turn in turns]
        return "".join([beginning, *texts, formats["generation"].format()])

    def _error(self, message: str) -> GraphError:
        return GraphError([Problem(self.template.name, "template", message, ProblemCode.TEXTS)])


Share = Literal["outline", "prompt"]
Turn = list[Ids | str]  # ids of literal text, and names of slots

NOTHING = PromptTokens()


class PromptBook:
    """The prompts of a run: one template, one tokenizer.

    share: what the branches of a request share, the outline or the prompt. part: size of a part.
    stop_ids: tokens that end a turn, besides those of tokenizer and template; then all of them.
    past, rules: turns before every question, and text before the first of them.
    Raises GraphError: the model's chat format and the template do not go together."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: Template,
        share: Share = "outline",
        stop_ids: Sequence[int] = (),
        *,
        max_branches: int = 8,
        tools: Sequence[str] = (),
        part: PartSize = "paragraph",
        past: Sequence[PastTurn] = (),
        rules: str = "",
    ) -> None:
        template = template.sized(part)
        self.share: Share = share
        self.form: OutlineFormat = template.format
        settings: Any = {"max_branches": max_branches, "tools": tools}
        self._again = partial(PromptBook, tokenizer, template, share, stop_ids=stop_ids, **settings)
        self._template = template
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._render = render_list if template.format == "list" else render_outline
        fixed = {RULES: self._question(rules)} if rules else {}
        for n, turn in enumerate(past):  # ids that the model generated are not encoded again
            fixed[f"question_{n}"] = self._question(turn.question)
            fixed[f"answer_{n}"] = list(turn.tokens) or self._encoder.text(turn.answer)
        facts = {"max_branches": str(max_branches), "tools": ", ".join(tools) or "none"}
        writer = ChatWriter(tokenizer, template, self._examples(facts), fixed)
        self._fixed = fixed | {name: self._encoder.text(text) for name, text in facts.items()}
        with chat_format(tokenizer).rendering():
            texts = {
                "plain": writer.opening(template.plain, system=False),
                "skeleton": writer.opening(template.skeleton, examples=True),
                "outline.branch": writer.following(template.outline.branch),
                "outline.direct": writer.following(template.outline.direct),
                "outline.combine": writer.following(template.combine),
                "prompt.branch": writer.opening(template.prompt.branch),
                "prompt.direct": writer.opening(template.prompt.direct),
                "outline.shared": writer.following(f"{{documents}}{template.outline.branch}"),
                "outline.documents": writer.following(f"{template.outline.direct}{{documents}}"),
                "prompt.documents": writer.opening(f"{template.prompt.direct}{{documents}}"),
                "dependency": pieces(template.dependency),
                "document": pieces(template.document),
                "document_gap": pieces(template.document_gap),
            }
        self._turns = {name: self._encoder.literals(cut) for name, cut in texts.items()}
        self._skeleton = self._split("skeleton")
        self._opening: Turn = []
        if share == "prompt" and template.examples:  # so that parts repeat the question
            starts = [self._turns[name][0] for name in ("skeleton", "prompt.branch")]
            pairs = enumerate(zip_longest(*starts))
            common = next((i for i, (a, b) in pairs if a != b), len(starts[0]))
            (first, *rest), after = self._skeleton
            self._skeleton = [first[:common]], [first[common:], *rest, *after]
            first, *rest = self._split("prompt.branch")[0]
            self._opening = [first[common:], *rest]
        self.gap = self._fill(self._turns["document_gap"])
        # The end tokens of the tokenizer, the template's turns and the model's files.
        stops = {int(i) for i in (*stop_ids, tokenizer.eos_token_id) if i is not None}
        end = self._turns["outline.direct"][0][:1]
        self.stop_ids = tuple(sorted(stops | self._encoder.special.intersection(end)))

    def behind(self, past: Sequence[PastTurn], rules: str = "") -> PromptBook:
        """The prompts of a question that follows these turns, under these rules."""
        return self._again(past=past, rules=rules)

    def plain(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        """The whole prompt of a plain answer; documents come right before the question."""
        return self._fill(self._turns["plain"], question=documents + self._question(question))

    def skeleton(
        self, question: str, documents: PromptTokens = NOTHING
    ) -> tuple[PromptTokens, PromptTokens]:
        """The prompt for an outline: the half that prompts of parts share, and the rest. The shared
        half ends with the question, with documents right before it. Under a template with examples,
        which only outlines have, it is the beginning of the chat format."""
        value = documents + self._question(question)
        first, rest = self._skeleton
        return self._fill(first, question=value), self._fill(rest, question=value)

    def opening(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        """The ids between the first half of `skeleton` and the prompts of the parts."""
        if not self._opening:
            return NOTHING
        return self._fill(self._opening, question=documents + self._question(question))

    def branch(
        self,
        point: Point,
        outline: Outline,
        dep_ids: Sequence[tuple[int, Sequence[int]]],
        shared: PromptTokens = NOTHING,
        own: PromptTokens = NOTHING,
        *,
        follows_part: bool = False,
    ) -> tuple[PromptTokens, PromptTokens]:
        """The prompt of one part: the ids that all branches of the request share, cut before the
        first slot that differs between parts, and the rest.

        With share `outline` it continues after the outline's ids without their stop token, and
        begins with the end of that turn. With share `prompt` it continues after the first half of
        `skeleton` and the `opening`.

        dep_ids: id and generated ids of each point that this one depends on.
        shared, own: documents of all branches, and of this one before the quoted results.
        follows_part: it continues after another part, with either share."""
        turn = self._turns["outline.shared" if shared.ids else "outline.branch"]
        if self.share == "prompt" and not follows_part:
            turn = [*(["documents"] if shared.ids else []), *self._split("prompt.branch")[1]]
        controls = self._encoder.special.union(self.stop_ids)
        for dep, ids in dep_ids:
            number_ids = self._encoder.text(str(dep))
            text_ids = [i for i in ids if i not in controls]
            own += self._fill(self._turns["dependency"], id=number_ids, text=text_ids)
        first = next(i for i, piece in enumerate(turn) if str(piece) in OF_A_BRANCH)
        line = self._template.plan_line.format
        plan = "\n".join(line(id=p.id, title=p.title) for p in outline.points)
        plan_ids = self._encoder.text(plan)
        values = {"id": str(point.id), "title": point.title, "length": str(point.length)}
        filled = {name: self._encoder.text(value) for name, value in values.items()}
        common = self._fill(turn[:first], plan=plan_ids, documents=shared)
        return common, self._fill(turn[first:], plan=plan_ids, deps=own, **filled)

    def next_part(self, point: Point, outline: Outline) -> tuple[PromptTokens, PromptTokens]:
        """The turn of a part after another part, as by `branch`, without documents and results."""
        return self.branch(point, outline, (), follows_part=True)

    def combine(self) -> PromptTokens:
        """The turn for one combined answer after the finished parts."""
        return self._fill(self._turns["outline.combine"])

    def direct(self, documents: PromptTokens = NOTHING) -> PromptTokens:
        """The turn for an answer without outline, then documents; continues as `branch` does."""
        name = "documents" if documents.ids else "direct"
        whole = self.share == "outline"
        turn = self._turns[f"outline.{name}"] if whole else self._split(f"prompt.{name}")[1]
        return self._fill(turn, documents=documents)

    def document(self, title: str, text: str) -> Ids:
        """A document as in a prompt, without the gap between it and its neighbours."""
        values = {"title": self._encoder.text(title), "text": self._encoder.text(text)}
        return list(self._fill(self._turns["document"], **values))

    def outline_ids(self, points: Sequence[Point]) -> Ids:
        """A given outline as the model would write it, without the end of its turn."""
        return self._encoder.text(self._render(points))

    def read_outline(
        self, ids: Sequence[int], *, max_branches: int, tools: Sequence[str]
    ) -> Outline:
        """The outline that a model wrote; never raises."""
        parse = parse_list if self.form == "list" else partial(parse_outline, tools=tools)
        return parse(self.decode(ids), max_branches=max_branches)

    def _examples(self, facts: Mapping[str, str]) -> list[Message]:
        """The template's examples as turns with the wording of `skeleton` and `outline.branch`."""
        turns = []
        for example in self._template.examples:
            points = [
                Point(i, USUAL_LENGTH, None, (), title=title)
                for i, title in enumerate(example.titles, 1)
            ]
            part = points[example.part - 1]
            slots = {**facts, "question": example.question, "deps": "", "plan": ""}
            slots |= {"id": str(part.id), "title": part.title, "length": str(part.length)}
            turns += [
                self._template.skeleton.format_map(slots),
                self._render(points),
                self._template.outline.branch.format_map(slots),
                example.text,
            ]
        return [_message(number, text.strip()) for number, text in enumerate(turns)]

    def encode(self, text: str) -> Ids:
        """The ids of a text that a user or a model wrote."""
        return self._encoder.text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def _question(self, question: str) -> Ids:
        check_question(question)
        return self._encoder.text(question)

    def _split(self, name: str) -> tuple[Turn, Turn]:
        """A turn cut after its question."""
        turn = self._turns[name]
        cut = turn.index("question") + 1
        return turn[:cut], turn[cut:]

    def _fill(self, turn: Iterable[Ids | str], **values: Ids | PromptTokens) -> PromptTokens:
        prompt = NOTHING
        for piece in turn:
            if not isinstance(piece, str):
                prompt += piece
            else:
                prompt += values[piece] if piece in values else self._fixed[piece]
        return prompt
