"""Strict YAML: the YAML 1.2 core schema, positions, and nothing that surprises.

PyYAML's reader, scanner and parser give the events; values are made here, because its own
resolver speaks YAML 1.1 (`on` is true, `1e-3` a string, `012` ten, `1:30` ninety). Anchors,
aliases, merge keys, tags, directives, several documents and keys given twice are refused. Nesting
is limited in the scanner already: deep files would cost seconds before the first event.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner, ScannerError

from .codes import ProblemCode

Path = tuple[str | int, ...]
Place = tuple[int, int]  # line and column, both from 1

MAX_DEPTH = 64
MAX_EVENTS = 20_000
MAX_BYTES = 256 * 1024
TOO_DEEP = "nested deeper"
MAX_DIGITS = 100  # Python itself refuses to print integers of more than 4300

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
BOOLS = {word: word[0] in "tT" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), partial(int, base=8)),
    (re.compile(r"0x[0-9a-fA-F]+"), partial(int, base=16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda t: float(t.replace(".", ""))),
)
SURROGATE = re.compile(r"[\0\ud800-\udfff]")
UNPRINTABLE = Reader.NON_PRINTABLE


class YamlError(ValueError):
    """One thing wrong with a text, at one place."""

    def __init__(self, place: Place, message: str, code: ProblemCode = ProblemCode.SYNTAX) -> None:
        super().__init__(message)
        self.place = place
        self.message = message
        self.code = code


def plain_scalar(text: str) -> Any:
    """The value of an unquoted scalar under the YAML 1.2 core schema.

    Raises:
        ValueError: a number with more than MAX_DIGITS characters.
    """
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    for pattern, make in NUMBERS:
        if pattern.fullmatch(text):
            if len(text) > MAX_DIGITS:
                raise ValueError(f"a number of {len(text)} characters")
            return make(text)
    return text


class _Events(Reader, Scanner, Parser):
    """PyYAML's events, with nesting limited where it is cheap to limit."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        self._limit(self.flow_level)
        super().fetch_flow_collection_start(token_class)

    def add_indent(self, column: int) -> bool:
        self._limit(len(self.indents))
        return bool(super().add_indent(column))

    def _limit(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            mark = self.get_mark()
            raise ScannerError(None, None, f"{TOO_DEEP} than {MAX_DEPTH} levels", mark)


def _place(mark: Any) -> Place:
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def place_of(text: str, index: int) -> Place:
    """Line and column of the character at `index`."""
    before = text[:index]
    return before.count("\n") + 1, index - before.rfind("\n")


def _events(text: str) -> Iterator[yaml.Event]:
    if wrong := UNPRINTABLE.search(text):
        what = f"the character U+{ord(wrong.group()):04X} is not allowed in YAML"
        raise YamlError(place_of(text, wrong.start()), what)
    reader = _Events(text)
    try:
        for count in range(MAX_EVENTS + 1):
            if not reader.check_event():
                return
            event: yaml.Event = reader.get_event()  # type: ignore[no-untyped-call]
            if count == MAX_EVENTS:
                many = f"more than {MAX_EVENTS} YAML items"
                raise YamlError(_place(event.start_mark), many, ProblemCode.TOO_LARGE)
            yield event
    except yaml.MarkedYAMLError as error:
        problem = error.problem or str(error)  # in PyYAML's words, where these need no help
        message = "a tab where blanks belong" if "'\\t'" in problem else problem
        message = message.replace("'\\x00'", "the end of the text")
        code = ProblemCode.TOO_LARGE if problem.startswith(TOO_DEEP) else ProblemCode.SYNTAX
        raise YamlError(_place(error.problem_mark or error.context_mark), message, code) from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, YamlError):
            raise
        message = "an escape names no character"  # "\U00110000", say
        raise YamlError(_place(reader.get_mark()), message) from None
    finally:
        reader.dispose()


class Tree:
    """A parsed text: its value, and the place of every key and value.

    errors: everything that is refused but does not stop the parser.
    """

    def __init__(self, text: str) -> None:
        self.data: Any = None
        self.keys: dict[Path, Place] = {}
        self.values: dict[Path, Place] = {}
        self.errors: list[YamlError] = []
        self._events = _events(text)
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if self.values:
                    raise YamlError(
                        _place(event.start_mark),
                        "a second document starts here",
                        ProblemCode.REFUSED,
                    )
                if event.tags or event.version not in (None, (1, 2)):
                    self._refuse(event, "directives other than `%YAML 1.2` are not allowed")
            elif isinstance(event, yaml.NodeEvent):
                self.data = self._value(event, ())

    def _refuse(
        self, event: yaml.Event, message: str, code: ProblemCode = ProblemCode.REFUSED
    ) -> None:
        self.errors.append(YamlError(_place(event.start_mark), message, code))

    def _value(self, event: Any, path: Path) -> Any:
        """The value that begins with this event, and what is inside it."""
        self.values[path] = _place(event.start_mark)
        return self._content(event, path)

    def _content(self, event: Any, path: Path) -> Any:
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"aliases are not allowed: *{event.anchor}")
            return None
        if event.anchor is not None:
            self._refuse(event, f"anchors are not allowed: &{event.anchor}")
        if event.tag is not None:
            self._refuse(event, f"tags are not allowed: {event.tag}")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(e, (*path, i)) for i, e in enumerate(self._inside())]
        mapping: dict[str | int, Any] = {}
        for key_event in self._inside():
            key = self._key(key_event, path)
            mapping[key] = self._value(next(self._events), (*path, key))
        return mapping

    def _inside(self) -> Iterator[yaml.Event]:
        """The first events of all that the innermost open collection holds."""
        return takewhile(lambda e: not isinstance(e, yaml.CollectionEndEvent), self._events)

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        if SURROGATE.search(event.value):
            self._refuse(event, "a string with a NUL or half of a surrogate pair")
        if event.style is not None:
            return event.value
        try:
            return plain_scalar(event.value)
        except ValueError as error:
            self._refuse(event, str(error), ProblemCode.TOO_LARGE)
            return 0

    def _key(self, event: Any, parent: Path) -> str | int:
        place = _place(event.start_mark)
        unnamed = f"<key at {place}>"
        value = self._content(event, (*parent, unnamed))
        plain = isinstance(event, yaml.ScalarEvent)
        key = value if plain and isinstance(value, str | int) else unnamed
        path = (*parent, key)
        if not plain:
            self._refuse(event, "a key must be a string, not a list or mapping")
        elif isinstance(value, bool) or not isinstance(value, str | int):
            self._refuse(event, f"a key must be a string: write '{event.value}' in quotes")
        elif value == "<<" and event.style is None:
            self._refuse(event, "merge keys are not allowed: <<")
        elif path in self.keys:
            first = self.keys[path][0]
            message = f"this key is given twice, first in line {first}"
            self._refuse(event, f"{'.'.join(map(str, path))}: {message}", ProblemCode.TWICE)
        self.keys[path] = place
        return key
