"""The messages between a worker and its user, the router of a server or the director of a run.

A message is one line of JSON: `kind` is one of these classes, the other keys are its fields, which
are checked when the line is read. KV rows travel separately, in collectives."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from threading import Lock
from typing import Annotated, Any, NamedTuple

from pydantic import SkipValidation, TypeAdapter

from ...states.request import MigratedRequest
from ..events import Committed
from ..prepare.inputs import AS_THE_GRAPH, Prompt, RequestSettings
from ..prepare.options import ClusterBlock

MAX_LINE_BYTES = 64 << 20
LOOPBACK = "127.0.0.1"
GRAMMAR = "grammar"  # `Refused.param` for the field that a request's grammar follows from
CONSTANTS = ("slot_bytes", "size")  # of a pool
Text = Annotated[str, SkipValidation()]  # may hold lone surrogates, which pydantic refuses


class ProtocolError(ValueError):
    """A line that is not a message."""


# -- to the engine process of a server ------------------------------------------------------------


class Start(NamedTuple):
    """First message: graphs by name, and the options of `specsot run` that decide on models."""

    graphs: Sequence[Text]
    options: Mapping[str, Any]


class Submit(NamedTuple):
    """A request. Its id is the prompt's key; the seed as of `specsot run --seed`. raw: the prompt's
    text is tokenized without a template. sampling: differences from the graph's. stop: texts that
    end the answer. logprobs: alternatives per token, -1: no scores; echo: score the prompt too.
    trace: send rejected drafts."""

    graph: Text
    prompt: Prompt
    settings: RequestSettings = AS_THE_GRAPH
    raw: bool = False
    sampling: Mapping[str, Any] = {}
    stop: Sequence[Text] = ()
    timeout: float | None = None
    logprobs: int = -1
    echo: bool = False
    trace: bool = False

    @property
    def id(self) -> str:
        return self.prompt.key


class Cancel(NamedTuple):
    """End a request, or what a worker of a run was assigned; tp: of that `Assign`."""

    id: str
    tp: int = 1


class Encode(NamedTuple):
    """Tokenize a text, with `chat` the whole prompt; token_ids: decode these instead."""

    graph: Text
    prompt: Prompt
    chat: bool = False
    token_ids: Sequence[int] | None = None

    @property
    def id(self) -> str:
        return self.prompt.key


class SnapshotRequest(NamedTuple):
    """Start (`on`) or stop sending `Picture`s."""

    on: bool


# -- from any worker, and from the engine process of a server -------------------------------------


class Ready(NamedTuple):
    """Models are loaded. graphs: `ServedGraph.facts` by name. weights: the target's bytes."""

    graphs: Mapping[str, Mapping[str, Any]] = {}
    pid: int = 0
    max_branches: int = 0
    weights: int = 0


class Heartbeat(NamedTuple):
    """The process is alive. stuck: seconds since the engines of a server's worker made progress."""

    stuck: float = 0.0


class Failed(NamedTuple):
    """The worker cannot start; code: exit code of the program."""

    code: int
    message: Text


class Admitted(NamedTuple):
    id: str
    prompt_tokens: int


class Refused(NamedTuple):
    """A request that cannot run, and why; param: the field to blame."""

    id: str
    message: Text
    param: Text | None = None
    code: Text | None = None


class Wrote(NamedTuple):
    """Output of one step for one request. text: new readable text of the answer. events: (name,
    branch, details): outline (titles), opened (title), reused ([run of its prompt, how]), wrote
    ([piece, origin]), ended (finish). tokens: written so far. scores: [branch, token id, text,
    log-probability, [[id, text, log-probability]]] where requested. ids: [branch, new ids].
    rejected: ("rejected", branch, text of drafts); a second run can have other rounds."""

    id: str
    text: Text
    events: Sequence[Sequence[Any]]
    step: int
    tokens: int
    scores: Sequence[Any] = ()
    ids: Sequence[Sequence[Any]] = ()
    rejected: Sequence[Sequence[Any]] = ()


class Ended(NamedTuple):
    """End of a request. text: the whole answer. finish: as of `specsot run`; stop: the text or id
    that ended it. usage: as `TokenUsage`. accepted, drafted: tokens of each of its rounds."""

    id: str
    text: Text
    finish: str
    usage: Mapping[str, int]
    stop: Text | None = None
    note: Text = ""
    accepted: Sequence[int] = ()
    drafted: Sequence[int] = ()


class Encoded(NamedTuple):
    """Answer to `Encode`: tokens with the text of each, or the decoded text."""

    id: str
    token_ids: Sequence[int] = ()
    pieces: Sequence[Text] = ()
    text: Text = ""


class Counts(NamedTuple):
    """Counters of each graph's engine (`EngineStats`), several times a second."""

    graphs: Mapping[str, Mapping[str, Any]]


