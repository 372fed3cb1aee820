"""A kept run, step by step and without a model: pictures from its trace, outputs and manifest.

Whose a slot was is not in a trace: the strip of a replayed run has the slots in use by owner.
"""

from bisect import bisect_right
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ...states.blend import BlendSummary
from ...states.round import RoundSummary, VerifiedTree
from ...states.trace import Moved, OpRan
from ..errors import UsageError
from .drafts import draft_tree
from .kept_runs import KeptRun
from .metrics import NS, Meter
from .replay_branches import ReplayedRequest, replayed_requests
from .run_folder import TRACE
from .snapshot import BRANCH, OUTLINE, PREFIX, Move, PoolView, Scene, Snapshot
from .trace_export import records_of
from .trace_records import COUNTS, Record, told_trees

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

    def __init__(self, run: KeptRun) -> None:
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
