"""The phase `merge`: combine finished parts where the graph asks for it, and build the answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ...ops.registry import op
from ...ops.types import Rows
from ..manager import BranchStateManager
from ..request import COMPLETE, Branch, Finish, Request, reason_of
from ..round import Batch
from ..scheduler import StepPlan
from ..text.outline import Outline
from ..text.prompts import PastTurn, PromptBook


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One branch of an answer. tokens: the ids that it decoded, without the stop token. The aliases
    are the names in outputs.jsonl."""

    index: int
    title: str
    text: str
    tokens: Annotated[tuple[int, ...], Field(alias="token_ids")]
    finish: Annotated[str, Field(alias="finish_reason")]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request's answer in reading order; `outline_tokens` is empty for a given outline.

    combined: the text that combines the sections, if the graph combines them. text: the combined
        text if it is complete, the sections otherwise. metrics: figures of the run, or token counts
        of an engine's request; empty where several answers share a run."""

    key: Annotated[str, Field(alias="id")]
    question: str
    outline: Outline | None = None
    outline_tokens: Annotated[tuple[int, ...], Field(alias="outline_token_ids")]
    outline_finish: Annotated[str, Field(alias="outline_finish_reason")] = ""
    sections: Annotated[tuple[Section, ...], Field(alias="parts")]
    text: str
    combined: Section | None = None
    metrics: Annotated[Mapping[str, Any], Field(exclude=True)] = field(
        default_factory=dict, compare=False
    )

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Its values for JSON, under the names in outputs.jsonl."""
        document: dict[str, Any] = ANSWER.dump_python(self, mode="json", by_alias=True)
        return document

    @property
    def samples(self) -> tuple[str, ...]:
        """The texts of all answers that were drawn to this prompt (`limits.n`)."""
        is_single = self.outline is not None or len(self.sections) < 2
        return (self.text,) if is_single else tuple(section.text for section in self.sections)

    @property
    def turn(self) -> PastTurn:
        """The turn that the next one of a conversation follows; parts are encoded again, in reading
        order."""
        outlined = self.outline is not None and bool(self.outline.points)
        return PastTurn(self.question, self.text, () if outlined else self.sections[0].tokens)


ANSWER = TypeAdapter(Answer)


@op("branch.fold_", writes="batch rows", needs="skeleton")
def fold_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the branches that combine finished parts: the parts one after another, or with
    `merge: attend` the request for one answer alone. There are no rows if this step combines none.
    """
    batch = branches.batch_builder.build_(step)
    if branches.admission.optimistic:  # a preempted branch prefills the parts again
        return batch, batch.rows
    for branch in batch.newcomers:  # the rows of the parts are in the batch or in the pool
        if branches.fold is not None:
            branches.fold.forget_(branch.request)
        branch.prompt = replace(branch.prompt, chunks=())
    return batch, batch.rows


@op("answer.merge", writes="answers", commits=True)
def merge(branches: BranchStateManager, prompts: PromptBook) -> tuple[Answer, ...]:
    """The answers of all requests that ended and are still in the table, in reading order."""
    return tuple(delivered(request, prompts) for request in branches.table.finished)


def delivered(request: Request, prompts: PromptBook) -> Answer:
    try:
        return answer(request, prompts)
    except Exception as error:
        section = Section(
            index=0, title="", text="", tokens=(), finish=str(Finish.FAILED), note=reason_of(error)
        )
        return Answer(
            key=request.key,
            question=request.question,
            outline_tokens=(),
            sections=(section,),
            text="",
        )


def answer(request: Request, prompts: PromptBook) -> Answer:
    sections = tuple(_section(b, prompts) for b in request.branches if not b.combines)
    combined = next((_section(b, prompts) for b in request.branches if b.combines), None)
    text = "\n\n".join(
        f"{part.index + 1}. {part.title}\n\n{part.text}" if part.title else part.text
        for part in sections
    )
    if combined is not None and combined.text and combined.finish in COMPLETE:
        text = combined.text
    root = request.root
    return Answer(
        key=request.key,
        question=request.question,
        outline=request.outline,
        outline_tokens=tuple(root.tokens) if root is not None else (),
        outline_finish=str(root.finish or "") if root is not None else "",
        sections=sections,
        text=text,
        combined=combined,
    )


def _section(branch: Branch, prompts: PromptBook) -> Section:
    return Section(
        index=branch.index,
        title=branch.title if branch.point or branch.combines or branch.request.samples > 1 else "",
        text=prompts.decode(branch.tokens).strip(),
        tokens=tuple(branch.tokens),
        finish=str(branch.finish or Finish.CANCELLED),
        note=branch.note,
    )
