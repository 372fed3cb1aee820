"""Streams that are closed or full, no room for a run folder, and signals while the program starts:
the answer first, files second, one line and the exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from helpers.fuzz import MAKERS, try_all, try_graph, try_input
from helpers.fuzz_streams import (
    ANSWER,
    LONG,
    NOWHERE,
    RUNNING,
    StreamCase,
    run_cases,
    stream_cases,
)
from helpers.support import SEED, taking_turns

from specsot.engine.cli import main as cli
from specsot.engine.errors import Code
from specsot.engine.run.core import Status, StopSignal
from specsot.engine.signals import ending_with

FULL = "specsot: standard output: No space left on device"
# A command and its streams, how it ends, and a line of its stderr.
STREAMS: tuple[tuple[StreamCase, int, str], ...] = (
    (StreamCase(ANSWER, "full"), Code.FAILED, f"{FULL}; the answer is in runs/"),
    (StreamCase(ANSWER, "closed"), Code.FAILED, "Bad file descriptor; the answer is in runs/"),
    *((StreamCase(ANSWER, stderr=one), Code.OK, "") for one in ("full", "closed")),
    (StreamCase([*ANSWER, *NOWHERE]), Code.FAILED, f"{NOWHERE[1]}: no run folder can be made ther"),
    (StreamCase([*ANSWER, *NOWHERE], "full"), Code.FAILED, "the answer follows here\n"),
    (StreamCase([*ANSWER, "--json", "-q"], "gone"), Code.OK, ""),
    (StreamCase(["schema"], "gone"), Code.OK, ""),
    (StreamCase(["list"], "full"), Code.FAILED, FULL),
    *((StreamCase(["check", "bim_eagel"], "file", one), 3, "") for one in ("full", "closed")),
    (StreamCase(["check", "bim_eagel"], "closed", "full"), Code.GRAPH, ""),
    (StreamCase(LONG, signals=(("SIGTERM", 0.0),), within=RUNNING), 143, "terminated"),
)


def test_the_answer_comes_first_where_a_stream_is_full_closed_or_gone(tmp_path: Path) -> None:
    """And where there is no room for a run folder; a few drawn ones of tests/full with them."""
    draw = Random(SEED)
    odd = draw.sample([one for one in stream_cases(draw) if one.words[:6] == ANSWER], 3)
    codes, faults = run_cases([*(one for one, _, _ in STREAMS), *odd], tmp_path)
    assert not faults and codes[:-3] == [code for _, code, _ in STREAMS] and len(codes[-3:]) == 3
    answer = (tmp_path / "0" / "stream1").read_text()
    for number, (one, _, line) in enumerate(STREAMS, 1):
        folder, errors = tmp_path / str(number), tmp_path / str(number) / "stream2"
        told = errors.read_text() if one.stderr == "file" else ""
        assert line in told and (line or not told)
        if one.words[:6] == ANSWER and one.stdout == "file":
            assert (folder / "stream1").read_text() == answer
        if line.endswith("runs/"):
            kept = json.loads((folder / "runs" / "latest" / "outputs.jsonl").read_text())
            assert kept["text"] == answer.rstrip("\n") and "outputs.jsonl\n" in told
        assert "follows" not in line or line + answer in told


def test_with_nothing_open_a_run_only_fails(tmp_path: Path) -> None:
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "specsot", *ANSWER]
    assert subprocess.run(words, cwd=tmp_path, timeout=240).returncode == Code.FAILED
    found = [*(tmp_path / "runs" / "latest").iterdir()]
    assert len(found) == 7 and all(file.stat().st_size for file in found)


def test_ctrl_c_before_a_command_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run"])
    assert ended.value.code == Code.INTERRUPTED
    assert capsys.readouterr().err == "specsot: interrupted\n"


def test_a_signal_while_the_program_closes_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(one) for one in both]
    try:
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        assert [signal.getsignal(one) for one in both] == before, "in somebody else's program"
        monkeypatch.setattr(sys, "argv", ["specsot", "--version"])
        with pytest.raises(SystemExit):
            cli.main()
        assert {signal.getsignal(one) for one in both} == {signal.SIG_IGN}
    finally:
        for one, handler in zip(both, before, strict=True):
            signal.signal(one, handler)


# -- signals ---------------------------------------------------------------------------------------

START = """
import os, signal, sys
from specsot.engine.cli.start import main
name, numbers = sys.argv[1], sys.argv[2].split(",")

