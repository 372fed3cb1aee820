"""The masks of a forward: a row sees what lies on the way from its segment to the root.

A committed slot is visible to a query row if its segment is on that way, and it does not lie behind
the row. Rows of prompts in the same forward follow the same rule. Nodes of token trees are visible
to their descendants alone.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .attention.cascade import plan
from .attention.metadata import AttentionGroup, AttentionMetadata, tensor
from .attention.stacks import Stack, group_of, history
from .kv.pool import KVCache
from .registry import op
from .types import Rows


@op("mask.build", writes="attention")
def build(rows: Rows, kv: KVCache, *, attention: str = "auto") -> AttentionMetadata:
    """Which rows attend to which slots: groups of rows, each with its own part of the pool."""
    readable = kv.committed.copy()
    readable[rows.prompt_slots] = True
    alone = int(rows.forest is not None)  # the first member, whose rows the device alone knows
    even = rows.blend is not None
    lineages = rows.lineages
    chosen = plan(kv, rows.members, lineages, rows.segment_N, attention, even=even, alone=alone)
    groups = tuple(_group(rows, kv, stack, readable) for stack in chosen.stacks)
    return AttentionMetadata(groups, chosen.merged)


def _group(
    rows: Rows, kv: KVCache, stack: Stack, readable: npt.NDArray[np.bool_]
) -> AttentionGroup:
    device = rows.tokens_BQ.device
    positions_N = rows.positions_BQ.view(-1)
    has_forest = rows.forest is not None and stack.rows_Gq[0, 0] == 0
    segment_Gq = rows.segment_N[stack.rows_Gq]
    index_Gq = None
    if has_forest:  # any segment may turn out to be a row's: all are prepared, by their numbers
        numbers_1S = np.arange(len(rows.lineages.ids_S) + 1, dtype=np.int32)[None]
        visible_PK, _ = history(kv, stack, rows.lineages, numbers_1S, readable)
        index_Gq = tensor(segment_Gq, device)
        assert rows.tree_segment_R is not None
        index_Gq[0, : len(rows.tree_segment_R)] = rows.tree_segment_R
    else:
        visible_PK, index = history(kv, stack, rows.lineages, segment_Gq, readable)
        if len(visible_PK) > 1:
            index_Gq = tensor(index, device)
    positions_GK = tensor(kv.position[stack.slots_GK], device)
    rows_Gq = stack.rows_on(device, positions_N.shape[0])
    if rows_Gq is None:
        positions_Gq = positions_N.view(stack.rows_Gq.shape)
    else:
        positions_Gq = positions_N[rows_Gq]
    visible = tensor(visible_PK, device)
    mask_GqK = positions_GK[:, None] <= positions_Gq[..., None]
    mask_GqK &= visible if index_Gq is None else visible[index_Gq]
    if has_forest:
        _forest(rows, stack, mask_GqK, positions_GK)
    elif rows.forest is None and not readable[rows.node_slots_ST].all():
        _trees(rows, stack, mask_GqK, positions_GK)
    return group_of(stack, rows_Gq, mask_GqK, positions_GK)


def _trees(rows: Rows, stack: Stack, mask_GqK: Tensor, positions_GK: Tensor) -> None:
    """Nodes see their ancestors, which stand where the device alone knows."""
    node_N = np.full(rows.positions_BQ.numel(), -1, np.int64)
    numbers_ST = np.arange(rows.node_rows_ST.size).reshape(rows.node_rows_ST.shape)
    node_N[rows.node_rows_ST] = numbers_ST
    node_N[rows.node_rows_ST[:, 0]] = numbers_ST[:, 0]  # whatever node has it too
    node_Gq = node_N[stack.rows_Gq]
    sequence_E, query_E = np.nonzero(node_Gq >= 0)
    if not sequence_E.size:
        return
    device = mask_GqK.device
    size = rows.node_rows_ST.shape[1]
    tree_E, node_E = np.divmod(node_Gq[sequence_E, query_E], size)
    here_E = stack.holds(rows.node_slots_ST[tree_E, 0], sequence_E)
    if not here_E.all():
        sequence_E, query_E, tree_E, node_E = (
            values[here_E] for values in (sequence_E, query_E, tree_E, node_E)
        )
    place_ET = stack.places(rows.node_slots_ST[tree_E], sequence_E)
    told = tensor(np.column_stack((sequence_E, query_E, tree_E, node_E, place_ET)), device)
    g_E1 = told[:, :1]
    q_E1 = told[:, 1:2]
    tree = told[:, 2]
    node = told[:, 3]
    place = told[:, 4:]
    seen_ET = rows.ancestors_STT[tree, node]
    if rows.live is not None:  # a node without a row has its root's, which all nodes see
        at_root_ST = rows.node_slots_ST == rows.node_slots_ST[:, :1]
        seen_ET = seen_ET | tensor(at_root_ST[tree_E], device)
    mask_GqK[g_E1, q_E1, place] = seen_ET
    positions_GK[g_E1, place] = rows.of_trees(rows.positions_BQ)[tree]


def _forest(rows: Rows, stack: Stack, mask_GqK: Tensor, positions_GK: Tensor) -> None:
    """The same where the device alone knows whose the trees' rows are; they are the first ones."""
    assert rows.forest is not None
    slots_1R = rows.node_slots_ST.reshape(1, -1)
    count = slots_1R.size
    place_R = tensor(stack.places(slots_1R, np.zeros(1, np.int64))[0], mask_GqK.device)
    mask_GqK[0, :count, place_R] = rows.forest.visible(rows.ancestors_STT)
    positions_GK[0, place_R] = rows.positions_BQ[0, :count]
