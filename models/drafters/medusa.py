"""Medusa (arXiv 2401.10774): heads on the target's last hidden state, each for one later token,
under the names of a published `medusa_lm_head`, or vLLM's. Arithmetic follows FasterDecoding/Medusa
and vLLM's `medusa.py`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import DecoderConfig
from ..files import Fields, ModelError, read_fields
from ..layers import wide_logits
from ..linear import Linear, replace_
from .config import MEDUSA_BLOCK

HEADS_KEY = "medusa_num_heads"
BLOCKS_KEY = "medusa_num_layers"
VLLM_HEADS_KEY = "num_heads"
TOKEN_MAP = "token_map"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """blocks: residual blocks of a head. vocab_size and hidden_size are the target's. draft_vocab:
    tokens that the heads can draft, 0 for all. bias: of the blocks. prefix: of all names. vllm: its
    names. shared: the last product of the first head is that of all."""

    path: Path
    heads: int
    blocks: int
    vocab_size: int
    hidden_size: int
    draft_vocab: int = 0
    bias: bool = True
    prefix: str = ""
    vllm: bool = False
    shared: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        sizes = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        return {HEADS_KEY: self.heads, BLOCKS_KEY: self.blocks, **sizes}

    def published(self, head: int, part: int, kind: str = "weight") -> str:
        """The name of a parameter of a block, or of the last product, which is the next part."""
        if self.vllm:
            last = f"lm_heads.{head}.{kind}"
            return self.prefix + (
                last if part == self.blocks else f"blocks.{head}.layers.{part}.{kind}"
            )
        block = "" if part == self.blocks else "linear."
        return f"{self.prefix}{head}.{part}.{block}{kind}"


def medusa_config(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], target: DecoderConfig
) -> MedusaConfig:
    """The numbers of heads and blocks are those of the tensors: published files with five heads
    name two in config.json. Raises ModelError for heads of another target."""
    fields = read_fields(folder)
    matches = [match for name in shapes if (match := MEDUSA_BLOCK.fullmatch(name))]
    if not matches:
        raise ModelError(folder, "holds no Medusa head, `0.0.linear.weight`")
    numbers = [[int(number) for number in match.groups()[1:] if number] for match in matches]
    heads, blocks = (1 + max(column) for column in zip(*numbers, strict=True))
    vllm = matches[0][0].endswith(f"layers.{numbers[0][1]}.weight")
    key = VLLM_HEADS_KEY if vllm else HEADS_KEY
    named = fields.integer(key, heads)
    note = f"`{key}` is {named}: the file holds {heads} heads, and all are read"
    _check_target(fields, target)
    if fields.number("logit_scale", 1.0) != 1.0:
        raise fields.wrong("`logit_scale` other than 1 is not supported")
    config = MedusaConfig(
        path=fields.path,
        heads=heads,
        blocks=blocks,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        bias=matches[0][0].removesuffix("weight") + "bias" in shapes,
        prefix=matches[0]["prefix"],
        vllm=vllm,
        shared=vllm and fields.flag("original_lm_head"),
        notes=() if named == heads else (note,),
    )
    mapped = shapes.get(TOKEN_MAP, ())
    rows = shapes.get(config.published(0, blocks), ())[:1]
    # Products with all tokens draft all of them, whatever the map names.
    return replace(config, draft_vocab=mapped[0]) if mapped and mapped[:1] == rows else config


def _check_target(fields: Fields, target: DecoderConfig) -> None:
    for key in ("vocab_size", "hidden_size"):  # which published files leave out
        own = getattr(target, key)
        if (value := fields.integer(key, own)) != own:
            reason = f"`{key}` is {value}, and {target.path} has {own}"
            raise fields.wrong(f"drafts for another target: {reason}")


class ResidualBlock(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear = Linear(hidden, hidden, bias=bias)

    def forward(self, x_RH: Tensor) -> Tensor:
        x_RH = x_RH.to(self.linear.weight.dtype)
        return x_RH + F.silu(self.linear.forward(x_RH))


class Medusa(nn.Module):
    """It has no layers, and so no rows in a pool. borrowed: parameters that are the target's head,
    or the first head's; the others are those of a published file. token_map: int64
    [draft_vocab]: the target's ids of the tokens that the heads can draft."""

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
            blocks = [ResidualBlock(hidden, config.bias) for _ in range(config.blocks)]
            last = Linear(hidden, config.draft_vocab or config.vocab_size, bias=False)
            heads.append(nn.ModuleList([*blocks, last]))
        self.heads = nn.ModuleList(heads)
        ids = torch.zeros(config.draft_vocab, dtype=torch.int64, device="cpu")  # never meta
        self.token_map: Tensor
        self.register_buffer(TOKEN_MAP, ids, persistent=False)
        self.borrowed: set[str] = set()

    @property
    def ends(self) -> list[str]:
        """The published names of the last product of each head."""
        config = self.config
        return [config.published(head, config.blocks) for head in range(config.heads)]

    def borrow_(self, names: Iterable[str], head_VH: Tensor) -> None:
        """Let these of `ends` be the target's head, or another one's."""
        for name in names:
            last = self.get_submodule(f"heads.{self.ends.index(name)}.{self.config.blocks}")
            replace_(last, "weight", head_VH)
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
        logits_RDV = torch.stack(logits, 1)
        if not self.config.draft_vocab:
            return logits_RDV
        sizes = (*logits_RDV.shape[:2], self.vocab_size)
        return logits_RDV.new_full(sizes, -torch.inf).index_copy_(2, self.token_map, logits_RDV)

    def published(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {TOKEN_MAP: self.token_map} if self.config.draft_vocab else {}
        for name, view in self.named_parameters(remove_duplicate=False):
            _, head, part, *_, kind = name.split(".")
            views[self.config.published(int(head), int(part), kind)] = view
        return {name: view for name, view in views.items() if name not in self.borrowed}
