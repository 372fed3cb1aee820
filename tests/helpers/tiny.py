"""Seeded random tiny models in Hugging Face layout: a target, drafters for it, a tokenizer.

They stand in for real checkpoints in tests and offline runs. A plain random model repeats one
token and no drafter can guess it; these are built so that neither is so:

* The residual stream's first dimension is constant. The output head uses it to push all but a few
  tokens far down, so that text stays inside a small set with the special ids in it.
* Every likely token follows two others: its row of the head is the sum of their embeddings. Which
  of its two successors a token gets is up to what the layers add from the context.
* The drafter forwards the embedding and a share of the last tap to the target's own head, and so
  agrees with the target as often as the context does not matter.

The DFlash drafter's first layer has one head for each distance: it looks at the token that far
back, whatever it is, and applies the linear map from that token's embedding to the mixture that
follows it at that distance. A block's row so sees its anchor, and more faintly the context."""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsot.models.config import DecoderConfig, RopeConfig
from specsot.models.decoder import Decoder
from specsot.models.drafters.config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    Reach,
    default_taps,
)
from specsot.models.drafters.dflash import DFlashDraftModel, TargetEnds
from specsot.models.drafters.eagle import EMBEDDING, Eagle, Eagle3
from specsot.models.drafters.medusa import Medusa, MedusaConfig
from specsot.models.drafters.mtp import Mtp, mtp_config
from specsot.models.families import decoder_config
from specsot.models.layers import AFTER_ATTENTION, AFTER_MLP, DecoderLayer, PoolModel
from specsot.models.load.weights import SINGLE, load_target

BOS, EOS, PAD = 1, 2, 3  # id 0 is an ordinary token here, and a likely one
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
BOOST = 1.0  # spread of the likely tokens' logits
PUSHED_DOWN = 20.0
OWN_KEYS: dict[str, dict[str, Any]] = {  # of families
    "mistral": {"sliding_window": None},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3_text": {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 100.0,
    },
}
STEPS = (1, 3)  # a token's successors lie so far on in the cycle of likely tokens: no short loops


def write_tiny_target(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    restrict: int = 20,
    layers: int = 8,
    hidden: int = 32,
    vocab: int = 130,
    max_positions: int = 1024,
    context: float = 1.0,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors (float32), the same for the same arguments.

    restrict: how many tokens are likely; ids 0, EOS and PAD are among them.
    context: how much the layers add to the embedding.
    extra: further keys of config.json, e.g. `sliding_window` or `rope_scaling`."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = _target_json(family, layers, hidden, vocab, max_positions) | dict(extra or {})
    write_json(folder / "config.json", raw)
    decoder = Decoder(decoder_config(folder))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, view in decoder.published().items():
            view.copy_(_target_weight(name, view, draw, context / layers**0.5))
        gain = 0.7 * context / layers**0.5
        gain *= hidden**0.5 if decoder.config.scaled_embedding else 1.0
        for layer in decoder.stack if decoder.config.norms != "before" else ():
            for place in (AFTER_ATTENTION, AFTER_MLP):  # what o and down add is of size 1 there
                getattr(layer, layer.norm_names[place]).weight.mul_(gain)
        for name, view in decoder.published().items() if decoder.config.centred_norms else ():
            if name.endswith("norm.weight"):
                view.sub_(1.0)
        _restrict_(decoder.lm_head.weight, decoder.embed, restrict, draw)
    save(folder, decoder.published())
    return folder


def _target_json(
    family: str, layers: int, hidden: int, vocab: int, max_positions: int
) -> dict[str, Any]:
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    } | OWN_KEYS.get(family, {})


def _target_weight(name: str, like: Tensor, draw: torch.Generator, gain: float) -> Tensor:
    noise = torch.randn(like.shape, generator=draw)
    if like.ndim == 1:
        return noise.mul(0.1).add(0.0 if name.endswith("bias") else 1.0)
    if "embed" in name:
        noise[:, 0] = 1.0
        return noise
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        noise[0] = 0.0
        noise *= gain
    return noise.div(like.shape[1] ** 0.5)


def likely_ids(head_VH: Tensor) -> Tensor:
    """The ids that `_restrict_` left likely, increasing."""
    return torch.nonzero(head_VH[:, 0] == 0).flatten()


def _restrict_(head_VH: Tensor, embed_VH: Tensor, count: int, draw: torch.Generator) -> None:
    vocab = head_VH.shape[0]
    others = torch.randperm(vocab - 4, generator=draw)[: count - 3] + 4
    likely = torch.cat((torch.tensor([0, EOS, PAD]), others))
    likely = likely[torch.randperm(count, generator=draw)]
    rows = 0.3 * torch.randn(count, head_VH.shape[1], generator=draw)
    for step in STEPS:
        rows += embed_VH[likely.roll(step)]
    rows[:, 0] = 0.0
    head_VH.zero_()
    head_VH[:, 0] = -PUSHED_DOWN
    head_VH[likely] = rows * BOOST


