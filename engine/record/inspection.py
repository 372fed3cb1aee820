"""What a halted run holds, read out for somebody who looks: texts, offered trees, the last forward.

Only while a run is stepped through. Reading waits for the device, and is no time of the run's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from ...ops.kv.slots import SlotRun
from ...states.machine import Run
from ...states.trace import Event, OpRan
from .drafts import DraftNode, DraftTree, Mark, shown
from .recorder import Recorder
from .text_stream import Pieces

Sights = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BranchText:
    """All that a branch has written, and the text of its tokens that have no row yet."""

    name: str
    title: str
    stage: str
    text: str
    pending: str


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """A row of the target's last forward: whose, which node of a tree (0 the root, -1 none)."""

    name: str
    node: int
    text: str
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class ForwardView:
    """The rows of a forward that stand for something, and the slots that each attends to.

    sees_NK: for each row and each of `slots`, those that any row sees; the last `fresh` of them are
    the forward's own.
    """

    state: str
    number: int
    rows: tuple[ForwardRow, ...]
    slots: tuple[int, ...]
    sees_NK: Sights
    fresh: int


@dataclass(frozen=True, slots=True)
class RunLook:
    """A halted run. offered: trees that are not verified yet; forward: the last one."""

    texts: tuple[BranchText, ...]
    offered: tuple[DraftTree, ...]
    forward: ForwardView | None


class Inspector:
    """Remembers the last forward of a run; listens to its recorder."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        self.recorder = recorder
        self.run = run
        self._pieces = Pieces(recorder.decode)
        self._forward: ForwardView | None = None
        recorder.listeners.append(self)

    def __call__(self, event: Event) -> None:
        board = self.run.board
        if isinstance(event, OpRan) and "attention" in event.results and "rows" in board:
            began = perf_counter_ns()
            self._forward = self._read(event.state, board)
            self.recorder.waited(perf_counter_ns() - began)

    def look(self) -> RunLook:
        """What there is now."""
        board = self.run.board
        requests = board["branches"].requests
        branches = [b for one in requests for b in one.branches or one.all_branches()]
        texts = tuple(self._text(branch) for branch in branches)
        return RunLook(texts, tuple(self._offered(board)), self._forward)

    def _text(self, branch: Any) -> BranchText:
        decode = self.recorder.decode
        kept = branch.tokens[: branch.kept]
        whole = decode(branch.tokens)
        text = decode(kept)
        text = text if whole.startswith(text) else whole
        if branch.ended:
            text = whole
        facts = (branch.name, branch.title, str(branch.stage))
        return BranchText(*facts, text, whole[len(text) :])

    def _offered(self, board: Mapping[str, Any]) -> Iterator[DraftTree]:
        """The proposal on the blackboard."""
        proposal = board.get("proposal")
        if proposal is None:
            return
        names = ("tokens_SN", "parents_SN", "valid_SN")
        columns = [getattr(proposal, name).tolist() for name in names]
        for branch, *drafts in zip(board["branches"].active, *columns, strict=False):
            root = DraftNode(self._piece(branch.tokens[-1]), -1, Mark.ROOT)
            place = {-1: 0}
            nodes = [root]
            for at, (token, parent, valid) in enumerate(zip(*drafts, strict=True)):
                if valid:
                    place[at] = len(nodes)
                    nodes.append(DraftNode(self._piece(token), place[parent], Mark.OFFERED))
            request, _, name = branch.name.rpartition("/")
            count = len(nodes) - 1
            yield DraftTree(request, name, 0, branch.length, tuple(nodes), count, 0)

    def _piece(self, token: int) -> str:
        return shown(token, self._pieces)

    def _read(self, state: str, board: Mapping[str, Any]) -> ForwardView:
        rows = board["rows"]
        batch = board["batch"]
        valid = [] if board.get("proposal") is None else board["proposal"].valid_SN.tolist()
        whose = dict(_whose(rows, batch, valid, board["branches"]))
        flat = {n: getattr(rows, n).reshape(-1).tolist() for n in ("tokens_BQ", "positions_BQ")}
        slots_N = rows.slots_BQ.reshape(-1).tolist()
        sees = _sights(board["attention"], len(slots_N))
        order = sorted(whose)
        fresh = sorted({slots_N[row] for row in order})
        seen = {slot for row in order for slot in sees.get(row, ())}
        slots = [*sorted(seen - set(fresh)), *fresh]
        place = {slot: at for at, slot in enumerate(slots)}
        sees_NK = np.zeros((len(order), len(slots)), np.bool_)
        for at, row in enumerate(order):
            sees_NK[at, [place[slot] for slot in sees.get(row, ()) if slot in place]] = True
        views = (
            ForwardRow(
                *whose[row],
                self._piece(flat["tokens_BQ"][row]),
                flat["positions_BQ"][row],
                slots_N[row],
            )
            for row in order
        )
        number = self.recorder.meter.forwards + 1
        return ForwardView(state, number, tuple(views), tuple(slots), sees_NK, len(fresh))


def _whose(
    rows: Any, batch: Any, valid: list[list[bool]], table: Any
) -> Iterator[tuple[int, tuple[str, int]]]:
    """(row, (whose, node)) of the rows that stand for something."""
    for branch, nodes, good in zip(batch.ran, rows.nodes_ST.tolist(), valid, strict=False):
        for node in range(len(good), 0, -1):  # a node without a row has its root's
            if good[node - 1]:
                yield nodes[node], (branch.name, node)
        yield nodes[0], (branch.name, 0)
    names = {b.owner: b.name for one in table.requests for b in one.all_branches()}
    names |= {one.prefix_owner: f"{one.key}/prefix" for one in table.requests}
    for span, placed in zip(batch.spans, batch.placed.spans, strict=True):
        for row in np.asarray(placed.flat_Cn).reshape(-1).tolist():
            yield row, (names.get(span.owner, "?"), -1)


def _sights(attention: Any, count: int) -> dict[int, list[int]]:
    """The slots that each row of a forward attends to."""
    sees: dict[int, set[int]] = {}
    for group in attention.groups:
        keys = group.keys
        slots_GK = keys.slots_GK if isinstance(keys, SlotRun) else keys.cpu().numpy()
        mask_GqK = group.mask_GqK.cpu().numpy()
        for rows_q, slots_K, mask_qK in zip(group.host_rows_Gq, slots_GK, mask_GqK, strict=False):
            for row, mask_K in zip(rows_q.tolist(), mask_qK, strict=True):
                if row < count:
                    of_row = sees.setdefault(row, set())
                    of_row.update(slots_K[mask_K].tolist())
    return {row: sorted(slots) for row, slots in sees.items()}
