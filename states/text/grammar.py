"""Grammars as token masks: of the outline, and of answers as a request wants them.

A token is legal if some outline continues with its text. Where the text is fixed, only the token
with which the tokenizer would write it is legal, so that drafts from `forced()` are never rejected.
Where a tokenizer cannot continue (some lack single bytes, or a line's end), the turn may end.
The readers skip and mend nothing in a text of the grammar. llguidance is imported lazily."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .outline import BIDI, MAX_TITLE, TOOL_NAME, WORDS, OutlineFormat, repeats

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarError(ValueError):
    """A grammar cannot be built from these settings, or not for this tokenizer."""


# Every blank that Python's strip() removes and that titles may contain.
_BLANKS = r" \u{a0}\u{1680}\u{2000}-\u{200a}\u{202f}\u{205f}\u{3000}"
# All markers begin with `<` or `[`, so a title without these contains none. (Subtracting the
# markers themselves multiplies the lexer's states, beyond llguidance's limit for one mask.)
_BARRED = r"\x00-\x1f\x7f-\x9f|<\[\u{2028}\u{2029}\u{fffd}" + "".join(
    f"\\u{{{ord(c):x}}}" for c in sorted(BIDI)
)
_TITLE = (
    rf"/[\p{{L}}\p{{N}}]([^{_BARRED}]{{0,{MAX_TITLE - 2}}}[^{_BARRED}{_BLANKS}])?/"
    rf" & ~/{'|'.join(WORDS)}/"
)
NO_EXTENSION = "NoExtensionBias"  # llguidance: no token continues the grammar


def outline_grammar(max_branches: int, tools: Sequence[str] = ()) -> str:
    """The grammar in llguidance's dialect of Lark. A length is 10..99 or a round number up to 990.
    Lists of dependencies share rules: `upto_k` is an increasing list whose ids are at most k,
    `last_k` one whose last id is k."""
    rules = ['start: "DIRECT" | "PLAN\\n" line_1']
    for number in range(1, max_branches + 1):
        deps = '"-"' if number == 1 else f'("-" | upto_{number - 1})'
        more = '"END"' if number == max_branches else f'(line_{number + 1} | "END")'
        line = f'"{number}|" LENGTH "|" TOOL "|" {deps} "|" TITLE "\\n" {more}'
        rules.append(f"line_{number}: {line}")
    for k in range(1, max_branches):
        rules.append(f"upto_{k}: upto_{k - 1} | last_{k}" if k > 1 else 'upto_1: "1"')
        rules += [f'last_{k}: "{k}" | upto_{k - 1} ",{k}"'] if k > 1 else []
    for name in tools:
        if not TOOL_NAME.fullmatch(name) or name.lower() == "none":
            raise GrammarError(f"{name!r} cannot be the name of a tool in an outline")
    names = " | ".join(['"-"', *(f'"{name}"' for name in tools)])
    return "\n".join([*rules, "LENGTH: /[1-9][0-9]0?/", f"TOOL: {names}", f"TITLE: {_TITLE}"])


def list_grammar(max_branches: int) -> str:
    """The format `list`, of two lines at least; the matcher prevents repeated titles."""
    rules = [f'start: "1. " TITLE{" line_2" if max_branches > 1 else ""}']
    for number in range(2, max_branches + 1):
        more = "" if number == max_branches else f" line_{number + 1}?"
        rules.append(f'line_{number}: "\\n{number}. " TITLE{more}')
    return "\n".join([*rules, f"TITLE: {_TITLE}"])


class TokenGrammar:
    """The bytes of a tokenizer's tokens as a trie, for grammars over whole tokens.

    tokenizer: of transformers (fast), or a tokenizers.Tokenizer.
    vocab_size: width of the model's logits; ids that the tokenizer lacks are never legal.
    eos_ids: the tokens that end a turn, all of them legal after the end and nowhere else.
    Raises GrammarError: the tokenizer cannot be used."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.closing_C: NDArray[np.int64] | None = None  # tokens that can end a title of a list
        backend = copy(getattr(tokenizer, "backend_tokenizer", tokenizer))
        backend.no_padding()  # both would change the forced tokens, which the table tokenizes
        backend.no_truncation()
        if (size := backend.get_vocab_size(with_added_tokens=True)) > vocab_size:
            raise GrammarError(f"the tokenizer has {size} tokens, the model's logits {vocab_size}")
        try:
            self.table = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids))
        except ValueError as error:
            raise GrammarError(f"the tokenizer cannot be used with a grammar: {error}") from error

    def first(self, grammar: str) -> LLMatcher:
        """The state at the beginning of a grammar; raises ValueError: it is not one."""
        from llguidance import LLMatcher

        first = LLMatcher(self.table, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if first.is_error():
            raise GrammarError(first.get_error())
        return first

    def matchers(self, grammar: str) -> Callable[[], OutlineMatcher]:
        """Makes matchers of an answer under this grammar; raises GrammarError: not supported."""
        try:
            first = self.first(grammar)
        except ValueError as error:
            raise GrammarError(PLACE.sub("", str(error).strip().split("\n", 1)[0])) from None
        return partial(OutlineMatcher, first, self, "")


class OutlineGrammar(TokenGrammar):
    """The grammar of outlines in a format. tools: names that a line may give instead of `-`; unused
    for lists. Raises GrammarError: bad settings, or no token that begins an outline."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Sequence[int],
        max_branches: int,
        tools: Sequence[str] = (),
        form: OutlineFormat = "fields",
    ) -> None:
        if max_branches < 1:
            raise GrammarError("max_branches must be at least 1")
        if not eos_ids or not all(0 <= e < vocab_size for e in eos_ids):
            raise GrammarError(f"no usable end-of-turn tokens: {list(eos_ids)}")
        lists = form == "list"
        text = list_grammar(max_branches) if lists else outline_grammar(max_branches, tools)
        super().__init__(tokenizer, vocab_size, eos_ids)
        if lists:
            ends = [b"\n" in self.table.decode_bytes([token]) for token in range(vocab_size)]
            others = np.setdiff1d(np.flatnonzero(ends), self.eos_ids)
            self.closing_C = np.concatenate([others, self.eos_ids])
        self._first = self.first(text)
        if set(self.eos_ids) == set(np.flatnonzero(self.matcher().legal_mask()).tolist()):
            raise GrammarError("the tokenizer has no token that can begin an outline")

    def matcher(self, question: str = "") -> OutlineMatcher:
        """A fresh state at the outline's beginning; no title of a list repeats the question."""
        return OutlineMatcher(self._first, self, question)


class OutlineMatcher:
    """The state of one outline in the grammar; `advance` and `rollback` change it in place.
    llguidance does not count an end-of-turn token after a complete outline: `finished` does."""

    def __init__(self, first: LLMatcher, grammar: TokenGrammar, question: str) -> None:
        self._first = first
        self._inner = first.deep_copy()
        self._grammar = grammar
        self._question = question
        self._legal_V: NDArray[np.bool_] | None = None
        self._tokens: list[int] = []
        self.finished = False  # an end-of-turn token was consumed; no token is legal

    @property
    def consumed(self) -> int:
        """Tokens so far, the end-of-turn token included."""
        return len(self._tokens)

    def is_legal(self, token: int) -> bool:
        """Whether the token may come next."""
        return 0 <= token < self._grammar.vocab_size and bool(self.legal_mask()[token])

    def legal_mask(self) -> NDArray[np.bool_]:
        """bool [vocab_size]: the tokens that may come next; computed once per state."""
        if self._legal_V is None:
            self._legal_V = np.zeros(self._grammar.vocab_size, dtype=np.bool_)
            if not self.finished:
                self._allow_(self._legal_V)
        return self._legal_V

    def _allow_(self, legal_V: NDArray[np.bool_]) -> None:
        if not self._inner.is_stopped():
            # Not `validate_tokens`: it accepts every spelling of a fixed text, the mask one.
            bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
            if not self._inner.is_error():
                legal_V |= np.unpackbits(bits, count=len(legal_V), bitorder="little").view(np.bool_)
            elif not self._inner.get_error().startswith(NO_EXTENSION):  # a limit of llguidance's
                raise GrammarError(self._inner.get_error())
            else:  # what has stopped cannot be rolled back
                self._inner = self._first.deep_copy()
                self._inner.consume_tokens(self._tokens)
        # Forbid ends that would make a list's title equal to an earlier one or to the question.
        closing_C = self._grammar.closing_C
        if closing_C is not None and legal_V[closing_C].any():
            *earlier, line = self._grammar.table.decode_bytes(self._tokens).split(b"\n")
            titles = [_title_of(text) for text in earlier]
            for token in closing_C[legal_V[closing_C]]:
                is_eos = token in self._grammar.eos_ids
                rest = b"" if is_eos else self._grammar.table.decode_bytes([token]).split(b"\n")[0]
                legal_V[token] = not repeats(_title_of(line + rest), titles, self._question)
        if not legal_V.any():
            legal_V[list(self._grammar.eos_ids)] = True

    def advance(self, token: int) -> None:
        """Consume a token; raises ValueError, with the state unchanged, if it is not legal."""
        if not self.is_legal(token):
            raise ValueError(f"token {token} is not legal here")
        if token in self._grammar.eos_ids:
            self.finished = True
        else:
            self._inner.consume_token(token)
        self._legal_V = None
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if not 0 <= count <= self.consumed:
            raise ValueError(f"cannot undo {count} of {self.consumed} tokens")
        if count > 0:
            self._inner.rollback(count - self.finished)
            del self._tokens[-count:]
            self._legal_V = None
            self.finished = False

    def forced(self) -> list[int]:
        """The tokens that must come next, without an end of turn; empty where there is a choice."""
        return [] if self._inner.is_stopped() else self._inner.compute_ff_tokens()


def _title_of(line: bytes) -> str:
    """The text after the number."""
    return line.decode("utf-8", errors="replace").partition(". ")[2]


# -- grammars of plain answers, in llguidance's dialect of Lark ------------------------------------

MAX_SCHEMA = 16_384  # characters
MAX_TOOLS = 131_072  # of the schemas of all tools, which compile in 0.1 s
MAX_DEPTH = 32  # objects and lists inside each other
ANY_OBJECT = {"type": "object"}
DENSE = {"x-guidance": {"whitespace_flexible": False}}  # else small models write only blanks
# Keywords of JSON schemas whose value is a schema, a list or a mapping of schemas.
INNER = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "not")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
COMBINED = ("anyOf", "oneOf", "allOf", "$ref")
# Text that cannot be the beginning of calls, which is `[{`.
NO_CALL = r"/\s*([^\s\[]|\[[^{])(?s:.)*/"
DELIMITERS = {"/": r"\/", "\n": r"\n"}
PLACE = re.compile(r"^at \d+\(\d+\): ")  # of an error in the text of a grammar


