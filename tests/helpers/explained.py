"""Explained rounds and a witness of them, which shares nothing with what made them.

Scores are those of transformers behind every node's own path (teacher forcing), coins come from
their keys, and which drafts are accepted follows from the recorded figures alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from helpers.drafters import drafting
from helpers.support import Graphs, Reference, Tiny, contexts, drive, outline_of, requests_of, start
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.ops.sampling.coins import (
    CoinRole,
    branch_key,
    gumbel,
    perturbed,
    round_keys,
    token_keys,
    uniforms,
)
from specsot.states.machine import Event, OpRan, Run
from specsot.states.request import Branch
from specsot.states.round import MATCH, ExplainedDraft, ExplainedRound, FinalToken

HEAT, KEPT = 1.3, 12
SINGLE = (Prompt("0", "hello"), Prompt("1", "a second question", max_new_tokens=7))


@dataclass
class Heard:
    """One record, with how many tokens its branch had before the round."""

    told: ExplainedRound
    before: int


def explaining(session: Session) -> Session:
    program = session.program.with_settings("verify.accept", {"explain": True})
    assert program is not None
    session.program = program
    return session


def listen(session: Session, prompts: Any = SINGLE) -> tuple[Run, list[Heard]]:
    """A whole run, and every record of it."""
    observe: list[Heard] = []

    def sink(event: Event) -> None:
        if isinstance(event, OpRan) and "committed" in event.results:
            sizes = {b.name: len(b.tokens) for r in requests_of(run) for b in r.all_branches()}
            for told in run.board["committed"].explained:
                observe.append(Heard(told, sizes[told.branch] - told.committed))

    run = start(session, prompts, sink)
    return drive(run, check=False), observe


def session_of(
    made: Tiny, graphs: Graphs, kind: str, *sets: str, graph: str = "", endless: int = 0
) -> Session:
    """Short answers that may end by a stop token; `endless`: answers of so many tokens."""
    models = made.models if kind == "none" else drafting(made, kind)
    book = made.book("outline", () if endless else (2,))
    sets = (f"drafter.kind={kind}", *sets)
    outline = outline_of(3) if graph else None
    graph = graph or "autoregressive"
    return graphs.session(graph, models, book, outline=outline, sets=sets, budget=endless or 10)


def laws(logits_V: torch.Tensor, drawn: bool) -> torch.Tensor:
    """float64 log-probabilities up to a constant, as the target (or a drafter) draws from them."""
    scores_V = logits_V.double() / (HEAT if drawn else 1.0)
    if not drawn:
        return scores_V
    return scores_V.where(scores_V >= scores_V.topk(KEPT).values[-1], -torch.inf)


class Witness:
    """Checks records against the target's own scores behind every node."""

    def __init__(self, run: Run, made: Tiny, drawn: bool, plain: bool = True) -> None:
        book = run.board["prompts"]
        pairs = [pair for r in requests_of(run) for pair in contexts(r, book, plain)]
        self.behind = {branch.name: (branch, context) for branch, context in pairs}
        self.drawn = drawn
        self.logits = cache(lambda ids: made.reference.logits(ids, torch.float32)[-1])

    def ids(self, observe: Heard) -> tuple[int, ...]:
        branch, context = self.behind[observe.told.branch]
        return (*context, *branch.tokens[: observe.before])

    def check(self, observe: Heard) -> None:
        told, ids = observe.told, self.ids(observe)
        assert told.root == ids[-1] and told.position == len(ids) - 1
        branch = self.behind[told.branch][0]
        path = [d.token for d in told.drafts if d.accepted]
        assert len(path) == told.accepted
        kept = branch.tokens[observe.before : observe.before + told.committed]
        assert kept == [*path, told.final][: told.committed]
        if told.committed <= told.accepted:
            assert told.finish is not None
        for draft in told.drafts:
            self._check(draft, branch, (*ids, *above(told, draft)), told)
        assert told.came is self._came(told)

    def _check(
        self, draft: ExplainedDraft, branch: Branch, ids: tuple[int, ...], told: ExplainedRound
    ) -> None:
        assert draft.depth == len(ids) - told.position
        key = torch.tensor([branch_key(branch.request.seed, branch.index)])
        if told.rule == MATCH:
            self._check_match(draft, key, ids, told)
        else:
            self._check_judged(draft, key, told)

    def _check_match(
        self, draft: ExplainedDraft, key: torch.Tensor, ids: tuple[int, ...], told: ExplainedRound
    ) -> None:
        found, scores_V = draft.figures, laws(self.logits(ids), self.drawn)
        at = token_keys(key, torch.tensor([len(ids)]))
        assert (found.p, found.q, found.r, found.chance) == (None,) * 4
        if self.drawn:
            scores_V = perturbed(scores_V[None], at)[0]
            assert found.coin == gumbel(at, torch.tensor([[draft.token]])).item()
        else:
            assert found.coin is None
        assert found.draw == int(scores_V.argmax())
        taken = {0} | {d.node for d in told.drafts if d.accepted}
        assert draft.reached == (draft.parent in taken)
        assert draft.accepted == (draft.reached and found.draw == draft.token)

    def _check_judged(self, draft: ExplainedDraft, key: torch.Tensor, told: ExplainedRound) -> None:
        found = draft.figures
        assert found.draw is None and found.coin is None
        if not draft.reached:
            assert (found.p, found.q, found.r, found.chance) == (None,) * 4
            return
        rank = sum(d.parent == draft.parent and d.node < draft.node for d in told.drafts)
        place = [torch.tensor([value]) for value in (told.position, draft.depth, rank)]
        assert found.r == uniforms(round_keys(key, *place, CoinRole.ACCEPT)).item()
        assert found.p is not None and found.q is not None and found.r is not None
        if told.rule != "block":
            passes = found.q > 0 and found.r * found.q < found.p
            assert draft.accepted == passes
            assert found.chance == pytest.approx(min(1, found.p / found.q), rel=1e-5)

    def _came(self, told: ExplainedRound) -> FinalToken:
        last = max((d.node for d in told.drafts if d.accepted), default=0)
        if not told.drafts:
            return FinalToken.TARGET
        if any(d.parent == last for d in told.drafts):
            return FinalToken.TARGET if told.rule == MATCH else FinalToken.RESIDUAL
        return FinalToken.BONUS

    def chances(self, observe: Heard) -> Iterator[tuple[ExplainedDraft, torch.Tensor]]:
        """Every tried draft, and the target's distribution where it was drafted."""
        for draft in observe.told.drafts:
            if draft.reached:
                ids = (*self.ids(observe), *above(observe.told, draft))
                yield draft, laws(self.logits(ids), True).softmax(-1)


def above(told: ExplainedRound, draft: ExplainedDraft) -> list[int]:
    """Drafted tokens between the root and a draft, from the top."""
    of_node, tokens = {d.node: d for d in told.drafts}, []
    while draft.parent:
        draft = of_node[draft.parent]
        tokens.append(draft.token)
    return tokens[::-1]


def small_model(made: Tiny) -> Reference:
    """The vanilla drafter as transformers has it."""
    return Reference(drafting(made, "vanilla").drafter.config.path.parent)
