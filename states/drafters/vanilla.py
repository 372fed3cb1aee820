"""A small language model of the target's tokenizer drafts a chain of tokens per branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ...ops.draft.gamma import GammaRecord, GammaState, Policy, first_state, next_state, plan
from ..drafter import DraftContext, Drafter, TextRows
from ..graph.drafter_settings import ChoosingSettings
from ..yaml.spec import Count, Int, Text

if TYPE_CHECKING:
    from torch import Tensor

    from ...ops.draft.vanilla import ChainStart
    from ...ops.types import DraftRows, Proposal
    from ..request import Branch
    from ..round import CommittedRows, RoundResult


PLUGGED_IN = ("svip", "confidence", "adaedl", "heuristic")


def _shipped(policy: Any) -> Any:
    if policy in PLUGGED_IN:
        what = "{policy} is a policy of the drafter adaptive: pip install ./examples/draft_lengths"
        raise PydanticCustomError("gamma", what, {"policy": policy})
    return policy


class VanillaSettings(ChoosingSettings):
    """A small language model of the target's tokenizer drafts a chain per branch."""

    kind: Literal["vanilla"]
    has_model: ClassVar[bool] = True
    gamma: Int = Field(5, ge=0, le=1024)
    """drafts per branch and round"""
    gamma_policy: Annotated[Policy, BeforeValidator(_shipped)] = "fixed"
    """how the number of drafts of a branch is chosen"""
    gamma_min: Int = Field(1, ge=0, le=1024)
    """fewest drafts of a policy"""
    gamma_max: Count | None = None
    """most drafts of a policy; gamma if not given"""
    egag_mode: Literal["linear", "seed"] = "linear"
    """from entropy to length, between the bounds or up to gamma_max"""
    egag_ema_beta: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    """share of the past in EGAG's moving average"""
    egag_h_ref: Annotated[float, Field(strict=True, gt=0)] | None = None
    """entropy in nats that counts as no confidence; ln V if not given"""
    draws: Literal["best", "sampled"] = "best"
    """drafts are the best tokens, or drawn, if the target's are"""
    model: Text | None = None
    """checkpoint of the small model"""

    @model_validator(mode="after")
    def _lengths_are_valid(self) -> Self:
        if self.gamma_min > self.longest:
            what = "draft lengths need 0 <= gamma_min <= gamma_max, gamma_max >= 1 and gamma >= 0, "
            what += f"not {self.gamma_min}, {self.longest} and {self.gamma}"
            raise PydanticCustomError("gamma", "{why}", {"why": what})
        return self

    @property
    def longest(self) -> int:
        return self.gamma_max or max(self.gamma, 1)

    @property
    def offered(self) -> int:
        return self.gamma if self.gamma_policy == "fixed" else self.longest

    @property
    def chooses(self) -> bool:
        return self.gamma_policy == "cost"

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def scratch(self) -> int:
        return max(self.offered - 1, 0)


class VanillaDrafter(Drafter):
    """Reads token ids alone, the next root included, and writes on. planned: the chains of this
    round; lengths: by branch, the state of the length policy; looks: whether the policy reads the
    drafter's distributions. A further policy is a subclass with its own `first_state` and
    `next_state`, as in `examples/draft_lengths`."""

    Settings = VanillaSettings
    settings: VanillaSettings
    loader = "load_vanilla"
    reads_root = True
    first_state = staticmethod(first_state)
    next_state = staticmethod(next_state)

    def __init__(self, settings: VanillaSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.planned: list[GammaRecord] = []
        self.lengths: dict[int, GammaState] = {}
        self.memory = (*self.memory, self.lengths)
        self.looks = settings.gamma_policy == "egag"

    @classmethod
    def logits(cls, model: Any, text: TextRows) -> Tensor:
        from ...ops.draft.vanilla import logits_of

        every_Q = text.slots_1Q[0] - text.slots_1Q[0, 0]
        inputs = text.tokens_1Q, text.slots_1Q, text.slots_1Q, text.attention
        return logits_of(model, *inputs, kv=text.kv, rows_R=every_Q)

    def observe(self, rows: CommittedRows) -> None:
        first = 1 if rows.is_path else 0  # the root was read when it was drawn
        self.queue(rows.owner, rows.position + first, [*rows.tokens[first:], *rows.following])

    def root(self, batch: DraftRows | tuple[Branch, ...]) -> ChainStart | tuple[Branch, ...]:
        """Plan the lengths of all chains, and read the committed tokens in one forward."""
        from ...ops.draft.vanilla import ChainStart, logits_of
        from ...ops.forward import plan_attention

        lengths = self.plan_(self.active)
        if isinstance(batch, tuple):
            return batch
        rows = batch.rows
        attention = plan_attention(rows, self.kv, attention=batch.attention)
        inputs = rows.tokens_BQ, rows.positions_BQ, rows.slots_BQ, attention
        logits_SV = logits_of(self.model, *inputs, self.kv, rows.tips_R)
        return ChainStart(logits_SV, lengths, self.looks, batch)

    def grow(self, frontier: ChainStart | tuple[Branch, ...]) -> Proposal:
        from ...ops.draft.proposals import Drawing
        from ...ops.draft.vanilla import write_chain_

        if isinstance(frontier, tuple):
            return self.no_drafts(len(frontier))
        drawing = Drawing.of(frontier.draft_rows, self.settings.draws, self.context.accept)
        return write_chain_(self.model, frontier, self.kv, drawing)

    def plan_(self, branches: Sequence[Branch]) -> tuple[int, ...]:
        """How many drafts each branch gets in this round."""
        if self.chooser is not None and branches:
            self.planned = [
                GammaRecord(nan, nan, count, nan, gamma=count, gamma_eff=count)
                for count in self.chooser.choice.lengths
            ]
        else:
            size = self.model.vocab_size
            self.planned = [
                plan(self.settings, self._state(branch), size, branch.budget - len(branch.tokens))
                for branch in branches
            ]
        return tuple(length.gamma_eff for length in self.planned)

    def _state(self, branch: Branch) -> GammaState:
        return self.lengths.get(branch.owner) or self.first_state(self.settings)

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        from ...ops.draft.vanilla import unpacked

        super().learn(branches, result, paths)
        if not (branches and self.planned):
            return ()
        records = []
        width = max(1, *(length.gamma_eff for length in self.planned))
        figures = unpacked(result.side_outputs_SC, width)
        trees = zip(branches, self.planned, figures, paths, strict=True)
        for branch, length, distributions, path in trees:
            accepted = len(path) - 1
            self.lengths[branch.owner] = self.next_state(
                self.settings, self._state(branch), length, accepted, figures=distributions
            )
            records.append(replace(length, accepted=accepted))
        return tuple(records)
