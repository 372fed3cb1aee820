"""Prompts with cached chunks through a decoder, and the vectors of golden/cacheblend."""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.decoders import CASES, LAYERS, SHAPE, save
from helpers.sequences import Pooled
from specsot.models import decoder, layers
from specsot.models.decoder import Decoder
from specsot.models.load.weights import load_target
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.blend import Blend, BlendRows, ChunkKV, RowRole, join
from specsot.ops.forward import TargetOutput
from specsot.ops.layer_plan import BlendSettings, LayerPlan, compile_layer_plan, decode_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "cacheblend"
LIMIT = {torch.float64: 1e-9, torch.float32: 5e-5}


def blend(**changes: Any) -> BlendSettings:
    """Settings with `plan: blend` and no smallest number of rows."""
    return BlendSettings(**{"plan": "blend", "min_tokens": 0} | changes)


@dataclass(frozen=True)
class Vectors:
    """One file of vectors and its model."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    model: Decoder
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Tensor:
        value = self.tensors[name]
        return value.to(self.dtype) if value.is_floating_point() else value

    @property
    def cache(self) -> ChunkKV:
        return ChunkKV(self["cache.k_pre"], self["cache.v"])

    @property
    def chunk_rows(self) -> list[Tensor]:
        return list(torch.arange(sum(self.meta["chunk_lens"])).split(self.meta["chunk_lens"]))


def read(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(
        GOLDEN / f"{name}.safetensors"
    )


def target(name: str, folder: Path, dtype: torch.dtype, window: int = 0) -> Decoder:
    """The model of the vectors, `llama` or `qwen3`."""
    meta, tensors = read(name)
    c = meta["config"]
    raw = {
        "model_type": name,
        "vocab_size": c["vocab"],
        "hidden_size": c["hidden"],
        "intermediate_size": c["intermediate"],
        "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"],
        "head_dim": c["head_dim"],
        "rope_theta": c["rope_theta"],
        "rms_norm_eps": c["rms_eps"],
        "max_position_embeddings": 256,
    }
    if window:
        raw |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    weights = {n[2:]: v for n, v in tensors.items() if n.startswith("w.")}
    save_file(weights, folder / "model.safetensors")
    model = load_target(folder, dtype)
    if dtype == torch.float64:  # the vectors' tables are float64 too
        exponents = torch.arange(0, model.head_dim, 2, dtype=dtype) / model.head_dim
        model.frequencies_RF = c["rope_theta"] ** -exponents[None]
    return model


def wide_norm(patch: pytest.MonkeyPatch) -> None:
    """RMSNorm in the dtype of its argument, as the vectors have it."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    for kind in (decoder.Decoder, layers.DecoderLayer):
        patch.setattr(kind, "normalise", staticmethod(norm))
    patch.setattr(layers, "rms_norm", norm)


def one_prompt(
    rows: int, suffix: int, protected: int = 0, chunks: Tensor | None = None
) -> BlendRows:
    """Protected rows, reused rows and the suffix of one sequence."""
    role = np.full((1, rows), RowRole.REUSED, np.int32)
    role[:, :protected] = RowRole.PROTECTED
    role[:, rows - suffix :] = RowRole.SUFFIX
    zero = np.zeros((1, rows), np.int32)
    chunk = zero.copy()
    if chunks is not None:
        chunk[0, : len(chunks)] = chunks.numpy()
    return BlendRows(role, zero, zero, chunk)


class Sequence(Pooled):
    """One sequence in a pool, its rows at shuffled slots; causal unless `allow` says otherwise."""

    def __init__(
        self,
        model: Decoder,
        ids: Tensor,
        positions: Tensor | None = None,
        allow: Tensor | None = None,
        seed: int = 3,
        spare: int = 16,
    ) -> None:
        self.ids, self.rows, self.allow = ids, len(ids), allow
        self.positions = torch.arange(self.rows) if positions is None else positions
        slots = torch.randperm(self.rows + spare, generator=torch.Generator().manual_seed(seed))
        super().__init__(model, slots, model.embed.dtype)

    def visible(self, first: int, last: int) -> AttentionPlan:
        """What rows first .. last - 1 see of rows 0 .. last - 1."""
        positions = torch.full((1, self.kv.capacity), 10**6)
        allow = torch.zeros(1, last - first, self.kv.capacity, dtype=torch.bool)
        more = torch.arange(max(last - self.rows, 0)) + self.positions.max() + 1
        place = torch.cat((self.positions, more))[:last]
        positions[0, self.slots[:last]] = place
        seen = place[None] <= place[first:, None]
        if self.allow is not None:
            seen = self.allow[first:last, :last]
        allow[0, :, self.slots[:last]] = seen
        return AttentionPlan.dense(allow, positions)

    def forward(
        self,
        plan: LayerPlan,
        blend: Blend | None = None,
        taps: tuple[int, ...] = (),
        part: slice = slice(None),
    ) -> TargetOutput:
        """All rows, or a part of them, and all their logits."""
        first, last, _ = part.indices(self.rows)
        return self.run(
            self.ids[part],
            first,
            self.visible(first, last),
            positions=self.positions[part],
            plan=plan,
            taps=taps,
            blend=blend,
        )

    def full(self, taps: tuple[int, ...] = ()) -> TargetOutput:
        return self.forward(decode_plan(self.model.num_layers), taps=taps)

    def blended(
        self, rows: BlendRows, cached: ChunkKV, settings: BlendSettings, taps: tuple[int, ...] = ()
    ) -> TargetOutput:
        plan = compile_layer_plan(settings, self.model.num_layers)
        return self.forward(plan, Blend.of(rows, cached, settings), taps)

    def held(self) -> tuple[Tensor, Tensor]:
        """K and V in the pool, each [layers, rows, kv_heads, head_dim]."""
        held = self.kv.data[:, :, :, self.slots[: self.rows]].transpose(2, 3)
        return held[:, 0], held[:, 1]

    def greedy(self, logits_V: Tensor, count: int) -> list[int]:
        """`count` tokens, the first by these logits, decoded one by one on what the pool holds."""
        found = [int(logits_V.argmax())]
        while len(found) < count:
            row = self.rows + len(found) - 1
            out = self.run(torch.tensor(found[-1:]), row, self.visible(row, row + 1))
            found.append(int(out.logits_RV.argmax()))
        return found


def near(ours: Tensor, theirs: Tensor, dtype: torch.dtype | None = None) -> None:
    assert ours.shape == theirs.shape
    assert not ours.isnan().any()
    assert (ours - theirs).abs().max() <= LIMIT[dtype or ours.dtype]


BOS, FIRST, SUFFIX = 1, 4, 5
SIZES = (9, 6, 7)
REUSE = BlendSettings(plan="reuse")
TAPS = tuple(range(LAYERS + 1))


@dataclass(frozen=True)
class Case:
    """A model, a prompt of chunks for it, and what its store holds."""

    model: Decoder
    chunks: list[list[int]]
    cached: ChunkKV

    @property
    def ids(self) -> Tensor:
        return torch.tensor([*chain(*self.chunks), 3, 9, 27, 20, 60])

    @property
    def rows(self) -> BlendRows:
        return one_prompt(len(self.ids), SUFFIX)

    def prompt(self) -> Sequence:
        return Sequence(self.model, self.ids)

    def blended(self, settings: BlendSettings, taps: tuple[int, ...] = ()) -> "Ran":
        prompt = self.prompt()
        return Ran(prompt, prompt.blended(self.rows, self.cached, settings, taps))

    def full(self, taps: tuple[int, ...] = ()) -> "Ran":
        prompt = self.prompt()
        return Ran(prompt, prompt.full(taps))


@dataclass(frozen=True)
class Ran:
    prompt: Sequence
    out: TargetOutput

    @property
    def kv(self) -> Tensor:
        return torch.stack(self.prompt.held())

    def picked(self, layer: int = 1) -> list[int]:
        assert self.out.blend is not None
        return [int(row) for row in self.out.blend.picked[layer]]


def ids_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(SHAPE["vocab_size"], (count,), generator=generator)]


def made(folder: Path, kind: str, dtype: torch.dtype, taps: tuple[int, ...] = ()) -> Case:
    save(folder, *CASES[kind])
    model = load_target(folder, dtype)
    chunks = [ids_of(size, number) for number, size in enumerate((FIRST, *SIZES))]
    with torch.inference_mode():
        parts = [model.collect(chunks[0], None, taps)]
        parts += [model.collect(chunk, BOS, taps) for chunk in chunks[1:]]
    return Case(model, chunks, join(parts))