class Finder:
    def find_spec(self, found, path=None, target=None):
        while found == name and numbers:
            os.kill(os.getpid(), int(numbers.pop(0)))

sys.meta_path.insert(0, Finder())
sys.argv[1:] = sys.argv[3:]
main()
"""
WORDS = ["run", "autoregressive", "Why?", "--max-new-tokens", "1", "--no-tui"]
SAID = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


def ended(folder: Path, script: str, *words: object, ignoring: bool = False) -> tuple[int, str]:
    """(code, stderr) of a script. ignoring: it is born with Ctrl-C ignored."""
    done = subprocess.run(
        [*(["nohup"] if ignoring else []), sys.executable, "-c", script, *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        # A shell's background job is born with Ctrl-C ignored, and so would be all that it starts.
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_IGN if ignoring else signal.SIG_DFL
        ),
    )
    return done.returncode, done.stderr


MODULES = (
    "typer.core",  # before there is a command line
    "specsot.engine.prepare.job",  # within a command, before it could deal with it
    "numpy._typing._dtype_like",  # within torch's own import of numpy, which swallows errors
)


@pytest.mark.parametrize(("module", "number"), taking_turns(MODULES, [*SAID]))
def test_an_import_that_is_interrupted_is_one_line(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    code, word = SAID[number]
    found = ended(tmp_path, START, module, int(number), *WORDS)
    assert found == (code, f"specsot: {word}\n") and not any(tmp_path.iterdir())


def test_twice_in_one_import_is_the_end_of_it_and_who_ignores_it_goes_on(tmp_path: Path) -> None:
    twice = ended(tmp_path, START, "torch.version", "2,2", *WORDS)
    assert twice == (Code.INTERRUPTED, "specsot: interrupted\n")
    code, said = ended(tmp_path, START, "typer.core", 2, "list", ignoring=True)
    assert code == Code.OK and "interrupted" not in said


DESTRUCTOR = """
import os, signal, sys
from specsot.engine.cli import run_command, start

class Gone:
    def __del__(self):
        os.kill(os.getpid(), int(number))
        signal.getsignal(signal.SIGINT)  # the interpreter handles signals between two calls

def prepare(options):
    Gone()
    return original(options)

number, original = sys.argv.pop(1), run_command.prepare
run_command.prepare = prepare
start.main()
"""


def test_a_signal_in_a_destructor_is_not_swallowed(tmp_path: Path) -> None:
    number = [*SAID][SEED % 2]
    code, word = SAID[number]
    found = ended(tmp_path, DESTRUCTOR, int(number), *WORDS)
    assert found == (code, f"specsot: {word}\n") and not any(tmp_path.iterdir())


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """What handlers did; SIGTERM's of before is one of them."""
    log: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: log.append("before"))
    yield log
    signal.signal(signal.SIGTERM, before)


def test_a_second_signal_is_handled_as_before(handled: list[str]) -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.status is Status.TERMINATED and handled == []
        signal.raise_signal(signal.SIGTERM)
        assert handled == ["before"]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.status is None, "nohup"


def test_what_is_cleaned_before_the_end(handled: list[str]) -> None:
    with ending_with(lambda: handled.append("outer")):
        with ending_with(lambda: handled.append("inner")):
            signal.raise_signal(signal.SIGTERM)
        assert handled == ["inner", "outer", "before"]
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN


# -- a few of the odd graphs and inputs that tests/full tries by hundreds -------------------------


def test_a_few_odd_graphs_and_an_odd_input_of_each_kind(here: Path) -> None:
    for one, count in ((try_graph, 6), (try_input, len(MAKERS))):
        tally = try_all(one, range(1000, 1000 + count), SEED)
        assert not tally.faults and tally.ended.total() == count


@pytest.mark.parametrize(("words", "waiting"), [("list", "PASSIVE"), ("bench --list", None)])
def test_other_programs_are_measured_with_their_own_waiting(
    words: str, waiting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert os.environ.get("OMP_WAIT_POLICY") == waiting
