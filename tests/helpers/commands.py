"""Command lines of specsot, in this process or another, and pictures of the live view."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specsot.engine import shell
from specsot.engine.bench import command as bench
from specsot.engine.certify import certificate, verify_run
from specsot.engine.cli.main import main
from specsot.engine.record.run_view import Scene, Snapshot
from specsot.engine.view.tui import frame


def _ending(command: Callable[..., int]) -> Callable[..., int]:
    """A command that tells a user's error and returns its exit code, as the command line does."""

    def called(*values: Any, **more: Any) -> int:
        try:
            return command(*values, **more)
        except (Exception, KeyboardInterrupt) as error:
            return shell.ended(error)

    return called


compare_command = _ending(bench.compare_command)
sweep_command = _ending(lambda one, vary, *more: bench.compare_command((one,), *more, vary=vary))
bench_command = _ending(bench.bench_command)
tune_command = _ending(bench.tune_command)
certify_command = _ending(certificate.certify_command)
verify_command = _ending(verify_run.verify_command)


def call(*words: str) -> int:
    """Run a command in this process; returns its exit code. Its last steps ignore signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        main(words)
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


class CommandLine:
    """A command that is called with more words, and what it printed last."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self.capsys, self.words = capsys, words
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        self.capsys.readouterr()
        code = call(*self.words, *words)
        self.out, self.err = self.capsys.readouterr()
        return code

    def json(self, *words: str) -> Any:
        assert self(*words, "--json") == 0, self.err
        return json.loads(self.out)


def ended(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process and a folder, with more environment; it must end with this
    code."""
    done = subprocess.run(
        [sys.executable, "-m", "specsot", *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def screenshot(scene: Scene, snap: Snapshot, width: int, height: int) -> Console:
    """A console that has recorded one frame, for `export_text`."""
    console = Console(
        record=True, width=width, height=height, force_terminal=True, file=io.StringIO()
    )
    console.print(frame(scene, snap, width, height), height=height)
    return console
