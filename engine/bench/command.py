"""`specsot compare`: the same prompts through several graphs; equal tokens, and what each costs."""

import json
import os
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ...states.graph.source import GraphError, Problem
from ..errors import UsageError
from ..prepare.files import FOLDER, PACKAGE
from ..prepare.inputs import Prompts, read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..shell import complain, ended, writer

if TYPE_CHECKING:
    from .report import Comparison

MOST_GRAPHS = 26  # they are called A to Z


def ten_prompts() -> Path:
    """The packaged prompts: plans and broad subjects, and a question with a short answer."""
    return Path(str(files(PACKAGE) / FOLDER / "prompts" / "ten.txt"))


def compare_command(graphs: tuple[str, ...], options: RunOptions) -> int:
    """Compare and return the exit code; what a user can mend ends as one message.

    Args:
        options: of every graph, as of `specsot run`.
    """
    try:
        return _compare(graphs, options)
    except (Exception, KeyboardInterrupt) as error:
        return ended(error)


def _compare(graphs: tuple[str, ...], options: RunOptions) -> int:
    prompts = read_file(options.prompts or ten_prompts())
    found = compare_jobs(prepare_all(graphs, options, prompts))
    if found.asked or options.as_json:
        _hand_over(found, options)
    for line in found.problems:
        complain(line)
    if found.failures:
        count = "1 branch differs" if found.failures == 1 else f"{found.failures} branches differ"
        complain(f"{count} where equality is promised")
    if len(found.asked) < len(prompts.items):
        complain(f"{found.status} after {len(found.asked)} of {len(prompts.items)} prompts")
    return found.code


def prepare_all(graphs: tuple[str, ...], options: RunOptions, prompts: Prompts) -> list[Job]:
    """Every graph checked, without torch.

    Raises:
        UsageError, OutlineError, GraphError: as `specsot run` does; the problems of all graphs.
    """
    if not 2 <= len(graphs) <= MOST_GRAPHS:
        raise UsageError(f"compare takes from 2 to {MOST_GRAPHS} graphs, not {len(graphs)}")
    jobs: list[Job] = []
    problems: list[Problem] = []
    for graph in graphs:
        try:
            jobs.append(prepare(replace(options, graph=graph), prompts=prompts))
        except GraphError as error:
            problems += error.problems
    if problems:
        raise GraphError(list(dict.fromkeys(problems)))
    return jobs


def compare_jobs(jobs: list[Job]) -> "Comparison":
    """Load the models, answer the jobs' prompts with each graph, and judge what came of it.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    from ..terminal import working

    with working(f"loading models for {len(jobs)} graphs ...") as tell:
        # Here and not above: a mistyped graph is told at once, torch takes seconds to import.
        from ..run.runner import Halt, Status
        from .report import judge
        from .sides import ask_all, load_sides, notes_of, prepare_sides

        sides = load_sides(jobs)
        for note in notes_of(sides):
            complain(f"note: {note}")
        with Halt() as halt:
            prepare_sides(sides, jobs[0].prompts, halt)
            asked = list(ask_all(sides, jobs[0].prompts, halt, tell))
        return judge(halt.status or Status.OK, sides, asked)


def _hand_over(found: "Comparison", options: RunOptions) -> None:
    """The tables or the document to stdout."""
    out = writer(sys.stdout)
    if options.as_json:
        from .report import document

        out(json.dumps(document(found), indent=2, ensure_ascii=False) + "\n")
        return
    from .table import render

    out(render(found, sys.stdout, dict(os.environ)))
