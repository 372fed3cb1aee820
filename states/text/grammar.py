"""The outline's grammar as token masks: which token may come next, given those before.

A mask looks at the whole text of every token, as bytes (llguidance): a token is legal if some
outline goes on with its text. Where the text that must follow is fixed, only the token with which
the tokenizer itself would write it is legal, so that drafting `forced()` is never in vain. Every
state has a legal token, and the language is finite, so an outline always comes to an end. What the
grammar allows, `parse_outline` reads without skipping or mending anything.

llguidance is imported when a grammar is built, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .outline import BIDI, MAX_TITLE, TOOL_NAME, WORDS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarError(ValueError):
    """A grammar cannot be built from these settings, or not for this tokenizer."""


# Every blank that Python's strip() takes off, and that is not excluded from titles altogether.
_BLANKS = r" \u{a0}\u{1680}\u{2000}-\u{200a}\u{202f}\u{205f}\u{3000}"
# All markers begin with `<` or `[`, so a title without these cannot hold one. (Subtracting the
# markers themselves multiplies the lexer's states, beyond what llguidance allows for one mask.)
_BARRED = r"\x00-\x1f\x7f-\x9f|<\[\u{2028}\u{2029}\u{fffd}" + "".join(
    f"\\u{{{ord(c):x}}}" for c in sorted(BIDI)
)
_TITLE = (
    rf"/[\p{{L}}\p{{N}}]([^{_BARRED}]{{0,{MAX_TITLE - 2}}}[^{_BARRED}{_BLANKS}])?/"
    rf" & ~/{'|'.join(WORDS)}/"
)
# Bytes that an outline may be spelled with. With a token for each of them alone no state is a dead
# end, whatever the other tokens are.
_NEEDED = (0x0A, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5))


def outline_grammar(max_branches: int, tools: Sequence[str] = ()) -> str:
    """The grammar in llguidance's dialect of Lark.

    Lines are numbered 1, 2, 3 ...; a length is 10..99 or a round number up to 990; dependencies
    are increasing ids below the line's own. Its size grows with max_branches only, since the lists
    of dependencies share rules: `upto_k` is a list whose ids are at most k, `last_k` one whose
    last id is k.
    """
    if max_branches < 1:
        raise GrammarError("max_branches must be at least 1")
    lines = [_line(i, max_branches) for i in range(1, max_branches + 1)]
    lists = [_lists(k) for k in range(1, max_branches)]
    names = " | ".join(['"-"', *map(_tool, tools)])
    terminals = ["LENGTH: /[1-9][0-9]0?/", f"TOOL: {names}", f"TITLE: {_TITLE}"]
    return "\n".join(['start: "DIRECT" | "PLAN\\n" line_1', *lines, *lists, *terminals])


def _line(number: int, last: int) -> str:
    deps = '"-"' if number == 1 else f'("-" | upto_{number - 1})'
    more = '"END"' if number == last else f'(line_{number + 1} | "END")'
    return f'line_{number}: "{number}|" LENGTH "|" TOOL "|" {deps} "|" TITLE "\\n" {more}'


def _lists(k: int) -> str:
    if k == 1:
        return 'upto_1: "1"'
    return f'upto_{k}: upto_{k - 1} | last_{k}\nlast_{k}: "{k}" | upto_{k - 1} ",{k}"'


def _tool(name: str) -> str:
    if not TOOL_NAME.fullmatch(name) or name.lower() == "none":
        raise GrammarError(f"{name!r} cannot be the name of a tool in an outline")
    return f'"{name}"'


class OutlineGrammar:
    """The grammar compiled for one tokenizer; `matcher()` gives each root branch its own state.

    Args:
        tokenizer: a fast tokenizer of transformers, or a tokenizers.Tokenizer.
        vocab_size: width of the model's logits; ids that the tokenizer lacks are never legal.
        eos_ids: the tokens that end a turn, all of them legal after the end and nowhere else.
        max_branches: most lines of an outline.
        tools: names that a line may give beside `-`.

    Raises:
        GrammarError: bad settings, or a tokenizer that cannot spell every byte.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Sequence[int],
        max_branches: int,
        tools: Sequence[str] = (),
    ) -> None:
        from llguidance import LLMatcher

        if not eos_ids or not all(0 <= e < vocab_size for e in eos_ids):
            raise GrammarError(f"no usable end-of-turn tokens: {list(eos_ids)}")
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        grammar = LLMatcher.grammar_from_lark(outline_grammar(max_branches, tools))
        self._first = LLMatcher(_token_table(tokenizer, vocab_size, eos_ids), grammar, log_level=0)
        if self._first.is_error():
            raise GrammarError(self._first.get_error())

    def matcher(self) -> OutlineMatcher:
        """A fresh state at the outline's beginning."""
        return OutlineMatcher(self._first.deep_copy(), self.vocab_size, self.eos_ids)


