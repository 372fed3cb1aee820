"""Beam search in the request table: hypotheses on the host, and their rows in the pool.

A branch is one search. Rows that all live beams share belong to the branch; every other row is a
segment, a child of the row before it. Rows that no live beam needs are freed at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ops.beam import Beams, first_beams
from ..ops.kv.pool import NO_SEGMENT, Ints, KVCache
from ..ops.types import Proposal
from .request import Branch, Finish
from .request_table import RequestTable
from .round import Ids, Trees


@dataclass(eq=False, slots=True)
class BeamSearch:
    """The hypotheses of one branch; W beams of n tokens each, best first. tokens_Wn: int64; the
    last ones have no rows yet. owners_Wm: int32, the segments of the rows. ended: the best ended
    hypotheses, best first, the stop token included; None for a free place."""

    beams: Beams
    tokens_Wn: Ids
    owners_Wm: Ints
    ended: list[Ids | None]

    @property
    def length(self) -> int:
        return int(self.tokens_Wn.shape[1])

    def tips(self, owner: int) -> list[int]:
        return self.owners_Wm[:, -1].tolist() if self.owners_Wm.size else [owner] * len(self.ended)

    @property
    def common_tokens(self) -> list[int]:
        """The first tokens of every hypothesis that can still win: no later step changes them."""
        live = self.tokens_Wn
        best = self.ended[0]
        if best is not None:
            length = min(self.length, len(best))
            live = np.vstack([live[:, :length], best[:length]])
        tokens: list[int] = live[0, : _agreed(live)].tolist()
        return tokens


def _agreed(table_Wn: npt.NDArray[Any]) -> int:
    """The number of leading columns that are equal in all rows."""
    return int(np.append((table_Wn != table_Wn[0]).any(0), True).argmax())


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What a step chose, on the host; the fields are those of `Chosen`."""

    parent_SW: Ids
    token_SW: Ids
    origin_SW: Ids
    parent_SC: Ids
    token_SC: Ids
    ended_SW: Ids
    score_SW: Ids
    over_S: Ids


@dataclass(eq=False, slots=True)
class BeamState:
    """The searches of a run's branches, of `width` beams each, by the branch's owner."""

    width: int
    table: RequestTable
    kv: KVCache
    searches: dict[int, BeamSearch] = field(default_factory=dict)

    def search(self, branch: Branch) -> BeamSearch:
        if branch.owner in self.searches:
            return self.searches[branch.owner]
        none_Wn = np.zeros((self.width, 0), np.int64)
        beams = first_beams(self.width, self.kv.data.device)
        return BeamSearch(beams, none_Wn, none_Wn.astype(np.int32), [None] * self.width)

    def forget(self, owners: Iterable[int]) -> list[int]:
        """Remove searches; returns the segments that their beams did not share."""
        removed = [self.searches.pop(owner) for owner in owners if owner in self.searches]
        return [int(owner) for search in removed for owner in np.unique(search.owners_Wm)]

    def trees(self, proposal: Proposal) -> Trees:
        pairs = [(branch, self.searches[branch.owner]) for branch in self.table.active]
        return Trees(
            roots=[int(search.tokens_Wn[0, -1]) for _, search in pairs],
            positions=[_position(branch, search) for branch, search in pairs],
            owners=[branch.owner for branch, _ in pairs],
            bound=(),
            proposal=proposal,
            segments=[search.tips(branch.owner) for branch, search in pairs],
        )

    def commit_rows_(self, branch: Branch, slots_W: Ints, parent_W: Ids) -> None:
        """Commit the new rows of live beams as segments; free the rows that no beam needs."""
        search = self.searches[branch.owner]
        segments = self.table.segments
        alive = np.unique(parent_W)
        self.kv.release_(np.delete(slots_W, alive))
        tips = search.tips(branch.owner)
        owner_W = np.full(len(parent_W), NO_SEGMENT, np.int32)
        owner_W[alive] = [segments.add(tips[beam]) for beam in alive]
        position = _position(branch, search) - 1  # the search has moved on
        home = segments.home[branch.owner]
        self.kv.commit_(slots_W[alive], [position] * len(alive), owner_W[alive], home)
        before = search.owners_Wm
        search.owners_Wm = np.column_stack([before, owner_W])[parent_W]
        dead = np.setdiff1d(before, search.owners_Wm).tolist()
        self.kv.retire_(dead)
        segments.remove(dead)
        trunk = _agreed(search.owners_Wm)  # rows that all live beams share
        for owner in search.owners_Wm[0, :trunk].tolist():
            if owner != branch.owner:
                self.kv.relabel_(owner, branch.owner, home)
                segments.merge_into_parent(owner, branch.owner)
        search.owners_Wm[:, :trunk] = branch.owner
        branch.length = branch.start + len(branch.prompt) + trunk


def _position(branch: Branch, search: BeamSearch) -> int:
    """Position of the last token of every live beam."""
    return branch.start + len(branch.prompt) + search.length - 1


def extend_(search: BeamSearch, step: BeamStep, number: int) -> None:
    old = search.tokens_Wn
    width = len(search.ended)

    def hypothesis(origin: int, ended: int) -> Ids | None:
        if origin < width or not ended:
            return search.ended[origin] if ended else None
        at = number, origin - width
        return np.append(old[step.parent_SC[at]], step.token_SC[at])

    pairs = zip(step.origin_SW[number].tolist(), step.ended_SW[number].tolist(), strict=True)
    search.ended = [hypothesis(origin, ended) for origin, ended in pairs]
    search.tokens_Wn = np.column_stack([old[step.parent_SW[number]], step.token_SW[number]])


def write_tokens_(branch: Branch, search: BeamSearch, step: BeamStep, number: int) -> None:
    """Give the branch the tokens that no later step can change; at the end, the best ones."""
    if not step.over_S[number]:
        branch.tokens = search.common_tokens
        branch.num_cached_tokens = min(len(branch.tokens), search.length - 1)
        return
    best = search.ended[0]
    assert best is not None, "a search that is over has a hypothesis"
    stopped = int(best[-1]) in branch.request.stop_ids
    branch.tokens = best[: len(best) - stopped].tolist()
    branch.score = float(step.score_SW[number, :1].astype(np.int32).view(np.float32)[0])
    notes = [note for note in (branch.note, f"score {branch.score:.6g}") if note]
    branch.end(Finish.STOP if stopped else Finish.LENGTH, "; ".join(notes))
