"""`specsot compare`: the same prompts through several graphs; equal tokens, and what each costs."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ...states.text.outline_file import OutlineError
from ...states.yaml.source import GraphError, Problem
from ..errors import UsageError
from ..limits import disturbance
from ..prepare.files import FOLDER, PACKAGE, is_graph
from ..prepare.inputs import Prompts, read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..shell import complain, exit_code, json_text, put
from ..terminal import working

if TYPE_CHECKING:
    from .report import Comparison

MOST_GRAPHS = 26  # they are called A to Z


def ten_prompts() -> Path:
    """The packaged prompts: plans and broad subjects, and a question with a short answer."""
    return Path(str(files(PACKAGE) / FOLDER / "prompts" / "ten.txt"))


@exit_code
def compare_command(sides: Sequence[str], options: RunOptions) -> int:
    """Compare and return the exit code; what a user can mend ends as one message.

    Args:
        sides: GRAPH, or GRAPH@SET,SET... with settings of its own.
        options: of every graph, as of `specsot run`.
    """
    prompts = read_file(options.prompts or ten_prompts())
    comparison = compare_jobs(prepare_all(sides, options, prompts))
    count, failures = len(comparison.prompts), comparison.failures
    if options.as_json:
        put(json_text(comparison.document()))
    elif count:
        # Here and not above: a mistyped graph is an error at once, torch takes seconds to import.
        from .table import render

        put(render(comparison, sys.stdout, dict(os.environ)))
    for line in comparison.problems:
        complain(line)
    if (reason := disturbance(comparison.cpu_share)) is not None:
        complain(f"warning: {reason}")
    if failures:
        branches = "1 branch differs" if failures == 1 else f"{failures} branches differ"
        complain(f"{branches} where equality is promised")
    if count < len(prompts.items):
        complain(f"{comparison.status} after {count} of {len(prompts.items)} prompts")
    return comparison.code


def prepare_all(sides: Sequence[str], options: RunOptions, prompts: Prompts) -> list[Job]:
    """Every graph checked, without torch.

    Raises:
        UsageError, OutlineError, GraphError: as `specsot run` does; the problems of all graphs.
    """
    if not 2 <= len(sides) <= MOST_GRAPHS:
        raise UsageError(f"compare takes from 2 to {MOST_GRAPHS} graphs, not {len(sides)}")
    jobs: list[Job] = []
    problems: list[Problem] = []
    for side in sides:
        graph, own = read_side(side)
        changed = replace(options, graph=graph, sets=(*options.sets, *own))
        try:
            jobs.append(prepare(changed, prompts=prompts))
        except GraphError as error:
            problems += (_of_side(side, own, one) for one in error.problems)
        except (UsageError, OutlineError) as error:
            raise UsageError(f"{side}: {error}" if own else str(error)) from None
    if problems:
        raise GraphError(problems)
    return jobs


def read_side(text: str) -> tuple[str, tuple[str, ...]]:
    """A graph and its own settings: GRAPH@SET,SET... is cut at the first @ behind a graph."""
    places = [at for at, char in enumerate(text) if char == "@"]
    if not places or is_graph(text):
        return text, ()
    at = next((at for at in places if is_graph(text[:at])), places[0])
    return text[:at], tuple(_sets(text[at + 1 :]))


def _sets(text: str) -> Iterator[str]:
    """Cut at commas, but at none inside brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _of_side(side: str, own: Sequence[str], problem: Problem) -> Problem:
    """A problem that says whose it is, where a side is more than its graph."""
    option = problem.file.removeprefix("--set ")
    if option in own and option != problem.file:
        return replace(problem, file=f"{read_side(side)[0]}@{option}")
    return replace(problem, file=f"{side}: {problem.file}") if own else problem


def compare_jobs(jobs: Sequence[Job]) -> "Comparison":
    """Load the models, answer the jobs' prompts with each graph, and judge what came of it.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    with working(f"loading models for {len(jobs)} graphs ...") as show:
        # Here and not above: a mistyped graph is told at once, torch takes seconds to import.
        from ..run.runner import Halt, Status
        from .report import judge
        from .sides import answer_all, load_sides, loading_notes, warm_up

        sides, prompts = load_sides(jobs), jobs[0].prompts
        for note in loading_notes(sides):
            complain(f"note: {note}")
        with Halt() as halt:
            warm_up(sides, prompts, halt)
            answers = list(answer_all(sides, prompts, halt, show))
        return judge(halt.status or Status.OK, sides, answers)