def write_tiny_eagle3(
    folder: Path,
    target_folder: Path,
    seed: int = 0,
    *,
    draft_vocab: int = 32,
    feature: float = 0.3,
    noise: float = 0.05,
) -> Path:
    """An EAGLE-3 drafter, in EAGLE's layout. draft_vocab: size of its vocabulary, the likely tokens
    first among them. feature: weight of the target's last tap beside the new token's embedding.
    noise: what is added to all weights; more of it lowers acceptance."""
    target = load_target(target_folder)
    config = Eagle3Config(
        **_shape(folder, target.config),
        draft_vocab_size=draft_vocab,
        target_hidden_size=target.hidden_size,
        taps=default_taps(target.num_layers),
    )
    drafter = Eagle3(config)
    return _write(folder, drafter, seed, noise, lambda draw: _aim_(drafter, target, feature, draw))


def _shape(folder: Path, target: DecoderConfig) -> dict[str, Any]:
    """What the configurations of all drafters have in common; heads of 16."""
    hidden = target.hidden_size
    return {
        "path": folder / "config.json",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "heads": hidden // 16,
        "kv_heads": hidden // 16,
        "head_dim": 16,
        "eps": target.eps,
        "rope": RopeConfig("default", 10000.0, {}, target.rope.trained),
    }


@torch.no_grad()
def _write(folder: Path, drafter: Any, seed: int, noise: float, aim: Callable[..., None]) -> Path:
    """Write a drafter of small random numbers, then aimed at its target."""
    draw = torch.Generator().manual_seed(seed)
    for view in drawn(drafter):
        view.copy_(torch.randn(view.shape, generator=draw) * noise)
    aim(draw)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", drafter.config.to_json())
    save(folder, drafter.published())
    return folder


def _aim_(drafter: Eagle3, target: Decoder, feature: float, draw: torch.Generator) -> None:
    """Each row attends to itself, adds its embedding to the feature, and asks the target's head."""
    hidden = target.hidden_size
    drafter.fc.weight[:, -hidden:] += feature * torch.eye(hidden)
    for norm in (drafter.midlayer.input_layernorm, drafter.midlayer.hidden_norm):
        norm.weight.add_(1.0)
    drafter.midlayer.post_attention_layernorm.weight.add_(1.0)
    drafter.norm.weight.add_(target.norm.weight + target.config.centred_norms)
    attend_to_itself_(drafter.midlayer, hidden, draw)
    likely = likely_ids(target.lm_head.weight)
    rest = torch.tensor([i for i in range(target.vocab_size) if i not in likely.tolist()])
    known = torch.cat((likely, rest))[: drafter.config.draft_vocab_size].sort().values
    drafter.lm_head.weight.copy_(target.lm_head.weight[known])
    drafter.d2t.copy_(known - torch.arange(len(known)))
    drafter.t2d.zero_()[known] = True


# Within a layer, in the order in which their numbers are drawn.
PARTS = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
PARTS += ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PARTS += ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def drawn(drafter: PoolModel) -> list[Tensor]:
    """Views of all parameters of a drafter, borrowed ones too, in an order of their own."""
    views = PoolModel.published(drafter)
    ranks: dict[str, tuple[int, int]] = {}
    for at, name in enumerate(views):
        part = next((i for i, part in enumerate(PARTS) if f".{part}." in name), None)
        prefix = name if part is None else name.partition(f".{PARTS[part]}.")[0]
        first = next(i for i, other in enumerate(views) if other.startswith(prefix))
        ranks[name] = (first if part is not None else at, -1 if part is None else part)
    return [views[name] for name in sorted(views, key=ranks.__getitem__)]


def attend_to_itself_(layer: DecoderLayer, hidden: int, draw: torch.Generator) -> None:
    """Each row sees mostly itself, and passes on the first `hidden` numbers of its input."""
    one = torch.eye(hidden)
    focus, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=draw))
    views = layer.published()
    for name in "qk":
        views[f"self_attn.{name}_proj.weight"][:, :hidden] += 3.0 * focus
    views["self_attn.v_proj.weight"][:, :hidden] += one
    views["self_attn.o_proj.weight"].add_(one)


