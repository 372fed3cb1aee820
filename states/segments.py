"""The tree of segments: which rows of the KV pools follow which.

A segment is a run of rows with consecutive positions. A request's prefix is a segment, each of its
branches is a child of it; a hypothesis of a beam search is a chain of segments. Cached rows of
earlier requests are ancestors of a prefix. A row sees the segments on its path to the root. A fork
is a new child: 0 bytes. A branch that combines others reads them in addition to its path.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from ..ops.attention.metadata import Visibility
from ..ops.kv.slots import NOBODY


class SegmentTree:
    """Parents and homes of segments; ids are never reused.

    Segments with the same home take slots next to each other, so attention can read them as one
    contiguous run. A root is its own home and the home of its descendants.

    Args:
        separate_homes: every segment is its own home (the layout ``paged``).
    """

    def __init__(self, *, separate_homes: bool = False) -> None:
        self.separate_homes = separate_homes
        self._ids = count()
        self._parent: dict[int, int] = {}
        self._home: dict[int, int] = {}
        self._reads: dict[int, tuple[int, ...]] = {}
        # Lineage and homes by segment, and the last Visibility: valid until the tree changes.
        self._visible: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._last_lineages: tuple[tuple[int, ...], Visibility] | None = None

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, segment: int) -> bool:
        return segment in self._parent

    def add(self, parent: int = NOBODY) -> int:
        """Add a child of `parent`, or a root."""
        segment = next(self._ids)
        self._parent[segment] = parent
        is_home = self.separate_homes or parent == NOBODY
        self._home[segment] = segment if is_home else self._home[parent]
        return segment

    def set_parent(self, segment: int, parent: int) -> None:
        """Move a segment below another parent; its home stays."""
        self._invalidate_()
        self._parent[segment] = parent

    def set_reads(self, segment: int, others: Sequence[int]) -> None:
        """Let a segment attend to segments that are not on its path, in place: 0 bytes."""
        self._invalidate_()
        self._reads[segment] = tuple(others)

    def insert_above(self, segment: int) -> int:
        """Insert a new segment, its own home, between a segment and its parent."""
        self._invalidate_()
        above = self.add()
        self._parent[above] = self._parent[segment]
        self._parent[segment] = above
        return above

    def make_home(self, segment: int) -> None:
        """Make a segment its own home."""
        self._invalidate_()
        self._home[segment] = segment

    def remove(self, segments: Iterable[int]) -> None:
        """Remove segments without children; unknown ones are ignored."""
        self._invalidate_()
        for segment in segments:
            self._parent.pop(segment, None)
            self._home.pop(segment, None)
            self._reads.pop(segment, None)

    def merge_into_parent(self, segment: int, parent: int) -> None:
        """Remove a segment whose rows joined its parent; its children become the parent's."""
        self.remove([segment])
        for child, above in self._parent.items():
            if above == segment:
                self._parent[child] = parent

    def parent(self, segment: int) -> int:
        """The parent of a segment; NOBODY for a root."""
        return self._parent[segment]

    def path(self, segment: int) -> list[int]:
        """The segment, its parent, and so on up to the root."""
        path = [segment]
        while (parent := self._parent[path[-1]]) != NOBODY:
            path.append(parent)
        return path

    def lineage(self, segment: int) -> tuple[int, ...]:
        """All segments whose rows it sees: its path, and what it reads in addition."""
        return self._visible_from(segment)[0]

    def home(self, segment: int) -> int:
        return self._home[segment]

    def homes(self, segment: int) -> tuple[int, ...]:
        """The homes of all segments that it sees, its own home first."""
        return self._visible_from(segment)[1]

    def _visible_from(self, segment: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if (visible := self._visible.get(segment)) is None:
            lineage = (*self.path(segment), *self._reads.get(segment, ()))
            homes = tuple(dict.fromkeys(self._home[member] for member in lineage))
            visible = self._visible[segment] = lineage, homes
        return visible

    def lineages(self, segments: Sequence[int]) -> Visibility:
        """The lineages of these segments as arrays for the attention backend."""
        key = tuple(segments)
        if self._last_lineages is not None and self._last_lineages[0] == key:
            return self._last_lineages[1]
        visible = [self._visible_from(segment) for segment in segments]
        width = max((len(path) for path, _ in visible), default=1)
        paths = [[*path, *[NOBODY] * (width - len(path))] for path, _ in visible]
        path_SA = np.array(paths, np.int32).reshape(len(paths), width)
        homes = tuple(homes for _, homes in visible)
        lineages = Visibility(np.array(segments, np.int32), path_SA, homes)
        self._last_lineages = key, lineages
        return lineages

    def _invalidate_(self) -> None:
        self._visible.clear()
        self._last_lineages = None
