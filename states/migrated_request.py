"""A request of which one of several engines decodes a part: the outline, or some branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .request import Branch, Request
from .text.tokens import PromptTokens


@dataclass(frozen=True, slots=True)
class MigratedBranch:
    """A branch to continue: its number, its prompt after the prefix, the tokens written so far, and
    its whole budget."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class MigratedRequest:
    """The part of a request that one engine decodes.

    Attributes:
        branches: to continue, all after `prefix`; none: the outline is written, and nothing else.
            outline: its tokens so far. arrival: number of the request among those of all engines;
            below 0: the engine numbers it.
    """

    prefix: tuple[int, ...] = ()
    branches: tuple[MigratedBranch, ...] = ()
    outline: tuple[int, ...] = ()
    arrival: int = -1


def hand_over_(request: Request, handed: MigratedRequest) -> None:
    """Reduce a request that has not started to the part that is decoded here."""
    request.arrival = handed.arrival
    if not handed.branches:
        request.budget = 0
        if handed.outline:
            request.root = _first(request, -1, handed.outline, request.outline_budget)
        return
    request.prefix = PromptTokens(handed.prefix)
    request.tail = PromptTokens()
    request.opening = PromptTokens()
    request.given_outline = None
    request.given_ids = []
    request.branches = [_branch(request, one) for one in handed.branches]


def go_on_(request: Request, begun: Mapping[int, Sequence[int]]) -> None:
    """Let a request that has not started continue the tokens of another engine.

    Args:
        begun: tokens of branches by index, the outline's at -1; they may end anywhere.
    """
    request.resumed_tokens = {index: tuple(tokens) for index, tokens in begun.items()}
    outlined = request.outline_budget > 0
    index, budget = (-1, request.outline_budget) if outlined else (0, request.budget)
    if tokens := request.resumed_tokens.pop(index, ())[: budget - 1]:
        first = _first(request, index, tokens, budget)
        request.root, request.branches = (first, []) if outlined else (None, [first])


def _first(request: Request, index: int, tokens: tuple[int, ...], budget: int) -> Branch:
    """The first branch after a request's prompt, with its grammar advanced if there is one."""
    branch = _branch(request, MigratedBranch(index, request.tail.ids, tokens, budget))
    if request.new_matcher is not None:
        branch.matcher = request.new_matcher()
        for token in tokens:
            branch.matcher.advance(token)
    return branch


def _branch(request: Request, handed: MigratedBranch) -> Branch:
    """The last written token has no row yet, as in every running branch."""
    kept = max(len(handed.tokens) - 1, 0)
    branch = Branch(request, handed.index, -1, handed.budget, prompt=PromptTokens(handed.prompt))
    branch.tokens = list(handed.tokens)
    branch.num_cached_tokens = kept
    return branch
