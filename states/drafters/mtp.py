"""MTP: the target's own layer for a later token drafts a dynamic token tree per branch."""

from __future__ import annotations

from typing import ClassVar, Literal

from .eagle import DynamicTreeSettings, EagleDrafter


class MtpSettings(DynamicTreeSettings):
    """The MTP layer in the target's own files drafts a dynamic token tree per branch."""

    kind: Literal["mtp"]
    checkpoint: ClassVar[str] = "target"


class MtpDrafter(EagleDrafter):
    """Like an EAGLE head, on the target's last hidden state before its final norm."""

    Settings = MtpSettings
    loader = "load_mtp"
