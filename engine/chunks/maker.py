"""Chunks of documents for one target and drafter: those that are not in the store are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...models.collect import collect
from ...models.decoder import Decoder
from ...ops.blend.blend import ChunkKV
from ...states.text.documents import leading_id
from .files import ChunkKey
from .store import ChunkStore

if TYPE_CHECKING:
    from ..models import Models


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
        return ChunkKey(self.model_hash, dtype, self.bos, self.taps, tuple(token_ids))

    def chunk(self, token_ids: Sequence[int], name: str = "") -> tuple[ChunkKV, bool]:
        """The chunk of these ids, not to be written to, and whether it was made just now.

        Raises:
            ModelError: it is longer than the model's sequences.
        """
        key = self.key(token_ids)
        if (found := self.store.get(key)) is not None:
            return found, False
        with torch.no_grad():
            made = collect(self.target, token_ids, self.bos, self.taps)
        self.store.put(key, made, name)
        return made, True


def chunk_maker(store: ChunkStore, models: "Models", model_hash: str) -> ChunkMaker:
    """For the models of a session."""
    taps = tuple(getattr(models.drafter, "tap_ids", ()))
    bos = None if models.tokenizer is None else leading_id(models.tokenizer)
    return ChunkMaker(store, models.target, model_hash, bos, taps)
