"""The answer first, files second: streams that are closed or full, and no room for a run folder."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from specsot.engine.cli import main as cli
from specsot.engine.errors import Code

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
