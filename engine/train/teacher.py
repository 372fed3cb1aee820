"""The target of a drafter's training: its outputs for a batch, and its greedy answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ...models.codes import FULL
from ...models.config import DecoderConfig
from ...models.families import decoder_config
from ...models.layers import BEFORE_ATTENTION, BEFORE_MLP, NORMS
from ...models.linear import has_products
from ...models.load.reference import as_reference
from ...models.load.tokenizer import load_tokenizer, stop_ids
from .data import TrainingBatch

Parts = Sequence[Tensor]


class TeacherOutput(NamedTuple):
    """Of packed rows: tapped hidden states, the head's input, the likeliest next token or zeros."""

    features_BSF: Tensor
    hidden_BSH: Tensor
    best_BS: Tensor


class Teacher:
    """A frozen target with its tokenizer; raises ModelError."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # ours is the only one
        self.folder = folder
        self.device = torch.device(device)
        self.config: DecoderConfig = decoder_config(folder)
        self.tokenizer: Any = load_tokenizer(folder, self.config)
        model: Any = as_reference(folder, torch.float32, FULL)
        self.model: Any = model.requires_grad_(False).to(self.device)
        # [V, H] both, and the same where they are tied.
        self.embedding: Tensor = self.model.get_input_embeddings().weight.detach()
        self.head: Tensor = self.model.get_output_embeddings().weight.detach()
        self.norm_H: Tensor = self.factor(self.model.base_model.norm.weight)
        self.stops = stop_ids(self.config, self.tokenizer)

    def factor(self, norm_H: Tensor) -> Tensor:
        """The factor of a norm with this weight."""
        return 1.0 + norm_H if self.config.centred_norms else norm_H

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters under a drafter's names, which has norms before attention and MLP
        only."""
        named = self.model.base_model.layers[index].named_parameters()
        weights = {n: self.factor(w) if n.endswith("norm.weight") else w for n, w in named}
        names = NORMS[self.config.norms]
        norms = [weights.pop(f"{name}.weight", None) for name in names]
        for place in (BEFORE_ATTENTION, BEFORE_MLP):
            if (norm := norms[place]) is not None:
                weights[f"{NORMS['before'][place]}.weight"] = norm
        return weights

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.no_grad()
    def read(
        self,
        batch: TrainingBatch,
        taps: tuple[int, ...] = (),
        *,
        best: bool = False,
        exact: bool = False,
    ) -> TeacherOutput:
        """One forward over packed rows; taps are indices of `hidden_states`, 0 the embedding. best:
        with the most likely tokens. exact: in float32, as in a run."""
        with self.low_precision(not exact):
            out = run_rows(self.model.base_model, batch, taps=bool(taps))
        last: Tensor = out.last_hidden_state
        features = [out.hidden_states[tap] for tap in taps] or [last[..., :0]]
        likeliest = self.logits(last).argmax(-1) if best else torch.zeros_like(batch.ids)
        return TeacherOutput(torch.cat(features, -1).float(), last, likeliest)

    @torch.no_grad()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[..., H] -> [..., V], in low precision."""
        with self.low_precision():
            return F.linear(hidden_RH, self.head)

    def low_precision(self, enabled: bool = True) -> torch.autocast:
        """Matrix products in bfloat16 where the device supports them."""
        low = enabled and has_products(self.device, torch.bfloat16)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=low)

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """Greedy answers: up to and including a stop id, or ``limit`` ids."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        # The folder's own settings may enable sampling or a repetition penalty.
        settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False, "pad_token_id": 0}
        settings["eos_token_id"] = list(self.stops)
        self.model.generation_config = GenerationConfig.from_dict(settings)
        out = self.model.generate(ids.to(self.device), attention_mask=mask.to(self.device))
        answers: list[list[int]] = out[:, width:].tolist()
        for answer in answers:
            end = next((i for i, token in enumerate(answer) if token in self.stops), len(answer))
            del answer[end + 1 :]
        return answers


def run_rows(model: Any, batch: TrainingBatch, taps: bool = False) -> Any:
    """A model of transformers, without its head, over packed rows; taps: all hidden states too."""
    places = {"attention_mask": batch.mask, "position_ids": batch.positions}
    return model(input_ids=batch.ids, use_cache=False, output_hidden_states=taps, **places)


def attend(q_Nhd: Tensor, keys: Parts, values: Parts, mask_BQK: Tensor) -> Tensor:
    """Attention of B sequences to parts of keys and values, each [B * rows, kv_heads, d] ->
    [N, heads * d]; rows that see nothing give zeros."""

    def by_head(parts: Parts) -> Tensor:
        sequences = [torch.unflatten(part, 0, (len(mask_BQK), -1)) for part in parts]
        return torch.cat(sequences, 1).transpose(1, 2)

    q_BhQd, k_BhKd, v_BhKd = (by_head(parts) for parts in ([q_Nhd], keys, values))
    if q_Nhd.is_cuda:  # its fast kernels with masks need as many keys as queries
        groups = q_BhQd.shape[1] // k_BhKd.shape[1]
        k_BhKd, v_BhKd = (x.repeat_interleave(groups, 1) for x in (k_BhKd, v_BhKd))
    out_BhQd = F.scaled_dot_product_attention(
        q_BhQd, k_BhKd, v_BhKd, mask_BQK[:, None], enable_gqa=True
    )
    return out_BhQd.transpose(1, 2).flatten(2).flatten(0, 1)


@torch.no_grad()
def draw_(views: Mapping[str, Tensor], seed: int) -> None:
    """Random initial weights."""
    torch.manual_seed(seed)
    for name, view in views.items():
        if view.is_floating_point() and view.ndim == 1:
            view.fill_(0.0 if name.endswith(".bias") else 1.0)
        elif view.is_floating_point():
            view.normal_(std=0.02)


@torch.no_grad()
def copy_equal_(views: Mapping[str, Tensor], source: Mapping[str, Tensor], skip: int = 0) -> None:
    """Copy tensors into views of the same shape, behind `skip` columns of projections' inputs."""
    for name, parameter in views.items():
        projects = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        part = parameter[:, skip:] if skip and projects else parameter
        if name in source and source[name].shape == part.shape:
            part.copy_(source[name])
