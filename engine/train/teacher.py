"""The target of a drafter's training: what it says about a batch, and what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ...models.config import DecoderConfig
from ...models.families import decoder_config
from ...models.linear import has_products
from ...models.load.tokenizer import load_tokenizer, stop_ids
from ..prepare.environment import model_folder, set_up_torch
from .data import Tokens, TrainingBatch, pack
from .settings import DrafterTraining


class Told(NamedTuple):
    """What the target says of packed rows.

    features_BSF: the tapped hidden states, joined. hidden_BSH: the input of its head.
    best_BS: int64, its likeliest next token; zeros unless it was asked for.
    """

    features_BSF: Tensor
    hidden_BSH: Tensor
    best_BS: Tensor


class Kept(NamedTuple):
    """A sample, held so that nothing else gets its id, and what was told of it, in bfloat16."""

    tokens: Tokens
    told: Told


class Teacher:
    """A frozen target with its tokenizer.

    Args:
        keep: read every sample once, and keep in memory what was found.

    Raises:
        ModelError: the folder holds no target that specsot can run, or no usable tokenizer.
    """

    def __init__(self, folder: Path, device: str = "cpu", *, keep: bool = False) -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # ours is the only one
        self.folder = folder
        self.device = torch.device(device)
        self.config: DecoderConfig = decoder_config(folder)
        self.tokenizer: Any = load_tokenizer(folder, self.config)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.requires_grad_(False).eval().to(self.device)
        # [V, H] both, and the same where they are tied.
        self.embedding: Tensor = self.model.get_input_embeddings().weight.detach()
        self.head: Tensor = self.model.get_output_embeddings().weight.detach()
        self.stops = stop_ids(self.config, self.tokenizer)
        self._kept: dict[int, Kept] | None = {} if keep else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text whose special tokens are meant as such."""
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.no_grad()
    def look(
        self,
        batch: TrainingBatch,
        taps: tuple[int, ...] = (),
        *,
        best: bool = False,
        exact: bool = False,
    ) -> Told:
        """One forward over packed rows; taps are indices of `hidden_states`, 0 the embedding.

        Args:
            best: the likeliest tokens are wanted too; that is the largest product of all.
            exact: in float32, as a run would be; nothing of it is kept.
        """
        if self._kept is None or exact:
            return self._forward(batch, taps, best, exact)
        rows = [[self._recall(self._kept, one, taps, best) for one in row] for row in batch.samples]
        length = batch.ids.shape[1]
        parts = range(len(Told._fields))
        return Told(*(self._joined(rows, part, length) for part in parts))

    def _joined(self, rows: list[list[Told]], part: int, length: int) -> Tensor:
        """One part of what is kept of each row's samples, behind each other."""
        joined = [torch.cat([told[part][0] for told in row]) for row in rows]
        padded = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, length - len(x))) for x in joined]
        both = torch.stack(padded).to(self.device)
        return both.float() if both.is_floating_point() else both

    def _recall(
        self, kept: dict[int, Kept], tokens: Tokens, taps: tuple[int, ...], best: bool
    ) -> Told:
        """What the target says of a sample. It is read by itself, so that this is the same in
        whatever batch it stands."""
        if id(tokens) not in kept:
            alone = pack([[tokens]], len(tokens.ids)).to(self.device)
            features, hidden, likeliest = self._forward(alone, taps, best, exact=False)
            told = Told(features.bfloat16().cpu(), hidden.bfloat16().cpu(), likeliest.cpu())
            kept[id(tokens)] = Kept(tokens, told)
        return kept[id(tokens)].told

    def _forward(
        self, batch: TrainingBatch, taps: tuple[int, ...], best: bool, exact: bool
    ) -> Told:
        with self.low_precision(not exact):
            out = self.model.base_model(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                position_ids=batch.positions,
                use_cache=False,
                output_hidden_states=bool(taps),
            )
        last: Tensor = out.last_hidden_state
        features = [out.hidden_states[tap] for tap in taps] or [last[..., :0]]
        likeliest = self.logits(last).argmax(-1) if best else torch.zeros_like(batch.ids)
        return Told(torch.cat(features, -1).float(), last, likeliest)

    @torch.no_grad()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[..., H] -> [..., V], in low precision."""
        with self.low_precision():
            return F.linear(hidden_RH, self.head)

    def low_precision(self, wanted: bool = True) -> torch.autocast:
        """Products in bfloat16 where the device has them, everything else as it is."""
        low = wanted and has_products(self.device, torch.bfloat16)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=low)

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """What the target writes greedily: up to and with a stop id, or ``limit`` ids."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        # The folder's own settings may ask for sampling or punish repetition.
        settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False, "pad_token_id": 0}
        settings["eos_token_id"] = list(self.stops)
        self.model.generation_config = GenerationConfig.from_dict(settings)
        out = self.model.generate(ids.to(self.device), attention_mask=mask.to(self.device))
        return [self._ended(row) for row in out[:, width:].tolist()]

    def _ended(self, row: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(row) if token in self.stops), len(row))
        return row[:end]


def load_teacher(settings: DrafterTraining) -> Teacher:
    """The target that a training asks for, after torch was set up for it.

    Raises:
        UsageError: no such device.
        ModelError: no such model.
    """
    set_up_torch(settings.threads or torch.get_num_threads(), settings.device)
    folder = model_folder(settings.target, "target")
    return Teacher(folder, settings.device, keep=settings.keep_features)
