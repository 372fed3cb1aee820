"""Segments of KV rows: each goes on where its parent ends, and sees what is on its way to the root.

A request's prefix is a segment, each of its branches one behind it; a hypothesis of a beam search
is a chain of them. A fork is a new segment: 0 bytes. What was kept of earlier requests stands in
front of a prefix as its parent. A branch that combines others reads them beside its path.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from ..ops.attention.metadata import Visibility
from ..ops.kv.slots import NOBODY


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
        # what rounds ask for again and again, until the tree changes
        self._seen: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._told: tuple[tuple[int, ...], Visibility] | None = None

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
        self._change_()
        self._parent[segment] = parent

    def read(self, segment: int, others: Sequence[int]) -> None:
        """A segment sees these others, which do not lie on its path, where they are: 0 bytes."""
        self._change_()
        self._reads[segment] = tuple(others)

    def insert(self, segment: int) -> int:
        """A new segment, its own home, between a segment and its parent."""
        self._change_()
        above = self.add()
        self._parent[above] = self._parent[segment]
        self._parent[segment] = above
        return above

    def settle(self, segment: int) -> None:
        """A segment becomes its own home."""
        self._change_()
        self._home[segment] = segment

    def remove(self, segments: Iterable[int]) -> None:
        """Forget segments that nobody goes on from; unknown ones are ignored."""
        self._change_()
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

    def lineage(self, segment: int) -> tuple[int, ...]:
        """All whose rows it sees: its path, and what it reads beside it."""
        return self._sight(segment)[0]

    def home(self, segment: int) -> int:
        return self._home[segment]

    def homes(self, segment: int) -> tuple[int, ...]:
        """Where everything lies that a row of this segment may see, its own home first."""
        return self._sight(segment)[1]

    def _sight(self, segment: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its lineage and its homes, which every round asks for several times."""
        if (known := self._seen.get(segment)) is None:
            lineage = (*self.path(segment), *self._reads.get(segment, ()))
            homes = tuple(dict.fromkeys(self._home[one] for one in lineage))
            known = self._seen[segment] = lineage, homes
        return known

    def lineages(self, segments: Sequence[int]) -> Visibility:
        """What attention has to know of these segments."""
        asked = tuple(segments)
        if self._told is not None and self._told[0] == asked:
            return self._told[1]
        sights = [self._sight(segment) for segment in segments]
        most = max((len(path) for path, _ in sights), default=1)
        paths = [[*path, *[NOBODY] * (most - len(path))] for path, _ in sights]
        path_SA = np.array(paths, np.int32).reshape(len(paths), most)
        homes = tuple(homes for _, homes in sights)
        told = Visibility(np.array(segments, np.int32), path_SA, homes)
        self._told = asked, told
        return told

    def _change_(self) -> None:
        """The tree is about to be another one."""
        self._seen.clear()
        self._told = None
