"""A small model drafts chains whose lengths follow a policy of the literature."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specsot.states.drafter import DraftContext
from specsot.states.drafters.vanilla import VanillaDrafter, VanillaSettings

from .policies import LIMITS, AdaptivePolicy, first_state, next_state


class AdaptiveSettings(VanillaSettings):
    """A small language model drafts a chain per branch, as long as a policy says."""

    kind: Literal["adaptive"]
    checkpoint: ClassVar[str] = "vanilla"
    gamma_policy: AdaptivePolicy = "svip"
    """how the number of drafts of a branch is chosen"""
    gamma_limit: Annotated[float, Field(strict=True, ge=0, le=10)] | None = None
    """threshold of svip (0.3 if not given), confidence (0.4) and, at the start, adaedl (0.4)"""


class AdaptiveDrafter(VanillaDrafter):
    """Drafts as `vanilla` does; the accepted drafts and their distributions decide the lengths."""

    Settings = AdaptiveSettings
    first_state = staticmethod(first_state)
    next_state = staticmethod(next_state)

    def __init__(self, settings: AdaptiveSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.looks = settings.gamma_policy in LIMITS
