"""How a request's tokens are drawn, as plain numbers. No torch: graphs are checked with it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

TIES = 64  # additional ids that may tie with the last of the top k

FilterOrder = Literal["temperature_first", "filters_first"]


class Draws(StrEnum):
    """The children of a node: the most probable tokens, independent draws, or distinct ones."""

    BEST = "best"
    SAMPLED = "sampled"
    DISTINCT = "distinct"


class Accept(StrEnum):
    """How drafts are accepted: if the target draws the same token, or by p / q under a `Rule`."""

    MATCH = "match"
    REJECTION = "rejection"


class Rule(StrEnum):
    """A rule of rejection sampling; `FITS` says for which drafts it is exact."""

    CHAIN = "chain"
    BLOCK = "block"
    WITH_REPLACEMENT = "with_replacement"
    WITHOUT_REPLACEMENT = "without_replacement"
    TOPK = "topk"


FITS: dict[Rule, tuple[Draws, ...]] = {
    Rule.CHAIN: (Draws.SAMPLED, Draws.BEST),
    Rule.BLOCK: (Draws.SAMPLED, Draws.BEST),
    Rule.WITH_REPLACEMENT: (Draws.SAMPLED,),
    Rule.WITHOUT_REPLACEMENT: (Draws.DISTINCT,),
    Rule.TOPK: (Draws.BEST,),
}
"""Which draws a rule is exact for; CHAIN and BLOCK take trees of one path only."""

CHAIN_RULES = (Rule.CHAIN, Rule.BLOCK)


def fitting_rules(draws: Draws, chain: bool) -> list[Rule]:
    """The rules for drafts that were drawn like this, the usual one first."""
    return [r for r in Rule if draws in FITS[r] and (chain or r not in CHAIN_RULES)]


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """How a request's tokens are drawn, as the block `sampling` of a graph documents it. The
    defaults take the best token of the logits (`plain`). Repetition: Keskar et al., 1909.05858."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    min_new_tokens: int = 0
    filter_order: FilterOrder = "temperature_first"
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        looks_back = self.penalises or self.forced or self.min_new_tokens > 0
        changes = looks_back or self.logit_bias or self.banned
        object.__setattr__(self, "plain", self.greedy and not changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def scale(self) -> float:
        """What scores are divided by before the filters read them."""
        return 1.0 if self.greedy or self.filter_order == "filters_first" else self.temperature

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)
