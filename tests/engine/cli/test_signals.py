"""Ctrl-C and SIGTERM while the program starts: one line and the exit code, wherever they arrive."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specsot.engine import signals
from specsot.engine.errors import Code, code_of
from specsot.engine.signals import Terminated

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
RUN = ["run", "autoregressive", "Why?", "--max-new-tokens", "1", "--no-tui"]
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
    assert start(tmp_path, RUN, module, number) == (code, f"specsot: {word}\n")
    assert not any(tmp_path.iterdir())


def test_twice_in_one_import_is_the_end_of_it(tmp_path: Path) -> None:
    twice = start(tmp_path, RUN, "torch.version", signal.SIGINT, signal.SIGINT)
    assert twice == (Code.INTERRUPTED, "specsot: interrupted\n")


def test_who_ignores_it_goes_on_ignoring_it(tmp_path: Path) -> None:
    code, said = start(tmp_path, ["list"], "typer.core", signal.SIGINT, ignoring=True)
    assert code == Code.OK and "interrupted" not in said


def test_a_signal_during_an_import_is_raised_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhole = True\n"
    (tmp_path / "halved.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {one: signal.getsignal(one) for one in (*signals.NAMES, signal.SIGALRM)}
    left = signal.getitimer(signal.ITIMER_REAL)
    try:
        signals.raise_them()
        with pytest.raises(Terminated) as ended:
            import halved  # type: ignore[import-not-found]

            signal.pause()
        assert halved.whole and code_of(ended.value) is Code.TERMINATED
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        for one, handler in kept.items():
            signal.signal(one, handler)
