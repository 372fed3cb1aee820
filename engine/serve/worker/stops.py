"""Texts that end an answer: nothing of them is ever shown, wherever tokens and steps cut them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StopTexts:
    """Lets text through up to the first of the stops.

    Attributes:
        stops: none of them empty. held: what may be the beginning of one. found: the one that was
            met; nothing comes through behind it.
    """

    stops: Sequence[str]
    held: str = ""
    found: str | None = None

    def take(self, text: str) -> str:
        """What is certain to stand before any stop."""
        if self.found is not None:
            return ""
        if not self.stops:
            return text
        text = self.held + text
        met = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if met:  # of those that begin at one place, the one that ends first is complete first
            at, self.found = min(met, key=lambda one: (one[0] + len(one[1]), one[0]))
            self.held = ""
            return text[:at]
        keep = self._open(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Nothing more comes: what was held is text."""
        held = self.held
        self.held = ""
        return held

    def _open(self, text: str) -> int:
        """Characters at the end that a stop may begin with, the most of all stops."""
        longest = max(map(len, self.stops)) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self.stops if len(stop) > count):
                return count
        return 0
