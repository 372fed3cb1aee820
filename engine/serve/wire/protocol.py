"""What the two processes of a server say to each other: frozen messages, one JSON line each.

Nothing is unpickled on either side: a line is JSON, its `kind` one of these classes, its fields
plain values.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

MOST = 64 << 20  # bytes of a line


class ProtocolError(ValueError):
    """A line that is no message."""


# -- to the engine --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: graphs by name, the options of `specsot run` that decide on models."""

    graphs: Sequence[str]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Submit:
    """A request.

    question: the last turn, past: [question, answer] of those before, rules: what stood before
    them; or text: a raw prompt; or token_ids: its ids. sampling: what differs from the graph's,
    as in `SamplingRules`. seed: as of `specsot run --seed`. stop: texts that end the answer.
    logprobs: how many of the best tokens are wanted beside each, -1 for no scores; echo: the
    prompt's tokens are scored as well. documents: [title, text].
    begun: [branch, token ids] that another engine has written of it.
    """

    id: str
    graph: str
    question: str = ""
    past: Sequence[Sequence[str]] = ()
    rules: str = ""
    text: str | None = None
    token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    skeleton: bool = True
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    schema: str | None = None
    documents: Sequence[Sequence[str]] = ()
    cache_salt: str = ""
    timeout: float | None = None
    logprobs: int = -1
    echo: bool = False
    begun: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone, or wants no more."""

    id: str


@dataclass(frozen=True, slots=True)
class Encode:
    """A text's token ids are wanted; with `past` or `chat`, those of the whole prompt."""

    id: str
    graph: str
    text: str
    chat: bool = False
    past: Sequence[Sequence[str]] = ()
    rules: str = ""


@dataclass(frozen=True, slots=True)
class Decode:
    """The text of token ids is wanted."""

    id: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Look:
    """Whether pictures of the engines are wanted."""

    on: bool


# -- from the engine ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded. graphs: what is served, by name; each a `GraphFacts` as a mapping."""

    graphs: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot start; code: the exit code that goes with it."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request was taken in."""

    id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be, and why; param: the field to blame."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Wrote:
    """What one step brought to a request.

    text: what can be read of the answer now and could not before. events: what happened to its
    branches, as (name, branch, more): outline (titles), opened (title), reused ([run of its prompt,
    how]), wrote ([piece, origin]), ended (finish). tokens: written by now. scores: of tokens, where
    they are asked for: [branch, token id, text, log-probability, [[id, text, log-probability]]].
    ids: [branch, token ids] of what was written.
    """

    id: str
    text: str
    events: Sequence[Sequence[Any]]
    step: int
    tokens: int
    scores: Sequence[Any] = ()
    ids: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request.

    text: the whole answer. finish: as of `specsot run`; stop: the text or id that ended it.
    usage: as `TokenUsage`. accepted, drafted: in each of its rounds.
    """

    id: str
    text: str
    finish: str
    stop: str | None
    note: str
    usage: Mapping[str, int]
    accepted: Sequence[int]
    drafted: Sequence[int]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The answer to `Encode`; pieces: the text of each token."""

    id: str
    token_ids: Sequence[int]
    pieces: Sequence[str]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answer to `Decode`."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What each graph's engine has done and holds, as `EngineStats` and what else is counted."""

    graphs: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Picture:
    """One engine at one moment: its state, runs of equal slots as (code, length), the moves since
    the last picture, requests that run and that wait."""

    graph: str
    state: str
    runs: Sequence[Sequence[int]]
    used: int
    capacity: int
    moves: Sequence[Sequence[Any]]
    running: int
    waiting: int


Message = (
    Start
    | Submit
    | Cancel
    | Encode
    | Decode
    | Look
    | Ready
    | Failed
    | Admitted
    | Refused
    | Wrote
    | Ended
    | Encoded
    | Decoded
    | Counts
    | Picture
)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}


def packed(message: Message) -> bytes:
    """A message as a line."""
    values = {one.name: getattr(message, one.name) for one in fields(message)}
    text = json.dumps({"kind": type(message).__name__, **values}, separators=(",", ":"))
    return text.encode() + b"\n"


def unpacked(line: bytes) -> Message:
    """A line as a message; raises ProtocolError."""
    try:
        values = json.loads(line)
        message: Message = KINDS[values.pop("kind")](**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"no message: {error}") from None
    return message
