"""No drafter: plain decoding, one token per branch and round."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ..drafter import Drafter
from ..graph.drafter_settings import DrafterSettings

if TYPE_CHECKING:
    from ...ops.types import Proposal
    from ..request import Branch


class NoDrafterSettings(DrafterSettings):
    """Plain decoding: one token per branch and round. The baseline, through the same machine."""

    kind: Literal["none"]

    drafts: ClassVar[bool] = False


class NoDrafter(Drafter):
    """Trees [S, 0]: verifying them is one ordinary decoding step of all branches."""

    Settings = NoDrafterSettings
    settings: NoDrafterSettings

    def grow(self, frontier: tuple[Branch, ...]) -> Proposal:
        return self.no_drafts(len(frontier))
