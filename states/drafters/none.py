"""No drafter: plain decoding, one token per branch and round."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..drafter import Drafter
from ..graph.drafter_settings import DrafterSettings


class NoDrafterSettings(DrafterSettings):
    """Plain decoding: one token per branch and round. The baseline, through the same machine."""

    kind: Literal["none"]

    drafts: ClassVar[bool] = False


class NoDrafter(Drafter):
    """A drafter as its base class is: trees without drafts."""

    Settings = NoDrafterSettings
    settings: NoDrafterSettings