def write_tiny_tokenizer(folder: Path, vocab: int = 130) -> Path:
    """A word-level tokenizer beside a tiny model: id i is the word `wi`, split at spaces."""
    special = dict(zip((BOS, EOS, PAD), SPECIAL.values(), strict=True))
    words = {special.get(i, f"w{i}"): i for i in range(vocab)}
    added = [
        {"id": i, "content": content, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, content in special.items()
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"tokenizer_class": "PreTrainedTokenizerFast"} | SPECIAL
    write_json(folder / "tokenizer_config.json", names)
    return folder


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    stored = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tiny_eagle(
    folder: Path,
    target_folder: Path,
    seed: int = 0,
    *,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    feature: float = 0.2,
    noise: float = 0.05,
) -> Path:
    """An EAGLE or EAGLE-2 drafter; settings as for `write_tiny_eagle3`."""
    target = load_target(target_folder)
    more = {"taps": (target.num_layers,), "fc_bias": fc_bias, "qkv_bias": qkv_bias}
    drafter = Eagle(EagleConfig(**_shape(folder, target.config), **more))
    drafter.owned = frozenset({EMBEDDING})  # published files hold a copy of the target's
    hidden = target.hidden_size

    def aim(draw: torch.Generator) -> None:
        drafter.embed_tokens.weight.copy_(target.embed)
        drafter.fc.weight[:, :hidden] += torch.eye(hidden)
        drafter.fc.weight[:, hidden:] += feature * torch.eye(hidden)
        drafter.layer.post_attention_layernorm.weight.add_(1.0)
        attend_to_itself_(drafter.layer, hidden, draw)

    return _write(folder, drafter, seed, noise, aim)


@torch.no_grad()
def write_tiny_medusa(
    folder: Path,
    target_folder: Path,
    seed: int = 0,
    *,
    heads: int = 3,
    blocks: int = 1,
    noise: float = 0.05,
) -> Path:
    """Heads of Medusa, each the target's head after the likeliest steps; noise: as above."""
    target = load_target(target_folder)
    draw = torch.Generator().manual_seed(seed)
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    config = MedusaConfig(path=folder / "config.json", heads=heads, blocks=blocks, **sizes)
    drafter = Medusa(config, (target.num_layers,))
    for view in drafter.published().values():
        view.copy_(torch.randn(view.shape, generator=draw) * noise)
    ids_L, step_LL = _steps(target)
    head_VH = target.lm_head.weight.clone()
    for name, view in drafter.published().items():
        if "linear" not in name:
            head_VH[ids_L] = step_LL.t() @ head_VH[ids_L]
            view.add_(head_VH)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config.to_json())
    save(folder, drafter.published())
    return folder


def write_tiny_mtp(
    folder: Path,
    target_folder: Path,
    seed: int = 0,
    *,
    feature: float = 0.2,
    noise: float = 0.05,
) -> Path:
    """A copy of a target with an MTP layer; settings as for `write_tiny_eagle3`."""
    shutil.copytree(target_folder, folder)
    target = load_target(target_folder)
    drafter = Mtp(mtp_config(target.config))
    draw = torch.Generator().manual_seed(seed)
    eye = torch.eye(target.hidden_size)
    with torch.no_grad():
        for name, view in drafter.published().items():
            view.copy_(torch.randn(view.shape, generator=draw) * noise)
            view.add_(1.0 if name.endswith("norm.weight") else 0.0)
        drafter.fc.weight.add_(torch.cat((feature * eye, eye), -1))
        drafter.final_layernorm.weight.copy_(target.norm.weight + target.config.centred_norms)
    save(folder, {**load_file(folder / SINGLE), **drafter.published()})
    return folder


