"""A JSON schema as a grammar: an answer that is held to it can be read by a program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .grammar import GrammarError, OutlineMatcher, Vocabulary

MAX_SCHEMA = 16_384  # characters
MAX_DEPTH = 32  # objects and lists inside each other
ANY_OBJECT = '{"type": "object"}'
DENSE: Any = {"whitespace_flexible": False}  # or small models write blanks until their budget ends


class SchemaGrammar:
    """Makes matchers of schemas, for one tokenizer, whose tokens are read once.

    Args:
        tokenizer, vocab_size, eos_ids: as for `OutlineGrammar`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids, titles_once=False)

    def matchers(self, schema: str) -> Callable[[], OutlineMatcher]:
        """Makes fresh states at the beginning of an answer under this schema.

        Raises:
            GrammarError: it is too large, or says what llguidance has no grammar for.
        """
        from llguidance import LLMatcher

        check_schema(schema)
        first: Any
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=DENSE)
            first = LLMatcher(self._vocabulary.table, grammar, log_level=0)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        if first.is_error():
            raise GrammarError(first.get_error().strip().split("\n", 1)[0])
        return partial(OutlineMatcher, first, self._vocabulary, "")


def check_schema(schema: str) -> None:
    """Refuse what is too large to be compiled; raises GrammarError."""
    if len(schema) > MAX_SCHEMA:
        raise GrammarError(f"the schema has {len(schema)} characters, at most {MAX_SCHEMA} fit")
    try:
        depth = _depth(json.loads(schema))
    except (ValueError, RecursionError):
        raise GrammarError("the schema is no JSON that can be read") from None
    if depth > MAX_DEPTH:
        raise GrammarError(f"the schema is {depth} deep, at most {MAX_DEPTH} is allowed")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0
