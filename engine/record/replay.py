"""A saved run as a sequence of snapshots, without a model."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import numpy as np

from ...states.blend import BlendSummary
from ...states.round import RoundSummary, VerifiedTree
from ...states.trace import Moved, OpRan
from ..errors import UsageError
from ..text_stream import HALF
from .metrics import NS, Meter
from .run_folder import TRACE, SavedRun
from .run_view import (
    BRANCH,
    OUTLINE,
    PREFIX,
    BranchView,
    Move,
    PoolView,
    RequestView,
    Scene,
    Snapshot,
    draft_tree,
)
from .trace import COUNTS, Record, records_of, told_trees

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


LAST = 64  # moves, and branches with their last rounds, that a picture has
PARSE = "outline.parse_"  # the op that makes parts of outlines
APART = 256  # frames between two moments that are kept, for going back


@dataclass
class _Moment:
    """What is true after some records."""

    taken: int = 0
    at: int = 0
    state: str = "start"
    before: str = ""
    kv: tuple[int, int] = (0, 0)
    parsed: int = 0
    meter: Meter = field(default_factory=Meter)
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=LAST))
    rounds: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    trees: dict[str, tuple[int, VerifiedTree]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    starting: set[str] = field(default_factory=set)  # they do with the next forward

    def take(self, record: Record) -> None:
        self.at = record["t"]
        if record["kind"] == "move":
            self._moved(record)
        elif record["kind"] == "op":
            self.meter.op_ran(OpRan(record["state"], record["op"], record["ns"], {}))
            self.parsed = self.meter.forwards if record["op"] == PARSE else self.parsed
        elif record["kind"] == "round":
            self._round(record)
        elif record["kind"] == "step":
            self._planned(record)

    def _moved(self, record: Record) -> None:
        way = (record["from"], record["to"], record["guard"])
        self.meter.moved(Moved(*way, record["step"], record["ns"]), record["t"])
        self.moves.append(Move(*way, record["ns"] / 1e6, record["committed"]))
        self.before, self.state = way[:2]

    def _planned(self, record: Record) -> None:
        """Who makes way, and who goes on; older traces know of neither."""
        names = record.get("preempted", ())
        self.meter.preempted += len(names)
        self.preempted |= set(names)
        self.starting = {*record["starts"], *record["chunks"]}

    def _round(self, record: Record) -> None:
        self.preempted -= self.starting
        self.meter.forward_done(_summary(record), record["t"])
        self.kv = record["kv"], record["kv_draft"]
        self.rounds.update(record["branches"])
        self.tokens.update(dict(zip(record["branches"], record["committed"], strict=True)))
        for tree in told_trees(record):
            self.trees.pop(tree.branch, None)
            self.trees[tree.branch] = (record["round"], tree)
        for name in list(self.trees)[:-LAST]:
            del self.trees[name]


class Replay:
    """The frames of a kept run: one for each state that it was in, with what was done there.

    Attributes:
        scene: what never changes. times: nanoseconds of the run at the end of each frame.
        lacks: what the run folder has not, in words.

    Raises:
        UsageError: there is no trace of a run.
    """

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        self.lacks: list[str] = []
        records = list(records_of(run))
        self.records = [one for one in records if one["kind"] != "texts"]
        moves = [at for at, one in enumerate(self.records) if one["kind"] == "move"]
        if not moves:
            raise UsageError(f"{run.path / TRACE}: no transition in it, nothing to replay")
        self._ends = [*moves[1:], len(self.records)]
        self.times = [self.records[end - 1]["t"] for end in self._ends]
        try:
            self.scene = _scene(run.manifest)
            self._texts = self._read_texts(records)
            self.requests = self._read_requests()
            self._sizes = self._read_sizes()
            self._moment = _Moment()
            self._kept = {0: _Moment()}
            self.snapshot(0)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"{run.path}: not as a run leaves it: {reason}") from None

    def __len__(self) -> int:
        return len(self._ends)

    def frame_at(self, nanos: float) -> int:
        """The frame that is over at that moment of the run."""
        return max(bisect_right(self.times, nanos) - 1, 0)

    def text_of(self, token: int) -> str:
        """The text of a single token; empty if it is not known."""
        return self._texts.get(token, "")

    def records_of(self, frame: int) -> list[Record]:
        """The records of one frame."""
        return self.records[self._ends[frame - 1] if frame else 0 : self._ends[frame]]

    def snapshot(self, frame: int) -> Snapshot:
        """The picture at the end of a frame."""
        moment = self._at(frame)
        shown = [
            one for request in self.requests for one in request.shown(moment.rounds, moment.parsed)
        ]
        meter = Meter()
        meter.add(moment.meter)
        return Snapshot(
            moment.state,
            moment.before,
            tuple(moment.moves),
            tuple(
                one.view(moment.rounds[one.name], moment.tokens[one.name], moment.preempted)
                for one in shown
            ),
            self._pool(moment),
            meter,
            moment.at / NS,
            moment.meter.blends[-1] if moment.meter.blends else None,
            tuple(
                one.view(moment.rounds, moment.parsed, moment.tokens, moment.preempted)
                for one in self.requests
            ),
            tuple(draft_tree(*of, self.text_of) for of in moment.trees.values()),
        )

    def _at(self, frame: int) -> _Moment:
        """The moment at the end of a frame, from the nearest one that is known before it."""
        end = self._ends[frame]
        if end < self._moment.taken:
            near = max(taken for taken in self._kept if taken <= end)
            self._moment = deepcopy(self._kept[near])
        moment = self._moment
        while moment.taken < end:
            moment.take(self.records[moment.taken])
            moment.taken += 1
            if moment.taken % APART == 0 and moment.taken not in self._kept:
                self._kept[moment.taken] = deepcopy(moment)
        return moment

    def _read_texts(self, records: list[Record]) -> dict[int, str]:
        told = next((one["texts"] for one in records if one["kind"] == "texts"), None)
        if told is None:
            self.lacks.append("the texts of single tokens")
        return {int(token): text for token, text in (told or {}).items()}

    def _read_requests(self) -> list[ReplayedRequest]:
        rounds = [one for one in self.records if one["kind"] == "round"]
        verified = [one for one in rounds if max(one["accepted"], default=-1) >= 0]
        if verified and not any("trees" in one or "explained" in one for one in verified):
            self.lacks.append("drafts")
        try:
            outputs = self.run.outputs
        except UsageError:
            outputs = {}
            self.lacks.append("outputs")
        graph = self.run.manifest["graph"]["resolved"]
        most = self.run.manifest.get("max_new_tokens") or graph["limits"]["max_new_tokens"]
        budgets = ((graph.get("skeleton") or {}).get("max_tokens", 0), most)
        return replayed_requests(outputs, rounds, self._texts, budgets)

    def _read_sizes(self) -> tuple[int, int, int]:
        """Slots of the target's pool, bytes of one, slots of the drafter's pool."""
        try:
            pools = self.run.metrics["kv"]
        except UsageError:
            self.lacks.append("metrics")
            return self.run.manifest["graph"]["resolved"]["layout"]["capacity"], 0, 0
        target = pools["target"]
        drafter = pools["drafter"] or {}
        return target["capacity_slots"], target["slot_bytes"], drafter.get("capacity_slots", 0)

    def _pool(self, moment: _Moment) -> PoolView:
        used, draft = moment.kv
        capacity, slot_bytes, draft_capacity = self._sizes
        parts = [(PREFIX, 0)]
        for request in self.requests:
            for one in request.branches:
                if one.holds(moment.rounds[one.name]):
                    code = OUTLINE if one.index < 0 else BRANCH + one.index
                    parts.append((code, max(moment.tokens[one.name] - 1, 0)))
        parts[0] = PREFIX, max(used - sum(count for _, count in parts), 0)
        kinds, counts = np.array(parts, np.int16).T
        codes = np.zeros(max(capacity, used), np.int16)
        codes[:used] = np.repeat(kinds, counts)[:used]
        sizes = (used, len(codes), used * slot_bytes, draft, draft_capacity)
        return PoolView(codes, *sizes, moved=None)


def _summary(record: Record) -> RoundSummary:
    """What the meter counts of a round."""
    branches, committed, accepted, drafted, rows, padding = (record[name] for name in COUNTS)
    lists = (tuple(branches), tuple(committed), tuple(accepted))
    sizes = (drafted, record["kv"], record["kv_draft"], rows, padding)
    blend = None
    told = cast(dict[str, Any], record.get("blend"))
    if told:
        numbers: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in told.items()
        }
        blend = BlendSummary(**numbers)
    return RoundSummary(*lists, *sizes, blend=blend)


def _scene(manifest: dict[str, Any]) -> Scene:
    graph = manifest["graph"]["resolved"]
    ways: dict[str, tuple[str, ...]] = {}
    for edge in graph["transitions"]:
        sources = edge["from"] if isinstance(edge["from"], list | tuple) else [edge["from"]]
        for source in sources:
            ways[source] = (*ways.get(source, ()), edge["to"])
    model = manifest["models"]["target"]["name"].rstrip("/").rpartition("/")[2]
    kinds = (graph["layout"]["kind"], graph["drafter"]["kind"])
    return Scene(graph["name"], *kinds, model, tuple(graph["states"]), ways, manifest["requests"])
