"""Token ids of a prompt, with marks where chunks of documents stand in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...ops.blend import ChunkKV


@dataclass(frozen=True, slots=True)
class Chunk:
    """A document's token ids, or a part of them, where they stand in a prompt.

    at: how many ids of the prompt stand before it. name: what to call it in lists.
    kept: its rows, if they are at hand and need not be looked for; is_exact: they are what a
        forward of the prompt would compute.
    """

    at: int
    ids: tuple[int, ...]
    name: str = ""
    kept: ChunkKV | None = field(default=None, repr=False, compare=False)
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Token ids, and the chunks among them in reading order; iterates over the ids."""

    ids: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __getitem__(self, part: slice) -> tuple[int, ...]:
        return self.ids[part]

    def __add__(self, more: PromptTokens | Sequence[int]) -> PromptTokens:
        """One after the other; ids alone bring no chunks."""
        tail = more if isinstance(more, PromptTokens) else PromptTokens(tuple(more))
        moved = (replace(chunk, at=chunk.at + len(self.ids)) for chunk in tail.chunks)
        return PromptTokens(self.ids + tail.ids, (*self.chunks, *moved))

    def behind(self, count: int) -> PromptTokens:
        """What follows on the first ids, without marks of chunks; all of it if there are none."""
        return self if count <= 0 else PromptTokens(self.ids[count:])

    @classmethod
    def chunk(cls, ids: Sequence[int], name: str) -> PromptTokens:
        """A chunk and nothing else."""
        return cls(tuple(ids), (Chunk(0, tuple(ids), name),))
