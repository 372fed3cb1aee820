"""Runs of models that say what a test wants: real forwards on real rows, and made-up logits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from helpers.support import FixedBook, Graphs, Tiny, check_rows, start
from specsot.states.machine import Run
from specsot.states.request import Branch

VOCAB = 130
MOST = 400  # transitions of a run
Says = Callable[[int], Tensor]
HAIR = 1e-10


@dataclass
class Scripted:
    """A decoder whose logits are `says(position of the row)`: float64 [V], for the next token.

    feeds: for each forward, the positions of its rows, in order; padding is left out.
    """

    model: Any
    says: Says
    feeds: list[list[int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, tokens_BQ: Tensor, positions_BQ: Tensor, *others: Any) -> Any:
        out = self.model.forward(tokens_BQ, positions_BQ, *others)
        positions = positions_BQ.flatten().tolist()
        self.feeds.append(positions)
        logit_rows = others[4]
        said = [self.says(positions[row]) for row in logit_rows.tolist()]
        return out._replace(logits_RV=torch.stack(said)) if said else out


def ranked(tokens: Sequence[int], size: int) -> Tensor:
    """Logits with these tokens in front, in their order; nothing else is possible."""
    logits_V = torch.full((size,), -torch.inf, dtype=torch.float64)
    for place, token in enumerate(tokens):
        logits_V[token] = -float(place)
    return logits_V


def with_entropy(token: int, size: int, nats: float) -> Tensor:
    """Logits whose best token is this one, of a law with so many nats of entropy, or a hair less.

    Less rather than more: lengths are rounded down, and half a token up.
    """
    if nats == 0:
        return ranked([token], size)
    low, high = 0.0, 60.0  # of the best token over all others
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy(middle, size) > nats - HAIR else (low, middle)
    logits_V = torch.zeros(size, dtype=torch.float64)
    logits_V[token] = high
    return logits_V


def _entropy(lead: float, size: int) -> float:
    total = torch.tensor(lead, dtype=torch.float64).exp().item() + size - 1
    best = 1 - (size - 1) / total
    return -best * log(best) + (1 - best) * log(total)


def text(position: int) -> int:
    """What the target says at a position."""
    return 5 + position * 7 % 100


def other(position: int) -> int:
    """What a drafter says there that is wrong."""
    return text(position) + 1


def begin(
    graphs: Graphs,
    made: Tiny,
    prompt: Sequence[int],
    budget: int,
    *sets: str,
    stop_ids: Sequence[int] = (),
    **models: Says,
) -> Run:
    """A run of one request; `target` and `drafter` are what they say after each position."""
    real = made.models.target
    scripts = {name: Scripted(real, says) for name, says in models.items()}
    graph = "speculative" if "drafter" in models else "ngram"
    book = FixedBook({"q": prompt}, stop_ids=stop_ids)
    scripted = replace(made.models, **scripts)
    session = graphs.session(graph, scripted, book, budget=budget, sets=sets)
    return start(session, ["q"])


def says_text(position: int) -> Tensor:
    return ranked([text(position + 1)], VOCAB)


def drafter_of(wrong: set[int]) -> Says:
    """Says what the target says, except at these positions."""

    def says(position: int) -> Tensor:
        place = position + 1
        return ranked([other(place) if place in wrong else text(place)], VOCAB)

    return says


def states_of(run: Run) -> Iterator[str]:
    """The states that are entered, one after another; pools and book agree after each.

    The first `schedule` is left out: nobody has begun there.
    """
    run.advance()
    for _ in range(MOST):
        run.advance()
        check_rows(run)
        yield run.state
        if run.finished:
            return
    raise AssertionError("the run does not come to an end")


def branch_of(run: Run) -> Branch:
    branch: Branch = run.board["branches"].requests[0].branches[0]
    return branch
