"""Fresh rows of a drafter's pool: every branch's own, for one grow_tree, then given back."""

import numpy as np
import torch
from torch import Tensor

from ..attention.masks import committed_visible
from ..kv.pool import KVCache, SlotTable
from ..types import DraftRows, Visibility


class Workspace:
    """Slots of each branch behind its committed rows, and what may be seen from them.

    Attributes:
        slots_SM: int64, flat slots of each branch's M fresh rows.
    """

    def __init__(self, kv: KVCache, draft_rows: DraftRows, each: int) -> None:
        self.kv, self.frame = kv, draft_rows.frame
        device = draft_rows.position_S.device
        rows = np.repeat(np.asarray(self.frame.rows_S, np.int32), each)
        # owner 0 and position 0: only what `visible` says ever sees them
        self.slots = kv.append_(np.zeros(rows.size), np.zeros(rows.size), rows)
        slots_SM = self.slots.reshape(len(self.frame.rows_S), each)
        self.slots_SM = torch.tensor(slots_SM, dtype=torch.int64, device=device)
        self.table = kv.table(kv.extent, self.frame.first_row, self.frame.height)
        self.row_S1 = self.frame.index_S[:, None]
        mine = SlotTable(*(part.index_select(0, self.row_S1[:, 0]) for part in self.table))
        self.history_S1X = committed_visible(
            draft_rows.owner_S[:, None],
            draft_rows.prefix_S[:, None],
            draft_rows.position_S[:, None],
            mine,
        )
        self.place_SM = self.slots_SM - (self.row_S1 + self.frame.first_row) * kv.capacity

    def visible(self, seen_SKM: Tensor, position_SM: Tensor) -> Visibility:
        """What K rows of each branch see: its history, and of the first M fresh rows those in
        `seen_SKM` (bool), which stand at `position_SM`."""
        width, fresh = seen_SKM.shape[1:]
        place_SM = self.place_SM[:, :fresh]
        mask_SKX = self.history_S1X.repeat(1, width, 1)
        mask_SKX.scatter_(2, place_SM[:, None].expand(-1, width, -1), seen_SKM)
        self.table.position_BK[self.row_S1, place_SM] = position_SM
        mask_BQX = self.frame.spread(mask_SKX)
        return Visibility(mask_BQX, self.table.position_BK, self.frame.first_row)

    def slots_BQ(self, first: int, count: int) -> Tensor:
        """Where `count` fresh rows of each branch are written; padding goes to the scratch slot."""
        return self.frame.spread(self.slots_SM[:, first : first + count], self.kv.scratch)

    def close_(self) -> None:
        """Give the slots back."""
        self.kv.release_(self.slots)
