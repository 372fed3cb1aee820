"""Settings of a run: command-line options, the `cluster` block and the profiles."""

import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...states.graph.graph import OPTIONAL_BLOCKS
from ...states.graph.load import Change, value_at
from ...states.yaml.source import Source
from ...states.yaml.spec import Int, Number, Spec, Text
from ..errors import UsageError

# ruff: noqa: RUF009  (the calls make fields)


JSONL = "(id, prompt|question|turns|task, seed, max_new_tokens, documents, cache_salt, category)"
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
    min: float | None = None
    max: float | None = None
    argument: bool = False
    mirrored: bool = False
    kind: Any = None


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """A field of a dataclass that is an option of a command; default: ... if it must be given."""
    text = OptionText(help, flags, **more)
    return field(default=MISSING if default is ... else default, metadata={"text": text})


def options_of(kind: type[Any]) -> dict[str, OptionText]:
    return {f.name: f.metadata["text"] for f in fields(kind) if f.metadata}


_option = partial(option, mirrored=True)


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
BREAK = "Halt only in this state; may be repeated."
DELAY = "Seconds to wait before each transition; not counted."
BRANCH = "Explain only rounds of this part; 0 is the outline; may be repeated."
ROUNDS = "Explain only round A, or the rounds A to B."
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
    outline: Path | None = _option(None, "Use this outline; the model writes none.")
    sets: Sequence[str] = _option((), SET, "--set", metavar="PATH=VALUE", mirrored=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SessionOptions):
    """What `specsot run` asks for; argv: the command line, for the manifest."""

    prompt: str = _setting(str, PROMPT, argument=True)
    prompts: Path | None = _option(None, f"Many questions: .txt (one per line) or .jsonl {JSONL}.")
    documents: Sequence[Path] = _option((), DOCUMENT, "--document", metavar="FILE")
    cache_dir: Path | None = _option(None, "Folder of document chunks for graphs with `blend`.")
    strict: bool = _option(False, "Refuse a model if anything is assumed or ignored.")
    no_nan_check: bool = _option(False, "Do not search the target for NaN and infinity.")
    as_json: bool = _option(False, "One JSON document on stdout.", "--json")
    no_tui: bool = _option(False, "Plain lines, no live view.")
    step: bool = _option(False, "Halt before each transition.")
    breaks: Sequence[str] = _option((), BREAK, "--break", metavar="STATE")
    step_delay: float | None = _option(None, DELAY, metavar="SECONDS")
    expect_digest: str | None = _option(None, "Exit 5 unless the output has this digest.")
    runs_dir: Path = _option(Path("runs"), "The folder for run folders.")
    explain_rounds: bool = _option(False, "Print every draft of every round.")
    branches: Sequence[int] | None = _option(None, BRANCH, "--branch", metavar="N", min=0)
    rounds: str | None = _option(None, ROUNDS, metavar="A:B")
    probe_blend: bool = _option(False, "Compare blended prompts with full prefills (slow).")
    quiet: bool = _option(False, "Only the answer.", "--quiet", "-q")
    resume: Path | None = _option(None, RESUME, metavar="FOLDER", mirrored=False)
    workers: int | None = _option(None, WORKERS)
    cluster: str | None = _option(None, ADDRESS, metavar="ADDRESS")
    argv: tuple[str, ...] = ()

    def explains(self, number: int, branch: str) -> bool:
        """Whether `explain_rounds` prints a round of a branch; raises UsageError."""
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", self.rounds or f"{number}")
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--rounds {self.rounds}: a round, or the first and last, as in 3:8")
        parts = [str(part or "outline") for part in self.branches or ()]
        return first <= number <= last and (not parts or branch.rpartition("/")[2] in parts)

    @property
    def changes_a_run(self) -> bool:
        """Whether anything is given that may change the tokens of a repeated run."""
        names = {*SESSION, "prompt", "prompts", "documents"} - {"threads"}
        return any(getattr(self, name) not in (None, (), []) for name in names)


OPTIONS = options_of(RunOptions)
SESSION = tuple(f.name for f in fields(SessionOptions) if f.name != "graph")
MODELS = tuple(name for name in SESSION if name != "outline")
SETTINGS = {name: text.kind for name, text in OPTIONS.items() if text.kind is not None}


def flag_of(name: str) -> str:
    """How the command line writes an option: `--max-new-tokens`."""
    return (*OPTIONS[name].flags, f"--{name.replace('_', '-')}")[0]


ORIGIN = re.compile(r"\*|https?://[^/\s]+")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")

