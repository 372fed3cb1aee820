"""The outline's grammar as token masks: which token may come next, given those before.

A mask looks at the whole text of every token, as bytes (llguidance): a token is legal if some
outline goes on with its text. Where the text that must follow is fixed, only the token with which
the tokenizer itself would write it is legal, so that drafting `forced()` is never in vain. Every
state has a legal token: where a tokenizer has no way on (some lack single bytes, or a line's end of
its own), the turn may end. The language is finite, so an outline always comes to an end. What the
grammar allows in full, `parse_outline` and `parse_list` read without skipping or mending anything.

llguidance is imported when a grammar is built, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .outline import BIDI, MAX_TITLE, TOOL_NAME, WORDS, OutlineFormat
from .outline_list import repeats

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
NO_WAY_ON = "NoExtensionBias"  # llguidance: the grammar goes on, the tokenizer cannot


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


def list_grammar(max_branches: int) -> str:
    """The grammar of the format `list`: two lines at least, if so many are allowed.

    That no title stands there twice is the matcher's business.
    """
    if max_branches < 1:
        raise GrammarError("max_branches must be at least 1")
    rules = [f'start: "1. " TITLE{" line_2" if max_branches > 1 else ""}']
    for number in range(2, max_branches + 1):
        more = "" if number == max_branches else f" line_{number + 1}?"
        rules.append(f'line_{number}: "\\n{number}. " TITLE{more}')
    return "\n".join([*rules, f"TITLE: {_TITLE}"])


class OutlineGrammar:
    """The grammar compiled for one tokenizer; `matcher()` gives each root branch its own state.

    Args:
        tokenizer: a fast tokenizer of transformers, or a tokenizers.Tokenizer.
        vocab_size: width of the model's logits; ids that the tokenizer lacks are never legal.
        eos_ids: the tokens that end a turn, all of them legal after the end and nowhere else.
        max_branches: most lines of an outline.
        tools: names that a line may give beside `-`; a list has none.
        form: how an outline looks.

    Raises:
        GrammarError: bad settings, or a tokenizer that cannot begin an outline.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Sequence[int],
        max_branches: int,
        tools: Sequence[str] = (),
        form: OutlineFormat = "fields",
    ) -> None:
        from llguidance import LLMatcher

        if not eos_ids or not all(0 <= e < vocab_size for e in eos_ids):
            raise GrammarError(f"no usable end-of-turn tokens: {list(eos_ids)}")
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        lists = form == "list"
        text = list_grammar(max_branches) if lists else outline_grammar(max_branches, tools)
        grammar = LLMatcher.grammar_from_lark(text)
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids, titles_once=lists)
        self._first = LLMatcher(self._vocabulary.table, grammar, log_level=0)
        if self._first.is_error():
            raise GrammarError(self._first.get_error())
        if set(self.eos_ids) == set(np.flatnonzero(self.matcher().legal_mask()).tolist()):
            raise GrammarError("the tokenizer has no token that an outline could begin with")

    def matcher(self, question: str = "") -> OutlineMatcher:
        """A fresh state at the outline's beginning; no title of a list repeats the question."""
        return OutlineMatcher(self._first, self._vocabulary, question)


