"""`specsot compare` and `specsot sweep`: one list of prompts through several graphs, in rounds.

A round is one prompt through every side. `specsot bench` measures with the same rounds.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...states.text.outline import OutlineError
from ...states.yaml.source import GraphError, Problem
from ..errors import Code, UsageError
from ..limits import disturbance
from ..prepare.files import FOLDER, PACKAGE
from ..prepare.inputs import Prompts, read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..record.run_folder import BestEffortRunFolder
from ..shell import complain, deliver, exit_code, json_text
from ..terminal import measuring
from .experiment import at_commas, read_side

if TYPE_CHECKING:
    from .comparison import Comparison
    from .results import ResultsFolder
    from .sides import Side


MOST_GRAPHS = 26


def ten_prompts() -> Path:
    """The packaged prompts: plans and broad subjects, and a question with a short answer."""
    return Path(str(files(PACKAGE) / FOLDER / "prompts" / "ten.txt"))


@exit_code
def compare_command(sides: Sequence[str], options: RunOptions, out: Path | None = None) -> int:
    """Compare and return the exit code; an error of the user ends as one message.

    Args:
        sides: GRAPH, or GRAPH@SET,SET... with settings of its own.
        options: of every graph, as of `specsot run`.
        out: the folder of the saved rounds and tables.
    """
    if not 2 <= len(sides) <= MOST_GRAPHS:
        raise UsageError(f"compare takes from 2 to {MOST_GRAPHS} graphs, not {len(sides)}")
    return measured("compare", sides, options, out)


def measured(
    command: str,
    sides: Sequence[str],
    options: RunOptions,
    out: Path | None,
    rated: bool = False,
) -> int:
    """Answer the prompts with every side, report, and return the exit code.

    Args:
        rated: the tables end with the best side, and leave single prompts out.
    """
    prompts = read_file(options.prompts or ten_prompts())
    jobs = prepare_all(sides, options, prompts)
    files = None if out is None else BestEffortRunFolder.at(out)
    comparison, folder = compare_jobs(jobs, files)
    # Local, so that a wrong graph is an error before torch is imported.
    from .comparison import best_line, document
    from .tables import equality_lines, render_comparison

    line = best_line(comparison) if rated else ""
    warning = disturbance(comparison.cpu_share)
    if folder is not None:
        notes = [*equality_lines(comparison), *filter(None, (line, warning))]
        folder.finish(comparison, f"specsot {command}", notes)
    faults = files.faults if files is not None else []
    if options.as_json:
        text = json_text({**document(comparison), "best": line} if rated else document(comparison))
    else:
        text = render_comparison(comparison, sys.stdout, dict(os.environ), each=not rated)
        text = f"{text}{line}\n" if line else text
    delivered = True
    if options.as_json or comparison.prompts:
        delivered = deliver(text, str(out) if out is not None and not faults else "")
    _complaints(comparison, len(prompts.items), warning, resumable=out is not None)
    for fault in faults:
        complain(fault)
    return comparison.code or (Code.OK if delivered and not faults else Code.FAILED)


def _complaints(
    comparison: "Comparison", requested: int, warning: str | None, resumable: bool
) -> None:
    """Report problems on stderr."""
    count = len(comparison.prompts)
    failures = comparison.failures
    for line in comparison.problems:
        complain(line)
    if warning is not None:
        complain(f"warning: {warning}")
    if failures:
        branches = "1 branch differs" if failures == 1 else f"{failures} branches differ"
        complain(f"{branches} where equality is promised")
    if count < requested:
        hint = "; the same command goes on from there" if resumable else ""
        complain(f"{comparison.status} after {count} of {requested} prompts{hint}")


def prepare_all(sides: Sequence[str], options: RunOptions, prompts: Prompts) -> list[Job]:
    """Every graph checked, without torch.

    Raises:
        UsageError, OutlineError, GraphError: as `specsot run` does; the problems of all graphs.
    """
    jobs: list[Job] = []
    problems: list[Problem] = []
    for side in sides:
        graph, side_sets = read_side(side)
        changed = replace(options, graph=graph, sets=(*options.sets, *side_sets))
        try:
            jobs.append(prepare(changed, prompts=prompts))
        except GraphError as error:
            problems += (_of_side(side, side_sets, problem) for problem in error.problems)
        except (UsageError, OutlineError) as error:
            raise UsageError(f"{side}: {error}" if side_sets else str(error)) from None
    if problems:
        raise GraphError(problems)
    return jobs


def _of_side(side: str, side_sets: Sequence[str], problem: Problem) -> Problem:
    """The problem with the name of its side, where the side has settings of its own."""
    option = problem.file.removeprefix("--set ")
    if option in side_sets and option != problem.file:
        return replace(problem, file=f"{read_side(side)[0]}@{option}")
    return replace(problem, file=f"{side}: {problem.file}") if side_sets else problem


def _as_they_are(sides: "list[Side]") -> "list[Side]":
    return sides


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The order and number of rounds.

    repeats: of all prompts. warm: rounds of the first prompt before anything counts. shuffled: an
    order of the sides is drawn for each round; else they begin in turn. collected: all chunks of
    documents are read before the first round. dress: what is done to the
    loaded sides. facts: what else makes it another comparison.
    """

    repeats: int = 1
    warm: int = 2
    shuffled: bool = False
    collected: bool = False
    dress: "Callable[[list[Side]], list[Side]]" = _as_they_are
    facts: Mapping[str, Any] = field(default_factory=dict)


