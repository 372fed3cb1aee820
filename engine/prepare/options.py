"""Settings of a run: command-line options, the `cluster` block and the profiles."""

import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typer import Option

from ...states.graph.graph import Graph
from ...states.graph.load import Change
from ...states.yaml.source import Source
from ...states.yaml.spec import Int, Number, Spec, Text
from ..errors import UsageError

# ruff: noqa: RUF009  (the calls make fields)


JSONL = "(id, prompt|question|turns|task, seed, max_new_tokens, documents, cache_salt)"
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
WeightFormat = Literal["full", "int8", "int4"]
Seed = Annotated[Int, Field(ge=0, lt=1 << 63)]
Threads = Annotated[Int, Field(ge=1, le=1024)]
Budget = Annotated[Int, Field(ge=1, le=1 << 20)]
TokenIds = tuple[Annotated[Int, Field(ge=0, lt=1 << 31)], ...]


@dataclass(frozen=True, slots=True)
class OptionText:
    """What the command line says about an option. flags: how it is written, unless that follows
    from its name; argument: without any, by its place. mirrored: an environment variable gives it
    too. kind: of a setting, which `specsot.yaml` has a key for, what the file may say."""

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    argument: bool = False
    mirrored: bool = True
    kind: Any = None


def _option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    return field(default=default, metadata={"text": OptionText(help, flags, **more)})


def _setting(kind: Any, help: str, *flags: str, **more: Any) -> Any:
    """None where it is not given, and then what `specsot.yaml` says; never None in a job."""
    return _option(None, help, *flags, kind=kind, **more)


