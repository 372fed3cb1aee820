"""A run by hand: from the command line and from Python, with the digest of the original."""

import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from specsot.engine.errors import Code
from specsot.engine.record.run_view import Mark, scene_of
from specsot.engine.run.api import Prompt, Recorder, open_session, token_digest
from specsot.engine.run.core import Status, StopSignal, drive
from specsot.engine.view.keys import Pages
from specsot.engine.view.step import Inspector, LiveStepper, PlainStepper, open_ways, picture
from specsot.engine.view.tui import screen

Patch = pytest.MonkeyPatch


@pytest.fixture
def session(tiny: tuple[Path, Path], tmp_path: Path) -> Any:
    file = tmp_path / "o.txt"
    file.write_text("PLAN\n1|60|-|-|First [bold]thing\n2|60|-|-|Second\nEND\n")
    options: Any = {"threads": 1, "max_new_tokens": 24, "outline": file}
    return open_session("bim_eagle", model=str(tiny[0]), drafter_model=str(tiny[1]), **options)


def test_a_stepped_run_has_the_digest_of_the_original(shell: Any, monkeypatch: Patch) -> None:
    assert shell.run() == Code.OK
    digest, moves = shell.digest, shell.lines("trace.jsonl")
    count = sum(record["kind"] == "move" for record in moves)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * count))
    assert shell.run(step=True) == Code.OK
    assert shell.digest == digest
    assert shell.err.count("[q] quit >") == count
    for wanted in ("state verify", "=> expand_root", " x parse  when outlines_finished", "kv "):
        assert wanted in shell.err


