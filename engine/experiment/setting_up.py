"""From what was asked to checked jobs, one for each row; without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...states.text.outline import Outline, OutlineError, Point
from ...states.yaml.source import GraphError, Problem, Source, hint
from ..bench.command import at_commas
from ..errors import LacksDrafterError, UsageError
from ..prepare.files import graph_names
from ..prepare.inputs import Prompts, read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from .peer_names import PEERS, PLAIN, why_missing
from .read import (
    Entry,
    Place,
    entries_of,
    experiment_names,
    find_experiment,
    known_side,
    prompts_file,
    read_experiment,
    text_of,
)
from .spec import PARTS, Experiment

PART_TOKENS = 60  # that a part of a given outline is expected to have
PEERS_KNOW = ("sampling", "limits")  # blocks whose settings for all are the peers' too
COMMAND_LINE = "bench"  # the name of what is made of graphs


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `specsot bench` is asked beside the options of runs.

    refs: an experiment, or graphs and peers. out: a folder to keep everything in, or to go on in.
    """

    refs: Sequence[str]
    against: str | None = None
    vary: Sequence[str] = ()
    repeats: int | None = None
    count: int | None = None
    out: Path | None = None
    baseline: Path | None = None
    plot: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """An experiment with everything checked that can be without torch; notes: what to tell."""

    experiment: Experiment
    entries: list[Entry]
    jobs: list[Job]
    prompts: Prompts
    notes: list[str] = field(default_factory=list)


def prepare_experiment(asked: BenchOptions, options: RunOptions) -> Prepared:
    """Read, change and check everything.

    A side that drafts, and for whose target there is no drafter of its kind, is left out of an
    experiment, with a note.

    Raises:
        UsageError, PromptError, OutlineError, GraphError: each message says where.
    """
    experiment, source = _changed(asked)
    given = experiment.options.model_dump()
    changes = {name: one for name, one in given.items() if getattr(options, name) is None}
    options = replace(options, **changes)
    prompts = read_file(options.prompts or prompts_file(experiment, source))
    if experiment.count is not None:
        prompts = replace(prompts, items=prompts.items[: experiment.count])
    entries = []
    jobs = []
    notes = []
    for entry in entries_of(experiment):
        if why := why_missing(entry.peer):
            notes.append(f"{entry.side} is left out: {why}")
            continue
        try:
            jobs.append(_job(entry, experiment, options, prompts, source))
            entries.append(entry)
        except LacksDrafterError as error:
            if source is None:
                raise
            notes.append(f"{entry.side} is left out: {error}")
    if not jobs:
        raise UsageError("\n".join(notes))
    return Prepared(experiment, entries, jobs, prompts, list(dict.fromkeys(notes)))


def _changed(asked: BenchOptions) -> tuple[Experiment, Source | None]:
    """The experiment, as the command line changes it."""
    experiment, source = _found(asked.refs)
    changes: dict[str, Any] = {"repeats": asked.repeats, "count": asked.count}
    if asked.against is not None:
        changes["against"] = tuple(filter(None, asked.against.split(",")))
        _check_sides(changes["against"], "--against ")
    if asked.vary:
        changes["vary"] = {**experiment.vary, **_axes(asked.vary)}
    changes = {name: value for name, value in changes.items() if value is not None}
    return experiment.model_copy(update=changes), source


def _found(refs: Sequence[str]) -> tuple[Experiment, Source | None]:
    if len(refs) == 1 and (file := find_experiment(refs[0])) is not None:
        return read_experiment(file)
    if not refs:
        raise UsageError("bench takes an experiment, or graphs; --list shows what ships")
    _check_sides(refs, "")
    doc = f"{len(refs)} sides of the command line."
    made = {"name": COMMAND_LINE, "doc": doc, "sides": list(refs)}
    return Experiment.model_validate(made), None


def _check_sides(sides: Sequence[str], option: str) -> None:
    for side in sides:
        if not known_side(side):
            near = hint(side, [*experiment_names(), *graph_names(), *PEERS])
            raise UsageError(f"{option}{side}: no experiment, graph or peer{near}")


def _axes(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """PATH=VALUE,VALUE... by path."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        if not equals or not path or not values:
            raise UsageError(f"--vary {text}: write path=value,value e.g. drafter.nodes=4,8,16")
        found[path] = tuple(dict.fromkeys(at_commas(values)))
    return found


def _job(
    entry: Entry,
    experiment: Experiment,
    options: RunOptions,
    prompts: Prompts,
    source: Source | None,
) -> Job:
    """One row's; raises GraphError with places in the experiment's file."""
    common = {path: text_of(value) for path, value in experiment.set.items()}
    if entry.peer:
        common = {p: value for p, value in common.items() if p.partition(".")[0] in PEERS_KNOW}
    parts = _parts(entry)
    more = (
        []
        if parts is None
        else [f"skeleton.max_branches={parts}", f"layout.max_num_branches={parts}"]
    )
    sets = [f"{path}={value}" for path, value in common.items()]
    sets += [*options.sets, *more, *PEERS.get(entry.peer, ()), *entry.sets]
    graph = PLAIN if entry.peer else entry.graph
    try:
        job = prepare(replace(options, graph=graph, sets=tuple(sets)), prompts=prompts)
    except GraphError as error:
        problems = [_placed(one, entry, experiment, source) for one in error.problems]
        raise GraphError(problems) from None
    except LacksDrafterError:
        raise
    except (UsageError, OutlineError) as error:
        raise UsageError(f"{entry.side}: {error}") from None
    if parts is None:
        return job
    named = replace(job.options, sets=(*job.options.sets, f"{PARTS}={parts}"))
    return replace(job, options=named, outline=_outline(parts))


def _placed(
    problem: Problem, entry: Entry, experiment: Experiment, source: Source | None
) -> Problem:
    """Where the experiment's file says what is wrong, if it does."""
    option = problem.file.removeprefix("--set ")
    if source is None or option == problem.file:
        return problem
    at: Mapping[str, Place] = {
        **{f"{path}={text_of(value)}": ("set", path) for path, value in experiment.set.items()},
        **dict.fromkeys(entry.sets, entry.at[""]),
        **{f"{path}={value}": entry.at[path] for path, value in entry.varied.items()},
    }
    if option not in at:
        return problem
    words = f"{entry.side}: {problem.where}: {problem.message}"
    return source.problem(at[option], words, problem.code)


def _parts(entry: Entry) -> int | None:
    """How many parts its outline is given; raises UsageError for what is no number."""
    text = entry.varied.get(PARTS)
    if text is None or (text.isdecimal() and 1 <= int(text) <= 64):
        return None if text is None else int(text)
    raise UsageError(f"--vary {PARTS}={text}: a number of parts is an integer from 1 to 64")


def _outline(count: int) -> Outline:
    """So many parts that do not wait for each other."""
    points = (Point(n, PART_TOKENS, None, (), f"Part {n}") for n in range(1, count + 1))
    return Outline("plan", tuple(points), (), "ok")