# help of the options that need more than a line
GRAPH = "A shipped graph, a graph file, or a run.yaml to repeat [specsot.yaml's]."
THREADS = "CPU threads [1 for small models, else up to 4]."
STOP = "One more token id that ends an answer; may be repeated."
SET = "Change a setting, e.g. drafter.kind=none."
PROMPT = "The question; - reads it from standard input [specsot.yaml's]."
DOCUMENT = "A text to answer from, or .jsonl of many (title, text); may be repeated."
CACHE_DIR = "Folder of document chunks for graphs with `blend`."
BREAK = "Halt only in this state; may be repeated."
SLOW = "Seconds to wait before each transition; not counted."
RESUME = "Continue the unfinished run of this folder; keeps its finished answers."
WORKERS = "Decode on N workers of a cluster (Ray; specsot.yaml's `cluster`)."
ADDRESS = "Where the workers are: local, or HOST:PORT of Ray [specsot.yaml's]."


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What decides on models and tokens, whatever is asked."""

    graph: str = _setting(Text, GRAPH, argument=True)
    _: KW_ONLY
    profile: str | None = _option(None, "A profile of specsot.yaml: a target with its settings.")
    model: str = _setting(Text, "Target: folder, .gguf file, known name or Hub id.")
    drafter_model: str = _setting(Text, "Drafter: folder or Hub id.")
    seed: int = _setting(Seed, "Seed of the run.")
    device: str = _setting(Device, "cpu, cuda, cuda:0 ...")
    dtype: str = _setting(Dtype, "float32 (lossless), float64, bfloat16, float16.")
    weights: str = _setting(WeightFormat, "Of the target: full, int8 or int4.")
    threads: int | None = _setting(Threads | None, THREADS)
    max_new_tokens: int | None = _setting(Budget | None, "Budget of each branch.")
    stop_ids: Sequence[int] | None = _setting(TokenIds | None, STOP, "--stop-id")
    outline: Path | None = _option(None, "A given outline instead of letting the model write one.")
    sets: Sequence[str] = _option((), SET, "--set", metavar="PATH=VALUE", mirrored=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SessionOptions):
    """What `specsot run` asks for; argv: the command line, for the manifest."""

    prompt: str = _setting(str, PROMPT, argument=True)
    prompts: Path | None = _option(None, f"Many questions: .txt (one per line) or .jsonl {JSONL}.")
    documents: Sequence[Path] = _option((), DOCUMENT, "--document", metavar="FILE")
    cache_dir: Path | None = _option(None, CACHE_DIR)
    strict: bool = _option(False, "Refuse models of which anything was assumed or ignored.")
    skip_scan: bool = _option(False, "Do not look for values that are not finite in the target.")
    as_json: bool = _option(False, "One JSON document on stdout.", "--json")
    no_tui: bool = _option(False, "Plain lines, no live view.")
    step: bool = _option(False, "Halt before each transition.")
    breaks: Sequence[str] = _option((), BREAK, "--break", metavar="STATE")
    slow: float | None = _option(None, SLOW, metavar="SECONDS")
    expect_digest: str | None = _option(None, "Exit 5 unless the output has this digest.")
    runs_dir: Path = _option(Path("runs"), "Where run folders go.")
    trace: str | None = _option(None, "kv: one trace line per KV operation too.", metavar="kv")
    explain_rounds: bool = _option(False, "Print every draft of every round.")
    probe_blend: bool = _option(False, "Compare what is blended with full prefills (slow).")
    quiet: bool = _option(False, "Only the answer.", "--quiet", "-q")
    resume: Path | None = _option(None, RESUME, metavar="FOLDER", mirrored=False)
    workers: int | None = _option(None, WORKERS)
    cluster: str | None = _option(None, ADDRESS, metavar="ADDRESS")
    argv: tuple[str, ...] = ()

    @property
    def changes_a_run(self) -> bool:
        """Whether anything is given that may change the tokens of a repeated run."""
        names = {*SESSION, "prompt", "prompts", "documents"} - {"threads"}
        return any(getattr(self, name) not in (None, (), []) for name in names)


OPTIONS: Mapping[str, OptionText] = {
    f.name: f.metadata["text"] for f in fields(RunOptions) if f.metadata
}
SESSION = tuple(f.name for f in fields(SessionOptions) if f.name != "graph")
MODELS = tuple(name for name in SESSION if name != "outline")
SETTINGS = {name: text.kind for name, text in OPTIONS.items() if text.kind is not None}


def flag_of(name: str) -> str:
    """How the command line writes an option: `--max-new-tokens`."""
    return (*OPTIONS[name].flags, f"--{name.replace('_', '-')}")[0]


ORIGIN = re.compile(r"\*|https?://[^/\s]+")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")

# help of the server's options, where it does not fit next to them
PORT = "0: any free one."
CORS = "Let pages of https://HOST use the API; * any; repeatable."
PATIENCE = "Seconds a client has to send a request."
STEP_LIMIT = "Seconds a step may make no progress."
KILL_AFTER = "Seconds until a hung engine is killed."
METRICS = "Metrics under vLLM's names too."
RUNS = "Where run folders are."


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Address, access and limits of the server; without keys every request is admitted."""

    host: Annotated[str, Option(envvar="SPECSOT_HOST", help="Address.")] = "127.0.0.1"
    port: Annotated[int, Option(envvar="SPECSOT_PORT", min=0, max=65535, help=PORT)] = 8000
    keys: Annotated[
        list[str] | None,
        Option("--api-key", envvar="SPECSOT_API_KEY", help="Key of clients; may be repeated."),
    ] = None
    insecure: Annotated[bool, Option(help="Allow other hosts without a key.")] = False
    cors: Annotated[list[str] | None, Option(metavar="ORIGIN", help=CORS)] = None
    max_queue: Annotated[int, Option(min=1, help="Requests that are open at once.")] = 256
    max_tokenize: Annotated[int, Option(min=1, help="Texts that are tokenized at once.")] = 8
    max_body: Annotated[int, Option(min=1024, help="Bytes of a request.")] = 1 << 20
    timeout: Annotated[float, Option(min=0.1, help="Seconds of a request.")] = 600.0
    stall: Annotated[float, Option(min=0.1, help="Seconds an answer may be unread.")] = 30.0
    patience: Annotated[float, Option(min=0.1, help=PATIENCE)] = 20.0
    hang: Annotated[float, Option(min=1.0, help="Seconds an engine may be silent.")] = 10.0
    step_limit: Annotated[float, Option(min=1.0, help=STEP_LIMIT)] = 600.0
    kill_after: Annotated[float, Option(min=0.0, help=KILL_AFTER)] = 30.0
    grace: Annotated[float, Option(min=0.0, help="Seconds for open requests.")] = 30.0
    metrics_compat: Annotated[str | None, Option(metavar="vllm", help=METRICS)] = None
    runs_dir: Annotated[Path, Option(envvar="SPECSOT_RUNS_DIR", help=RUNS)] = Path("runs")

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK

    def check(self) -> None:
        """Raise UsageError for a wrong value, or if other machines could connect without a key."""
        if self.metrics_compat not in (None, "vllm"):
            raise UsageError(f"--metrics-compat {self.metrics_compat}: there is only `vllm`")
        for origin in self.cors or ():
            if not ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors {origin}: must be https://HOST, http://HOST:PORT or *")
        if not (self.loopback or self.keys or self.insecure):
            reason = "others could reach the server; give --api-key, or --insecure"
            raise UsageError(f"--host {self.host}: {reason}")

    def allows(self, key: str) -> bool:
        """Whether this is one of the keys; takes the same time for every wrong one."""
        keys = [key, *(self.keys or ())]
        digest, *valid = [sha256(k.encode("utf-8", "surrogateescape")).digest() for k in keys]
        same = [hmac.compare_digest(digest, other) for other in valid]
        return any(same)


