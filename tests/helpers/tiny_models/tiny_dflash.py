"""A seeded random DFlash drafter for a target of `tiny.write_tiny_target`, right often enough.

What such a target says next depends mostly on its last token, so what stands d tokens later is a
known mixture, and a linear map of the token's embedding. The drafter's first layer has one head
for each distance: it looks at the token that far back, whatever it is, and applies the map of that
distance. A block's row so sees its anchor, and more faintly the context before it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.tiny_models.tiny import likely_ids, save, write_json
from specsot.models.config import DecoderConfig, RopeConfig
from specsot.models.decoder import Decoder
from specsot.models.drafters.config import DFlashConfig, Reach
from specsot.models.drafters.dflash import DFlashDraftModel, TargetEnds
from specsot.models.layers import DrafterAttention
from specsot.models.load.weights import load_target

SHARP = 6.0  # weight of the query and key norms: a head sees one distance and nearly nothing else
LOUD = 4.0  # what is seen, against the mask's own embedding in the residual stream
FAINT = 0.2  # the context, against the anchor


def write_tiny_dflash(
    folder: Path,
    target_folder: Path,
    seed: int = 0,
    *,
    block_size: int = 8,
    layers: int = 2,
    window: int | None = None,
    noise: float = 0.03,
) -> Path:
    """Write config.json and model.safetensors (float32), the same for the same arguments.

    Args:
        layers: all but the first add noise only.
        window: the first layer is a sliding one.
        noise: what is added to all weights; more of it lowers acceptance.
    """
    target = load_target(target_folder)
    config = _config(folder, target.config, block_size, layers, window, _spare_id(target))
    drafter = DFlashDraftModel(config, TargetEnds(target.embed, target.lm_head.weight))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * noise)
            if parameter.ndim == 1:
                parameter.add_(1.0)
        _aim_(drafter, target)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config.to_json())
    save(folder, drafter.published())
    return folder


def _spare_id(target: Decoder) -> int:
    """The highest id that the target hardly ever says: it stands for the mask."""
    likely = set(likely_ids(target.lm_head.weight).tolist())
    return max(set(range(target.vocab_size)) - likely)


def _config(
    folder: Path,
    target: DecoderConfig,
    block_size: int,
    layers: int,
    window: int | None,
    mask_token_id: int,
) -> DFlashConfig:
    hidden, heads = target.hidden_size, block_size - 1
    return DFlashConfig(
        path=folder / "config.json",
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden,
        eps=target.eps,
        rope=RopeConfig("default", 10000.0, {}, target.rope.trained),
        reaches=(Reach(window, window is not None), *(Reach() for _ in range(layers - 1))),
        layer_ids=(0, target.num_layers // 2),
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layers=target.num_layers,
    )


def _aim_(drafter: DFlashDraftModel, target: Decoder) -> None:
    hidden = target.hidden_size
    drafter.fc.weight[:, :hidden] += torch.eye(hidden)
    drafter.hidden_norm.weight.mul_(FAINT)
    drafter.norm.weight.copy_(target.norm.weight)
    attention, maps_dHH = drafter.stack[0].self_attn, _maps(drafter, target)
    _look_back_(attention, drafter.frequencies, len(maps_dHH))
    attention.v_proj.weight.add_(maps_dHH.flatten(0, 1))
    attention.o_proj.weight.add_(LOUD * torch.eye(hidden).repeat(1, len(maps_dHH)))


def _look_back_(attention: DrafterAttention, frequencies: Tensor, heads: int) -> None:
    """Head d - 1 attends to the position d back.

    Its queries and keys are constant, read from the residual stream's constant first dimension;
    the queries are turned back by d positions.
    """
    angles_dF = torch.arange(1, heads + 1)[:, None] * frequencies
    query_dD = torch.cat((angles_dF.cos(), -angles_dF.sin()), -1)
    key_dD = torch.cat((torch.ones_like(angles_dF), torch.zeros_like(angles_dF)), -1)
    attention.q_proj.weight[:, 0] += query_dD.flatten()
    attention.k_proj.weight[:, 0] += key_dD.flatten()
    attention.q_norm.weight.mul_(SHARP)
    attention.k_norm.weight.mul_(SHARP)


def _maps(drafter: DFlashDraftModel, target: Decoder) -> Tensor:
    """[block - 1, H, H]: the map of each distance takes a token's embedding to the mixture of what
    stands one token before that distance (the head does the last step), and the mask's to zero."""
    ids_L = likely_ids(target.lm_head.weight)
    token_LH, mask_H = target.embed[ids_L], target.embed[drafter.mask_token_id]
    step_LL = F.linear(target.norm(token_LH), target.lm_head.weight[ids_L]).softmax(-1)
    size = token_LH.shape[-1:]
    known_LH = F.rms_norm(torch.cat((token_LH, mask_H[None])), size)
    solve_HL = torch.linalg.pinv(known_LH)
    later_LH, found = token_LH, []
    for _ in range(drafter.block_size - 1):
        wanted_LH = torch.cat((later_LH, torch.zeros_like(mask_H)[None]))
        found.append((solve_HL @ wanted_LH).t())
        later_LH = step_LL @ later_LH
    return torch.stack(found)
