"""Options of a run: the one list that commands, `specsot.yaml` and Python take theirs from."""
# ruff: noqa: RUF009  (the calls make fields)

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any

JSONL = "(id, prompt|question|turns|task, seed, max_new_tokens, documents)"
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class OptionText:
    """What the command line says about an option.

    flags: how it is written, unless that follows from its name; argument: without any, by its
    place. mirrored: whether an environment variable gives it too. limits: of a setting, which
    `specsot.yaml` has a key for: `one_of` these values, or what pydantic's `Field` takes.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    argument: bool = False
    mirrored: bool = True
    limits: Mapping[str, Any] | None = None


def _option(
    default: Any, help: str, *flags: str, metavar: str | None = None, mirrored: bool = True
) -> Any:
    text = OptionText(help, flags, metavar, mirrored=mirrored)
    return field(default=default, metadata={"text": text})


def _setting(help: str, *, argument: bool = False, **limits: Any) -> Any:
    """None where it is not given, and then what `specsot.yaml` says; never None in a job."""
    text = OptionText(help, argument=argument, limits=limits)
    return field(default=None, metadata={"text": text})


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What decides on models and tokens, whatever is asked."""

    graph: str = _setting(
        "A shipped graph, a graph file, or a run.yaml to repeat [specsot.yaml's].",
        argument=True,
        min_length=1,
    )
    _: KW_ONLY
    model: str = _setting("Target: folder or Hub id.", min_length=1)
    drafter_model: str = _setting("Drafter: folder or Hub id.", min_length=1)
    seed: int = _setting("Seed of the run.", ge=0, lt=1 << 63)
    device: str = _setting("cpu, cuda, cuda:0 ...", pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")
    dtype: str = _setting("float32 (lossless), float64, bfloat16, float16.", one_of=DTYPES)
    threads: int | None = _setting("CPU threads; at most 4 by default.", ge=1, le=1024)
    max_new_tokens: int | None = _setting("Budget of each branch.", ge=1, le=1 << 20)
    outline: Path | None = _option(None, "A given outline instead of letting the model write one.")
    sets: Sequence[str] = _option(
        (),
        "Change a setting, e.g. drafter.kind=none.",
        "--set",
        metavar="PATH=VALUE",
        mirrored=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SessionOptions):
    """What `specsot run` asks for; argv: the command line, for the manifest."""

    prompt: str = _setting(
        "The question; - reads it from standard input [specsot.yaml's].", argument=True
    )
    prompts: Path | None = _option(None, f"Many questions: .txt (one per line) or .jsonl {JSONL}.")
    documents: Sequence[Path] = _option(
        (),
        "A text to answer from, or .jsonl of many (title, text); may be repeated.",
        "--document",
        metavar="FILE",
    )
    cache_dir: Path | None = _option(
        None, "Where chunks of documents are kept that graphs with `blend` reuse."
    )
    as_json: bool = _option(False, "One JSON document on stdout.", "--json")
    no_tui: bool = _option(False, "Plain lines, no live view.")
    step: bool = _option(False, "Halt before each transition.")
    expect_digest: str | None = _option(None, "Exit 5 unless the output has this digest.")
    runs_dir: Path = _option(Path("runs"), "Where run folders go.")
    trace: str | None = _option(None, "kv: one trace line per KV operation too.", metavar="kv")
    explain_rounds: bool = _option(False, "Print every draft of every round.")
    probe_blend: bool = _option(False, "Compare what is blended with full prefills (slow).")
    quiet: bool = _option(False, "Only the answer.", "--quiet", "-q")
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
SETTINGS = {name: text.limits for name, text in OPTIONS.items() if text.limits is not None}


def flag_of(name: str) -> str:
    """How the command line writes an option: `--max-new-tokens`."""
    return (*OPTIONS[name].flags, f"--{name.replace('_', '-')}")[0]
