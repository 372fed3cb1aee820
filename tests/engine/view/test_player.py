"""A replay's keys, its bar, its plain lines, and keys as a terminal sends them."""

import io
import os
import pty
from time import monotonic
from typing import Any

import pytest
from rich.console import Console

from specsot.engine.errors import Code
from specsot.engine.record.replay import Replay
from specsot.engine.record.run_folder import SavedRun
from specsot.engine.view.lines import replay_lines
from specsot.engine.view.tui import Keys, Player, play


@pytest.fixture
def replay(shell: Any) -> Replay:
    assert shell.run(max_new_tokens=8) == Code.OK
    return Replay(SavedRun(shell.latest))


def test_forwards_back_and_at_any_speed(replay: Replay) -> None:
    player, last = Player(replay), len(replay) - 1
    assert player.playing and player.frame == 0
    half = (replay.times[-1] - replay.times[0]) / 2e9
    player.pass_time(half)
    middle = player.frame
    assert 0 < middle < last and replay.times[middle] <= player.at < replay.times[middle + 1]
    assert player.press("right") and player.frame == middle + 1 and not player.playing
    player.pass_time(9.0)
    assert player.frame == middle + 1, "it pauses"
    player.press("left")
    assert player.frame == middle
    for key, wanted in (("home", 0), ("left", 0), ("end", last), ("l", last)):
        player.press(key)
        assert player.frame == wanted, key
    player.press(" ")
    assert player.playing and player.frame == 0, "from the end it begins anew"
    player.press("down")
    assert player.speed == 0.5
    player.pass_time(half)
    assert player.at == pytest.approx(replay.times[0] + half * 0.5e9)
    player.pass_time(1e6)
    assert player.frame == last and not player.playing
    assert not player.press("q")


def test_from_round_to_round_and_the_bar_says_where_in_any_width(replay: Replay) -> None:
    player, seen = Player(replay), []
    for _ in range(4):
        player.press("page down")
        seen.append(replay.snapshot(player.frame).meter.forwards)
    assert seen == [1, 2, 3, 4]
    player.press("page up")
    assert replay.snapshot(player.frame).meter.forwards == 3
    player = Player(replay)
    for width in (20, 40, 80, 160):
        assert player.bar(width).cell_len <= width
    bar = player.bar(160).plain
    assert f"step 1/{len(replay)}" in bar and " 1x " in bar and "q quit" in bar


class Typed(Keys):
    """A keyboard on which somebody has typed already."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.keys = list(keys)
        self.available = True

    def read(self, seconds: float) -> str:
        return self.keys.pop(0)


def test_it_is_played_until_a_key_or_by_itself_to_its_end(replay: Replay) -> None:
    out = io.StringIO()
    size: Any = {"width": 90, "height": 24, "_environ": {"TERM": "xterm"}}
    console = Console(file=out, force_terminal=True, **size)
    player = Player(replay)
    play(player, console, Typed("end", "left", "", "q"))
    assert player.frame == len(replay) - 2 and f"step {len(replay) - 1}/" in out.getvalue()
    player = Player(replay, speed=1000)
    began = monotonic()
    play(player, console, Keys(io.StringIO()))
    assert player.frame == len(replay) - 1 and monotonic() - began < 5


def test_plain_lines_tell_every_round(replay: Replay) -> None:
    lines = list(replay_lines(replay))
    assert lines[:2] == ["bim_eagle · bim · eagle3 · target", "? [1] How do bees make honey?"]
    rounds = replay.snapshot(len(replay) - 1).meter
    heads = [line for line in lines if line.lstrip().startswith("round ")]
    assert sum(int(line.split("+")[1].split()[0]) for line in heads) == rounds.tokens
    text = "\n".join(lines)
    assert "verify → schedule" in text and "✓" in text and "✗" in text
    assert max(map(len, lines)) <= 120


def test_keys_of_a_terminal() -> None:
    outer, inner = pty.openpty()
    with open(inner, encoding="utf-8") as stream, Keys(stream) as keys:
        assert keys.available and keys.read(0.0) == ""
        os.write(outer, b"\x1b[C\x1b[5~ q\x1bOA\x1b[99~")
        found = [keys.read(1.0) for _ in range(5)]
        assert found == ["right", "page up", " ", "q", "up"]
        assert keys.read(0.1) == "\x1b" and keys.read(0.0) == ""
    assert not keys.available
    os.close(outer)
    with Keys(io.StringIO("q")) as keys:
        assert not keys.available and keys.read(0.01) == ""
