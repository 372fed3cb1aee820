"""A kept run read back: every frame is the picture that the live run had there."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.axes import preempt_at_random
from rich.cells import cell_len

from specsot.engine.cli import live_run
from specsot.engine.errors import Code, UsageError
from specsot.engine.record import recorder
from specsot.engine.record.recorder import trace_record
from specsot.engine.record.replay import Replay, ReplayedBranch, trees_of
from specsot.engine.record.run_folder import SavedRun
from specsot.engine.record.run_view import BRANCH, FREE, PREFIX, Mark, Snapshot
from specsot.states.round import RoundSummary, VerifiedTree
from tools.pictures.tui import still

Patch = pytest.MonkeyPatch

TREE = VerifiedTree("1/1", 30, 9, (-1, 11, 12, 13, -1), (0, 0, 0, 1, 0), (0, 1), 77, 2)
CHAIN = VerifiedTree("1/2", 40, 8, (-1, 21, 22), (0, 0, 1), (0, 1, 2), 66, 3, True)


def test_rejected_drafts_follow_the_accepted_path() -> None:
    assert TREE.rejected == [13] and CHAIN.rejected == []
    assert replace(TREE, path=(0,), num_committed=1).rejected == [11, 13]
    assert replace(TREE, num_committed=1).rejected == [], "the branch ended on the path"


def watched(
    shell: Any,
    monkeypatch: Patch,
    most: int | None = None,
    before: Callable[[Any], None] = lambda run: None,
    **options: Any,
) -> list[Snapshot]:
    """A run, and the pictures of it before every transition but the first; it is stopped after so
    many rounds."""
    seen: list[Snapshot] = []

    @contextmanager
    def look(job: Any, run: Any, recorder: Any, **more: Any) -> Iterator[Any]:
        before(run)

        def pause(run: Any) -> bool:
            recorder.take_snapshot()
            seen.append(recorder.snapshot)
            return most is None or recorder.meter.rounds < most

        yield [pause]

    monkeypatch.setattr(live_run, "_watched", look)
    assert shell.run(**options) == (Code.OK if most is None else Code.INTERRUPTED)
    return seen[1:]


@pytest.mark.parametrize("outline", [Path("outline.txt"), None])
def test_every_frame_is_the_runs(shell: Any, monkeypatch: Patch, outline: Path | None) -> None:
    seen = watched(shell, monkeypatch, outline=outline)
    found = Replay(SavedRun(shell.latest))
    assert found.missing == [] and len(found) == len(seen) + 1
    back = [found.snapshot(at) for at in reversed(range(len(seen)))][::-1]
    for live, again in zip(seen, back, strict=True):
        for name in ("state", "moves", "requests", "trees", "blend"):
            assert getattr(again, name) == getattr(live, name), (name, live.state)
        assert [replace(one, text="") for one in again.branches] == [
            replace(one, text="") for one in live.branches
        ]
        for name in ("forwards", "rounds", "tokens", "drafted", "accepted", "lengths", "visits"):
            assert getattr(again.meter, name) == getattr(live.meter, name), name
        assert again.pool.codes.size == live.pool.codes.size
        assert again.seconds <= live.seconds
    if outline is None:
        marks = {node.mark for snap in seen for tree in snap.trees for node in tree.nodes}
        assert Mark.FORCED in marks, "the grammar of outlines forces tokens"
    texts = [[one.text.strip() for one in side[-1].branches] for side in (seen, back)]
    assert texts[0] == texts[1] and any(texts[0])
    used = [(a.pool.used, (a.pool.codes > 0).sum()) for a in back]
    assert used[-1][0] and all(told == drawn for told, drawn in used)


def test_who_makes_way_is_in_the_picture_live_and_again(shell: Any, monkeypatch: Patch) -> None:
    prompts = Path("prompts.txt")
    prompts.write_text("How do bees make honey?\nWhat is water?\n")
    seen = watched(
        shell,
        monkeypatch,
        before=lambda run: preempt_at_random(run, Random(3)),
        prompts=prompts,
        prompt=None,
    )
    found = Replay(SavedRun(shell.latest))
    again = [found.snapshot(at) for at in range(len(seen))]
    waits = [snap for snap in seen if "preempted" in {one.stage for one in snap.branches}]
    assert waits and "preempted" in {one.stage for snap in seen for one in snap.requests}
    for live, told in zip(seen, again, strict=True):
        assert told.meter.preempted == live.meter.preempted, live.state
        assert told.requests == live.requests, live.state
        assert [(o.stage, o.tokens) for o in told.branches] == [
            (o.stage, o.tokens) for o in live.branches
        ]
    console = still(found, seen.index(waits[0]), 80, 24)
    lines = console.export_text().splitlines()
    assert len(lines) <= 24 and all(cell_len(line) <= 80 for line in lines)
    assert any("‖" in line for line in lines) and "preempted" in lines[-1]


def test_a_run_that_was_halted_ends_as_it_stood(shell: Any, monkeypatch: Patch) -> None:
    seen = watched(shell, monkeypatch, most=4, outline=Path("outline.txt"))
    found = Replay(SavedRun(shell.latest))
    last = found.snapshot(len(found) - 1)
    running = {one.index for one in seen[-1].branches if one.stage == "running"}
    assert {one.index for one in last.branches if one.finish == "cancelled"} == running
    assert running
    assert set(last.pool.codes.tolist()) == {FREE, PREFIX} | {BRANCH + one for one in running}


def test_a_text_grows_with_its_tokens() -> None:
    facts = ("1/1", 0, "answer", 9, "stop", [1, 2, 3, 4])
    pieces = {1: "Bees", 2: " make", 3: " hon", 4: "ey."}
    one = ReplayedBranch(*facts, "Bees make honey.", pieces)
    grown = [one.text_at(count) for count in range(5)]
    assert grown == ["", "Bees", "Bees make", "Bees make hon", "Bees make honey."]
    halves = ReplayedBranch(
        *facts, "Bees m\xe4ke.", {1: "Bees m", 2: "\ufffd", 3: "\ufffd", 4: "ke."}
    )
    assert [halves.text_at(count) for count in (2, 4)] == ["Bees ", "Bees m\xe4ke."]
    outline = ReplayedBranch(*facts[:5], [1, 5], None, {1: "PLAN", 5: "\ufffd"})
    assert [outline.text_at(count) for count in (1, 2)] == ["PLAN", "PLAN"]


def test_trees_are_told_in_few_words_and_read_back() -> None:
    summary = RoundSummary(("1/1", "1/2", "2/1"), (2, 3, 1), (1, 2, -1), 5, 9, 9, 6)
    record = trace_record(5, replace(summary, trees=(TREE, CHAIN)), 1)
    assert record["trees"][1] == {
        "at": 40,
        "root": 8,
        "tokens": [21, 22],
        "path": [1, 2],
        "final": 66,
        "forced": True,
    }
    (first, second) = trees_of(json.loads(json.dumps(record)))
    assert second == CHAIN
    assert first == replace(TREE, tokens=TREE.tokens[:-1], parents=TREE.parents[:-1])
    assert "trees" not in trace_record(5, summary, 1)


def test_a_round_tells_of_so_many_nodes_at_most(monkeypatch: Patch) -> None:
    monkeypatch.setattr(recorder, "MAX_TREE_NODES", 4)
    summary = RoundSummary(("1/1", "1/2"), (2, 3), (1, 2), 5, 9, 9, 6, trees=(TREE, CHAIN))
    record = trace_record(5, summary, 1)
    assert [tree.branch for tree in trees_of(record)] == ["1/1"]


def test_the_trace_of_a_killed_run_is_replayed_as_far_as_it_goes(shell: Any) -> None:
    assert shell.run(explain_rounds=True) == Code.OK
    path = shell.latest / "trace.jsonl"
    records = shell.lines("trace.jsonl")
    whole = Replay(SavedRun(shell.latest))
    assert records[-1]["kind"] == "texts"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records[:-1]))
    (shell.latest / "metrics.json").unlink()
    bare = Replay(SavedRun(shell.latest))
    assert bare.missing == ["the texts of single tokens", "metrics"]
    last = len(whole) - 1
    snap = bare.snapshot(last)
    trees = whole.snapshot(last).trees
    assert [tree.accepted for tree in snap.trees] == [tree.accepted for tree in trees]
    assert [node.mark for node in snap.trees[0].nodes] == [node.mark for node in trees[0].nodes]
    assert snap.trees[0].nodes[0].text.startswith("<")
    assert snap.meter.tokens == whole.snapshot(last).meter.tokens
    assert {one.stage for one in snap.branches} == {"done"}


@pytest.mark.parametrize(
    ("trace", "manifest", "words"),
    [
        ("", None, "nothing to replay"),
        ('{"kind": "op", "t": 1}\n', None, "nothing to replay"),
        ('{"kind": "move", "t": 1}\n', None, "not a valid run folder"),
        ("x\n", None, "trace.jsonl:1: not a record"),
        (None, "{}", "not a valid run folder"),
    ],
)
def test_no_run_is_replayed(
    kept: Path, trace: str | None, manifest: str | None, words: str
) -> None:
    for name, text in (("trace.jsonl", trace), ("manifest.json", manifest)):
        if text is not None:
            (kept / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        Replay(SavedRun(kept))


MOVE = {"kind": "move", "t": 1, "step": 1, "from": "start", "to": "a", "guard": None, "ns": 0}
GRAPH = {
    "name": "g",
    "layout": {"kind": "bim", "kv_slots": 8},
    "drafter": {"kind": "none"},
    "limits": {"max_new_tokens": 4},
    "states": {"a": {}},
    "transitions": [],
}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    manifest = {"graph": {"resolved": GRAPH}, "models": {"target": {"name": "m"}}, "requests": 1}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "outputs.jsonl").touch()
    (tmp_path / "trace.jsonl").write_text(json.dumps({**MOVE, "committed": 0}) + "\n")
    return tmp_path


def test_the_smallest_run(kept: Path) -> None:
    found = Replay(SavedRun(kept))
    assert len(found) == 1 and found.snapshot(0).state == "a"
    assert found.missing == ["the texts of single tokens", "metrics"]
