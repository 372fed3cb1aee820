"""Medusa (arXiv 2401.10774): heads on the target's last hidden state, each for one later token,
under the names of a published `medusa_lm_head`. Arithmetic follows FasterDecoding/Medusa."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import DecoderConfig
from ..files import Fields, ModelError, read_fields
from ..layers import wide_logits
from ..linear import Linear, replace_

HEADS_KEY = "medusa_num_heads"
BLOCKS_KEY = "medusa_num_layers"
BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """blocks: residual blocks of a head. vocab_size and hidden_size are the target's."""

    path: Path
    heads: int
    blocks: int
    vocab_size: int
    hidden_size: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        sizes = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        return {HEADS_KEY: self.heads, BLOCKS_KEY: self.blocks, **sizes}


def medusa_config(folder: Path, names: Iterable[str], target: DecoderConfig) -> MedusaConfig:
    """The numbers of heads and blocks are those of the tensors: published files with five heads
    name two in config.json. Raises ModelError for heads of another target."""
    fields = read_fields(folder)
    found = [(int(match[1]), int(match[2])) for n in names if (match := BLOCK.fullmatch(n))]
    heads = 1 + max((head for head, _ in found), default=-1)
    blocks = 1 + max((block for _, block in found), default=-1)
    if not heads:
        raise ModelError(folder, "holds no Medusa head, `0.0.linear.weight`")
    named = fields.integer(HEADS_KEY, heads)
    note = f"`{HEADS_KEY}` is {named}: the file holds {heads} heads, and all are read"
    _check_target(fields, target)
    return MedusaConfig(
        path=fields.path,
        heads=heads,
        blocks=blocks,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        notes=() if named == heads else (note,),
    )


def _check_target(fields: Fields, target: DecoderConfig) -> None:
    for key in ("vocab_size", "hidden_size"):  # which published files leave out
        own = getattr(target, key)
        if (value := fields.integer(key, own)) != own:
            reason = f"`{key}` is {value}, and {target.path} has {own}"
            raise fields.wrong(f"drafts for another target: {reason}")


class ResidualBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = Linear(hidden, hidden)

    def forward(self, x_RH: Tensor) -> Tensor:
        x_RH = x_RH.to(self.linear.weight.dtype)
        return x_RH + F.silu(self.linear.forward(x_RH))


class Medusa(nn.Module):
    """It has no layers, and so no rows in a pool. borrowed: parameters that are the target's head;
    the others are those of a published file."""

    num_layers = 0
    kv_heads = 1
    head_dim = 1

    def __init__(self, config: MedusaConfig, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.notes = config.notes
        self.tap_ids = taps
        self.vocab_size = config.vocab_size
        hidden = config.hidden_size
        heads = []
        for _ in range(config.heads):
            blocks = [ResidualBlock(hidden) for _ in range(config.blocks)]
            heads.append(nn.ModuleList([*blocks, Linear(hidden, config.vocab_size, bias=False)]))
        self.heads = nn.ModuleList(heads)
        self.borrowed: set[str] = set()

    @property
    def ends(self) -> list[str]:
        """The published names of the last product of each head."""
        return [f"{head}.{self.config.blocks}.weight" for head in range(self.config.heads)]

    def borrow_(self, names: Iterable[str], head_VH: Tensor) -> None:
        """Let these of `ends` be the target's head."""
        for name in names:
            replace_(self.get_submodule(f"heads.{name.rpartition('.')[0]}"), "weight", head_VH)
            self.borrowed.add(name)

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """The target's last hidden states after token t -> float32 [R, heads, V]: head i, from 0,
        predicts token t + 2 + i."""
        logits = []
        for head in self.heads:
            x_RH = hidden_RH
            for part in head.children():
                x_RH = wide_logits(x_RH, part) if isinstance(part, Linear) else part(x_RH)
            logits.append(x_RH)
        return torch.stack(logits, 1)

    def published(self) -> dict[str, Tensor]:
        views = {n.removeprefix("heads."): value for n, value in self.named_parameters()}
        return {name: view for name, view in views.items() if name not in self.borrowed}
