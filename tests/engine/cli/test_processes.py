"""Streams that are closed or full, no room for a run folder, and signals while the program starts:
the answer first, files second, one line and the exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from helpers.fuzz import MAKERS, try_all, try_graph, try_input
from helpers.fuzz_streams import ANSWER, run_cases, stream_cases
from helpers.support import SEED

from specsot.engine.cli import main as cli
from specsot.engine.errors import Code
from specsot.engine.run.core import Status, StopSignal
from specsot.engine.signals import ending_with

PROGRAM = [sys.executable, "-c", "from specsot.engine.cli.main import main; main()"]
RUN = ["run", "autoregressive", "Why is the sky blue?", "--max-new-tokens", "6", "--no-tui"]
NOWHERE = "/proc/nowhere"


def specsot(
    streams: str, folder: Path, *more: str, words: Sequence[str] = RUN
) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh", *PROGRAM, *words, *more]
    return subprocess.run(shell, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = specsot("", tmp_path_factory.mktemp("good"))
    assert done.returncode == Code.OK and "run folder runs/" in done.stderr
    return done.stdout


@pytest.mark.parametrize("streams", [">/dev/full", ">&-"])
def test_an_answer_that_stdout_does_not_take_is_kept(
    streams: str, tmp_path: Path, answer: str
) -> None:
    done = specsot(streams, tmp_path)
    assert done.returncode == Code.FAILED and "fault of" not in done.stderr
    reason = {">/dev/full": "No space left on device", ">&-": "Bad file descriptor"}[streams]
    assert f"specsot: standard output: {reason}; the answer is in runs/" in done.stderr
    kept = json.loads((tmp_path / "runs" / "latest" / "outputs.jsonl").read_text())
    assert kept["text"] == answer.rstrip("\n") and "outputs.jsonl\n" in done.stderr


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-"])
def test_without_stderr_the_answer_is_the_same(streams: str, tmp_path: Path, answer: str) -> None:
    done = specsot(streams, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (Code.OK, answer, "")


def test_without_a_folder_the_answer_is_the_same(tmp_path: Path, answer: str) -> None:
    done = specsot("", tmp_path, "--runs-dir", NOWHERE)
    assert done.returncode == Code.FAILED and done.stdout == answer
    assert f"specsot: {NOWHERE}: no run folder can be made there: " in done.stderr
    assert "fault of" not in done.stderr
    done = specsot(">/dev/full </dev/null", tmp_path, "--runs-dir", NOWHERE)
    assert done.returncode == Code.FAILED and "the answer follows here\n" + answer in done.stderr


def test_with_nothing_open_a_run_only_fails(tmp_path: Path) -> None:
    assert specsot("<&- >&- 2>&-", tmp_path).returncode == Code.FAILED
    found = [*(tmp_path / "runs" / "latest").iterdir()]
    assert len(found) == 6 and all(file.stat().st_size for file in found)


def test_a_list_and_problems_that_a_stream_does_not_take(tmp_path: Path) -> None:
    done = specsot(">/dev/full", tmp_path, words=["list"])
    assert done.returncode == Code.FAILED and "fault of" not in done.stderr
    assert "standard output: No space left on device" in done.stderr
    for streams in ("2>/dev/full", "2>&-", ">&- 2>/dev/full"):
        done = specsot(streams, tmp_path, words=["check", "bim_eagel"])
        assert done.returncode == Code.GRAPH


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


def start(
    folder: Path, words: list[str], module: str, *sent: signal.Signals, ignoring: bool = False
) -> tuple[int, str]:
    """(code, stderr) of a command which gets these signals when this module is looked for."""
    numbers = ",".join(str(int(number)) for number in sent)
    done = subprocess.run(
        [*(["nohup"] if ignoring else []), sys.executable, "-c", START, module, numbers, *words],
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


@pytest.mark.parametrize("number", SAID)
@pytest.mark.parametrize(
    "module",
    [
        "typer.core",  # before there is a command line
        "specsot.engine.prepare.job",  # within a command, before it could deal with it
        "numpy._typing._dtype_like",  # within torch's own import of numpy, which swallows errors
    ],
)
def test_an_import_that_is_interrupted_is_one_line(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    code, word = SAID[number]
    assert start(tmp_path, WORDS, module, number) == (code, f"specsot: {word}\n")
    assert not any(tmp_path.iterdir())


def test_twice_in_one_import_is_the_end_of_it(tmp_path: Path) -> None:
    twice = start(tmp_path, WORDS, "torch.version", signal.SIGINT, signal.SIGINT)
    assert twice == (Code.INTERRUPTED, "specsot: interrupted\n")


def test_who_ignores_it_goes_on_ignoring_it(tmp_path: Path) -> None:
    code, said = start(tmp_path, ["list"], "typer.core", signal.SIGINT, ignoring=True)
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


@pytest.mark.parametrize("number", SAID)
def test_a_signal_in_a_destructor_is_not_swallowed(number: signal.Signals, tmp_path: Path) -> None:
    code, word = SAID[number]
    done = subprocess.run(
        [sys.executable, "-c", DESTRUCTOR, str(int(number)), *WORDS],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (code, f"specsot: {word}\n")
    assert not any(tmp_path.iterdir())


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


# -- a few of the odd graphs, inputs and streams that tests/full tries by hundreds -----------------


def test_a_few_odd_graphs_and_an_odd_input_of_each_kind(here: Path) -> None:
    for one, count in ((try_graph, 6), (try_input, len(MAKERS))):
        tally = try_all(one, range(1000, 1000 + count), SEED)
        assert not tally.faults and tally.ended.total() == count


def test_a_few_odd_streams(here: Path) -> None:
    draw = Random(SEED)
    cases = draw.sample([one for one in stream_cases(draw) if one.words[:6] == ANSWER], 3)
    codes, faults = run_cases(cases, here)
    assert not faults and len(codes) == 3
