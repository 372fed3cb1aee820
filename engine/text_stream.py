"""Text that grows token by token: only new tokens are decoded, incomplete characters wait."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HALF = "\ufffd"  # a tokenizer's text of an incomplete byte sequence
MAX_TOKENS_PER_CHARACTER = 8  # after that the bytes are wrong, not incomplete
UNSAFE = re.compile(  # control characters, surrogates, marks that change the text direction
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\u2028\u2029]"
)

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class TextStream:
    """The text of one branch.

    Attributes:
        text: the certain text so far.
        decoded: number of tokens in `text`. The last piece is decoded again each time, because the
            text of a token can depend on the token before it.
    """

    decode: Decode
    text: str = ""
    decoded: int = 0
    _base: int = field(default=0, init=False)

    def update(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """Decode the tokens after the first `decoded`; `final`: no token follows."""
        if len(tokens) <= self.decoded:
            return self.text
        before = self.decode(tokens[self._base : self.decoded]) if self.decoded > self._base else ""
        whole = self.decode(tokens[self._base :])
        waits = len(tokens) - self.decoded <= MAX_TOKENS_PER_CHARACTER
        if whole.endswith(HALF) and waits and not final:
            return self.text
        self.text += whole[len(before) :]
        self._base = self.decoded
        self.decoded = len(tokens)
        return self.text


class TokenTexts:
    """The text of single tokens inside a text, each decoded once."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if (text := self.texts.get(token)) is not None:
            return text
        # Some tokenizers drop the blank of the first token of a text.
        once = self.decode([token])
        twice = self.decode([token, token])
        text = twice[len(once) :] if twice.startswith(once) else once
        return self.texts.setdefault(token, text)


def printable(text: str, keep: str = "\n\t") -> str:
    """Without control characters, escape sequences and direction overrides, except `keep`."""
    return UNSAFE.sub(lambda match: match[0] if match[0] in keep else _picture(match[0]), text)


def _picture(char: str) -> str:
    """The Unicode picture of a control character, or the replacement character."""
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else HALF
