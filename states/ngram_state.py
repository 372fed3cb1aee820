"""What n-gram drafting remembers: the text of every branch, as an index or as counts."""

from collections.abc import Sequence

from ..ops.draft.gamma import GammaRecord
from ..ops.draft.host_tree import HostTree
from ..ops.draft.lookup import SuffixIndex, lookup_tree
from ..ops.draft.ngram import CountTable, CountTables, Scope, count_tree
from .draft_state import DraftState
from .request import Branch, Request
from .round import RoundResult


class NgramState(DraftState):
    """Drafts from what was committed; knows nothing that a branch has not read or written.

    Attributes:
        indices: of each branch's own context, extended as it grows (prompt lookup).
        tables: counts of what followed what, of a branch, a request or the whole run (NASD), from
            the first round on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.indices: dict[int, SuffixIndex] = {}
        self.tables: CountTables | None = None
        self._counted: dict[int, int] = {}  # tokens of its context that a branch has counted
        self._fillers: dict[int, list[Sequence[int]]] = {}
        self._open: set[int] = set()

    def lookup_(
        self, branch: Branch, nodes: int, levels: int, longest: int, width: int
    ) -> HostTree:
        """Prompt lookup: what followed the last tokens of the branch before."""
        index = self.indices.setdefault(branch.owner, SuffixIndex(longest))
        index.append_(branch.context(len(index)))
        stops = branch.request.stop_ids
        return lookup_tree(index, nodes=nodes, levels=levels, matches=width, stop_ids=stops)

    def count_(
        self, branch: Branch, nodes: int, levels: int, longest: int, width: int, scope: str
    ) -> HostTree:
        """NASD: what mostly followed, by the counts of this scope."""
        if self.tables is None:
            self.tables = CountTables(Scope(scope), longest + 1, 1, width)
        tables = self._tables_(branch, self.tables)
        self._count_committed_(branch, tables[-1], longest)
        return count_tree(
            tables,
            branch.context(branch.size - longest),
            nodes=nodes,
            levels=levels,
            width=width,
            stop_ids=branch.request.stop_ids,
        )

    def _count_committed_(self, branch: Branch, table: CountTable, longest: int) -> None:
        """Count what the branch has committed since the last time."""
        start = self._counted[branch.owner]
        fillers = self._fillers.pop(branch.owner, [])
        missing = branch.size - start - len(fillers)  # a root token was drawn without any
        first = max(start - longest, 0)  # contexts of what follows
        padded = [*[()] * missing, *fillers] if fillers else ()
        table.learn_(branch.context(first), start - first, padded)
        self._counted[branch.owner] = branch.size

    def _tables_(self, branch: Branch, tables: CountTables) -> tuple[CountTable, ...]:
        """The prompt that all branches share is counted once, each branch's own once more."""
        request = branch.request
        if request.prefix_owner not in self._open:
            self._open.add(request.prefix_owner)
            tables.open_(request.key, request.context)
        self._counted.setdefault(branch.owner, len(request.context))
        return tables.tables_(request.key, branch.owner)

    def learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """What else the target found likely in the place of each token of the round."""
        if self.tables is not None and result.side_outputs_SC.size:
            nodes = result.tokens_ST.shape[1]
            for branch, row, path in zip(ran, result.side_outputs_SC, paths, strict=True):
                self._fillers[branch.owner] = row.reshape(nodes, -1)[list(path)].tolist()
        return ()

    def close(self, request: Request) -> None:
        self._open.discard(request.prefix_owner)
        if self.tables is not None:
            self.tables.close_(request.key)
        for branch in request.all_branches():
            for memory in (self.indices, self._counted, self._fillers):
                memory.pop(branch.owner, None)