class Picture(NamedTuple):
    """One engine at a moment. runs: (code, length) of slots. moves: since the last one. busy:
    seconds of its steps since it last had no requests."""

    graph: str
    state: str
    runs: Sequence[Sequence[int]]
    used: int
    capacity: int
    moves: Sequence[Sequence[Any]]
    running: int
    waiting: int
    busy: float


# -- to a worker of a run -------------------------------------------------------------------------


class Load(NamedTuple):
    """First message: load the models of a job, or keep them loaded. graph: its YAML. options: those
    that decide on models. packed: its weights may be. part: of the weights, and how many."""

    graph: Text
    options: Mapping[str, Any]
    packed: bool = True
    part: tuple[int, int] = (0, 1)


class FormGroup(NamedTuple):
    """Join a process group, which replaces the one before. port: of the store where its members
    meet. block: has its address, and the sizes of the smaller groups (`ranks_of_groups`)."""

    number: int
    rank: int
    size: int
    port: int
    block: ClusterBlock


class Assign(NamedTuple):
    """Decode a part of a request: its outline, or some of its branches. id: what replies name. tp,
    group: the worker group that decodes it, and its number; with tp 1 the worker itself."""

    id: str
    prompt: Prompt
    part: MigratedRequest
    tp: int = 1
    group: int = 0


class Regroup(NamedTuple):
    """Broadcast the rows of a prefix from each worker of the group that has them to all workers.
    number: what replies name. tp, group: the source. ids: of the target's rows. rows: per pool."""

    number: int
    epoch: int
    tp: int
    group: int
    ids: tuple[int, ...]
    rows: tuple[int, ...]
    cache_salt: str = ""


class CountWork(NamedTuple):
    number: int


class Grouped(NamedTuple):
    """The process group is formed. error: why not, or why a collective of it has failed since."""

    number: int
    error: str = ""


class BranchEnded(NamedTuple):
    """A branch has ended. rows: of an outline's prefix, retained by the worker in each pool."""

    id: str
    branch: int
    finish: str
    note: str
    rows: tuple[int, ...] = ()


class Regrouped(NamedTuple):
    """A collective is over. bytes: received; stored: they were needed and had space. collective:
    its seconds. error: why it failed. rows: what the source has; None if it sent the rows."""

    number: int
    bytes: int = 0
    stored: bool = False
    collective: float = 0.0
    error: str = ""
    rows: tuple[int, ...] | None = None


class WorkCounts(NamedTuple):
    """counts: of the worker's `Meter`; memory: of each engine; peak_memory: in KB on Linux."""

    number: int
    counts: dict[str, Any]
    memory: list[dict[str, Any]]
    open_files: int
    peak_memory: int


Request = Submit | Encode
Order = FormGroup | Regroup | CountWork
NumberedReply = Grouped | Regrouped | WorkCounts
Output = Committed | BranchEnded
Answer = Admitted | Refused | Wrote | Ended | Encoded
State = Ready | Heartbeat | Failed | Counts | Picture | NumberedReply | Output
Message = Start | Load | SnapshotRequest | Cancel | Request | Assign | Order | Answer | State
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}
_adapter: Any = cache(TypeAdapter)


def _values(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in type(message).__annotations__}


def encode(message: Message) -> bytes:
    values = {"kind": type(message).__name__, **_values(message)}
    return json.dumps(values, separators=(",", ":"), default=_values).encode() + b"\n"


def decode(line: bytes) -> Message:
    """A line as a message; raises ProtocolError."""
    try:
        values = json.loads(line)
        kind = _adapter(KINDS[values.pop("kind")])
        message: Message = kind.validate_python(values, by_alias=False, by_name=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not a message: {error}") from None
    return message


def summed(values: Sequence[Any], name: str = "") -> Any:
    """Counters of several workers together: sums of numbers, of lists place by place, of mappings
    key by key. None counts as absent, and the fields in CONSTANTS are not added."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if isinstance(present[0], Mapping):
        keys = dict.fromkeys(key for value in present for key in value)
        return {key: summed([value.get(key) for value in present], key) for key in keys}
    if isinstance(present[0], list):
        return [sum(numbers) for numbers in zip_longest(*present, fillvalue=0)]
    return present[0] if name in CONSTANTS else sum(present)


class WorkerSocket:
    """The worker's end of its connection; any thread may send. closed: the other end is gone."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._sending = Lock()
        self._lines = pipe.makefile("rb")
        self.closed = False

    @property
    def address(self) -> str:
        name = self._pipe.getsockname()
        return str(name[0]) if isinstance(name, tuple) else LOOPBACK

    def send(self, message: Message) -> None:
        with self._sending:
            try:
                self._pipe.sendall(encode(message))
            except OSError:
                self.closed = True

    def __iter__(self) -> Iterator[Message]:
        """The messages until the end; raises ProtocolError."""
        with suppress(OSError):
            while line := self._lines.readline():
                yield decode(line)
        self.closed = True

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._pipe.close()