def schema_grammar(schema: Any) -> str:
    """Of the JSON texts of a schema without blanks; an object has only the properties of its
    schema, unless that allows more. Raises GrammarError: it is too large, or no object."""
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema must be an object")
    return f"start: {_json_rule(schema)}"


def regex_grammar(pattern: str) -> str:
    """Of the texts that match a regular expression as a whole; GrammarError: empty, or too long."""
    if not pattern:
        raise GrammarError("texts must not be empty")
    _check_size(pattern)
    # Lark delimits a regular expression with slashes, on one line.
    text = re.sub(r"(?s)\\.|/|\n", lambda match: DELIMITERS.get(match[0], match[0]), pattern)
    return f"start: /{text}/"


def choice_grammar(choices: Sequence[str]) -> str:
    """Of these texts; raises GrammarError if one is empty, or they are too long."""
    if not all(choices):
        raise GrammarError("texts must not be empty")
    texts = " | ".join(map(json.dumps, choices))
    _check_size(texts)
    return f"start: {texts}"


def calls_grammar(functions: Mapping[str, Mapping[str, Any]], most: int, *, free: bool) -> str:
    """Of a JSON list of one to `most` calls of functions, by name the schemas of their arguments:
    `[{"name":"f","arguments":{}}]`; with `free` of other texts too. Raises GrammarError."""
    more = f'("," call){{0,{most - 1}}}' if most > 1 else ""
    rules = [
        f"start: {'TEXT | ' if free else ''}calls",
        f'calls: "[" call {more} "]"',
        f"call: {' | '.join(f'call_{n}' for n in range(len(functions)))}",
        *([f"TEXT: {NO_CALL}"] if free else []),
    ]
    for number, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name":{json.dumps(name)},"arguments":')
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {_json_rule({**schema, **ANY_OBJECT})}")
    text = "\n".join(rules)
    _check_size(text, MAX_TOOLS)
    return text