def _token_table(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of every token, as a trie."""
    from llguidance import LLTokenizer

    backend = copy(getattr(tokenizer, "backend_tokenizer", tokenizer))
    backend.no_padding()  # both would touch the forced tokens, which the table tokenizes itself
    backend.no_truncation()
    if (size := backend.get_vocab_size(with_added_tokens=True)) > vocab_size:
        raise GrammarError(f"the tokenizer has {size} tokens, the model's logits {vocab_size}")
    try:
        table = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        raise GrammarError(f"the tokenizer cannot be used with a grammar: {error}") from error
    alone = {table.decode_bytes([token]) for token in range(vocab_size)}
    if missing := [f"{b:02x}" for b in _NEEDED if bytes([b]) not in alone]:
        raise GrammarError(f"the tokenizer has no token for the bytes {' '.join(missing)}")
    return table


class OutlineMatcher:
    """Where one outline stands. Changed in place by `advance` and `rollback`.

    The grammar's end is kept here and not in llguidance, which does not count an end-of-turn token
    that follows a complete outline and would roll back one token too many.
    """

    def __init__(self, inner: LLMatcher, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._mask: bytes | None = None
        self.consumed = 0  # tokens, the end-of-turn token included
        self.finished = False  # an end-of-turn token was consumed; nothing is legal any more

    def is_legal(self, token: int) -> bool:
        """Whether the token may come next."""
        if self.finished or not 0 <= token < self._vocab_size:
            return False
        if self._inner.is_stopped():
            return token in self._eos_ids
        return bool(self._bits()[token >> 3] >> (token & 7) & 1)

    def legal_mask(self) -> NDArray[np.bool_]:
        """bool [vocab_size]: the tokens that may come next."""
        if self.finished or self._inner.is_stopped():
            mask = np.zeros(self._vocab_size, dtype=np.bool_)
            mask[list(self._eos_ids)] = not self.finished
            return mask
        bits = np.frombuffer(self._bits(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _bits(self) -> bytes:
        """llguidance's mask of this state, one bit per token, computed once.

        Not `validate_tokens`: where the text is fixed it takes every spelling, the mask only one.
        """
        if self._mask is None:
            self._mask = self._inner.compute_bitmask()
            if self._inner.is_error():  # a limit of llguidance's, never a token that we let through
                raise GrammarError(self._inner.get_error())
        return self._mask

    def advance(self, token: int) -> None:
        """Take a token; ValueError if it is not legal, the state then stays as it was."""
        if not self.is_legal(token):
            raise ValueError(f"token {token} is not legal here")
        if self._inner.is_stopped():
            self.finished = True
        else:
            self._inner.consume_token(token)
        self._mask = None
        self.consumed += 1

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if not 0 <= count <= self.consumed:
            raise ValueError(f"cannot take {count} of {self.consumed} tokens back")
        if count == 0:
            return
        self._inner.rollback(count - self.finished)
        self._mask = None
        self.finished = False
        self.consumed -= count

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model says; empty where there is a choice.

        Each is the only legal token of its state. An end-of-turn token is never among them.
        """
        return [] if self._inner.is_stopped() else self._inner.compute_ff_tokens()
