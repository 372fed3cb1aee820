"""A request's documents on their way into the prompts of its branches."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..text.documents import CHUNK_TOKENS, Document
from ..text.prompt_tokens import PromptTokens
from ..text.prompts import PromptBook
from .branch import Branch, Request
from .passages import behind, in_front, search_all, search_question


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """What stands in prompts beside the texts of the template.

    found: documents that a search gives, at most. most: tokens of a chunk, at most.
    """

    prompts: PromptBook
    found: int = 2
    most: int = CHUNK_TOKENS

    def check(self, documents: Iterable[Document]) -> None:
        """Raise PromptError for a text that this tokenizer cannot write into a prompt."""
        for document in documents:
            self.prompts.document(document.title, document.text)

    def plain(self, question: str, documents: Iterable[Document]) -> PromptTokens:
        """The whole prompt of a plain answer, documents before the question."""
        front = in_front(documents, self.prompts, self.most)
        if not front.ids:
            return PromptTokens(tuple(self.prompts.plain(question)))
        return self.prompts.plain_with(question, front)

    def skeleton(
        self, question: str, documents: Iterable[Document]
    ) -> tuple[PromptTokens, PromptTokens]:
        """The two halves of the prompt that asks for an outline, documents before the question."""
        front = in_front(documents, self.prompts, self.most)
        if front.ids:
            before, after = self.prompts.skeleton_with(question, front)
            return before, PromptTokens(tuple(after))
        prefix, tail = self.prompts.skeleton(question)
        return PromptTokens(tuple(prefix)), PromptTokens(tuple(tail))

    def shared(self, request: Request) -> tuple[PromptTokens, list[tuple[Document, ...]]]:
        """What all branches' prompts begin with, and the documents that each has for itself."""
        assert request.outline is not None
        points = request.outline.points
        if not request.documents:
            hoist, _ = self.prompts.branch(points[0], request.outline, ())
            return PromptTokens(tuple(hoist)), [() for _ in points]
        together, own = search_all(points, request.documents, self.found)
        place = in_front if self.prompts.share == "outline" else behind
        front = place(together, self.prompts, self.most)
        hoisted, _ = self.prompts.branch_with(points[0], request.outline, (), front, PromptTokens())
        return hoisted, own

    def branch(self, branch: Branch) -> PromptTokens:
        """A branch's own prompt; results that it depends on are quoted by their token ids."""
        point, request = branch.point, branch.request
        assert point is not None and request.outline is not None
        done = {b.point.id: b.tokens for b in request.branches if b.point is not None}
        quoted = [(dep, done[dep]) for dep in point.deps]
        if not branch.documents:
            return PromptTokens(tuple(self.prompts.branch(point, request.outline, quoted)[1]))
        own = behind(branch.documents, self.prompts, self.most)
        return self.prompts.branch_with(point, request.outline, quoted, PromptTokens(), own)[1]

    def direct(self, request: Request) -> PromptTokens:
        """What follows where there is no outline to follow."""
        found = search_question(request.question, request.documents, self.found)
        if not found:
            return PromptTokens(tuple(self.prompts.direct()))
        return self.prompts.direct_with(behind(found, self.prompts, self.most))
