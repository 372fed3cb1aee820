"""From options to everything a run needs but its models: checked, and without torch."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...states.graph.load import load_program, op_table
from ...states.graph.program import Program
from ...states.graph.source import GraphError
from ...states.text.outline import Outline, parse_outline
from ...states.text.outline_file import OutlineError, load_outline
from ..errors import UsageError
from .config import RunConfig, read_config
from .documents import read_documents
from .files import open_source
from .inputs import Prompt, Prompts, read_prompts
from .options import RunOptions
from .repeat import Provenance, RunResult, graph_source, is_run_file, prompts_of, read_run

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class Job:
    """A checked graph with its prompts and settings.

    graph_file: the graph as the user named it.
    made_with, result: of the run that is repeated.
    """

    program: Program
    graph_file: str
    config: RunConfig
    prompts: tuple[Prompt, ...]
    outline: Outline | None = None
    made_with: Provenance | None = None
    result: RunResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        return self.config.threads or min(os.cpu_count() or 1, 4)


def prepare(options: RunOptions, folder: Path = Path(), prompts: Prompts | None = None) -> Job:
    """Read and check everything that was named.

    Args:
        prompts: read already; None reads those that the options name.

    Raises:
        UsageError, PromptError, OutlineError, GraphError: each message says where.
    """
    _check(options)
    config = _configuration(options, folder)
    source = open_source(config.graph)
    if is_run_file(source):
        return _repeated(options, source, config, prompts)
    program = _asked(load_program(source, op_table(), sets=options.sets), options)
    asked = prompts or read_prompts(options.prompt, options.prompts, config.prompt)
    asked = _with_documents(asked, options)
    config = _with_drafter(config, program, options)
    outline = _outline(options.outline, program)
    return Job(program, source.file, config, asked.items, outline, notes=asked.notes)


def _configuration(options: RunOptions, folder: Path) -> RunConfig:
    """An option that cannot be is wrong usage; the same value in specsot.yaml is a bad file."""
    try:
        return read_config(folder, options.configured)
    except GraphError as error:
        if not all(problem.file.startswith("--") for problem in error.problems):
            raise
        lines = [f"{problem.file}: {problem.message}" for problem in error.problems]
        raise UsageError("\n".join(lines)) from None


def _check(options: RunOptions) -> None:
    digest = options.expect_digest
    if digest is not None and (len(digest) < 12 or set(digest.lower()) - set("0123456789abcdef")):
        raise UsageError("--expect-digest takes 12 to 64 hexadecimal digits")
    if options.step and options.prompt == "-":
        raise UsageError("--step reads the keyboard, so the prompt cannot come from standard input")
    if options.trace not in (None, "kv"):
        raise UsageError(f"--trace {options.trace}: there is only `kv`")


def _asked(program: Program, options: RunOptions) -> Program:
    """The program that tells what the command line asks for, whatever the graph says."""
    if options.probe_blend and program.graph.blend is None:
        name = program.graph.name
        raise UsageError(f"--probe-blend: graph {name!r} has no block `blend`")
    if not options.explain_rounds:
        return program
    explaining = program.asking("verify.accept", explain=True)
    if explaining is None:
        name = program.graph.name
        raise UsageError(f"--explain-rounds: graph {name!r} has no rounds that verify drafts")
    return explaining


def _repeated(options: RunOptions, source: Any, config: RunConfig, prompts: Prompts | None) -> Job:
    """A run.yaml's own settings stand between the command line and the defaults."""
    run = read_run(source)
    given = {k: v for k, v in options.configured.items() if v is not None and k != "graph"}
    values = {**config.model_dump(), "threads": None, "max_new_tokens": None}
    values |= {**run.options, **given, "graph": run.graph_file}
    config = _validated(values, source.file)
    program = load_program(graph_source(source), op_table(), sets=options.sets)
    program = _asked(program, options)
    if prompts is None and (options.prompt is not None or options.prompts is not None):
        prompts = read_prompts(options.prompt, options.prompts, "")
    asked = _with_documents(prompts or Prompts(prompts_of(run, source)), options)
    outline = _outline(options.outline, program)
    if outline is None and run.outline is not None:
        outline = _parsed(run.outline, program, source.file)
    result = None if options.changes_a_run else run.result
    made = run.made_with
    return Job(program, run.graph_file, config, asked.items, outline, made, result, asked.notes)


def _validated(values: dict[str, Any], file: str) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValueError as error:
        where = "; ".join(str(error).splitlines()[1:3]).strip()
        raise UsageError(f"{file}: options: {where}") from None


def _with_drafter(config: RunConfig, program: Program, options: RunOptions) -> RunConfig:
    """Which drafter: the command line, then the graph, then specsot.yaml."""
    named = options.drafter_model or getattr(program.graph.drafter, "model", None)
    if named:
        return config.model_copy(update={"drafter_model": named})
    needs = program.graph.drafter.has_model
    if needs and config.model != EMBEDDED and config.drafter_model == EMBEDDED:
        raise UsageError(
            f"graph {program.graph.name!r} drafts with {program.graph.drafter.kind}, and the "
            f"embedded drafter fits the embedded model only: give --drafter-model for "
            f"{config.model}, or --set drafter.kind=none"
        )
    return config


def _with_documents(prompts: Prompts, options: RunOptions) -> Prompts:
    """Those of the command line stand before each prompt's own: what prompts share comes first."""
    if shared := read_documents(options.documents):
        known = set(shared)
        own = [tuple(d for d in p.documents if d not in known) for p in prompts.items]
        pairs = zip(prompts.items, own, strict=True)
        items = tuple(replace(prompt, documents=shared + rest) for prompt, rest in pairs)
        prompts = replace(prompts, items=items)
    return prompts


def _outline(path: Path | None, program: Program) -> Outline | None:
    if path is None:
        return None
    skeleton = program.graph.skeleton
    if skeleton is None:
        raise UsageError(f"--outline: graph {program.graph.name!r} has no skeleton to give")
    return load_outline(path, max_branches=skeleton.max_branches, tools=skeleton.tools)


def _parsed(text: str, program: Program, file: str) -> Outline:
    skeleton = program.graph.skeleton
    most = skeleton.max_branches if skeleton is not None else 1
    outline = parse_outline(text, max_branches=most, tools=None)
    if outline.status not in ("ok", "direct"):
        raise OutlineError(f"{file}: outline: cannot be read back ({outline.status})")
    return outline
