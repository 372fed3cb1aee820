"""The options of `specsot run`. What they do is imported only when the command runs."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..prepare.options import RunOptions


def option(name: str, help: str, *flags: str, **more: Any) -> Any:
    """An option that an environment variable mirrors."""
    return typer.Option(*flags, envvar=f"SPECSOT_{name}", help=help, **more)


def _argument(name: str, help: str) -> Any:
    return typer.Argument(envvar=f"SPECSOT_{name}", help=help, show_default=False)


JSONL = "(id, prompt|question|turns|task, seed, max_new_tokens, documents)"

Graph = Annotated[
    str | None,
    _argument("GRAPH", "A shipped graph, a graph file, or a run.yaml to repeat [specsot.yaml's]."),
]
Prompt = Annotated[
    str | None,
    _argument("PROMPT", "The question; - reads it from standard input [specsot.yaml's]."),
]
Prompts = Annotated[
    Path | None, option("PROMPTS", f"Many questions: .txt (one per line) or .jsonl {JSONL}.")
]
Documents = Annotated[
    list[Path] | None,
    typer.Option(
        "--document",
        metavar="FILE",
        envvar="SPECSOT_DOCUMENT",
        help="A text to answer from, or .jsonl of many (title, text); may be repeated.",
    ),
]
CacheDir = Annotated[
    Path | None,
    option("CACHE_DIR", "Where chunks of documents are kept that graphs with `blend` reuse."),
]
Json = Annotated[bool, option("JSON", "One JSON document on stdout.", "--json")]
NoTui = Annotated[bool, option("NO_TUI", "Plain lines, no live view.", "--no-tui")]
Model = Annotated[str | None, option("MODEL", "Target: folder or Hub id.")]
Drafter = Annotated[str | None, option("DRAFTER_MODEL", "Drafter: folder or Hub id.")]
Seed = Annotated[int | None, option("SEED", "Seed of the run.")]
Device = Annotated[str | None, option("DEVICE", "cpu, cuda, cuda:0 ...")]
Dtype = Annotated[str | None, option("DTYPE", "float32 (lossless), float64, bfloat16, float16.")]
Threads = Annotated[int | None, option("THREADS", "CPU threads; at most 4 by default.")]
Budget = Annotated[int | None, option("MAX_NEW_TOKENS", "Budget of each branch.")]
Outline = Annotated[
    Path | None, option("OUTLINE", "A given outline instead of letting the model write one.")
]
Step = Annotated[bool, option("STEP", "Halt before each transition.", "--step")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting, e.g. drafter.kind=none."),
]
Digest = Annotated[str | None, option("EXPECT_DIGEST", "Exit 5 unless the output has this digest.")]
Runs = Annotated[Path, option("RUNS_DIR", "Where run folders go.")]
Trace = Annotated[
    str | None, option("TRACE", "kv: one trace line per KV operation too.", metavar="kv")
]
Explain = Annotated[
    bool, option("EXPLAIN_ROUNDS", "Print every draft of every round.", "--explain-rounds")
]
Probe = Annotated[
    bool,
    option("PROBE_BLEND", "Compare what is blended with full prefills (slow).", "--probe-blend"),
]
Quiet = Annotated[bool, option("QUIET", "Only the answer.", "--quiet", "-q")]


def run(
    graph: Graph = None,
    prompt: Prompt = None,
    prompts: Prompts = None,
    documents: Documents = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
    no_tui: NoTui = False,
    model: Model = None,
    drafter_model: Drafter = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    max_new_tokens: Budget = None,
    outline: Outline = None,
    step: Step = False,
    sets: Sets = None,
    expect_digest: Digest = None,
    runs_dir: Runs = Path("runs"),
    trace: Trace = None,
    explain_rounds: Explain = False,
    probe_blend: Probe = False,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt: outline, parallel branches, speculative decoding, live.

    Examples: `specsot run`, `specsot run graphs/bim_eagle.yaml "How do bees make honey?"`,
    `specsot run eagle --prompts questions.jsonl --json`, `specsot run runs/latest/run.yaml`.
    """
    given = {**locals(), "sets": tuple(sets or ()), "documents": tuple(documents or ())}
    given["argv"] = tuple(sys.argv)
    from .run_command import run_command

    raise typer.Exit(run_command(RunOptions(**given)))
