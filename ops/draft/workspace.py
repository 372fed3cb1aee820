"""Fresh rows of a drafter's pool: every branch's own, for one grow_tree, then given back."""

import numpy as np
from torch import Tensor

from ..attention.backends import AttentionPlan, backend
from ..attention.metadata import AttentionMetadata, QuerySequence, tensor
from ..kv.pool import KVCache
from ..types import DraftRows, DraftWork


class Workspace:
    """Slots of each branch after its committed rows, and the attention of rows in them.

    Attributes:
        slots_SM: int64, flat slots of each branch's M fresh rows.
        spent: the forwards that `fresh` has prepared.
    """

    def __init__(self, kv: KVCache, draft_rows: DraftRows, each: int) -> None:
        self.kv = kv
        self.frame = draft_rows.frame
        self.spent = DraftWork()
        device = draft_rows.position_S.device
        branches = len(self.frame.rows_S)
        visibility = draft_rows.rows.visibility
        segment_S = draft_rows.segment_S
        homes_S = [visibility.homes_S[segment] for segment in segment_S]
        rows_S = self.frame.rows_S if kv.rows > 1 else (0,) * branches
        rows = np.repeat(np.asarray(rows_S, np.int32), each)
        owner = np.repeat(visibility.ids_S[segment_S], each)
        # position 0, not committed: only what `fresh` says ever sees them
        self.slots = kv.append_(
            owner, np.zeros(rows.size), rows, np.repeat([homes[0] for homes in homes_S], each)
        )
        slots_SM = self.slots.reshape(branches, each)
        self.slots_SM = tensor(slots_SM, device)
        if kv.rows > 1:
            sequences = [
                QuerySequence(np.array([branch]), row, ()) for branch, row in enumerate(rows_S)
            ]
        else:
            by_homes: dict[tuple[int, ...], list[int]] = {}
            for branch, homes in enumerate(homes_S):
                by_homes.setdefault(homes, []).append(branch)
            sequences = [
                QuerySequence(np.array(group), 0, homes) for homes, group in by_homes.items()
            ]
        metadata = AttentionMetadata(
            kv=kv,
            sequences=tuple(sequences),
            visibility=visibility,
            segment_N=segment_S,
            positions_N=draft_rows.position_S,
            readable=kv.committed,
            fresh_SM=slots_SM,
        )
        self.plan = backend(draft_rows.attention).plan(metadata)

    def fresh(self, seen_SKM: Tensor, position_SM: Tensor) -> tuple[Tensor, Tensor, AttentionPlan]:
        """positions_BQ, slots_BQ and attention of the last K of M fresh rows of each branch.

        A row sees its branch's history, and of the M fresh rows those in `seen_SKM` (bool), whose
        positions are `position_SM`. Padding is written to the scratch slot.
        """
        fresh = position_SM.shape[1]
        width = seen_SKM.shape[1]
        spread = self.frame.spread
        rows = slice(fresh - width, fresh)
        slots_BQ = spread(self.slots_SM[:, rows], self.kv.scratch)
        padding = slots_BQ.numel() - position_SM.shape[0] * width
        self.spent = self.spent.plus(DraftWork(1, slots_BQ.numel(), padding))
        first_S = self.frame.place_S * width
        plan = self.plan.widened(seen_SKM, position_SM, first_S, self.frame.places * width)
        return spread(position_SM[:, rows]), slots_BQ, plan

    def close_(self) -> None:
        """Give the slots back."""
        self.kv.release_(self.slots)