def _steps(target: Decoder) -> tuple[Tensor, Tensor]:
    """The likely ids, and the chance of each after each of them, by its embedding alone."""
    ids_L = likely_ids(target.lm_head.weight)
    normed_LH = target.normalise(target.embed[ids_L], target.norm.weight, target.norm.eps)
    return ids_L, F.linear(normed_LH, target.lm_head.weight[ids_L]).softmax(-1)


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
    """A DFlash drafter. layers: all but the first add noise only. window: the first layer is a
    sliding one. noise: as for `write_tiny_eagle3`."""
    target = load_target(target_folder)
    likely = set(likely_ids(target.lm_head.weight).tolist())
    heads = {"heads": block_size - 1, "kv_heads": block_size - 1, "head_dim": target.hidden_size}
    config = DFlashConfig(
        **_shape(folder, target.config) | heads,
        reaches=(Reach(window, window is not None), *(Reach() for _ in range(layers - 1))),
        layer_ids=(0, target.num_layers // 2),
        block_size=block_size,
        mask_token_id=max(set(range(target.vocab_size)) - likely),  # hardly ever said
        target_layers=target.num_layers,
    )
    drafter = DFlashDraftModel(config, TargetEnds(target.embed, target.lm_head.weight))
    return _write(folder, drafter, seed, noise, lambda draw: _aim_dflash_(drafter, target))


def _aim_dflash_(drafter: DFlashDraftModel, target: Decoder) -> None:
    hidden = target.hidden_size
    for view in drawn(drafter):
        view.add_(1.0 if view.ndim == 1 else 0.0)
    drafter.fc.weight[:, :hidden] += torch.eye(hidden)
    drafter.hidden_norm.weight.mul_(FAINT)
    drafter.norm.weight.copy_(target.norm.weight + target.config.centred_norms)
    views, maps_dHH = drafter.stack[0].published(), _maps(drafter, target)
    _look_back_(views, drafter.frequencies_RF[0], len(maps_dHH))
    views["self_attn.v_proj.weight"].add_(maps_dHH.flatten(0, 1))
    views["self_attn.o_proj.weight"].add_(LOUD * torch.eye(hidden).repeat(1, len(maps_dHH)))


def _look_back_(views: Mapping[str, Tensor], frequencies: Tensor, heads: int) -> None:
    """Head d - 1 attends to the position d back. Its queries and keys are constant, read from the
    residual stream's constant first dimension; the queries are turned back by d positions."""
    angles_dF = torch.arange(1, heads + 1)[:, None] * frequencies
    query_dD = torch.cat((angles_dF.cos(), -angles_dF.sin()), -1)
    key_dD = torch.cat((torch.ones_like(angles_dF), torch.zeros_like(angles_dF)), -1)
    views["self_attn.q_proj.weight"][:, 0] += query_dD.flatten()
    views["self_attn.k_proj.weight"][:, 0] += key_dD.flatten()
    views["self_attn.q_norm.weight"].mul_(SHARP)
    views["self_attn.k_norm.weight"].mul_(SHARP)


def _maps(drafter: DFlashDraftModel, target: Decoder) -> Tensor:
    """[block - 1, H, H]: the map of each distance takes a token's embedding to the mixture of what
    stands one token before that distance (the head does the last step), and the mask's to zero."""
    ids_L, step_LL = _steps(target)
    token_LH, mask_H = target.embed[ids_L], target.embed[drafter.mask_token_id]
    size = token_LH.shape[-1:]
    known_LH = F.rms_norm(torch.cat((token_LH, mask_H[None])), size)
    solve_HL = torch.linalg.pinv(known_LH)
    later_LH, found = token_LH, []
    for _ in range(drafter.block_size - 1):
        wanted_LH = torch.cat((later_LH, torch.zeros_like(mask_H)[None]))
        found.append((solve_HL @ wanted_LH).t())
        later_LH = step_LL @ later_LH
    return torch.stack(found)


WEIGHTS = "model.safetensors"
Spoil = Callable[[Path], object]


def edit(folder: Path, inner: dict[str, object] | None = None, **changes: object) -> None:
    """Other values in config.json, and of `dflash_config` inside it; None drops a key."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    if inner is not None:
        merged = raw["dflash_config"] | inner
        raw["dflash_config"] = {k: v for k, v in merged.items() if v is not None}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def config(**changes: Any) -> Spoil:
    """`edit` with these changes."""
    return lambda folder: edit(folder, **changes)


def one(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(value))


class Evil:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.path, "run")


def pickled(name: str) -> Spoil:
    """Weights in a file of that name, which would leave a file `executed`."""

    def build(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Evil(folder.parent / "executed")))

    return build


def change(folder: Path, update: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the mapping of names to tensors in place."""
    tensors = load_file(folder / WEIGHTS)
    update(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)


def put(name: str, value: Tensor | Callable[[Tensor], Tensor]) -> Spoil:
    """Replace or add one tensor, or make it from the old one."""

    def update(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value if isinstance(value, Tensor) else value(tensors[name])

    return lambda folder: change(folder, update)


def drop(*names: str) -> Spoil:
    return lambda folder: change(folder, lambda tensors: [tensors.pop(name) for name in names])


def as_speculators(folder: Path, target: Decoder) -> Path:
    """A DFlash drafter of z-lab's layout in that of speculators."""
    raw = json.loads((folder / "config.json").read_text())
    inner = raw.pop("dflash_config")
    layer = {k: v for k, v in raw.items() if k not in ("block_size", "num_target_layers")}
    outer = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "draft_vocab_size": 128,
        "block_size": 8,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "sample_from_anchor": False,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    head = target.lm_head.weight.data.bfloat16()
    copies = {"embed_tokens.weight": target.embed.data.bfloat16(), "lm_head.weight": head}
    change(folder, lambda tensors: tensors.update(copies))
    return folder