@pytest.mark.parametrize(
    ("answers", "code", "status"),
    [("\n\n\n\nq\n", Code.INTERRUPTED, "interrupted"), ("what?\n\n", Code.OK, "ok")],
)
def test_q_ends_a_run_and_the_end_of_the_answers_does_not(
    answers: str, code: Code, status: str, shell: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    assert shell.run(step=True, max_new_tokens=2) == code
    assert shell.read("manifest.json")["status"] == status


def started(session: Any) -> tuple[Any, Recorder]:
    recorder = Recorder(session.prompts.decode)
    run = session.start([Prompt("1", "How do bees make honey?")], recorder)
    recorder.attach(run)
    return run, recorder


def test_by_hand_from_python(session: Any) -> None:
    digests = []
    for _ in range(2):
        run, recorder = started(session)
        states = []
        while not run.finished:
            (first, *_) = [t for t, _, opened in open_ways(session.program, run) if opened]
            run.advance()
            assert run.state == first, "the first open way is the one that is taken"
            states.append(run.state)
        assert states[:2] == ["schedule", "skeleton"]
        assert states[-4:] == ["merge", "schedule", "idle", "done"]
        assert recorder.meter.visits.total() == len(states)
        digests.append(token_digest(run.answers))
    assert digests[0] == digests[1]


def test_the_picture_shows_keys_and_shapes(session: Any) -> None:
    run, _ = started(session)
    assert "=> schedule" in picture(session.program, run)
    while run.state != "grow_tree":
        run.advance()
    text = picture(session.program, run)
    assert "x continuous_decode  when newcomers_fit" in text and "=> verify" in text
    assert "Proposal(tokens_SN=int64[2," in text
    assert "float32[8,2," in text and "2 active" in text
    assert max(map(len, text.split("\n"))) < 200


def test_a_pause_can_stop_a_run(session: Any) -> None:
    run, recorder = started(session)
    inspector = Inspector(session.program, recorder, run)
    source = io.StringIO("\nq\n")
    stepper = PlainStepper(inspector=inspector, source=source, out=lambda text: None)
    assert drive(run, recorder, max_rounds=9, pause=stepper) is Status.INTERRUPTED
    assert run.steps == 1
    assert drive(run, recorder, max_rounds=1) is Status.LIMIT
    assert recorder.meter.rounds == 1
    halt = StopSignal()
    halt.status = Status.TERMINATED
    assert drive(run, recorder, max_rounds=9, stop=halt) is Status.TERMINATED
    assert drive(run, recorder, max_rounds=99) is Status.OK


# -- breakpoints and pages ------------------------------------------------------------------------


def halts(shell: Any) -> list[str]:
    return [line.split()[-1] for line in shell.err.splitlines() if "  state " in line]


def test_breakpoints_halt_in_their_states_alone(shell: Any, monkeypatch: Patch) -> None:
    shell.defaults["max_new_tokens"] = 8
    assert shell.run() == Code.OK
    digest, moves = shell.digest, [r for r in shell.lines("trace.jsonl") if r["kind"] == "move"]
    wanted = [move["to"] for move in moves if move["to"] in ("verify", "merge")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\n" * len(moves)))
    assert shell.run(breaks=("verify", "merge")) == Code.OK
    assert shell.digest == digest and len(wanted) > 2
    assert halts(shell) == wanted and "[c] to the next halt" in shell.err
    assert shell.read("metrics.json")["overhead_share"] >= 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\nq\n"))
    assert shell.run(breaks=("verify",)) == Code.INTERRUPTED
    assert halts(shell) == ["verify", "schedule", "expand_root"], "single steps"


def test_pages_in_plain_lines(shell: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("tree\n\nrows\ntext\ntree\nq\n"))
    assert shell.run(breaks=("grow_tree",)) == Code.INTERRUPTED
    offered, after = shell.err.split("  state verify")
    assert "+ offered, not verified yet" in offered and "drafts, root at position" in offered
    assert "rows see" in after and "✓ accepted ✗ rejected" in after and "⟨" in after


def halted_in(session: Any, state: str) -> tuple[Any, Recorder, Inspector]:
    run, recorder = started(session)
    inspector = Inspector(session.program, recorder, run)
    while recorder.meter.visits[state] < 2:
        run.advance()
    return run, recorder, inspector


def test_rows_have_their_positions_and_see_their_ancestors(session: Any) -> None:
    _, recorder, inspector = halted_in(session, "verify")
    view = inspector.forward
    assert view is not None and view.number == recorder.meter.forwards
    tree = {t.branch: t for _, t in recorder.view.trees.values()}["1/1"]
    rows = [at for at, row in enumerate(view.rows) if row.name == "1/1"]
    assert [view.rows[at].node for at in rows] == list(range(len(rows))) and len(rows) > 2
    visible_NK = np.array([row.visible_K for row in view.rows])
    own = visible_NK[:, -view.fresh :]
    place = {slot: at for at, slot in enumerate(view.slots[-view.fresh :])}
    depth = {0: 0}
    for at in rows:
        node, line = view.rows[at].node, {0}
        depth[node] = depth[tree.parents[node]] + (node > 0)
        assert view.rows[at].position == tree.position + depth[node]
        up = node
        while up:
            line.add(up)
            up = tree.parents[up]
        seen = [n for n in range(len(rows)) if own[at, place[view.rows[rows[n]].slot]]]
        assert seen == sorted(line), node
        assert own[at].sum() == len(line), "of no other branch"
    cached = visible_NK[rows[0], : -view.fresh]
    assert cached.sum() == tree.position, "the prefix and its own rows"


def test_what_is_offered_is_what_is_verified(session: Any) -> None:
    run, recorder, inspector = halted_in(session, "grow_tree")
    offered = {tree.name: tree for tree in inspector.offered()}
    run.advance()
    recorder.take_snapshot()
    assert recorder.snapshot is not None and run.state == "verify" and len(offered) == 2
    for tree in recorder.snapshot.trees:
        before = Counter(node.text for node in offered[tree.name].nodes)
        assert before < Counter(node.text for node in tree.nodes), "the final token is new"
        assert {node.mark for node in offered[tree.name].nodes} == {Mark.ROOT, Mark.OFFERED}
        assert offered[tree.name].drafted == tree.drafted
    assert not list(inspector.offered())


class Screen:
    """As much of a live view as a stepper wants; reads the keys in `typed`."""

    def __init__(self, session: Any, recorder: Recorder, typed: list[str]) -> None:
        self.recorder, self.console, self.shown = recorder, Console(width=100, height=30), []
        self.scene = scene_of(session.program.graph.model_dump(by_alias=True), "tiny", 1)
        self.typed, self.pages = typed, Pages(())

    def refresh(self) -> None:
        assert self.recorder.snapshot is not None
        console = Console(record=True, width=100, height=30, file=io.StringIO())
        console.print(
            screen(self.scene, self.recorder.snapshot, 100, 30, pages=self.pages), height=30
        )
        self.shown.append(console.export_text())

    def read(self, seconds: float) -> str:
        key = self.typed.pop(0)
        return "" if self.pages.press(key) else key


def live(inspector: Inspector, view: Any, stopped: bool = False) -> LiveStepper:
    return LiveStepper(inspector=inspector, view=view, stopped=lambda: stopped)


def test_keys_turn_pages_inside_the_view(session: Any) -> None:
    run, recorder, inspector = halted_in(session, "verify")
    typed = ["1", "4", "down", "tab", "3", "?", "q", "enter"]
    view = Screen(session, recorder, typed)
    stepper = live(inspector, view)
    assert stepper(run) and not typed
    picture, board, rows, lower, again, tree, opened, closed = view.shown
    assert "drafts" in picture and "‖" in picture and "[0 picture]" in picture
    assert "=> schedule" in board and "committed" in board and "0 picture [1 board]" in board
    assert "of its own" in rows and "own" in rows and "[4 rows]" in rows
    assert rows != lower or "lines 1-" in lower
    assert again == picture and "root at position" in tree
    assert all("Enter step" in shown and "? help" in shown for shown in view.shown)
    assert "take one step" in opened and "what each row of the last forward" in opened
    assert closed == tree, "q closes the help, it does not end the run"
    typed[:] = ["q"]
    assert not stepper(run)
    typed[:] = ["c"]
    assert stepper(run) and stepper.free and stepper(run)
    assert live(inspector, Screen(session, recorder, []), stopped=True)(run), "without a key"
