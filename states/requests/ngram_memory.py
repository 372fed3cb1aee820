"""What n-gram drafting remembers of a run: the text of every branch, as an index or as counts."""

from collections.abc import Sequence
from typing import Protocol

from ...ops.draft.host_tree import HostTree
from ...ops.draft.lookup import SuffixIndex, lookup_tree
from ...ops.draft.ngram import CountTable, CountTables, Scope, count_tree
from ..graph.drafter_spec import Drafter
from ..graph.drafters import NgramDrafter
from .branch import Branch, Request


class NgramMemory(Protocol):
    """Drafts from what was committed; knows nothing that a branch has not read or written."""

    def tree(self, branch: Branch, nodes: int) -> HostTree:
        """Drafts for a branch, after everything that it has committed."""
        ...

    def observe(self, branch: Branch, fillers: Sequence[Sequence[int]]) -> None:
        """What else the target found likely in the place of each token of the last round."""
        ...

    def forget(self, request: Request) -> None:
        """A request is done."""
        ...


class LookupMemory:
    """Prompt lookup: an index of each branch's own context, extended as it grows."""

    def __init__(self, settings: NgramDrafter) -> None:
        self.settings = settings
        self.indices: dict[int, SuffixIndex] = {}

    def tree(self, branch: Branch, nodes: int) -> HostTree:
        index = self.indices.get(branch.owner)
        if index is None:
            index = self.indices[branch.owner] = SuffixIndex(self.settings.longest)
        index.append_(branch.context(len(index)))
        settings = self.settings
        return lookup_tree(
            index,
            nodes=nodes,
            levels=settings.levels,
            matches=settings.width,
            stop_ids=branch.request.stop_ids,
        )

    def observe(self, branch: Branch, fillers: Sequence[Sequence[int]]) -> None:
        """The text alone is looked up."""

    def forget(self, request: Request) -> None:
        for branch in request.all_branches():
            self.indices.pop(branch.owner, None)


class CountMemory:
    """NASD: counts of what followed what, of a branch, a request or the whole run."""

    def __init__(self, settings: NgramDrafter) -> None:
        self.settings = settings
        self.shelf = CountTables(Scope(settings.scope), settings.longest + 1, 1, settings.width)
        self.counted: dict[int, int] = {}  # tokens of its context that a branch has counted
        self.fillers: dict[int, list[Sequence[int]]] = {}
        self.open: set[str] = set()

    def tree(self, branch: Branch, nodes: int) -> HostTree:
        tables, settings = self._tables(branch), self.settings
        self._learn(branch, tables[-1])
        return count_tree(
            tables,
            branch.context(branch.size - settings.longest),
            nodes=nodes,
            levels=settings.levels,
            width=settings.width,
            stop_ids=branch.request.stop_ids,
        )

    def _learn(self, branch: Branch, table: CountTable) -> None:
        """Count what the branch has committed since the last time."""
        start = self.counted[branch.owner]
        fillers = self.fillers.pop(branch.owner, [])
        missing = branch.size - start - len(fillers)  # a root token was drawn without any
        first = max(start - self.settings.longest, 0)  # contexts of what follows
        padded = [*[()] * missing, *fillers] if fillers else ()
        table.learn_(branch.context(first), start - first, padded)
        self.counted[branch.owner] = branch.size

    def _tables(self, branch: Branch) -> tuple[CountTable, ...]:
        """The prompt that all branches share is counted once, each branch's own once more."""
        request = branch.request
        if request.key not in self.open:
            self.open.add(request.key)
            self.shelf.open_(request.key, request.context)
        tables = self.shelf.tables_(request.key, branch.owner)
        if branch.owner not in self.counted:
            self.counted[branch.owner] = len(request.context)
        return tables

    def observe(self, branch: Branch, fillers: Sequence[Sequence[int]]) -> None:
        self.fillers[branch.owner] = list(fillers)

    def forget(self, request: Request) -> None:
        self.open.discard(request.key)
        self.shelf.close_(request.key)
        for branch in request.all_branches():
            self.counted.pop(branch.owner, None)
            self.fillers.pop(branch.owner, None)


def ngram_memory_of(settings: Drafter) -> NgramMemory | None:
    """The memory that a drafter needs; None for those that remember nothing here."""
    if not isinstance(settings, NgramDrafter):
        return None
    return LookupMemory(settings) if settings.method == "lookup" else CountMemory(settings)