def _json_rule(schema: Mapping[str, Any]) -> str:
    try:
        depth = _depth_of(schema)
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise GrammarError("the schema is not valid JSON") from None
    _check_size(text)
    if depth > MAX_DEPTH:
        raise GrammarError(f"the schema is {depth} deep, at most {MAX_DEPTH} is allowed")
    return f"%json {json.dumps({**_closed(schema), **DENSE})}"


def _check_size(text: str, most: int = MAX_SCHEMA) -> None:
    if len(text) > most:
        raise GrammarError(f"the schema has {len(text)} characters, at most {most} fit")


def _depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth_of, inner), default=0)


def _closed(schema: Any, *, combined: bool = False) -> Any:
    """The schema with `additionalProperties` false where an object has properties. combined: its
    properties are allowed next to those of another schema, so that it cannot be closed."""
    if isinstance(schema, list):
        return [_closed(one, combined=combined) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    shared = combined or ("properties" in schema and any(key in schema for key in COMBINED))
    members = schema.get("allOf")
    several = isinstance(members, list) and len(members) > 1
    for key in INNER:
        if key in schema:
            together = key in COMBINED and (shared or (key == "allOf" and several))
            closed[key] = _closed(schema[key], combined=together)
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(one) for name, one in schema[key].items()}
    if "properties" in schema and not shared and "patternProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed
