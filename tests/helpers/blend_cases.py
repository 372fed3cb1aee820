"""Models of every kind with a prompt of chunks that their store holds."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from helpers.decoders import CASES, LAYERS, SHAPE, save
from specsot.models.decoder import Decoder
from specsot.models.load.weights import load_target
from specsot.ops.blend import BlendRows, ChunkKV, join
from specsot.ops.forward import TargetOutput
from specsot.ops.layer_plan import BlendSettings

from .blends import Sequence, one_prompt

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
