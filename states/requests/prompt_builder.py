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
        return self.prompts.plain(question, in_front(documents, self.prompts, self.most))

    def skeleton(
        self, question: str, documents: Iterable[Document]
    ) -> tuple[PromptTokens, PromptTokens]:
        """The two halves of the prompt that asks for an outline, documents before the question."""
        return self.prompts.skeleton(question, in_front(documents, self.prompts, self.most))

    def opening(self, question: str, documents: Iterable[Document]) -> PromptTokens:
        """What parts' prompts begin with behind the prefix, if they ask the question again."""
        return self.prompts.opening(question, in_front(documents, self.prompts, self.most))

    def shared(self, request: Request) -> tuple[PromptTokens, list[tuple[Document, ...]]]:
        """What all branches' prompts begin with, and the documents that each has for itself."""
        assert request.outline is not None
        points = request.outline.points
        together, own = search_all(points, request.documents, self.found)
        place = in_front if self.prompts.share == "outline" else behind
        front = place(together, self.prompts, self.most)
        return self.prompts.branch(points[0], request.outline, (), front)[0], own

    def branch(self, branch: Branch) -> PromptTokens:
        """A branch's own prompt; results that it depends on are quoted by their token ids."""
        point, request = branch.point, branch.request
        assert point is not None and request.outline is not None
        done = {b.point.id: b.tokens for b in request.branches if b.point is not None}
        quoted = [(dep, done[dep]) for dep in point.deps]
        own = behind(branch.documents, self.prompts, self.most)
        return self.prompts.branch(point, request.outline, quoted, own=own)[1]

    def direct(self, request: Request) -> PromptTokens:
        """What follows where there is no outline to follow."""
        hits = search_question(request.question, request.documents, self.found)
        return self.prompts.direct(documents=behind(hits, self.prompts, self.most))
