"""A run by hand: from the command line and from Python, with the digest of the original."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from specsot.engine.errors import Code
from specsot.engine.run.api import Prompt, Recorder, open_session, token_digest
from specsot.engine.run.runner import Halt, Status, drive
from specsot.engine.view.stepper import Stepper, open_ways, picture


@pytest.fixture
def session(tiny: tuple[Path, Path], tmp_path: Path) -> Any:
    (tmp_path / "o.txt").write_text("PLAN\n1|60|-|-|First [bold]thing\n2|60|-|-|Second\nEND\n")
    return open_session(
        "bim_eagle",
        model=str(tiny[0]),
        drafter_model=str(tiny[1]),
        threads=1,
        max_new_tokens=24,
        outline=tmp_path / "o.txt",
    )


def test_a_stepped_run_has_the_digest_of_the_original(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell.run() == Code.OK
    digest, moves = shell.digest, shell.lines("trace.jsonl")
    count = sum(record["kind"] == "move" for record in moves)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * count))
    assert shell.run(step=True) == Code.OK
    assert shell.digest == digest
    assert shell.err.count("[q] quit >") == count
    for wanted in ("state verify", "=> expand_root", " x parse  when outlines_finished", "kv "):
        assert wanted in shell.err


def test_quitting_keeps_what_was_made(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n\n\n\n\n\nq\n"))
    assert shell.run(step=True) == Code.INTERRUPTED
    assert shell.read("manifest.json")["status"] == "interrupted"


def test_the_end_of_the_answers_goes_on(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("what?\n\n"))
    assert shell.run(step=True, max_new_tokens=2) == Code.OK


def test_step_and_piped_prompt_exclude_each_other(shell: Any) -> None:
    assert shell.run(step=True, prompt="-") == Code.USAGE


def test_by_hand_from_python(session: Any) -> None:
    digests = []
    for _ in range(2):
        recorder = Recorder(session.prompts.decode)
        run = session.start([Prompt("1", "How do bees make honey?")], recorder)
        recorder.attach(run)
        states = []
        while not run.finished:
            (first, *_) = [t for t, _, opened in open_ways(session.program, run) if opened]
            run.advance()
            assert run.state == first, "the first open way is the one that is taken"
            states.append(run.state)
        assert states[0] == "skeleton" and states[-2:] == ["merge", "done"]
        assert recorder.meter.visits.total() == len(states)
        digests.append(token_digest(run.board["answers"]))
    assert digests[0] == digests[1]


def test_the_picture_shows_keys_and_shapes(session: Any) -> None:
    run = session.start([Prompt("1", "How do bees make honey?")], lambda event: None)
    assert "=> skeleton" in picture(session.program, run)
    while run.state != "grow_tree":
        run.advance()
    text = picture(session.program, run)
    assert "x continuous_decode  when newcomers_fit" in text and "=> verify" in text
    assert "Proposal(tokens_SN=int64[2," in text
    assert "float32[8,2," in text and "2 active" in text
    assert max(map(len, text.split("\n"))) < 200


def test_a_pause_can_stop_a_run(session: Any) -> None:
    recorder = Recorder(session.prompts.decode)
    run = session.start([Prompt("1", "How do bees make honey?")], recorder)
    recorder.attach(run)
    stepper = Stepper(session.program, io.StringIO("\nq\n"), lambda text: None)
    assert drive(run, recorder, max_rounds=9, pause=stepper) is Status.INTERRUPTED
    assert run.steps == 1
    assert drive(run, recorder, max_rounds=1) is Status.LIMIT
    assert recorder.meter.rounds == 1
    halt = Halt()
    halt.status = Status.TERMINATED
    assert drive(run, recorder, max_rounds=9, halt=halt) is Status.TERMINATED
    assert drive(run, recorder, max_rounds=99) is Status.OK
