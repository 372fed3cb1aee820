"""A saved run, transition by transition and without a model, from its trace, outputs and manifest;
its trace as a table, for ui.perfetto.dev, for the page of a server.

A trace has no owner of a slot: the strip of a replayed run shows how many slots each owner has."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from ...states.machine import Moved, OpRan
from ...states.round import BlendSummary, RoundSummary, VerifiedTree
from ...states.yaml.source import number_of
from ..errors import UsageError
from ..events import HALF, Origin
from . import run_view
from .metrics import NS
from .recorder import ROUND_FIELDS, Record
from .run_folder import TRACE, SavedRun, valid

MAX_FRAMES = 20_000  # that a page plays
MAX_BYTES = 128 << 20  # of a trace that a page plays
CHECKPOINT_INTERVAL = 256  # records between two states that are retained for going back
PARSE_OP = "outline.parse_"  # the op that turns outlines into branches


@dataclass
class ReplayedView(run_view.RunView):
    """The view of a run after the records so far. kv: slots in use in both pools. parsed: forwards
    at the last parse of outlines. rounds, tokens: of each branch. preempted: names; `starting`
    resume with the next forward."""

    kv: tuple[int, int] = (0, 0)
    parsed: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    preempted: set[str] = field(default_factory=set)
    starting: frozenset[str] = frozenset()

    def fold(self, record: Record) -> None:
        """Fold a trace record, as the live run folded its event."""
        match record["kind"]:
            case "move":
                edge = (record["from"], record["to"], record["guard"])
                self.committed = record["committed"]
                self.moved(Moved(*edge, record["step"], record["ns"]), record["t"])
            case "op":
                self.meter.op_ran(OpRan(record["state"], record["op"], record["ns"], {}))
                if record["op"] == PARSE_OP:
                    self.parsed = self.meter.forwards
            case "step":
                preempted = record["preempted"]
                self.meter.preempted += len(preempted)
                self.preempted.update(preempted)
                self.starting = frozenset((*record["starts"], *record["chunks"]))
            case "round":
                blend = record.get("blend")
                summary = RoundSummary(
                    **{name: record[name] for name in ROUND_FIELDS},
                    target_length=record["kv"],
                    draft_length=record["kv_draft"],
                    trees=tuple(trees_of(record)),
                    blend=BlendSummary(**blend) if blend else None,
                )
                self.round_done(summary, record["t"])
                self.preempted -= self.starting
                self.kv = (summary.target_length, summary.draft_length)
                self.rounds.update(summary.branches)
                self.tokens.update(dict(zip(summary.branches, summary.committed, strict=True)))


@dataclass(eq=False)
class ReplayedBranch:
    """As it ended; text: None for an outline; texts: of single tokens; rounds: its forwards."""

    name: str
    index: int
    title: str
    budget: int
    finish: str
    ids: list[int]
    text: str | None
    texts: Mapping[int, str]
    rounds: int = 0
    last_round: int = 0

    def view(self, run: ReplayedView) -> run_view.BranchView:
        stage = self.stage(run)
        tokens = run.tokens[self.name] if self.rounds else len(self.ids)
        request = self.name.rpartition("/")[0]
        if stage == "running" and {self.name, request} & run.preempted:
            stage = "preempted"
        return run_view.BranchView(
            request=request,
            index=self.index,
            title=self.title,
            stage=stage,
            finish=self.finish if stage == "done" else "",
            tokens=tokens,
            budget=self.budget,
            text=self.text_at(tokens),
        )

    def stage(self, run: ReplayedView) -> str:
        rounds = run.rounds[self.name]
        if not rounds:
            before = not self.rounds and self.ids  # decoded before the run was resumed
            return "done" if before or self.finish == "refused" else "waiting"
        return "done" if rounds >= self.rounds else "running"

    def text_at(self, tokens: int) -> str:
        """The text of the first tokens: a proportional share of the whole text if the texts of
        single tokens do not add up to it."""
        whole, ends = self._pieces
        if tokens >= len(self.ids) and self.text is not None:
            return self.text
        if self.text is None or whole.strip() == self.text.strip():
            return whole[: ends[min(tokens, len(ends) - 1)]].rstrip(HALF)
        return self.text[: round(len(self.text) * min(tokens / max(len(self.ids), 1), 1))]

    @cached_property
    def _pieces(self) -> tuple[str, list[int]]:
        pieces = [self.texts.get(token, "") for token in self.ids]
        return "".join(pieces), [0, *accumulate(map(len, pieces))]


@dataclass(eq=False)
class ReplayedRequest:
    """A combined answer is the last of the parts."""

    key: str
    question: str
    outline: ReplayedBranch | None = None
    parts: list[ReplayedBranch] = field(default_factory=list)

    @property
    def branches(self) -> Iterator[ReplayedBranch]:
        if self.outline is not None:
            yield self.outline
        yield from self.parts

    def visible(self, run: ReplayedView) -> list[ReplayedBranch]:
        """The parts once they exist, before that the outline."""
        root = self.outline
        begun = any(run.rounds[part.name] for part in self.parts)
        if root is None or begun or root.last_round <= run.parsed:
            return self.parts
        return [root] if run.rounds[root.name] else []

    def view(self, run: ReplayedView) -> run_view.RequestView:
        parts = self.parts if self.visible(run) is self.parts else []
        done = sum(part.stage(run) == "done" for part in parts)
        if parts and done == len(parts):
            stage = "done"
        elif self.key in run.preempted:
            stage = "preempted"
        elif any(run.rounds[branch.name] for branch in self.branches):
            stage = "running" if parts else "outlining"
        else:
            stage = "waiting"
        return run_view.RequestView(
            key=self.key,
            question=self.question,
            stage=stage,
            parts=len(parts),
            done=done,
            tokens=sum(run.tokens[branch.name] for branch in self.branches),
            refused=stage == "done" and any(b.finish == "refused" for b in self.branches),
        )


class Replay:
    """The frames of a saved run: one for each state that it was in; raises UsageError. times:
    nanoseconds of the run at the end of each frame. missing: what the run folder lacks."""

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        self.missing: list[str] = []
        with valid(run):
            records = list(records_of(run))
            self.records = [record for record in records if record["kind"] != "texts"]
            moves = [at for at, record in enumerate(self.records) if record["kind"] == "move"]
            if not moves:
                raise UsageError(f"{run.path / TRACE}: no transition in it, nothing to replay")
            self._ends = [*moves[1:], len(self.records)]
            self.times = [self.records[end - 1]["t"] for end in self._ends]
            self._graph = run.manifest["graph"]["resolved"]
            model = run.manifest["models"]["target"]["name"]
            self.scene = run_view.scene_of(self._graph, model, run.manifest["requests"])
            texts = [record["texts"] for record in records if record["kind"] == "texts"] or [{}]
            self._texts = {int(token): text for token, text in texts[-1].items()}
            if len(self.records) == len(records):
                self.missing.append("the texts of single tokens")
            self.requests = self._read_requests()
            self.branches = {b.name: b for request in self.requests for b in request.branches}
            try:
                pools = run.metrics["kv"]
            except UsageError:  # a run that did not end has none
                self.missing.append("metrics")
                pools = {"target": {"capacity_slots": self._graph["layout"]["kv_slots"]}}
            self._target = {"slot_bytes": 0, **pools["target"]}
            self._draft_slots = (pools.get("drafter") or {}).get("capacity_slots", 0)
            self._view = ReplayedView()
            self._position = 0  # records that `_view` has folded
            self._checkpoints = {0: ReplayedView()}
            self.snapshot(0)

    def _read_requests(self) -> list[ReplayedRequest]:
        rounds = [record for record in self.records if record["kind"] == "round"]
        outputs: Mapping[str, Any] = {}
        try:
            outputs = self.run.outputs
        except UsageError:
            self.missing.append("outputs")
        saved: dict[str, Mapping[str, Any]] = {}
        for key, line in outputs.items():
            ids = line.get("outline_token_ids") or []
            finish = line.get("outline_finish_reason") or ""
            if ids or finish:
                outline = {"title": "outline", "finish_reason": finish, "token_ids": ids}
                saved[f"{key}/outline"] = outline
            saved |= {f"{key}/{part['index'] + 1}": part for part in line.get("parts", ())}
            if line.get("combined") is not None:
                saved[f"{key}/combined"] = line["combined"]
        counts = Counter(name for record in rounds for name in record["branches"])
        last = {name: record["round"] for record in rounds for name in record["branches"]}
        budget = self.run.manifest.get("max_new_tokens") or self._graph["limits"]["max_new_tokens"]
        outline_budget = (self._graph.get("skeleton") or {}).get("max_tokens", 0)
        requests = {k: ReplayedRequest(k, line.get("question", "")) for k, line in outputs.items()}
        for name in {**saved, **counts}:
            key, _, title = name.rpartition("/")
            request = requests.setdefault(key, ReplayedRequest(key, ""))
            values = saved.get(name, {"title": title, "finish_reason": "", "token_ids": []})
            branch = ReplayedBranch(
                name=name,
                index=-1 if title == "outline" else len(request.parts),
                title=values["title"] or "answer",
                budget=outline_budget if title == "outline" else budget,
                finish=values["finish_reason"],
                ids=values["token_ids"],
                text=values.get("text"),
                texts=self._texts,
                rounds=counts[name],
                last_round=last.get(name, 0),
            )
            if title == "outline":
                request.outline = branch
            else:
                request.parts.append(branch)
        return list(requests.values())

    def __len__(self) -> int:
        return len(self._ends)

    def text_of(self, token: int) -> str:
        return str(self._texts.get(token, ""))

    def records_of(self, frame: int) -> list[Record]:
        return self.records[self._ends[frame - 1] if frame else 0 : self._ends[frame]]

    def snapshot(self, frame: int) -> run_view.Snapshot:
        view = self.view(frame)
        return view.snapshot(
            [branch.view(view) for request in self.requests for branch in request.visible(view)],
            [request.view(view) for request in self.requests],
            self.pool(view),
            seconds=self.times[frame] / NS,
            text=self.text_of,
        )

    def view(self, frame: int) -> ReplayedView:
        """The view at the end of a frame, folded from the nearest one before it; not a copy."""
        end = self._ends[frame]
        if end < self._position:
            self._position = max(position for position in self._checkpoints if position <= end)
            self._view = deepcopy(self._checkpoints[self._position])
        with valid(self.run):
            while self._position < end:
                self._view.fold(self.records[self._position])
                self._position += 1
                if self._position % CHECKPOINT_INTERVAL == 0:
                    self._checkpoints.setdefault(self._position, deepcopy(self._view))
        return self._view

    def pool(self, view: ReplayedView) -> run_view.PoolView:
        used, draft_used = view.kv
        kinds = [run_view.PREFIX]
        counts: list[int] = []
        for branch in self.branches.values():
            # A cancelled branch keeps its slots to the end of the trace.
            cancelled = branch.finish == "cancelled" and view.rounds[branch.name] > 0
            if cancelled or branch.stage(view) == "running":
                code = run_view.BRANCH + branch.index
                kinds.append(code if branch.index >= 0 else run_view.OUTLINE)
                counts.append(max(view.tokens[branch.name] - 1, 0))
        codes = np.zeros(max(self._target["capacity_slots"], used), np.int16)
        prefix = max(used - sum(counts), 0)
        codes[:used] = np.repeat(np.array(kinds, np.int16), [prefix, *counts])[:used]
        return run_view.PoolView(
            codes=codes,
            used=used,
            bytes=used * self._target["slot_bytes"],
            draft_used=draft_used,
            draft_capacity=self._draft_slots,
            moved=None,
        )


def records_of(run: SavedRun) -> Iterator[Record]:
    for number, line in enumerate(run.lines(TRACE), 1):
        try:
            record = json.loads(line)
            yield {"kind": record["kind"], "t": record["t"], **record}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{run.path / TRACE}:{number}: not a record of a trace") from None


def trees_of(record: Record) -> Iterator[VerifiedTree]:
    """The trees of a round's record."""
    for at, tree in enumerate(record.get("trees", ())):
        yield VerifiedTree(
            branch=record["branches"][at],
            position=tree["at"],
            root=tree["root"],
            tokens=(-1, *tree["tokens"]),
            parents=(0, *tree.get("parents", range(len(tree["tokens"])))),
            path=(0, *tree["path"]),
            final=tree["final"],
            num_committed=record["committed"][at],
            forced=tree.get("forced", False),
        )


