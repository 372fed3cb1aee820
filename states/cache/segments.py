"""Segments of KV rows: each goes on where its parent ends, and sees what is on its way to the root.

A request's prefix is a segment, each of its branches one behind it; a hypothesis of a beam search
is a chain of them. A fork is a new segment: 0 bytes. What was kept of earlier requests stands in
front of a prefix as its parent. A branch that combines others reads them beside its path.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from ...ops.attention.stacks import Lineages
from ...ops.kv.slots import NOBODY


class SegmentTree:
    """Which segment goes on behind which; ids are never used twice.

    Every segment has a home: segments of one home take slots near each other, and whoever reads one
    of them reads the run that holds all. A root is its own home, and that of what is added behind.

    Args:
        apart: every segment is its own home (the layout ``paged``).
    """

    def __init__(self, *, apart: bool = False) -> None:
        self.apart = apart
        self._ids = count()
        self._parent: dict[int, int] = {}
        self._home: dict[int, int] = {}
        self._reads: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, segment: int) -> bool:
        return segment in self._parent

    def add(self, parent: int = NOBODY) -> int:
        """A new segment behind `parent`, or a root."""
        segment = next(self._ids)
        self._parent[segment] = parent
        own = self.apart or parent == NOBODY
        self._home[segment] = segment if own else self._home[parent]
        return segment

    def hang(self, segment: int, parent: int) -> None:
        """A segment goes on behind another one from now on; its home stays."""
        self._parent[segment] = parent

    def read(self, segment: int, others: Sequence[int]) -> None:
        """A segment sees these others, which do not lie on its path, where they are: 0 bytes."""
        self._reads[segment] = tuple(others)

    def insert(self, segment: int) -> int:
        """A new segment, its own home, between a segment and its parent."""
        above = self.add()
        self._parent[above], self._parent[segment] = self._parent[segment], above
        return above

    def settle(self, segment: int) -> None:
        """A segment becomes its own home."""
        self._home[segment] = segment

    def remove(self, segments: Iterable[int]) -> None:
        """Forget segments that nobody goes on from; unknown ones are ignored."""
        for segment in segments:
            self._parent.pop(segment, None)
            self._home.pop(segment, None)
            self._reads.pop(segment, None)

    def absorb(self, segment: int, into: int) -> None:
        """A segment becomes a part of the one that it goes on from."""
        self.remove([segment])
        for child, parent in self._parent.items():
            if parent == segment:
                self._parent[child] = into

    def parent(self, segment: int) -> int:
        """What a segment goes on behind; NOBODY of a root."""
        return self._parent[segment]

    def path(self, segment: int) -> list[int]:
        """The segment, its parent, and so on up to its root."""
        path = [segment]
        while (parent := self._parent[path[-1]]) != NOBODY:
            path.append(parent)
        return path

    def lineage(self, segment: int) -> list[int]:
        """All whose rows it sees: its path, and what it reads beside it."""
        return [*self.path(segment), *self._reads.get(segment, ())]

    def home(self, segment: int) -> int:
        return self._home[segment]

    def homes(self, segment: int) -> tuple[int, ...]:
        """Where everything lies that a row of this segment may see, its own home first."""
        return tuple(dict.fromkeys(self._home[one] for one in self.lineage(segment)))

    def lineages(self, segments: Sequence[int]) -> Lineages:
        """What attention has to know of these segments."""
        paths = [self.lineage(segment) for segment in segments]
        path_SA = np.full((len(paths), max(map(len, paths), default=1)), NOBODY, np.int32)
        for row, path in zip(path_SA, paths, strict=True):
            row[: len(path)] = path
        homes = tuple(self.homes(segment) for segment in segments)
        return Lineages(np.asarray(segments, np.int32), path_SA, homes)
