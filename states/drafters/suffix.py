"""Suffix matching: drafts are what followed the same tokens in any text of the engine before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...ops.draft.ngram import HostTree
from ...ops.draft.suffix import FAR, Place, SuffixTexts, suffix_tree
from ..drafter import DraftContext, Drafter, remembered_
from ..graph.drafter_settings import Nodes, TreeSettings
from ..yaml.spec import Int

if TYPE_CHECKING:
    from ...ops.draft.gamma import GammaRecord
    from ..request import Branch, Request
    from ..round import RoundResult


class SuffixSettings(TreeSettings):
    """Drafts are what followed the longest matches of the last tokens in any text before."""

    kind: Literal["suffix"]
    num_draft_tokens: Nodes = 8
    """drafted tokens of a tree, or {active branches: nodes}"""
    draft_depth: Int = Field(8, ge=1, le=256)
    """drafted levels of a tree"""
    most_tokens: Int = Field(200_000, ge=16, le=1 << 26)
    """tokens of prompts and answers that are kept; the oldest texts are forgotten"""


class SuffixDrafter(Drafter):
    """Its texts are those of all requests of an engine with the same cache salt: prompts with their
    documents, and the branches of all answers."""

    Settings = SuffixSettings
    settings: SuffixSettings

    def __init__(self, settings: SuffixSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.texts: dict[str, SuffixTexts] = {}
        # by segment: its text, in what texts, and how much of its context is in it
        self._text_of: dict[int, tuple[SuffixTexts, int, int]] = {}
        self._matches: dict[int, list[Place]] = {}  # of each branch in this round

    def texts_(self, request: Request) -> SuffixTexts:
        most = self.settings.most_tokens
        return remembered_(self.texts, request.cache_salt, partial(SuffixTexts, most))

    def tree_(self, branch: Branch, nodes: int) -> HostTree:
        matches = self._match_(branch)
        return suffix_tree(
            self._text_of[branch.owner][0],
            matches,
            nodes=nodes,
            levels=self.settings.draft_depth,
            stop_ids=branch.request.stop_ids,
        )

    def expected_(self, branch: Branch, nodes: int) -> tuple[float, int]:
        matches = self._match_(branch)
        levels = min(nodes, self.settings.draft_depth)
        tokens = self._text_of[branch.owner][0].expected(matches, levels)
        return tokens, nodes if matches else 0

    def _match_(self, branch: Branch) -> list[Place]:
        """The matches of a branch in this round."""
        owner = branch.owner
        if owner not in self._matches:
            if owner not in self._text_of:
                self._open_(branch)
            self._read_(branch)
            texts, text, _ = self._text_of[owner]
            ids = texts.texts.get(text) or branch.context(branch.size - FAR)
            self._matches[owner] = texts.matches(ids)
        return self._text_of[owner][0].kept(self._matches[owner])

    def _open_(self, branch: Branch) -> None:
        """Start the text of a branch, after that of its request's prefix."""
        request = branch.request
        texts = self.texts_(request)
        if request.prefix_owner not in self._text_of:
            self._text_of[request.prefix_owner] = texts, texts.open_(), 0
        own, prefix, known = self._text_of[request.prefix_owner]
        own.append_(prefix, request.context[known:])
        self._text_of[request.prefix_owner] = own, prefix, len(request.context)
        start = branch.size - branch.num_tokens
        before = branch.context(start - FAR)[: min(FAR, start)]
        self._text_of[branch.owner] = texts, texts.open_(before), start

    def _read_(self, branch: Branch) -> None:
        """Append the branch's new tokens to its text."""
        texts, text, known = self._text_of[branch.owner]
        texts.append_(text, branch.context(known))
        self._text_of[branch.owner] = texts, text, branch.size

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        rows = zip(branches, result.tokens_ST, paths, result.bonus_S.tolist(), strict=True)
        for branch, tokens_T, path, bonus in rows:
            token = int(tokens_T[path[1]]) if len(path) > 1 else int(bonus)
            if branch.owner in self._matches:
                self._text_of[branch.owner][0].count_(self._matches.pop(branch.owner), token)
        return super().learn(branches, result, paths)

    def close(self, request: Request) -> None:
        for branch in request.all_branches():
            if branch.owner in self._text_of:
                self._read_(branch)

    def forget(self, owners: Sequence[int]) -> None:
        super().forget(owners)
        for owner in owners:
            self._text_of.pop(owner, None)
            self._matches.pop(owner, None)
