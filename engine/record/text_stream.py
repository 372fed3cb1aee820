"""Text that grows token by token: only new tokens are decoded, half characters are held back."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HALF = "\ufffd"  # what a tokenizer makes of a byte sequence that is not complete
LONGEST = 8  # tokens that one character can take; after that the bytes are simply wrong
UNSAFE = re.compile(  # control characters, halves of surrogates, marks that turn the direction
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\u2028\u2029]"
)

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class TextStream:
    """The text of one branch.

    Attributes:
        text: what is certain so far.
        seen: tokens that are in `text`; the piece before is decoded again each time, because a
            token's text can depend on the one before it.
    """

    decode: Decode
    text: str = ""
    seen: int = 0
    _base: int = field(default=0, init=False)

    def update(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """Take in the tokens behind those already seen; `final`: nothing more will come."""
        if len(tokens) <= self.seen:
            return self.text
        known = self.decode(tokens[self._base : self.seen]) if self.seen > self._base else ""
        whole = self.decode(tokens[self._base :])
        waits = len(tokens) - self.seen <= LONGEST
        if whole.endswith(HALF) and waits and not final:
            return self.text
        self.text += whole[len(known) :]
        self._base = self.seen
        self.seen = len(tokens)
        return self.text


class Pieces:
    """The text of single tokens as it is inside a text, each decoded once."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if (known := self.texts.get(token)) is not None:
            return known
        # Some tokenizers drop the blank of a token that nothing stands before.
        alone = self.decode([token])
        twice = self.decode([token, token])
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        return self.texts.setdefault(token, text)


def printable(text: str, keep: str = "\n\t") -> str:
    """Without control characters, escape sequences and direction overrides; `keep` stays."""
    return UNSAFE.sub(lambda one: one[0] if one[0] in keep else _shown(one[0]), text)


def _shown(char: str) -> str:
    """A control character as its picture; what has none becomes the replacement character."""
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else HALF
