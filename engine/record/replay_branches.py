"""Requests and branches of a kept run, and what they had written after so many tokens."""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from .snapshot import BranchView, RequestView
from .text_stream import HALF

Texts = Mapping[int, str]


@dataclass(eq=False)
class ReplayedBranch:
    """One branch as it ended.

    name: as rounds have it. rounds: how many forwards it was in; last: the number of the last one.
    text: None for an outline, which is not kept as text. texts: of single tokens.
    """

    name: str
    index: int
    title: str
    budget: int
    finish: str
    ids: list[int]
    text: str | None
    texts: Texts
    rounds: int = 0
    last: int = 0

    def view(self, rounds: int, tokens: int, preempted: Set[str] = frozenset()) -> BranchView:
        """It after so many forwards and tokens; `preempted` are those who make way."""
        stage = self.stage(rounds)
        finish = self.finish if stage == "done" else ""
        request = self.name.rpartition("/")[0]
        if stage == "running" and {self.name, request} & preempted:
            stage = "preempted"
        facts = (request, self.index, self.title, stage, finish, tokens, self.budget)
        return BranchView(*facts, self.text_at(tokens))

    def stage(self, rounds: int) -> str:
        if not rounds:
            return "done" if self.finish == "refused" else "waiting"
        return "done" if rounds >= self.rounds else "running"

    def holds(self, rounds: int) -> bool:
        """Whether it has slots of its own after so many forwards; to the end, if it was halted."""
        halted = self.finish == "cancelled" and rounds > 0
        return halted or self.stage(rounds) == "running"

    def text_at(self, tokens: int) -> str:
        """What its first tokens say; a share of the whole where single tokens do not add up to it,
        or their texts are not known."""
        whole, ends = self._pieces
        if tokens >= len(self.ids) and self.text is not None:
            return self.text
        if self.text is None or whole.strip() == self.text.strip():
            return whole[: ends[min(tokens, len(ends) - 1)]].rstrip(HALF)
        return self.text[: round(len(self.text) * min(tokens / max(len(self.ids), 1), 1))]

    @cached_property
    def _pieces(self) -> tuple[str, list[int]]:
        """All tokens' texts joined, and where each ends."""
        pieces = [self.texts.get(token, "") for token in self.ids]
        return "".join(pieces), [0, *accumulate(map(len, pieces))]


@dataclass(eq=False)
class ReplayedRequest:
    """One request: its outline, if it wrote one, and its parts; what combines them stands last."""

    key: str
    question: str
    outline: ReplayedBranch | None = None
    parts: list[ReplayedBranch] = field(default_factory=list)

    @property
    def branches(self) -> Iterator[ReplayedBranch]:
        if self.outline is not None:
            yield self.outline
        yield from self.parts

    def shown(self, rounds: Mapping[str, int], parsed: int) -> list[ReplayedBranch]:
        """Its parts once they are there, before that its outline.

        Args:
            rounds: of each branch so far. parsed: how many forwards were done when outlines were
                last read into parts.
        """
        root = self.outline
        if root is None or root.last <= parsed:
            return self.parts
        if any(rounds.get(part.name) for part in self.parts):
            return self.parts
        return [root] if rounds.get(root.name) else []

    def view(
        self,
        rounds: Mapping[str, int],
        parsed: int,
        tokens: Mapping[str, int],
        preempted: Set[str] = frozenset(),
    ) -> RequestView:
        """It after so many rounds and tokens of its branches."""
        parts = self.parts if self.shown(rounds, parsed) is self.parts else []
        stages = [one.stage(rounds.get(one.name, 0)) for one in parts]
        done = stages.count("done")
        if parts and done == len(parts):
            stage = "done"
        elif self.key in preempted:
            stage = "preempted"
        elif any(rounds.get(one.name) for one in self.branches):
            stage = "running" if parts else "outlining"
        else:
            stage = "waiting"
        count = sum(tokens.get(one.name, 0) for one in self.branches)
        refused = stage == "done" and any(one.finish == "refused" for one in self.branches)
        return RequestView(self.key, self.question, stage, len(parts), done, count, refused)


def replayed_requests(
    outputs: Mapping[str, Mapping[str, Any]],
    rounds: Iterable[Mapping[str, Any]],
    texts: Texts,
    budgets: tuple[int, int],
) -> list[ReplayedRequest]:
    """The requests of a run in its order.

    Args:
        outputs: lines of outputs.jsonl by key; without any, what rounds tell: names alone.
        rounds: records of the trace. budgets: of outlines, and of parts.
    """
    found = {key: _request(key, line, texts, budgets) for key, line in outputs.items()}
    known = {one.name: one for request in found.values() for one in request.branches}
    for record in rounds:
        for name in record["branches"]:
            if name not in known:
                key = name.rpartition("/")[0]
                request = found.setdefault(key, ReplayedRequest(key, ""))
                known[name] = _nameless(request, name, texts, budgets)
            known[name].rounds += 1
            known[name].last = record["round"]
    return list(found.values())


def _nameless(
    request: ReplayedRequest, name: str, texts: Texts, budgets: tuple[int, int]
) -> ReplayedBranch:
    """A branch of which nothing but rounds was kept."""
    is_outline = name.endswith("/outline")
    index, budget = (-1, budgets[0]) if is_outline else (len(request.parts), budgets[1])
    title = name.rpartition("/")[2]
    branch = ReplayedBranch(name, index, title, budget, "", [], "", texts)
    if is_outline:
        request.outline = branch
    else:
        request.parts.append(branch)
    return branch


def _request(
    key: str, line: Mapping[str, Any], texts: Texts, budgets: tuple[int, int]
) -> ReplayedRequest:
    made = ReplayedRequest(key, line.get("question", ""))
    ids = line.get("outline_token_ids") or []
    finish = line.get("outline_finish_reason") or ""
    if ids or finish:
        facts = (f"{key}/outline", -1, "outline", budgets[0], finish)
        made.outline = ReplayedBranch(*facts, ids, None, texts)
    parts = [(f"{key}/{part['index'] + 1}", part) for part in line.get("parts", ())]
    if line.get("combined") is not None:
        parts.append((f"{key}/combined", line["combined"]))
    for at, (name, part) in enumerate(parts):
        facts = (name, at, part["title"] or "answer", budgets[1], part["finish_reason"])
        made.parts.append(ReplayedBranch(*facts, part["token_ids"], part["text"], texts))
    return made