class Vocabulary:
    """The bytes of every token, as a trie; and the tokens that may end a title of a list."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], *, titles_once: bool
    ) -> None:
        self.size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.table = _token_table(tokenizer, vocab_size, eos_ids)
        self.closing_C: NDArray[np.int64] | None = None
        if titles_once:
            ends = [b"\n" in self.table.decode_bytes([token]) for token in range(vocab_size)]
            ends = [end and token not in self.eos_ids for token, end in enumerate(ends)]
            self.closing_C = np.concatenate([np.flatnonzero(ends), self.eos_ids])

    def before_end(self, token: int) -> bytes:
        """What a token adds to the line that it ends."""
        return b"" if token in self.eos_ids else self.table.decode_bytes([token]).split(b"\n")[0]


def _token_table(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    backend = copy(getattr(tokenizer, "backend_tokenizer", tokenizer))
    backend.no_padding()  # both would touch the forced tokens, which the table tokenizes itself
    backend.no_truncation()
    if (size := backend.get_vocab_size(with_added_tokens=True)) > vocab_size:
        raise GrammarError(f"the tokenizer has {size} tokens, the model's logits {vocab_size}")
    try:
        return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        raise GrammarError(f"the tokenizer cannot be used with a grammar: {error}") from error


class OutlineMatcher:
    """Where one outline stands. Changed in place by `advance` and `rollback`.

    The grammar's end is kept here and not in llguidance, which does not count an end-of-turn token
    that follows a complete outline and would roll back one token too many.
    """

    def __init__(self, first: LLMatcher, vocabulary: Vocabulary, question: str) -> None:
        self._first = first
        self._inner = first.deep_copy()
        self._vocabulary = vocabulary
        self._question = question
        self._legal_V: NDArray[np.bool_] | None = None
        self._tokens: list[int] = []
        self.finished = False  # an end-of-turn token was consumed; nothing is legal any more

    @property
    def consumed(self) -> int:
        """Tokens so far, the end-of-turn token included."""
        return len(self._tokens)

    def is_legal(self, token: int) -> bool:
        """Whether the token may come next."""
        return 0 <= token < self._vocabulary.size and bool(self.legal_mask()[token])

    def legal_mask(self) -> NDArray[np.bool_]:
        """bool [vocab_size]: the tokens that may come next; computed once per state."""
        if self._legal_V is None:
            self._legal_V = self._legal()
        return self._legal_V

    def _legal(self) -> NDArray[np.bool_]:
        size = self._vocabulary.size
        ends = list(self._vocabulary.eos_ids)
        legal_V = np.zeros(size, dtype=np.bool_)
        if self.finished:
            return legal_V
        if not self._inner.is_stopped():
            # Not `validate_tokens`: where the text is fixed it takes every spelling, this only one.
            bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
            if not self._inner.is_error():
                legal_V |= np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
            elif not self._inner.get_error().startswith(NO_WAY_ON):  # a limit of llguidance's
                raise GrammarError(self._inner.get_error())
            else:  # what has stopped cannot be rolled back
                self._inner = self._first.deep_copy()
                self._inner.consume_tokens(self._tokens)
            self._bar_repeats_(legal_V)
        if not legal_V.any():
            legal_V[ends] = True
        return legal_V

    def _bar_repeats_(self, legal_V: NDArray[np.bool_]) -> None:
        """A title of a list may not end as one that stood before, nor as the question."""
        closing_C = self._vocabulary.closing_C
        if closing_C is None or not legal_V[closing_C].any():
            return
        *earlier, line = self._vocabulary.table.decode_bytes(self._tokens).split(b"\n")
        titles = [_title_of(text) for text in earlier]
        for token in closing_C[legal_V[closing_C]]:
            title = _title_of(line + self._vocabulary.before_end(token))
            legal_V[token] = not repeats(title, titles, self._question)

    def advance(self, token: int) -> None:
        """Take a token; ValueError if it is not legal, the state then stays as it was."""
        if not self.is_legal(token):
            raise ValueError(f"token {token} is not legal here")
        if token in self._vocabulary.eos_ids:
            self.finished = True
        else:
            self._inner.consume_token(token)
        self._legal_V = None
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if not 0 <= count <= self.consumed:
            raise ValueError(f"cannot take {count} of {self.consumed} tokens back")
        if count == 0:
            return
        self._inner.rollback(count - self.finished)
        del self._tokens[-count:]
        self._legal_V = None
        self.finished = False

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model says; empty where there is a choice.

        Each is the only legal token of its state. An end-of-turn token is never among them.
        """
        return [] if self._inner.is_stopped() else self._inner.compute_ff_tokens()


def _title_of(line: bytes) -> str:
    """What stands behind the number."""
    return line.decode("utf-8", errors="replace").partition(". ")[2]
