"""Which part of a decoder each rank of a group computes, and how ranks are numbered, in integers.

A part of `size` things is cut at the multiples of size / count, rounded up. Wherever a count
divides another one, the cuts of the coarser split are cuts of the finer one too, so that a finer
part lies inside one coarser part. Parts may be uneven (3 KV heads of 2 ranks: 2 + 1) or empty.
"""

from dataclasses import replace
from typing import NamedTuple, Self

from .config import DecoderConfig


class Share(NamedTuple):
    """What a rank computes: its KV heads (with the query heads that read them), columns of the MLP
    and rows of the head."""

    kv_heads: range
    columns: range
    vocabulary: range

    @classmethod
    def of(cls, config: DecoderConfig, index: int = 0, count: int = 1) -> Self:
        """Part `index` of `count` equal ones; ValueError if there is no such part."""
        if not 0 <= index < count:
            raise ValueError(f"there is no part {index} of {count}")
        sizes = (config.kv_heads, config.intermediate_size, config.vocab_size)
        return cls(*(part(size, index, count) for size in sizes))

    def within(self, other: "Share") -> "Share | None":
        """The same, counted from where another one begins; None if it is not inside of it."""
        pairs = list(zip(self, other, strict=True))
        if any(len(a) and (a.start < b.start or a.stop > b.stop) for a, b in pairs):
            return None
        return Share(*(range(a.start - b.start, a.stop - b.start) for a, b in pairs))

    def narrowed(self, config: DecoderConfig) -> DecoderConfig:
        """A decoder's shape with the layers of this share."""
        heads = len(self.kv_heads)
        columns = len(self.columns)
        queries = heads * (config.heads // config.kv_heads)
        return replace(config, heads=queries, kv_heads=heads, intermediate_size=columns)


def part(size: int, index: int, count: int) -> range:
    """Part `index` of `count` of so many things."""
    return range(-(-index * size // count), -(-(index + 1) * size // count))


class Place(NamedTuple):
    """Where a rank stands when all ranks form groups of `tp`: its number in its group, and the
    group's ranks in order."""

    number: int
    members: range


def place(rank: int, ranks: int, tp: int) -> Place:
    """The groups take every (ranks / tp)-th rank each: what a rank computes in a group of all ranks
    is a part of what it computes in any smaller group, so regrouping moves no weight.

    Raises:
        ValueError: `tp` does not divide the number of ranks, or there is no such rank.
    """
    if tp < 1 or ranks % tp or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} in groups of {tp}: the groups must come out even")
    groups = ranks // tp
    return Place(rank // groups, range(rank % groups, ranks, groups))


def peers(rank: int, ranks: int, before: int, tp: int) -> range:
    """Whoever has, in groups of `before`, a part of what this rank computes in groups of `tp`, in
    the order of the parts: they exchange what they have when groups become smaller.

    Raises:
        ValueError: such groups are not parts of each other.
    """
    here = place(rank, ranks, before)
    there = place(rank, ranks, tp)
    if before % tp:
        raise ValueError(f"groups of {before} do not become groups of {tp}")
    parts = before // tp
    return here.members[there.number * parts : (there.number + 1) * parts]
