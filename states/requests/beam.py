"""Beam search in the book of a run: hypotheses on the host, and their rows in the pool.

A branch is one search. Its beams share rows wherever they share tokens, so the rows are a tree:
those that all live beams agree on are the branch's own, each other one has an owner of its own and
is shown to the beams behind it (`lineage`). Rows that no live beam needs are given back at once;
nothing is ever copied, in no layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ops.beam import Beams, Chosen, Searches, first_beams
from ...ops.host import HostReader
from ...ops.kv.pool import NOBODY, Ints, KVCache
from ...ops.types import Proposal
from ..graph.beam_spec import BeamBlock
from ..layout.tree_rows import Trees
from .branch import Branch, Finish, Request, RoundSummary
from .manager import BranchStateManager
from .request_table import BuildPrompt, RunLimits
from .rounds import Ids, split


@dataclass(eq=False, slots=True)
class BeamSearch:
    """The hypotheses of one branch; W beams of n tokens each, best first.

    beams: what the device knows of them, as a set of one.
    tokens_Wn: int64; the last tokens have no rows yet.
    owners_Wm: int32, whose the row of each token is; m = n - 1, 0 before the first step.
    kept: the ended hypotheses that are kept, best first, the stop token included; None for none.
    """

    beams: Beams
    tokens_Wn: Ids
    owners_Wm: Ints
    kept: list[Ids | None]

    @property
    def length(self) -> int:
        return int(self.tokens_Wn.shape[1])

    @property
    def trunk(self) -> int:
        """How many rows all live beams share."""
        return _agreed(self.owners_Wm)

    @property
    def settled(self) -> list[int]:
        """The tokens of every hypothesis that can still win: no later step changes them."""
        live, best = self.tokens_Wn, self.kept[0]
        if best is not None:
            length = min(self.length, len(best))
            live = np.vstack([live[:, :length], best[:length]])
        tokens: list[int] = live[0, : _agreed(live)].tolist()
        return tokens


def _agreed(table_Wn: npt.NDArray[Any]) -> int:
    """So many of the first columns are the same in all rows."""
    differs_n = np.append((table_Wn != table_Wn[0]).any(0), True)
    return int(differs_n.argmax())


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


def read_step(host: HostReader, chosen: Chosen) -> BeamStep:
    """Everything the host needs, in one read; scores travel as their bits."""
    parts = [chosen.parent_SW, chosen.token_SW, chosen.origin_SW, chosen.parent_SC]
    parts += [chosen.token_SC, chosen.beams.ended_SW, chosen.beams.kept_SW.view(torch.int32)]
    parts += [chosen.over_S]
    flat = host.read(torch.cat([part.reshape(-1).long() for part in parts]))
    return BeamStep(*split(flat, [tuple(part.shape) for part in parts]))


class BeamManager(BranchStateManager):
    """A book whose branches are searches: lays out their beams, and keeps what a step chose."""

    def __init__(
        self, kv: KVCache, rules: RunLimits, build_prompt: BuildPrompt, beam: BeamBlock
    ) -> None:
        super().__init__(kv, None, rules, build_prompt)
        self.beam = beam
        self.searches: dict[int, BeamSearch] = {}  # by the branch's owner

    def submit(self, request: Request) -> None:
        """Queue a request; each of its hypotheses may need rows for its whole budget."""
        request.beams = self.beam.num_beams
        super().submit(request)

    def retire_(self, owners: Sequence[int]) -> None:
        """With a search go the rows that its beams do not share."""
        gone = [self.searches.pop(owner) for owner in owners if owner in self.searches]
        rows = [int(owner) for search in gone for owner in np.unique(search.owners_Wm)]
        super().retire_([*owners, *rows])

    def _ids(self, values: npt.ArrayLike) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64), device=self.layout.device)

    # -- rows of the next forward -----------------------------------------------------------------

    def _running(self) -> list[BeamSearch]:
        return [self.searches[branch.owner] for branch in self.active]

    def offer(self) -> Proposal:
        """The last token of every live beam: a tree without levels, its nodes side by side."""
        tokens = [search.tokens_Wn[1:, -1] for search in self._running()]
        tokens_SN = self._ids(np.array(tokens).reshape(len(tokens), self.beam.num_beams - 1))
        none_SN = torch.zeros_like(tokens_SN)
        return Proposal(tokens_SN, none_SN - 1, none_SN, none_SN == 0, none_SN.float(), levels=0)

    def _trees(self, proposal: Proposal) -> Trees:
        searches = self._running()
        return Trees(
            [int(search.tokens_Wn[0, -1]) for search in searches],
            [_position(b, s) for b, s in zip(self.active, searches, strict=True)],
            [branch.owner for branch in self.active],
            [branch.request.prefix_owner for branch in self.active],
            (),
            proposal,
        )

    def lineage(self) -> Tensor:
        """int64 [3, P]: search, beam and slot of every earlier row that a beam has for itself."""
        order = np.argsort(self.kv.owner, kind="stable")
        known = self.kv.owner[order]
        found = [np.zeros((3, 0), np.int64)]
        for number, search in enumerate(self._running()):
            own_Wm = search.owners_Wm[:, search.trunk :]
            slots_Wm = order[np.searchsorted(known, own_Wm)]
            beams_Wm = np.broadcast_to(np.arange(len(own_Wm))[:, None], own_Wm.shape)
            search_Wm = np.full(own_Wm.shape, number)
            found.append(np.stack([search_Wm, beams_Wm, slots_Wm]).reshape(3, -1))
        return torch.from_numpy(np.concatenate(found, axis=1)).to(self.layout.device)

    # -- a step -----------------------------------------------------------------------------------

    def _everyone(self) -> list[Branch]:
        """Who is in the forward: those that had beams in it, then those that begin."""
        assert self._placed is not None
        return [*(self.active if self._placed.rows.trees else ()), *self._newcomers]

    def known(self) -> Searches:
        """What is known of everyone in the forward, on the device."""
        branches, ids = self._everyone(), self._ids
        searches = [self._search(branch) for branch in branches]
        none = _part(self._first().beams, slice(0, 0))
        stops = [sorted(branch.request.stop_ids) for branch in branches]
        most = max(map(len, stops), default=0)
        return Searches(
            _joined([none, *(search.beams for search in searches)]),
            ids([search.length + 1 for search in searches])[:, None],
            ids([branch.budget for branch in branches])[:, None],
            ids([[*s, *[-1] * (most - len(s))] for s in stops]).view(len(branches), most),
        )

    def _search(self, branch: Branch) -> BeamSearch:
        return self.searches.get(branch.owner) or self._first()

    def _first(self) -> BeamSearch:
        """A search that begins."""
        width = self.beam.num_beams
        none_Wn = np.zeros((width, 0), np.int64)
        beams = first_beams(width, self.layout.device)
        return BeamSearch(beams, none_Wn, none_Wn.astype(np.int32), [None] * width)

    def commit_beams_(self, host: HostReader, chosen: Chosen) -> RoundSummary:
        """Read the step; keep the rows of beams that live on, end the searches that are over."""
        assert self._placed is not None
        step, branches, placed = read_step(host, chosen), self._everyone(), self._placed
        for span, laid in zip(self._spans, placed.spans, strict=True):
            for slots in laid.slots_Cn:
                self.kv.commit_(slots, span.positions)
        for branch in self._newcomers:
            branch.length += len(branch.prompt)
        before = [len(branch.tokens) for branch in branches]
        for number, branch in enumerate(branches):
            search = self.searches[branch.owner] = self._search(branch)
            search.beams = _part(chosen.beams, slice(number, number + 1))
            move_on_(search, step, number)
            if number < placed.rows.trees:
                self._keep_rows_(branch, search, placed.tree_slots[number], step.parent_SW[number])
            _settle_(branch, search, step, number)
        summary = self._summary(branches, before)
        self._newcomers, self._opened, self._placed = [], [], None
        self.retire_and_prepare_(branches)
        return replace(summary, target_length=self.kv.current_length)

    def _keep_rows_(self, branch: Branch, search: BeamSearch, slots_W: Ints, parent_W: Ids) -> None:
        """The new rows of beams that live on get owners; what no beam needs any more goes."""
        alive = np.unique(parent_W)
        self.kv.release_(np.delete(slots_W, alive))
        owner_W = np.full(len(parent_W), NOBODY, np.int32)
        owner_W[alive] = [next(self._owners) for _ in alive]
        position = _position(branch, search) - 1  # the search has moved on
        self.kv.commit_(slots_W[alive], [position] * len(alive), owner_W[alive])
        before = search.owners_Wm
        search.owners_Wm = np.column_stack([before, owner_W])[parent_W]
        self.kv.retire_(np.setdiff1d(before, search.owners_Wm).tolist())
        trunk = search.trunk
        for owner in search.owners_Wm[0, :trunk].tolist():
            if owner != branch.owner:
                self.kv.relabel_(owner, branch.owner)
        search.owners_Wm[:, :trunk] = branch.owner
        branch.length = branch.start + len(branch.prompt) + trunk

    def _summary(self, branches: Sequence[Branch], before: Sequence[int]) -> RoundSummary:
        assert self._placed is not None
        rows, ran = self._placed.rows, self._placed.rows.trees
        return RoundSummary(
            tuple(branch.name for branch in branches),
            tuple(len(b.tokens) - n for b, n in zip(branches, before, strict=True)),
            tuple(0 if number < ran else -1 for number in range(len(branches))),
            0,
            self.kv.current_length,
            0,
            rows.tokens_BQ.numel(),
            self._placed.padding,
            rows.alignment,
        )


def _position(branch: Branch, search: BeamSearch) -> int:
    """Of the last token of every live beam."""
    return branch.start + len(branch.prompt) + search.length - 1


def move_on_(search: BeamSearch, step: BeamStep, number: int) -> None:
    """The live beams become their continuations; of the ended ones the best are kept."""
    old, width = search.tokens_Wn, len(search.kept)

    def hypothesis(origin: int, ended: int) -> Ids | None:
        if origin < width or not ended:
            return search.kept[origin] if ended else None
        parent, token = step.parent_SC[number], step.token_SC[number]
        return np.append(old[parent[origin - width]], token[origin - width])

    pairs = zip(step.origin_SW[number].tolist(), step.ended_SW[number].tolist(), strict=True)
    search.kept = [hypothesis(origin, ended) for origin, ended in pairs]
    search.tokens_Wn = np.column_stack([old[step.parent_SW[number]], step.token_SW[number]])


def _settle_(branch: Branch, search: BeamSearch, step: BeamStep, number: int) -> None:
    """What no later step can change is the branch's; in the end all of the best hypothesis."""
    if not step.over_S[number]:
        branch.tokens = search.settled
        branch.kept = min(len(branch.tokens), search.length - 1)
        return
    best = search.kept[0]
    assert best is not None, "a search that is over has a hypothesis"
    stopped = int(best[-1]) in branch.request.stop_ids
    branch.tokens = best[: len(best) - stopped].tolist()
    branch.score = float(step.score_SW[number, :1].astype(np.int32).view(np.float32)[0])
    notes = [note for note in (branch.note, f"score {branch.score:.6g}") if note]
    branch.end(Finish.STOP if stopped else Finish.LENGTH, "; ".join(notes))


def _fields(beams: Beams) -> Iterator[Tensor]:
    yield from (beams.running_SW, beams.kept_SW, beams.ended_SW)


def _part(beams: Beams, which: slice) -> Beams:
    return Beams(*(value[which] for value in _fields(beams)))


def _joined(every: Sequence[Beams]) -> Beams:
    return Beams(*(torch.cat(one) for one in zip(*map(_fields, every), strict=True)))
