"""The tree of segments: which rows of the KV pools follow which.

A segment is a run of rows with consecutive positions. A request's prefix is a segment, each of its
branches is a child of it; a hypothesis of a beam search is a chain of segments. Cached rows of
earlier requests are ancestors of a prefix. A row sees the segments on its path to the root. A fork
is a new child: 0 bytes. A branch that combines others reads them in addition to its path.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from ..ops.attention.metadata import Visibility
from ..ops.kv.slots import NOBODY

MAX_VISIBILITIES = 16  # sets of segments whose arrays are reused by later forwards

Key = TypeVar("Key")
Value = TypeVar("Value")


class ComputedDict(dict[Key, Value], Generic[Key, Value]):
    """A dict that computes a missing value once; the hot path reads the others without a call."""

    def __init__(self, compute: Callable[[Key], Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: Key) -> Value:
        value = self[key] = self._compute(key)
        return value


class SegmentTree:
    """Parents and homes of segments; ids are never reused.

    Segments with the same home take slots next to each other, so attention can read them as one
    contiguous run. A root is its own home and the home of its descendants.

    Args:
        separate_homes: every segment is its own home (the layout ``paged``).

    Attributes:
        parent: of each segment; NOBODY for a root. home: of each segment.
        lineage: all segments whose rows a segment sees: its path, and what it reads in addition.
        homes: the homes of all segments that a segment sees, its own home first.
        visibility: the lineages of some segments as arrays for the attention backend.
    """

    def __init__(self, *, separate_homes: bool = False) -> None:
        self.separate_homes = separate_homes
        self.parent: dict[int, int] = {}
        self.home: dict[int, int] = {}
        self.lineage = ComputedDict[int, tuple[int, ...]](self._lineage)
        self.homes = ComputedDict[int, tuple[int, ...]](self._homes)
        self.visibility = ComputedDict[tuple[int, ...], Visibility](self._visibility)
        self._ids = count()
        self._reads: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def __contains__(self, segment: int) -> bool:
        return segment in self.parent

    def add(self, parent: int = NOBODY) -> int:
        """Add a child of `parent`, or a root."""
        segment = next(self._ids)
        self.parent[segment] = parent
        is_home = self.separate_homes or parent == NOBODY
        self.home[segment] = segment if is_home else self.home[parent]
        return segment

    def set_parent(self, segment: int, parent: int) -> None:
        """Move a segment below another parent; its home stays."""
        self._invalidate_()
        self.parent[segment] = parent

    def set_reads(self, segment: int, others: Sequence[int]) -> None:
        """Let a segment attend to segments that are not on its path, in place: 0 bytes."""
        self._invalidate_()
        self._reads[segment] = tuple(others)

    def insert_above(self, segment: int) -> int:
        """Insert a new segment, its own home, between a segment and its parent."""
        self._invalidate_()
        above = self.add()
        self.parent[above] = self.parent[segment]
        self.parent[segment] = above
        return above

    def make_home(self, segment: int) -> None:
        """Make a segment its own home."""
        self._invalidate_()
        self.home[segment] = segment

    def remove(self, segments: Iterable[int]) -> None:
        """Remove segments without children; unknown ones are ignored."""
        self._invalidate_()
        for segment in segments:
            self.parent.pop(segment, None)
            self.home.pop(segment, None)
            self._reads.pop(segment, None)

    def merge_into_parent(self, segment: int, parent: int) -> None:
        """Remove a segment whose rows joined its parent; its children become the parent's."""
        self.remove([segment])
        for child, above in self.parent.items():
            if above == segment:
                self.parent[child] = parent

    def path(self, segment: int) -> list[int]:
        """The segment, its parent, and so on up to the root."""
        path = [segment]
        while (parent := self.parent[path[-1]]) != NOBODY:
            path.append(parent)
        return path

    def _lineage(self, segment: int) -> tuple[int, ...]:
        return (*self.path(segment), *self._reads.get(segment, ()))

    def _homes(self, segment: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.home[member] for member in self.lineage[segment]))

    def _visibility(self, segments: tuple[int, ...]) -> Visibility:
        if len(self.visibility) > MAX_VISIBILITIES:
            self.visibility.clear()
        paths = [self.lineage[segment] for segment in segments]
        path_SA = np.full((len(paths), max(map(len, paths), default=1)), NOBODY, np.int32)
        for row_A, path in zip(path_SA, paths, strict=True):
            row_A[: len(path)] = path
        homes = tuple(self.homes[segment] for segment in segments)
        return Visibility(np.array(segments, np.int32), path_SA, homes)

    def _invalidate_(self) -> None:
        self.lineage.clear()
        self.homes.clear()
        self.visibility.clear()
