"""Single keys of a terminal, without Enter; none without a keyboard."""

import os
import select
import sys
from contextlib import suppress
from time import sleep
from typing import Self, TextIO

KEY_NAMES = {  # of the sequences that terminals send, CSI and SS3
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"},
    **{"\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left"},
    **{"\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end"},
    **{"\x1b[1~": "home", "\x1b[4~": "end", "\x1b[5~": "page up", "\x1b[6~": "page down"},
    **{"\r": "enter", "\n": "enter", "\t": "tab", "\x03": "q", "\x04": "q"},
}


class Keys:
    """Reads keys while the context is open; the terminal is restored afterwards.

    Attributes:
        available: whether the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdin
        self.available = False
        self._typed = ""

    def __enter__(self) -> Self:
        with suppress(ImportError, OSError, ValueError):
            import termios
            import tty

            self._number = self._stream.fileno()
            self._before = termios.tcgetattr(self._number)  # fails without a terminal
            tty.setcbreak(self._number)
            self.available = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.available:
            import termios

            termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)
            self.available = False

    def read(self, seconds: float) -> str:
        """The next key, by name or as a character; empty after `seconds` without a key."""
        if not self._typed and not self._receive(seconds):
            return ""
        for sent, name in KEY_NAMES.items():
            if self._typed.startswith(sent):
                self._typed = self._typed[len(sent) :]
                return name
        key = self._typed[0]
        self._typed = self._typed[1:]
        if key == "\x1b":  # an unknown sequence
            self._typed = ""
        return key

    def _receive(self, seconds: float) -> bool:
        if not self.available:
            sleep(max(seconds, 0.0))
        elif select.select([self._number], [], [], max(seconds, 0.0))[0]:
            piece = os.read(self._number, 64)
            self._typed += piece.decode("utf-8", "replace") or "q"  # the terminal is closed
        return bool(self._typed)
