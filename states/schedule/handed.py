"""A request that others have begun, or of which one engine does a part: the outline, branches."""

from collections.abc import Mapping, Sequence
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
        arrival: number of the request among all that were submitted anywhere; below 0: it arrives
            with this part of it.
    """

    prefix: tuple[int, ...] = ()
    branches: tuple[HandedBranch, ...] = ()
    outline: tuple[int, ...] = ()
    arrival: int = -1


def hand_over_(request: Request, handed: HandedOver) -> None:
    """Leave of a request that has not begun what is to be done here."""
    request.arrival = handed.arrival
    if not handed.branches:
        request.budget = 0
        if handed.outline:
            request.root = _first(request, -1, handed.outline, request.outline_budget)
        return
    request.prefix = PromptTokens(handed.prefix)
    request.tail = PromptTokens()
    request.opening = PromptTokens()
    request.given = None
    request.given_ids = []
    request.branches = [_branch(request, one) for one in handed.branches]


def go_on_(request: Request, begun: Mapping[int, Sequence[int]]) -> None:
    """Let a request that has not begun here go on behind what is written of it.

    Args:
        begun: tokens of branches by index, the outline's at -1; they may end anywhere.
    """
    request.begun = {index: tuple(tokens) for index, tokens in begun.items()}
    outlined = request.outline_budget > 0
    index, budget = (-1, request.outline_budget) if outlined else (0, request.budget)
    if tokens := request.begun.pop(index, ())[: budget - 1]:
        first = _first(request, index, tokens, budget)
        request.root, request.branches = (first, []) if outlined else (None, [first])


def _first(request: Request, index: int, tokens: tuple[int, ...], budget: int) -> Branch:
    """The branch that stands behind a request's own prompt, held to its grammar if there is one."""
    branch = _branch(request, HandedBranch(index, request.tail.ids, tokens, budget))
    if request.new_matcher is not None:
        branch.matcher = request.new_matcher()
        for token in tokens:
            branch.matcher.advance(token)
    return branch


def _branch(request: Request, handed: HandedBranch) -> Branch:
    """The last token that is written has no row yet, as of every branch that runs."""
    kept = max(len(handed.tokens) - 1, 0)
    branch = Branch(request, handed.index, -1, handed.budget, prompt=PromptTokens(handed.prompt))
    branch.tokens = list(handed.tokens)
    branch.kept = kept
    return branch
