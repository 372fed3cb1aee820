"""Cached chunks for a run: looked up in a store, read alone first where they are missing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ...models.collect import collect
from ...models.decoder import Decoder
from ...models.files import ModelError
from ...models.load.checkpoint import model_hash
from ...ops.blend import ChunkKV
from ...ops.layer_plan import compile_layer_plan
from ...states.graph.blocks import BlendBlock
from ...states.graph.program import Program
from ...states.text.chat_format import leading_id
from ...states.text.prompt_tokens import Chunk
from ...states.yaml.codes import ProblemCode
from ...states.yaml.source import GraphError
from .files import ChunkKey
from .store import ChunkStore

if TYPE_CHECKING:
    from ..models import Models

CHUNK_BYTES = 8 << 30  # of chunks in memory and in a folder, if nobody says otherwise


@dataclass(frozen=True, slots=True)
class ChunkMaker:
    """Keys and makes chunks.

    model_hash: of the target's weights. bos: what stands before every chunk that is made.
    taps: whose features the drafter reads; empty for drafters that read text.
    """

    store: ChunkStore
    target: Decoder
    model_hash: str
    bos: int | None
    taps: tuple[int, ...]

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        dtype = str(self.target.embed.dtype).removeprefix("torch.")
        if self.target.weights != "full":
            dtype = f"{dtype}/{self.target.weights}"
        return ChunkKey(self.model_hash, dtype, self.bos, self.taps, tuple(token_ids))

    def chunk(self, token_ids: Sequence[int], name: str = "") -> tuple[ChunkKV, bool]:
        """The chunk of these ids, not to be written to, and whether it was made just now.

        Raises:
            ModelError: it is longer than the model's sequences.
        """
        key = self.key(token_ids)
        if (chunk := self.store.get(key)) is not None:
            return chunk, False
        with torch.no_grad():
            chunk = collect(self.target, token_ids, self.bos, self.taps)
        self.store.put(key, chunk, name)
        return chunk, True


def chunk_maker(store: ChunkStore, models: "Models", model_hash: str) -> ChunkMaker:
    """For the models of a session."""
    taps = tuple(getattr(models.drafter, "tap_ids", ()))
    bos = None if models.tokenizer is None else leading_id(models.tokenizer)
    return ChunkMaker(store, models.target, model_hash, bos, taps)


@dataclass(slots=True)
class ChunkLibrary:
    """A store as a run uses it, with what became of its look-ups.

    collect: whether missing chunks are read alone and kept; None is found for them otherwise.

    Attributes:
        hits, missed: look-ups of chunks that were cached, and that had to be computed in place.
        made, made_rows, made_nanos: chunks that were read alone, their tokens, and the time of it.
        made_sizes: tokens of each.
    """

    maker: ChunkMaker
    collect: bool
    hits: int = 0
    missed: int = 0
    made_nanos: int = 0
    made_sizes: list[int] = field(default_factory=list)

    def find(self, chunk: Chunk) -> ChunkKV | None:
        """K, V and features of these ids, not to be written to; None if they must be computed."""
        if not self.collect:
            cached = self.maker.store.get(self.maker.key(chunk.ids))
            self.hits += cached is not None
            self.missed += cached is None
            return cached
        begun = time.perf_counter_ns()
        try:
            cached, is_new = self.maker.chunk(chunk.ids, chunk.name)
        except ModelError:  # longer than the model's sequences: so is the prompt, which is refused
            self.missed += 1
            return None
        self.hits += not is_new
        if is_new:
            self.made_nanos += time.perf_counter_ns() - begun
            self.made_sizes.append(len(chunk.ids))
        return cached


def chunks_for(program: Program, models: "Models", store: ChunkStore | None) -> ChunkMaker | None:
    """What reads chunks of documents for a graph, by default into memory; None if it reuses none.

    Raises:
        GraphError: a check layer that the model does not have, a mask that its layers cannot use.
    """
    blend = program.graph.blend
    target = models.target
    if blend is None:
        return None
    _check_model(program, blend, target)
    drafter = models.drafter if program.graph.drafter.has_model else None
    if store is None:
        store = ChunkStore(CHUNK_BYTES, device=models.device)
    weights = "" if store.files is None else model_hash(target.config.path.parent)
    return chunk_maker(store, replace(models, drafter=drafter), weights)


def _check_model(program: Program, blend: BlendBlock, target: Any) -> None:
    source = program.source
    try:
        compile_layer_plan(blend.settings, target.num_layers)
    except ValueError:
        last = blend.check_layers[-1]
        at = ("blend", "check_layers", len(blend.check_layers) - 1)
        message = f"no layer {last}: the model's layers are 0 to {target.num_layers - 1}"
        raise GraphError([source.problem(at, message, ProblemCode.MODEL_LAYERS)]) from None
    if blend.mask == "bottom_right" and any(target.config.sliding):
        message = "bottom_right cannot be used: layers of this model have a sliding window"
        wrong = source.problem(("blend", "mask"), message, ProblemCode.MODEL_LAYERS)
        raise GraphError([wrong])
