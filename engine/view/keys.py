"""The keys of all terminal views: single keys from a terminal, the pages and lists that they move,
the hints of the bottom line, and the help."""

import os
import select
import termios
import tty
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import sleep
from typing import NamedTuple, Self, TextIO

from rich.text import Text

ESCAPE = "\x1b"
NAMES = {  # of the sequences that terminals send, CSI and SS3
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"},
    **{"\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left"},
    **{"\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end"},
    **{"\x1b[1~": "home", "\x1b[4~": "end", "\x1b[5~": "page up", "\x1b[6~": "page down"},
    **{"\r": "enter", "\n": "enter", "\t": "tab", "\x03": "q", "\x04": "q"},
}
HELP = "? help"


class Keys:
    """Reads single keys, without Enter, while the context is open; then restores the terminal.
    available: whether the stream is a terminal that this process may read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.available = False
        self._typed = ""

    def __enter__(self) -> Self:
        with suppress(OSError, ValueError, termios.error):
            self._number = self._stream.fileno()
            self._before = termios.tcgetattr(self._number)  # fails without a terminal
            if self._in_front():
                tty.setcbreak(self._number)
                self.available = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.available and self._in_front():
            termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)
        self.available = False

    def _in_front(self) -> bool:
        """Whether the process is in the foreground: the terminal stops others that use it."""
        with suppress(OSError):  # not the terminal of this session
            return os.tcgetpgrp(self._number) == os.getpgrp()
        return True

    def read(self, seconds: float) -> str:
        """The next key, by name or as a character; empty after `seconds` without a key."""
        if not self._typed and not (self.available and self._in_front()):
            sleep(max(seconds, 0.0))
        elif not self._typed and select.select([self._number], [], [], max(seconds, 0.0))[0]:
            piece = b""
            with suppress(OSError):
                piece = os.read(self._number, 64)
            self.available = bool(piece)  # else the terminal is closed
            self._typed = piece.decode("utf-8", "replace") or "q"
        if not self._typed:
            return ""
        sent = next(filter(self._typed.startswith, NAMES), self._typed[0])
        rest = self._typed[len(sent) :]
        self._typed = "" if sent == ESCAPE else rest  # an unknown sequence
        return NAMES.get(sent, sent)


class Key(NamedTuple):
    """keys: as they are shown. hint: a word for the bottom line; empty: only in the help. does: a
    line of the help."""

    keys: str
    hint: str
    does: str


SCROLL = Key("j/k", "scroll", "scroll a list or a page with more lines than fit")
PANELS = {
    "states": "visits and ms of each; arrow: last transition; ◦ may be next",
    "trace": "the last transitions: guard, ms in the state, committed tokens",
    "drafts": "accepted/drafted and last tree of each, accepted path first",
    "branches": "mark, title, tokens/budget, end of text; running parts first",
    "requests": "mark, finished parts, tokens and question; running ones first",
    "sequence": "slots of the KV cache by content; a digit is a part",
    "accepted": "tokens that a branch committed in a round; τ is their mean",
}


@dataclass
class Pages:
    """What keys change in every view: the page, the position in its lists, and the help. keys: of
    the view, the most important first. names: of its pages, with lines of the help; the first is
    the picture of the run. texts: lines of the others. note: for the first line, in a pause. first,
    last, visible: of the longest list, the first visible item, its maximum, the visible items."""

    keys: Sequence[Key]
    names: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, Sequence[Text]] = field(default_factory=dict)
    note: str = ""
    page: int = 0
    first: int = 0
    last: int = 0
    visible: int = 1
    help: bool = False

    def press(self, key: str) -> bool:
        """Whether the key was one of these."""
        turns = {"tab": self.page + 1, "right": self.page + 1, "left": self.page - 1}
        turns |= {str(page): page for page in range(len(self.names))}
        places = {"home": 0, "end": self.last}
        for names, step in ((("up", "k"), -1), (("down", "j"), 1)):
            places |= dict.fromkeys(names, self.first + step)
            places[f"page {names[0]}"] = self.first + step * self.visible
        if key in places:
            self.first = min(max(places[key], 0), self.last)
            return True
        if key == "?" or (self.help and key in (ESCAPE, "q")):
            self.help = not self.help
        elif self.names and key in turns:
            self.page = turns[key] % len(self.names)
            self.help = False
        else:
            return False
        self.first = 0
        return True

    def window(self, count: int, visible: int) -> int:
        """The first visible item of a list; the longest list of a picture ends the scrolling."""
        last = max(count - visible, 0)
        if last > self.last:
            self.last = last
            self.visible = visible
        return min(self.first, last)

    def shown(self) -> tuple[str, Sequence[Text]] | None:
        """The title and the lines of the help or of a page; None for the picture of the run."""
        if not self.help:
            name = [*self.names][self.page] if self.page else ""
            return (name, self.texts[name]) if name in self.texts else None
        keys = {key.keys: key.does for key in self.keys} | {"?": "this help; Esc closes it"}
        lines = []
        for title, rows in (("keys", keys), ("panels", PANELS), ("pages", self.names)):
            lines += [Text(title, style="bold")] if rows else []
            lines += [Text.assemble((f"  {n:<11}", "green"), does) for n, does in rows.items()]
        return "help", lines

    def hints(self, width: int) -> Text:
        """The most important keys that fit, the names of the pages, and the key of the help."""
        listed = [f"{number} {name}" for number, name in enumerate(self.names)]
        names = [f"[{name}]" if at == self.page else name for at, name in enumerate(listed)]
        words = [f"{key.keys} {key.hint}" for key in self.keys if key.hint]
        line = ""
        for word in (*words[:2], " ".join(names), *words[2:]):
            if word and len(line) + len(word) + len(HELP) + 3 <= width:
                line += f"{word} · "
        return Text(line + HELP, style="dim", no_wrap=True)


MaybePages = Pages | None  # None: of a picture without keys


def place_line(what: str, shown: range, count: int, pages: MaybePages) -> str:
    """What a list hides: with keys the place in it, otherwise a number."""
    if pages is None:
        return f"… and {count - len(shown)} more"
    return f"{what} {shown.start + 1}-{shown.stop} of {count} (j/k)"
