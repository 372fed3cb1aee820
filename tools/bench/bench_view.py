"""What the live view costs: the same runs with it and without, in turn.

    python -m tools.bench.bench_view bim_eagle --rounds 10
    python -m tools.bench.bench_view bim_eagle --profile smollm2 --dtype bfloat16 --rounds 4

Every run is `specsot run` in a process of its own, on a pseudo-terminal of 160 x 48 characters that
is read as fast as it is written. Compared is the time from the first transition to the last, which
`metrics.json` has; within a round the order is drawn. Prints each round's ratio and their median.
"""

import argparse
import fcntl
import json
import os
import pty
import random
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

QUESTION = "Tell me about honey bees."
SIZE = struct.pack("HHHH", 48, 160, 0, 0)  # rows, columns, and pixels that nobody asks for


def seconds(command: Sequence[str], folder: Path) -> tuple[float, int]:
    """Seconds of one run on a terminal of its own, and the bytes that it was sent."""
    driver, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, SIZE)
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "48"}
    run = [sys.executable, "-m", "specsot", "run", *command, "--runs-dir", str(folder)]
    process = subprocess.Popen(
        run, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = 0
    while piece := _read(driver):
        shown += len(piece)
    os.close(driver)
    if code := process.wait():
        raise SystemExit(f"specsot run ended with {code}")
    found = json.loads((folder / "latest" / "metrics.json").read_text(encoding="utf-8"))
    return found["tokens"] / found["tokens_per_second"], shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", nargs="?", default="bim_eagle")
    parser.add_argument("--rounds", type=int, default=10)
    asked, options = parser.parse_known_args()
    plain = [asked.graph, QUESTION, *options]
    sides = {"view": plain, "plain": [*plain, "--no-tui"]}
    ratios = list[float]()
    for number in range(-1, asked.rounds):  # the first one warms up
        took = dict[str, float]()
        for side in random.sample([*sides], len(sides)):
            with TemporaryDirectory() as folder:
                took[side], shown = seconds(sides[side], Path(folder))
            print(f"round {number}: {side} {took[side]:.2f} s, {shown} bytes shown")
        if number >= 0:
            ratios.append(took["view"] / took["plain"])
    each = " ".join(f"{one:.3f}" for one in sorted(ratios))
    print(f"with the view / without: median {median(ratios):.3f} ({each})")


if __name__ == "__main__":
    main()
