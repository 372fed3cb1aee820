"""The installed program on a real (pseudo) terminal and in real pipes; tiny models."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Self

import pyte
import pytest

from specsot.engine.record.replay import Replay
from specsot.engine.record.run_folder import SavedRun

STATES = ("schedule", "skeleton", "expand_root", "grow_tree", "verify", "parallel_prefill")
PROGRAM = [sys.executable, "-c", "from specsot.engine.cli.main import main; main()"]
PATIENCE = 120.0


def command(tiny: tuple[Path, Path], *more: str) -> list[str]:
    models = ["--model", str(tiny[0]), "--drafter-model", str(tiny[1]), "--threads", "1"]
    given = ["bim_eagle", "How do bees make honey?", "--outline", "outline.txt", *models, *more]
    return [*PROGRAM, "run", *given]


def environment(**changes: str) -> dict[str, str]:
    without = ("CI", "NO_COLOR", "TERM", "COLUMNS", "LINES")  # the size is the terminal's own
    plain = {k: v for k, v in os.environ.items() if k not in without}
    return {**plain, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **changes}


class Terminal:
    """A program on a pseudo terminal, its screen read by a terminal emulator."""

    def __init__(self, words: list[str], width: int, height: int, **changes: str) -> None:
        self.screen = pyte.Screen(width, height)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.process = subprocess.Popen(
            words,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)

    def screens(self, seconds: float = PATIENCE) -> Iterator[str]:
        until = monotonic() + seconds
        while monotonic() < until:
            if not select.select([self.end], [], [], min(seconds, 1.0))[0]:
                continue
            try:
                piece = os.read(self.end, 65536)
            except OSError:  # the other end was closed
                return
            if not piece:
                return
            self.raw += piece
            self.stream.feed(piece)
            yield "\n".join(self.screen.display)

    def wait_for(self, text: bytes, after: int = 0, seconds: float = PATIENCE) -> int:
        screens = self.screens(seconds)
        while text not in self.raw[after:]:
            if next(screens, None) is None:
                return -1
        return self.raw.index(text, after) + len(text)

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def finish(self) -> int:
        for _ in self.screens():
            pass
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        os.close(self.end)


def write_outline(folder: Path, count: int) -> None:
    points = "".join(f"{i}|60|-|-|Part {i}\n" for i in range(1, count + 1))
    (folder / "outline.txt").write_text(f"PLAN\n{points}END\n")


@pytest.fixture
def place(here: Path) -> Path:
    write_outline(here, 5)
    return here


def check_view(picture: str, terminal: Terminal, budget: int) -> None:
    facts = ("bim_eagle", "Part 1", f"/{budget}", "KV ", "tok/s", "prefix", "τ", "drafts", "bees")
    for wanted in (*STATES, "merge", "done", *facts, "✓ accepted ✗ rejected ★ bonus"):
        assert wanted in picture, f"{wanted!r} is not on the screen:\n{picture}"
    assert terminal.raw.count(b"\x1b[H") > 2, "frames"
    assert b"\x1b[?1049l" in terminal.raw, "the normal screen comes back"


def test_the_live_view(endless: Any, place: Path) -> None:
    with Terminal(command(endless, "--max-new-tokens", "600"), 100, 30) as terminal:
        seen = [s for s in terminal.screens() if "tok/forward" in s and "Part 5" in s]
        assert terminal.process.wait(PATIENCE) == 0
    check_view(seen[len(seen) // 2], terminal, 600)
    assert any("╭" in s and "▶" in s and "╴" in s for s in seen)
    # A slow machine shows few pictures, and not every move.
    moves = ("verify → schedule", "expand_root → grow_tree", "grow_tree → verify")
    assert any(move in s for move in moves for s in seen)
    assert b"1. Part 1" in terminal.raw, "the answer stays on the normal screen"


def test_ctrl_c_on_a_small_terminal(endless: Any, place: Path) -> None:
    seen = list[str]()
    with Terminal(command(endless, "--max-new-tokens", "700"), 80, 24) as terminal:
        for screen in terminal.screens():
            if "tok/forward" in screen and "Part 5" in screen:
                seen.append(screen)
                if len(seen) == 3:
                    terminal.type("\x03")
                    break
        assert terminal.finish() == 130
    check_view(seen[-1], terminal, 700)
    assert b"interrupted:" in terminal.raw and b"Traceback" not in terminal.raw
    outputs = (place / "runs" / "latest" / "outputs.jsonl").read_text()
    assert '"finish_reason":"cancelled"' in outputs


def test_keys_of_a_live_run_on_a_small_terminal(endless: Any, place: Path) -> None:
    write_outline(place, 8)
    with Terminal(command(endless, "--max-new-tokens", "700"), 80, 24) as terminal:
        answers = [("branches 1-4 of 8 (j/k)", "j"), ("branches 2-5 of 8", "?")]
        answers += [("scroll a list or a page", "\x1b"), ("branches 1-4 of 8", "\x03")]
        seen = answered(terminal, answers)
        assert terminal.process.wait(PATIENCE) == 130
    assert len(seen) == 4 and "✗" in seen[0] and "╭─ help" in seen[2]
    assert all(shown.splitlines()[-1].rstrip().endswith("? help") for shown in seen)


def test_a_recorded_run_is_a_page_on_a_terminal(tiny: Any, place: Path) -> None:
    with Terminal(command(tiny, "--max-new-tokens", "6", "--quiet"), 80, 24) as terminal:
        assert terminal.finish() == 0
    with Terminal([*PROGRAM, "runs", "show"], 80, 90) as terminal:
        *_, page = terminal.screens()
        assert terminal.process.wait(PATIENCE) == 0
    run = SavedRun((place / "runs" / "latest").resolve())
    (line,) = run.outputs.values()
    for part in line["parts"]:
        assert re.search(
            rf"{part['title']} +{len(part['token_ids'])}  {part['finish_reason']}", page
        )
    figures = (r"tokens +\d+  tokens", r"seconds.total +[\d.]+  s", r"acceptance_rate +[\d.]+  %")
    for wanted in (*figures, r"tokens_per_second +[\d.,]+  tokens/s", r"verify +\d+ +[\d.]+"):
        assert re.search(wanted, page), wanted
    share = f"{100 * run.metrics['overhead_share']:.4g}"
    assert re.search(rf"overhead_share +{re.escape(share)}  %", page)
    digest = run.manifest["digest"]
    for wanted in (f"digest  {digest}", "? How do bees make honey?", "bim_eagle (bim · eagle3)"):
        assert wanted in page, wanted
    assert re.search(rf"trace.jsonl +{(run.path / 'trace.jsonl').stat().st_size:,}", page)
    assert " 1 Part 1" in page and "| metric |" not in page, "rendered"


def test_plain_lines_where_a_live_view_is_not_wanted(tiny: Any, place: Path) -> None:
    with Terminal(command(tiny, "--max-new-tokens", "4"), 80, 24, NO_COLOR="1") as terminal:
        assert terminal.finish() == 0
    assert b"\x1b" not in terminal.raw
    assert b"outline: 5 parts" in terminal.raw and b"digest" in terminal.raw


def answered(terminal: Terminal, answers: list[tuple[str, str]]) -> list[str]:
    seen = []
    for screen in terminal.screens():
        if answers and answers[0][0] in screen:
            seen.append(screen)
            terminal.type(answers.pop(0)[1])
    return seen


def test_stepping_inside_the_live_view(tiny: Any, place: Path) -> None:
    words = command(tiny, "--max-new-tokens", "6", "--break", "verify")
    with Terminal(words, 100, 30) as terminal:
        answers = [("verify → schedule ·", "4"), ("[4 rows]", "\n")]
        seen = answered(terminal, [*answers, ("schedule → expand_root ·", "q")])
        assert terminal.process.wait(PATIENCE) == 130
    assert len(seen) == 3 and "rows see" in seen[1] and "slots per cell" in seen[1]
    assert b"interrupted:" in terminal.raw and b"\x1b[?1049l" in terminal.raw


def test_a_replay_on_a_terminal(place: Path) -> None:
    run = Path(__file__).parents[3] / "tools" / "pictures" / "run"
    steps = len(Replay(SavedRun(run)))
    ends = [("step 1", " "), ("‖", "\x1b[F"), (f"{steps}/{steps}", "\x1b[H")]
    with Terminal([*PROGRAM, "replay", str(run), "--speed", "4"], 80, 24) as terminal:
        rounds = [("step 1/", "\x1b[6~"), ("step 2/", "\x1b[6~"), ("round 1 ", "q")]
        seen = answered(terminal, [*ends, *rounds])
        assert terminal.process.wait(PATIENCE) == 0
    assert len(seen) == 6 and "drafts" in seen[-1] and "Plan a weekend camping" in seen[-1]


def test_in_a_chat_ctrl_c_stops_the_answer_and_ctrl_d_ends(place: Path) -> None:
    words = ["chat", "autoregressive", "--max-new-tokens", "800", "--set"]
    with Terminal([*PROGRAM, *words, "sampling.temperature=5.0"], 80, 24, TERM="dumb") as terminal:
        at = terminal.wait_for(b"> ")
        terminal.type("How do bees make honey?\n")
        at = terminal.wait_for(b"\n", at)
        terminal.wait_for(b"nothing", seconds=1.0)
        terminal.type("\x03")
        at = terminal.wait_for(b"> ", terminal.wait_for(b"stopped", at))
        # Python sees a Ctrl-C that came just before readline waits only with the next key.
        for _ in range(60):
            terminal.type("\x03")
            if (end := terminal.wait_for(b"Ctrl-D or /quit ends", at, seconds=3.0)) > 0:
                break
        terminal.wait_for(b"> ", terminal.raw.rindex(b" ends"))  # what is typed before is dropped
        terminal.type("\x04")
        assert end > 0 and terminal.process.wait(60) == 0
