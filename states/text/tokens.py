"""Text to token ids, so that no text of a user or a model becomes a control token, and prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...models.files import panics_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ...ops.blend import ChunkKV

Ids = list[int]
Piece = tuple[str, bool]  # of a template: a literal text, or (True) the name of a slot


def leading_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The beginning-of-text token (a chunk's attention sink), if the tokenizer puts it first."""
    first = tokenizer.encode("a")[:1]
    bos = tokenizer.bos_token
    return first[0] if bos and first == tokenizer.encode(str(bos))[:1] else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Token ids of a document or a part of it, after the first `at` ids of a prompt. kept: its KV
    rows, if the caller has them. is_exact: a forward of the prompt would compute them."""

    at: int
    ids: tuple[int, ...]
    name: str = ""
    kept: ChunkKV | None = field(default=None, repr=False, compare=False)
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Token ids and the chunks among them, in reading order. Iterating gives the ids."""

    ids: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __getitem__(self, part: slice) -> tuple[int, ...]:
        return self.ids[part]

    def __add__(self, more: PromptTokens | Sequence[int]) -> PromptTokens:
        tail = more if isinstance(more, PromptTokens) else PromptTokens(tuple(more))
        moved = (replace(chunk, at=chunk.at + len(self.ids)) for chunk in tail.chunks)
        return PromptTokens(self.ids + tail.ids, (*self.chunks, *moved))

    def behind(self, count: int) -> PromptTokens:
        """The ids after the first `count`, without chunks; for count 0 everything."""
        return self if count <= 0 else PromptTokens(self.ids[count:])


MAX_CHARACTERS = 200_000


class OutlineError(ValueError):
    """A file that is not an outline; one `file:line: reason` per problem."""


class PromptError(ValueError):
    """A text that cannot be a prompt; the message gives the reason."""


def check_unicode(text: str, what: str) -> None:
    if lone := re.search("[\ud800-\udfff]", text):
        raise PromptError(f"the {what} has a lone surrogate at {lone.start()}: not valid Unicode")


def check_question(text: str, what: str = "prompt") -> None:
    """Raise PromptError for a text that is too long, blank, or has a NUL or a lone surrogate."""
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"the {what} has {len(text)} characters, at most {MAX_CHARACTERS} fit")
    if not text.strip():
        raise PromptError(f"the {what} is {'blank' if text else 'empty'}")
    if "\x00" in text:
        raise PromptError(f"the {what} has a NUL character at {text.index(chr(0))}")
    check_unicode(text, what)


class Encoder:
    """Encodes template text with control tokens and any other text without."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids).union(i for i, t in added if t.special)
        # Some control tokens (`<think>`, `<tool_call>`) are added tokens that are not special.
        self._control = self.special.union(i for i, token in added if str(token).strip())

    def literals(self, cut: Sequence[Piece]) -> list[Ids | str]:
        """A template's pieces: literals as ids with special tokens, slots as their names."""
        return [piece if is_slot else self.literal(piece) for piece, is_slot in cut]

    def literal(self, piece: str) -> Ids:
        """Template text, in which control tokens are read. The tokenizer stores this setting: if
        another thread has changed it meanwhile, the ids may be wrong. `text` is right with either
        setting."""
        while True:
            ids = self._encode(piece, split_special_tokens=False)
            if not self._tokenizer.backend_tokenizer.encode_special_tokens:
                return ids

    def text(self, text: str) -> Ids:
        """Text of a user or a model; no part of it becomes a control token."""
        ids = self._encode(text, split_special_tokens=True)
        if self._control.isdisjoint(ids):
            return ids
        backend = self._tokenizer.backend_tokenizer  # its steps without the search for added tokens
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids = [token.id for part in parts for token in backend.model.tokenize(part)]
        if not self.special.isdisjoint(ids):
            raise PromptError("the text holds a control token that this tokenizer cannot write out")
        return ids

    def _encode(self, text: str, **options: bool) -> Ids:
        # Not verbose: the length of whole prompts is checked elsewhere.
        more = {"add_special_tokens": False, "verbose": False}
        with panics_as(PromptError):
            return list(self._tokenizer.encode(text, **more, **options))