ONCE = RoundPlan()


def compare_jobs(
    jobs: Sequence[Job], files: BestEffortRunFolder | None = None, plan: RoundPlan = ONCE
) -> tuple["Comparison", "ResultsFolder | None"]:
    """Load the models, answer the jobs' prompts with each graph, and compare the answers.

    Rounds that the files already contain are not measured again.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    with measuring(f"loading models for {len(jobs)} graphs ...") as show:
        # Local, so that a wrong graph is an error before torch is imported.
        from ..run.runner import Status, StopSignal
        from .comparison import Comparison, judge_prompt
        from .equality import pairs_of
        from .results import ResultsFolder, setup_of
        from .sides import answer_all, drawn, in_turn, load_sides, loading_notes, warm_up

        sides = plan.dress(load_sides(jobs))
        prompts = [*jobs[0].prompts] * plan.repeats
        pairs = pairs_of(sides)
        folder = None
        rounds = {}
        for note in loading_notes(sides):
            complain(f"note: {note}")
        if files is not None:
            setup = setup_of(sides, jobs[0].prompts, jobs[0].options.argv)
            folder = ResultsFolder(files, {**setup, **plan.facts})
            rounds = folder.kept(prompts, pairs)
        missing = [number for number in range(len(prompts)) if number not in rounds]
        with StopSignal() as halt:
            pending = [prompts[number] for number in missing]
            warm_up(sides, jobs[0].prompts, pending, halt, plan.warm, plan.collected)
            seeds = partial(drawn, numbers=missing)
            answers = answer_all(sides, pending, halt, show, seeds if plan.shuffled else in_turn)
            for number, answer in zip(missing, answers, strict=False):
                rounds[number] = answer, judge_prompt(answer, pairs)
                if folder is not None:
                    folder.add(number, *rounds[number])
        done = [rounds[number] for number in sorted(rounds)]
        results = [branch for _, judged in done for branch in judged]
        status = halt.status or Status.OK
        return Comparison(status, sides, pairs, [answer for answer, _ in done], results), folder


MOST_POINTS = 256


@exit_code
def sweep_command(
    graph: str, vary: Sequence[str], options: RunOptions, out: Path | None = None
) -> int:
    """Compare all points of a grid and return the exit code, as `compare_command` does.

    Args:
        vary: PATH=VALUE,VALUE... for each path; the last one changes fastest.
    """
    return measured("sweep", points(graph, vary), options, out, rated=True)


def points(graph: str, vary: Sequence[str]) -> list[str]:
    """The grid as sides of a comparison; its first point has the first value of every path.

    Raises:
        UsageError: a path without values, a repeated path, or too many points.
    """
    axes: dict[str, list[str]] = {}
    for text in vary:
        path, equals, values = text.partition("=")
        if not equals or not path or not values:
            raise UsageError(
                f"--vary {text}: write path=value,value e.g. drafter.num_draft_tokens=4,8,16"
            )
        if path in axes:
            raise UsageError(f"--vary {text}: {path} varies already")
        axes[path] = list(dict.fromkeys(at_commas(values)))
    count = 1
    for axis in axes.values():
        count *= len(axis)
    if not 2 <= count <= MOST_POINTS:
        raise UsageError(f"--vary: a sweep has from 2 to {MOST_POINTS} points, not {count}")
    name, graph_sets = read_side(graph)
    grid = product(*([f"{path}={value}" for value in values] for path, values in axes.items()))
    return [f"{name}@{','.join((*graph_sets, *point))}" for point in grid]
