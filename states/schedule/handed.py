"""A request of which one engine does a part: the outline, or some of its branches."""

from dataclasses import dataclass

from ..requests.branch import Branch, Request
from ..text.prompt_tokens import PromptTokens


@dataclass(frozen=True, slots=True)
class HandedBranch:
    """A branch that goes on here: its number, its own prompt behind the prefix, what is written of
    it, and how much it may write in all."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What one of several engines does of a request.

    Attributes:
        branches: those that it goes on with, all of them behind `prefix`; none: it writes the
            outline and nothing else. outline: what is written of that.
    """

    prefix: tuple[int, ...] = ()
    branches: tuple[HandedBranch, ...] = ()
    outline: tuple[int, ...] = ()


def hand_over_(request: Request, handed: HandedOver) -> None:
    """Leave of a request that has not begun what is to be done here."""
    if not handed.branches:
        request.budget = 0
        if handed.outline:
            root = HandedBranch(-1, request.tail.ids, handed.outline, request.outline_budget)
            request.root = _branch(request, root)
            if request.new_matcher is not None:
                request.root.matcher = request.new_matcher()
                for token in handed.outline:
                    request.root.matcher.advance(token)
        return
    request.prefix, request.tail = PromptTokens(handed.prefix), PromptTokens()
    request.opening, request.given, request.given_ids = PromptTokens(), None, []
    request.branches = [_branch(request, one) for one in handed.branches]


def _branch(request: Request, handed: HandedBranch) -> Branch:
    """The last token that is written has no row yet, as of every branch that runs."""
    kept = max(len(handed.tokens) - 1, 0)
    branch = Branch(request, handed.index, -1, handed.budget, prompt=PromptTokens(handed.prompt))
    branch.tokens, branch.kept = list(handed.tokens), kept
    return branch
