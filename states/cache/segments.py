"""Segments of KV rows: each goes on where its parent ends, and sees what is on its way to the root.

A request's prefix is a root, each of its branches a segment behind it; a hypothesis of a beam
search is a chain of them. A fork is a new segment: 0 bytes.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from ...ops.attention.metadata import Lineages
from ...ops.kv.slots import NOBODY


class SegmentTree:
    """Which segment goes on behind which; ids are never used twice."""

    def __init__(self) -> None:
        self._ids = count()
        self._parent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, segment: int) -> bool:
        return segment in self._parent

    def add(self, parent: int = NOBODY) -> int:
        """A new segment behind `parent`, or a root."""
        segment = next(self._ids)
        self._parent[segment] = parent
        return segment

    def remove(self, segments: Iterable[int]) -> None:
        """Forget segments that nobody goes on from; unknown ones are ignored."""
        for segment in segments:
            self._parent.pop(segment, None)

    def absorb(self, segment: int, into: int) -> None:
        """A segment becomes a part of the one that it goes on from."""
        del self._parent[segment]
        for child, parent in self._parent.items():
            if parent == segment:
                self._parent[child] = into

    def path(self, segment: int) -> list[int]:
        """The segment, its parent, and so on up to its root."""
        path = [segment]
        while (parent := self._parent[path[-1]]) != NOBODY:
            path.append(parent)
        return path

    def root(self, segment: int) -> int:
        return self.path(segment)[-1]

    def lineages(self, segments: Sequence[int]) -> Lineages:
        """What attention has to know of these segments."""
        paths = [self.path(segment) for segment in segments]
        path_SA = np.full((len(paths), max(map(len, paths), default=1)), NOBODY, np.int32)
        for row, path in zip(path_SA, paths, strict=True):
            row[: len(path)] = path
        roots = [path[-1] for path in paths]
        return Lineages(np.asarray(segments, np.int32), path_SA, np.asarray(roots, np.int32))
