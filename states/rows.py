"""Data of the rows of a forward: what goes in, where it was placed, and whose rows they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ops.kv.slots import Ints
from ..ops.types import NO_WORK, DraftWork, Proposal, Rows
from .request import Branch, Request
from .text.tokens import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Prefill rows of one segment, in reading order.

    request: prefix owner of the request whose prompt the rows belong to. draws: whether the last
    row's logits draw a root token; bound: whether a grammar restricts it. chunks: document chunks
    in `tokens`.
    """

    owner: int
    request: int
    position: int
    tokens: Sequence[int]
    draws: bool = False
    bound: bool = False
    chunks: tuple[Chunk, ...] = ()

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + len(self.tokens)))


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Committed rows that the drafter has not read yet.

    The row at `position + i` has the token `tokens[i]` and, for drafters that read features,
    `features[i]` [F]; the drafter defines how they are paired.
    """

    owner: int
    position: int
    tokens: Sequence[int]
    features: Tensor | None

    def before(self, position: int) -> "PendingRows":
        """The rows before a position."""
        count = max(position - self.position, 0)
        features = None if self.features is None else self.features[:count]
        return PendingRows(self.owner, self.position, self.tokens[:count], features)


@dataclass(frozen=True, slots=True)
class Trees:
    """The active branches as roots of token trees: host ints, in the proposal's order.

    bound: numbers of the trees under a grammar. segments: for each tree the segments whose history
    its nodes see; None if every tree sees its owner's.
    """

    roots: Sequence[int]
    positions: Sequence[int]
    owners: Sequence[int]
    bound: tuple[int, ...]
    proposal: Proposal
    segments: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class SpanSlots:
    """The place of a span: flat row indices of one copy, and slots and flat row indices of all
    copies, each [C, n]."""

    rows: Ints
    slots_Cn: Ints
    flat_Cn: Ints


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a forward and their places.

    tree_rows, tree_slots: flat indices and slots of the trees' nodes, each [S, T]; [R] while only
        the device knows their owners (`states.commit.with_host_tokens`).
    fresh: all slots of trees.
    paddings: number of padding rows at the start of each tensor row; padding: of all padding rows.
    """

    rows: Rows
    tree_rows: Ints
    tree_slots: Ints
    fresh: Ints
    spans: tuple[SpanSlots, ...]
    paddings: tuple[int, ...]
    padding: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one target forward and their owners; on the blackboard until it is committed.

    placed: the rows and their slots. rows: the same, with sampling parameters and cached rows.
    ran: branches with a tree, in the proposal's order. newcomers: branches that start; opened:
    requests that start; branches: all branches that get tokens, `ran` and then `newcomers`.
    spans: prefill rows, in the order of `placed.spans`.
    forced: trees that a grammar forces; work: the cost of the drafts.
    """

    rows: Rows
    placed: PlacedRows
    ran: tuple[Branch, ...]
    newcomers: tuple[Branch, ...]
    opened: tuple[Request, ...]
    branches: tuple[Branch, ...]
    spans: tuple[Span, ...]
    forced: tuple[int, ...] = ()
    work: DraftWork = NO_WORK