CORS = "Let pages of https://HOST use the API; * any; repeatable."


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Address, access and limits of the server; without keys every request is admitted."""

    host: str = _option("127.0.0.1", "Address.")
    port: int = _option(8000, "0: any free one.", min=0, max=65535)
    keys: Sequence[str] | None = _option(None, "Key of clients; may be repeated.", "--api-key")
    insecure: bool = option(False, "Allow other hosts without a key.", "--insecure/--no-insecure")
    cors: Sequence[str] | None = option(None, CORS, metavar="ORIGIN")
    max_queue: int = option(256, "Requests that are open at once.", min=1)
    max_tokenize: int = option(8, "Texts that are tokenized at once.", min=1)
    max_body: int = option(1 << 20, "Bytes of a request.", min=1024)
    timeout: float = option(600.0, "Seconds of a request.", min=0.1)
    write_timeout: float = option(30.0, "Seconds an answer may be unread.", min=0.1)
    read_timeout: float = option(20.0, "Seconds a client has to send a request.", min=0.1)
    hang: float = option(10.0, "Seconds an engine may be silent.", min=1.0)
    step_limit: float = option(600.0, "Seconds a step may make no progress.", min=1.0)
    kill_after: float = option(30.0, "Seconds until a hung engine is killed.", min=0.0)
    shutdown_timeout: float = option(30.0, "Seconds for open requests.", min=0.0)
    metrics_compat: str | None = option(None, "Metrics under vLLM's names too.", metavar="vllm")
    runs_dir: Path = _option(Path("runs"), "Where run folders are.")

    def check(self) -> None:
        """Raise UsageError for a wrong value, or if other machines could connect without a key."""
        if self.metrics_compat not in (None, "vllm"):
            raise UsageError(f"--metrics-compat {self.metrics_compat}: there is only `vllm`")
        for origin in self.cors or ():
            if not ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors {origin}: must be https://HOST, http://HOST:PORT or *")
        if not (self.host in LOOPBACK or self.keys or self.insecure):
            reason = "others could reach the server; give --api-key, or --insecure"
            raise UsageError(f"--host {self.host}: {reason}")

    def allows(self, key: str) -> bool:
        """Whether this is one of the keys; takes the same time for every wrong one."""
        keys = [key, *(self.keys or ())]
        digest, *valid = [sha256(k.encode("utf-8", "surrogateescape")).digest() for k in keys]
        return sum(hmac.compare_digest(digest, other) for other in valid) > 0


REFS = "A shipped experiment or its file; or graphs (GRAPH@PATH=VALUE,...), hf, hf-assisted."
AGAINST = "Sides that do not vary: graphs, hf, hf-assisted, hf-lookup. Ratios are to the first."
VALUES = "Values of a setting; may be repeated."
AXIS = "PATH=VALUE,..."
SetName = Literal["mt-bench", "spec-bench", "vicuna", "gsm8k", "humaneval"]
SET_OF = f"--prompts is the file of {', '.join(get_args(SetName))}: tables as in the papers."
TUNE = (
    "Instead: find the fastest tree sizes, draft lengths or blocks of GRAPH here, and"
    " print a profile (profile.yaml in --out)."
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `specsot bench` alone; refs: an experiment, or graphs and peers."""

    refs: Sequence[str] = option((), REFS, argument=True, metavar="EXPERIMENT | GRAPH...")
    against: str | None = option(None, AGAINST, metavar="SIDE,...")
    vary: Sequence[str] = option(
        (), f"{VALUES} parts=1,2,4: parts of a given outline.", metavar=AXIS
    )
    set_of: SetName | None = option(None, SET_OF, metavar="NAME")
    repeats: int | None = option(None, "Of every prompt [3].", min=1, max=1000)
    count: int | None = option(None, "Only the first N prompts.", min=1, max=1024)
    out: Path | None = option(None, "Folder for rounds, tables and pictures.", metavar="DIR")
    baseline: Path | None = option(
        None, "An earlier result.json; exit 6 if a figure got worse.", metavar="FILE"
    )
    plot: bool = option(False, "Pictures too, SVG and PNG, into --out.")
    tune: bool = option(False, TUNE)
    listed: bool = option(False, "Instead: the shipped experiments.", "--list")


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
LONG_FORM = BeforeValidator(lambda ref: {"model": ref} if isinstance(ref, str) else ref)


class Profile(Spec):
    """A target and what suits it. drafters: by kind, the model or a mapping of settings of the
    block `drafter`, `model` among them. set: settings of graphs, as of `--set`."""

    model: Text
    drafters: dict[str, Annotated[dict[str, Any], LONG_FORM]] = Field(default_factory=dict)
    dtype: Dtype | None = None
    weights: WeightFormat | None = None
    stop_ids: TokenIds | None = None
    set: dict[Text, Any] = Field(default_factory=dict)


class ExperimentOptions(Spec):
    """Options of `specsot run`, for all sides; those of the command line win."""

    profile: Text | None = None
    model: Text | None = None
    drafter_model: Text | None = None
    seed: Seed | None = None
    device: Device | None = None
    dtype: Dtype | None = None
    weights: WeightFormat | None = None
    threads: Threads | None = None
    max_new_tokens: Budget | None = None


@dataclass(frozen=True, slots=True)
class ChosenProfile:
    """A profile by its name, with the places of its values in `sources`, the user's file first."""

    name: str
    profile: Profile
    sources: Sequence[Source]

    def changes(self, source: Source, sets: Sequence[Change]) -> Iterator[Change]:
        """Its changes of a graph to which ``sets`` are applied afterwards: of drafters only those
        of the kinds that the graph then drafts with; none in an optional block that it lacks."""
        data = source.data if isinstance(source.data, dict) else {}
        changes = [
            Change(tuple(path.split(".")), value, self._place("set", path))
            for path, value in self.profile.set.items()
            if (top := path.partition(".")[0]) in data or top not in OPTIONAL_BLOCKS
        ]
        yield from changes
        changed = {change.path: change.value for change in (*changes, *sets)}
        for block in (("drafter",), ("skeleton", "drafter")):
            at = (*block, "kind")
            kind = str(changed.get(at, value_at(at, data)))
            for key, value in self.profile.drafters.get(kind, {}).items():
                yield Change((*block, key), value, self._place("drafters", kind, key))

    def _place(self, *at: str) -> str:
        path = (KEY, self.name, *at)
        deepest = max(self.sources, key=lambda source: len(source.nearest(path)))
        file, line, column = deepest.place(path, key=True)
        return f"{file}:{line}:{column}: {KEY}.{self.name}"