LOCAL = "local"
Workers = Annotated[Int, Field(ge=1, le=1024)]


def _interface(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        what = "must be an IP address of this machine, such as 127.0.0.1"
        raise PydanticCustomError("interface", what) from None


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text != LOCAL and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        what = "must be `local`, or HOST:PORT of a Ray cluster that runs"
        raise PydanticCustomError("address", what)
    return text


class GroupSize(Spec):
    """How many workers compute together on one text (tensor parallelism)."""

    tp: Workers = 1


class ClusterBlock(Spec):
    """Workers of `specsot run --workers` and `specsot cluster up`."""

    address: Annotated[Text, AfterValidator(_address)] = LOCAL
    workers: Workers = 2
    devices: tuple[Device, ...] = ()
    skeleton: GroupSize = GroupSize()
    branches: GroupSize = GroupSize()
    interface: Annotated[Text, AfterValidator(_interface)] = "127.0.0.1"
    deadline: Annotated[Number, Field(gt=0, le=3600)] = 10.0
    wait: Annotated[Number, Field(ge=0, le=86400)] = 120.0

    @property
    def together(self) -> int:
        """The most workers that compute together."""
        return max(self.skeleton.tp, self.branches.tp)

    @property
    def parts(self) -> int:
        """The smallest group: each worker holds at most 1 / parts of the weights of a layer."""
        return min(self.skeleton.tp, self.branches.tp)

    def device_of(self, worker: int) -> dict[str, str]:
        """The option `device` of a worker, by its number; empty for that of the run."""
        return {"device": self.devices[worker % len(self.devices)]} if self.devices else {}


KEY = "profiles"
OPTION_KEYS = ("model", "dtype", "weights", "stop_ids")  # what is an option too
LONG_FORM = BeforeValidator(lambda ref: {"model": ref} if isinstance(ref, str) else ref)
OPTIONAL = [name for name, field in Graph.model_fields.items() if field.default is None]


class Profile(Spec):
    """A target and what suits it. drafters: by kind, the model or a mapping of settings of the
    block `drafter`, `model` among them. set: settings of graphs, as of `--set`."""

    model: Text
    drafters: dict[str, Annotated[dict[str, Any], LONG_FORM]] = Field(default_factory=dict)
    dtype: Dtype | None = None
    weights: WeightFormat | None = None
    stop_ids: TokenIds | None = None
    set: dict[Text, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChosenProfile:
    """A profile by its name, with the places of its values in `sources`, the user's file first."""

    name: str
    profile: Profile
    sources: Sequence[Source]

    def options(self) -> dict[str, Any]:
        values = {key: getattr(self.profile, key) for key in OPTION_KEYS}
        return {key: value for key, value in values.items() if value is not None}

    def changes(self, source: Source, sets: Sequence[Change]) -> Iterator[Change]:
        """Its changes of a graph to which ``sets`` are applied afterwards: of drafters only those
        of the kinds that the graph then drafts with; none in an optional block that it lacks."""
        data = source.data if isinstance(source.data, dict) else {}
        changes = [
            Change(tuple(path.split(".")), value, self._place("set", path))
            for path, value in self.profile.set.items()
            if (top := path.partition(".")[0]) in data or top not in OPTIONAL
        ]
        yield from changes
        changed = {change.path: change.value for change in (*changes, *sets)}
        for block in (("drafter",), ("skeleton", "drafter")):
            here: Any = data
            for part in (*block, "kind"):
                here = here.get(part) if isinstance(here, dict) else None
            kind = str(changed.get((*block, "kind"), here))
            for key, value in self.profile.drafters.get(kind, {}).items():
                yield Change((*block, key), value, self._place("drafters", kind, key))

    def _place(self, *at: str) -> str:
        path = (KEY, self.name, *at)
        deepest = max(self.sources, key=lambda source: len(source.nearest(path)))
        file, line, column = deepest.place(path, key=True)
        return f"{file}:{line}:{column}: {KEY}.{self.name}"
