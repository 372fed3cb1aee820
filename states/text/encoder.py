"""Text to token ids, so that nothing that somebody wrote becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .chat_format import Ids
from .template import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_CHARACTERS = 200_000


class PromptError(ValueError):
    """A text that cannot be a prompt, with the reason."""


def check_question(text: str, what: str = "prompt") -> None:
    """Refuse what cannot be a prompt, or ``what`` else it is; needs no tokenizer.

    Raises:
        PromptError: longer than MAX_CHARACTERS, empty, blank, or with a NUL or a lone surrogate.
    """
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"the {what} has {len(text)} characters, at most {MAX_CHARACTERS} fit")
    if not text.strip():
        raise PromptError(f"the {what} is {'blank' if text else 'empty'}")
    if "\x00" in text:
        raise PromptError(f"the {what} has a NUL character at {text.index(chr(0))}")
    if lone := re.search("[\ud800-\udfff]", text):
        raise PromptError(f"the {what} has a lone surrogate at {lone.start()}: not valid Unicode")


class Encoder:
    """Text to ids, in two ways that are never mixed up."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(tokenizer.all_special_ids) | {
            i for i, token in added.items() if token.special
        }
        # Some control tokens (`<think>`, `<tool_call>`) are added tokens that are not special.
        self._control = self.special | {i for i, t in added.items() if str(t).strip()}

    def literals(self, cut: Sequence[Piece]) -> list[Ids | str]:
        """A template's pieces: literals as ids, special tokens included; slots by their names."""
        return [
            piece if is_slot else self._encode(piece, split_special_tokens=False)
            for piece, is_slot in cut
        ]

    def text(self, text: str) -> Ids:
        """Text that somebody wrote; no part of it becomes a control token."""
        ids = self._encode(text, split_special_tokens=True)
        if self._control.isdisjoint(ids):
            return ids
        ids = self._without_added_tokens(text)
        if not self.special.isdisjoint(ids):
            raise PromptError("the text holds a control token that this tokenizer cannot write out")
        return ids

    def _encode(self, text: str, **options: bool) -> Ids:
        # Not verbose: whether a prompt is too long is counted elsewhere, in whole prompts.
        more = {"add_special_tokens": False, "verbose": False}
        return list(self._tokenizer.encode(text, **more, **options))

    def _without_added_tokens(self, text: str) -> Ids:
        """The tokenizer's own steps, without the one that looks for added tokens."""
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]