# -- the trace in other formats --------------------------------------------------------------------

# tracks of Chrome's trace event format
STATES_TRACK = 1
OPS_TRACK = 2
FIRST_BRANCH_TRACK = 10
COLUMNS = [
    *("kind", "t", "step", "round", "from", "to", "guard", "state", "op", "ns", "branches"),
    *("committed", "accepted", "drafted", "rows", "padding", "kv", "kv_draft"),
]


def as_csv(records: Iterable[Record]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for record in records:
        values = (record.get(name) for name in COLUMNS)
        table.writerow(" ".join(map(str, v)) if isinstance(v, list) else v for v in values)
    return out.getvalue()


def as_perfetto(records: Iterable[Record], title: str) -> str:
    """In Chrome's trace event format: complete events (`ph: X`) of states, ops and branches with
    times in microseconds, counters (`ph: C`), names of tracks (`ph: M`)."""
    events: list[Record] = []

    def add(phase: str, name: str, args: Any, **place: float) -> None:
        events.append({"name": name, "ph": phase, "pid": 1, **place, "args": args})

    def add_span(track: int, name: str, start: int, end: int, args: Any) -> None:
        add("X", name, args, tid=track, ts=start / 1e3, dur=(end - start) / 1e3)

    add("M", "process_name", {"name": title}, tid=0)
    add("M", "thread_name", {"name": "states"}, tid=STATES_TRACK)
    add("M", "thread_name", {"name": "ops"}, tid=OPS_TRACK)
    tracks: dict[str, int] = {}
    before = 0
    for record in records:
        kind = record["kind"]
        t = record["t"]
        if kind == "move" and record["step"] > 1:
            args = {name: record[name] for name in ("to", "guard", "committed")}
            add_span(STATES_TRACK, record["from"], t - record["ns"], end=t, args=args)
        elif kind == "op":
            args = {name: record[name] for name in ("state", "shapes")}
            add_span(OPS_TRACK, record["op"], t - record["ns"], end=t, args=args)
        elif kind == "round":
            counts = zip(record["committed"], record["accepted"], strict=True)
            for branch, (committed, accepted) in zip(record["branches"], counts, strict=True):
                if branch not in tracks:
                    tracks[branch] = FIRST_BRANCH_TRACK + len(tracks)
                    add("M", "thread_name", {"name": f"branch {branch}"}, tid=tracks[branch])
                args = {"round": record["round"], "committed": committed, "accepted": accepted}
                name = "prefill" if accepted < 0 else number_of(committed, "token")
                add_span(tracks[branch], name, before, end=t, args=args)
            before = t
            for name in ("drafted", "rows", "kv", "kv_draft"):
                add("C", name, {name: record[name]}, ts=t / 1e3)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def playback_of(run: SavedRun) -> dict[str, Any]:
    """The scene of a run, its requests and its frames, as JSON values; raises UsageError."""
    trace = run.path / TRACE
    if trace.exists() and trace.stat().st_size > MAX_BYTES:
        raise UsageError(f"{trace}: a page plays at most {MAX_BYTES >> 20} MiB")
    replay = Replay(run)
    if len(replay) > MAX_FRAMES:
        reason = f"{len(replay)} transitions, a page plays at most {MAX_FRAMES}"
        raise UsageError(f"{run.path}: {reason}")
    scene = replay.scene
    parsed: set[str] = set()

    def frame(number: int) -> dict[str, Any]:
        view = replay.view(number)
        pool = replay.pool(view)
        return {
            "t": replay.times[number] / 1e6,
            "state": view.state,
            "events": list(_events(replay, number, parsed)),
            "runs": run_view.runs_of(pool.codes),
            "used": pool.used,
            "capacity": pool.codes.size,
        }

    ways = [[source, to, ""] for source, targets in scene.ways.items() for to in targets]
    with valid(run):
        frames = [frame(number) for number in range(len(replay.times))]
    return {
        "run": run.path.name,
        "graph": {
            "name": scene.graph,
            "layout": scene.layout,
            "drafter": scene.drafter,
            "model": scene.model,
            "states": list(scene.states),
            "ways": ways,
            "initial": ways[0][0],
        },
        "requests": [[request.key, request.question] for request in replay.requests],
        "lacks": replay.missing,
        "frames": frames,
    }


def _events(replay: Replay, frame: int, parsed: set[str]) -> Iterator[list[Any]]:
    """[request, name, branch, details] of each event of a frame, as a live page gets it; parsed:
    keys of the requests whose outline was yielded."""
    view = replay.view(frame)
    for record in replay.records_of(frame):
        if record["kind"] == "op" and record["op"] == PARSE_OP:
            for request in replay.requests:
                root = request.outline
                is_new = root is not None and request.key not in parsed
                if is_new and root is not None and view.rounds[root.name] >= root.rounds:
                    parsed.add(request.key)
                    titles = [part.title for part in request.parts if part.title != "combined"]
                    yield [request.key, "outline", -1, titles if len(titles) > 1 else []]
        elif record["kind"] == "round":
            trees = {tree.branch: tree for tree in trees_of(record)}
            columns = (record[name] for name in ("branches", "committed", "accepted"))
            for name, count, accepted in zip(*columns, strict=True):
                branch = replay.branches[name]
                key = name.rpartition("/")[0]
                if view.rounds[name] == 1:
                    yield [key, "opened", branch.index, branch.title]
                first = view.tokens[name] - count
                if tokens := branch.ids[first : first + count]:
                    drafts = min(accepted, len(tokens))
                    tree = trees.get(name)
                    kind = Origin.FORCED if tree is not None and tree.forced else Origin.DRAFT
                    letters = kind * drafts + Origin.TARGET * (len(tokens) - drafts)
                    if accepted < 0:
                        letters = Origin.PROMPT * len(tokens)
                    texts = map(replay.text_of, tokens)
                    pairs = [list(pair) for pair in zip(texts, letters, strict=True)]
                    yield [key, "wrote", branch.index, pairs]
                    if tree is not None and tree.rejected:
                        rejected = "".join(map(replay.text_of, tree.rejected))
                        yield [key, "rejected", branch.index, rejected]
                if view.rounds[name] >= branch.rounds:
                    yield [key, "ended", branch.index, branch.finish]
