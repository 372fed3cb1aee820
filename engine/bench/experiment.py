"""Experiments: their YAML, the command line's changes to it, one checked job for each row, and the
figures of a row (docs/metrics.md) with bootstrap intervals. Nothing here imports torch."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...states.text.outline import Outline, Point
from ...states.text.tokens import OutlineError
from ...states.yaml.source import GraphError, Problem, ProblemCode, Source, hint
from ...states.yaml.spec import Count, Int, Name, Spec, Text, check_mapping, validated
from ..errors import LacksDrafterError, UsageError
from ..prepare.files import FOLDER, SHIPPED, graph_names, is_graph, read_source
from ..prepare.inputs import Prompts, read_file
from ..prepare.job import Job, prepare
from ..prepare.options import BenchOptions, ExperimentOptions, RunOptions, SetName
from .question_sets import SETS, Question, read_questions

if TYPE_CHECKING:
    from .sides import SideRun

    Runs = Sequence[SideRun]
    Measured = Callable[[SideRun], tuple[float, float]]  # with a whole of 0 where it means nothing

ASSISTED = "hf-assisted"
LOOKUP = "hf-lookup"
LLAMA_CPP = "llama-cpp"
PEERS: Mapping[str, tuple[str, ...]] = {  # settings of the plain graph, for the models to load
    "hf": (),
    ASSISTED: ("drafter.kind=vanilla", "drafter.gamma=4"),
    LOOKUP: (),
    LLAMA_CPP: (),
}
PEERS_KNOW = ("sampling", "limits")  # blocks whose settings for all are the peers' too
PARTS = "parts"  # a path that no graph has: the number of parts of a given outline
PART_TOKENS = 60  # that a part of a given outline is expected to have
MAX_PARTS = 64
PARTS_RANGE = f"a number of parts is an integer from 1 to {MAX_PARTS}"
DEFAULT = ("speedup_decode", "speedup_ttlt", "tokens", "tau_step", "kv_held_mb")
EXPERIMENTS = "experiments"
PROMPTS = {"ten": "ten.txt", "hard": "hard.txt", "documents": "documents.jsonl"}
MOST_ROWS = 256
BY_PROMPT = "speedup_by_prompt"
# Figures that `specsot compare` and `sweep` show.
COMPARED = (BY_PROMPT, "tau_step", "tokens", "target_forwards", "ms_per_round", "kv_held_mb")
# Those of a question set; QUALITY has a table of its own.
OF_SETS = ("speedup_decode", "tau_step", "speedup_ttlt", "ms_to_last_token", "correct", "parsable")
QUALITY = ("tokens", "length_ratio", "repetition", "coverage", "part_similarity")

Place = tuple[str | int, ...]


class Reported(Spec):
    """A published measurement. source: the paper or the code, with table or section."""

    source: Text
    says: Text


class Plot(Spec):
    """One picture. x: a path of `vary`; without it a bar for each side."""

    y: Text
    x: Text | None = None


class Experiment(Spec):
    """Every side runs at every point of `vary`; those of `against` run once, unchanged. Ratios
    refer to the first of `against`; without one to the first side, at its first point or (`pairing:
    point`) at the same point."""

    version: Literal[1] = 1
    name: Name
    doc: Text = Field(description="what it shows, in a line")
    reproduces: Text = Field("", description="what of which paper")
    reported: tuple[Reported, ...] = Field((), description="what the original says, and where")
    sides: tuple[Text, ...] = Field(
        min_length=1, description="graphs, GRAPH@PATH=VALUE,..., or hf, hf-assisted, hf-lookup"
    )
    against: tuple[Text, ...] = Field((), description="more of them, which do not vary")
    labels: Mapping[Text, Text] = Field(
        default_factory=dict, description="names of sides in tables and pictures"
    )
    vary: dict[Text, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="values by setting; `parts`: parts of a given outline"
    )
    pairing: Literal["first", "point"] = Field(
        "first", description="whether ratios are to one row, or to the first side at each point"
    )
    set: Mapping[Text, Any] = Field(default_factory=dict, description="settings of all graphs")
    options: ExperimentOptions = ExperimentOptions()
    prompts: Text = Field("ten", description="ten, hard, documents, or a file in the same folder")
    set_of: SetName | None = Field(None, description="whose published file the prompts are")
    count: Count | None = Field(None, description="only the first N prompts, of a set's each task")
    repeats: Annotated[Int, Field(ge=1, le=1000)] = Field(3, description="of every prompt")
    figures: tuple[Text, ...] = Field(DEFAULT, description="those that tables show")
    plots: tuple[Plot, ...] = ()
    probe: bool = Field(False, description="also compare what is blended with full prefills")


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: a graph or a peer at one point. at: places in the file by setting, `` the side's."""

    side: str
    varied: Mapping[str, str]
    at: Mapping[str, Place]

    @property
    def graph(self) -> str:
        return read_side(self.side)[0]

    @property
    def peer(self) -> str:
        return self.graph if self.graph in PEERS else ""

    @property
    def sets(self) -> tuple[str, ...]:
        point = (f"{path}={value}" for path, value in self.varied.items() if path != PARTS)
        return (*read_side(self.side)[1], *point)

    @property
    def name(self) -> str:
        """Of the side with all its settings, in messages."""
        return f"{self.graph}@{','.join(self.sets)}" if self.sets else self.graph


def read_side(text: str) -> tuple[str, tuple[str, ...]]:
    """A graph and its own settings: GRAPH@SET,SET... is cut at the first @ behind a graph."""
    places = [at for at, char in enumerate(text) if char == "@"]
    if not places or is_graph(text):
        return text, ()
    at = next((at for at in places if is_graph(text[:at])), places[0])
    return text[:at], tuple(at_commas(text[at + 1 :]))


def at_commas(text: str) -> Iterator[str]:
    """Cut at commas, but at none inside brackets."""
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def experiment_names() -> list[str]:
    return sorted(path.stem for path in (SHIPPED / EXPERIMENTS).glob("*.yaml"))


def find_experiment(ref: str) -> Path | None:
    """The file of this name if it holds an experiment, or a shipped one."""
    file = Path(ref)
    if file.is_file() and file.suffix in (".yaml", ".yml"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        # No graph has a key `sides`.
        return file if any(line.startswith("sides:") for line in lines) else None
    name = ref.removeprefix(f"{FOLDER}/{EXPERIMENTS}/").removesuffix(".yaml")
    return SHIPPED / EXPERIMENTS / f"{name}.yaml" if name in experiment_names() else None


def read_experiment(file: Path) -> tuple[Experiment, Source]:
    """A checked file; raises GraphError with every problem."""
    shipped = file.is_relative_to(SHIPPED)
    source = read_source(str(file), str(file.relative_to(SHIPPED.parent)) if shipped else "")
    check_mapping(source, "experiment")
    experiment = validated(Experiment, source)
    if problems := [*_unknown(experiment, source)]:
        raise GraphError(problems)
    return experiment, source


def _unknown(experiment: Experiment, source: Source) -> Iterator[Problem]:
    for key in ("sides", "against"):
        for at, side in enumerate(getattr(experiment, key)):
            if (name := read_side(side)[0]) not in PEERS and not is_graph(name):
                words = f"no graph {name!r}, nor a peer{hint(name, [*graph_names(), *PEERS])}"
                yield source.problem((key, at), words, ProblemCode.NO_SIDE)
    for side in experiment.labels:
        if side not in (known := (*experiment.sides, *experiment.against)):
            words = f"no side {side!r}{hint(side, known)}"
            yield source.problem(("labels", side), words, ProblemCode.NO_SIDE, key=True)
    names: dict[Place, str] = {("figures", at): name for at, name in enumerate(experiment.figures)}
    names |= {("plots", at, "y"): plot.y for at, plot in enumerate(experiment.plots)}
    for place, name in names.items():
        if name not in FIGURES:
            words = f"no figure {name!r}{hint(name, FIGURES)}; there are: {', '.join(FIGURES)}"
            yield source.problem(place, words, ProblemCode.NO_FIGURE)
    for at, plot in enumerate(experiment.plots):
        if plot.x is not None and plot.x not in experiment.vary:
            words = f"{plot.x!r} does not vary{hint(plot.x, experiment.vary)}"
            yield source.problem(("plots", at, "x"), words, ProblemCode.NO_AXIS)
    for at, value in enumerate(experiment.vary.get(PARTS, ())):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PARTS:
            yield source.problem(("vary", PARTS, at), PARTS_RANGE, ProblemCode.WRONG_VALUE)
    if (count := len(entries_of(experiment))) > MOST_ROWS:
        words = f"{count} rows; at most {MOST_ROWS}"
        yield source.problem(("vary",), words, ProblemCode.NO_AXIS, key=True)


def entries_of(experiment: Experiment) -> list[Entry]:
    """All rows: those that ratios are taken to first, then side by side, point by point."""
    axes = [
        [(path, text_of(value), ("vary", path, at)) for at, value in enumerate(values)]
        for path, values in experiment.vary.items()
    ]
    rows = [Entry(side, {}, {"": ("against", n)}) for n, side in enumerate(experiment.against)]
    for number, side in enumerate(experiment.sides):
        for point in product(*([] if read_side(side)[0] in PEERS else axes)):
            varied = {path: value for path, value, _ in point}
            at: dict[str, Place] = {path: place for path, _, place in point}
            rows.append(Entry(side, varied, {"": ("sides", number), **at}))
    return rows


def references_of(experiment: Experiment, entries: Sequence[Entry]) -> list[int]:
    """For each row the number of the one that its ratios are taken to."""
    if experiment.pairing == "first":
        return [0] * len(entries)
    points = [entry.varied for entry in entries]
    return [points.index(point) for point in points]


def text_of(value: Any) -> str:
    """As `--set` takes it; JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def experiment_of_sides(name: str, sides: Sequence[str], **values: Any) -> Experiment:
    """Of sides that the command line names, which are checked when they are prepared."""
    doc = f"{len(sides)} side{'s' * (len(sides) > 1)} of the command line."
    return Experiment.model_construct(name=name, doc=doc, sides=tuple(sides), **values)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked experiment; questions: of a set, by the prompts' keys; notes: for the user."""

    experiment: Experiment
    prompts: Prompts
    questions: Mapping[str, Question] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def prepare_experiment(
    experiment: Experiment, options: RunOptions, source: Source | None = None
) -> Prepared:
    """Check every side; one of a file (source) is omitted if its target lacks the drafter; raises
    UsageError, PromptError, OutlineError, GraphError."""
    defaults = experiment.options.model_dump()
    changes = {name: value for name, value in defaults.items() if getattr(options, name) is None}
    options = replace(options, **changes)
    name = experiment.set_of
    if name is not None and options.prompts is None and experiment.prompts in PROMPTS:
        raise UsageError(f"--set-of {name} reads a file that you have: --prompts FILE")
    file = options.prompts or _prompts_file(experiment, source)
    questions: Mapping[str, Question] = {}
    if name is None:
        prompts = read_file(file)
        prompts = replace(prompts, items=prompts.items[: experiment.count])
    else:
        prompts, questions = read_questions(name, file, experiment.count)
    prepared = Prepared(experiment, prompts, questions)
    notes = prepared.notes
    problems: list[Problem] = []
    for entry in entries_of(experiment):
        if entry.peer == LLAMA_CPP and find_spec("llama_cpp") is None:
            why = "llama-cpp-python is not installed (docs/cli.md)"
            notes.append(f"{entry.side} is left out: {why}")
            continue
        try:
            prepared.jobs.append(_job(entry, prepared, options))
            prepared.entries.append(entry)
        except GraphError as error:
            problems += [_placed(problem, entry, prepared, source) for problem in error.problems]
        except (UsageError, OutlineError) as error:
            if source is None or not isinstance(error, LacksDrafterError):
                raise UsageError(f"{entry.name}: {error}") from None
            notes.append(f"{entry.side} is left out: {error}")
    if problems:
        raise GraphError(problems)
    notes[:] = dict.fromkeys(notes)  # one for all points of a side
    if not prepared.jobs:
        raise UsageError("\n".join(notes))
    return prepared


def experiment_of(bench_options: BenchOptions) -> tuple[Experiment, Source | None]:
    """What `specsot bench` measures, and its file if it has one; raises UsageError, GraphError."""
    refs = bench_options.refs
    source = None
    if len(refs) == 1 and (file := find_experiment(refs[0])) is not None:
        experiment, source = read_experiment(file)
    elif refs:
        _check_sides(refs, "")
        experiment = experiment_of_sides("bench", refs)
    else:
        raise UsageError("bench takes an experiment, or graphs; --list shows what ships")
    changes: dict[str, Any] = {"repeats": bench_options.repeats, "count": bench_options.count}
    if bench_options.against is not None:
        changes["against"] = tuple(filter(None, bench_options.against.split(",")))
        _check_sides(changes["against"], "--against ")
    if (name := bench_options.set_of) is not None:
        changes |= {"set_of": name, "figures": OF_SETS}
    if name is not None and source is None:
        if bench_options.against is None:
            changes["against"] = ("autoregressive",)
        changes["sides"] = tuple(ref for ref in refs if ref not in changes["against"])
        changes |= {"name": name, "doc": f"Questions of {SETS[name].title}."}
    if bench_options.vary:
        changes["vary"] = {**experiment.vary, **dict(map(axis_of, bench_options.vary))}
    changes = {name: value for name, value in changes.items() if value is not None}
    return experiment.model_copy(update=changes), source


def _check_sides(sides: Sequence[str], option: str) -> None:
    for side in sides:
        if (name := read_side(side)[0]) not in PEERS and not is_graph(name):
            near = hint(side, [*experiment_names(), *graph_names(), *PEERS])
            raise UsageError(f"{option}{side}: no experiment, graph or peer{near}")


def axis_of(text: str) -> tuple[str, tuple[str, ...]]:
    """The path and the values of PATH=VALUE,VALUE...; raises UsageError."""
    path, _, values = text.partition("=")
    if not path or not values:
        how = "write path=value,value e.g. drafter.num_draft_tokens=4,8,16"
        raise UsageError(f"--vary {text}: {how}")
    return path, tuple(dict.fromkeys(at_commas(values)))


def _prompts_file(experiment: Experiment, source: Source | None) -> Path:
    if experiment.prompts in PROMPTS:
        return SHIPPED / "prompts" / PROMPTS[experiment.prompts]
    folder = Path(source.file).parent if source is not None else Path()
    for file in (folder / experiment.prompts, Path(experiment.prompts)):
        if file.is_file():
            return file
    where = f"{source.at(('prompts',))}: " if source is not None else ""
    raise UsageError(f"{where}no prompts {experiment.prompts!r}: ten, hard, documents, or a file")


def _job(entry: Entry, prepared: Prepared, options: RunOptions) -> Job:
    parts = entry.varied.get(PARTS)
    if parts is not None and not (parts.isdecimal() and 1 <= int(parts) <= MAX_PARTS):
        raise UsageError(f"--vary {PARTS}={parts}: {PARTS_RANGE}")
    common = _common_sets(prepared.experiment)
    shared = [s for s, path in common.items() if path.partition(".")[0] in PEERS_KNOW]
    sets = [*(shared if entry.peer else common), *options.sets]
    if parts is not None:
        sets += [f"skeleton.max_branches={parts}", f"layout.max_num_branches={parts}"]
    sets += [*PEERS.get(entry.peer, ()), *entry.sets]
    graph = "autoregressive" if entry.peer else entry.graph
    job = prepare(replace(options, graph=graph, sets=tuple(sets)), prompts=prepared.prompts)
    if parts is None:
        return job
    named = replace(job.options, sets=(*job.options.sets, f"{PARTS}={parts}"))
    titles = [f"Part {number}" for number in range(1, int(parts) + 1)]
    return replace(job, options=named, outline=outline_of(titles, PART_TOKENS))


def _common_sets(experiment: Experiment) -> dict[str, str]:
    """The paths of the settings of all graphs, by the option that sets each."""
    return {f"{path}={text_of(value)}": path for path, value in experiment.set.items()}


def outline_of(titles: Iterable[str], tokens: int, tool: str | None = None) -> Outline:
    """A given outline of parts of this expected length."""
    points = (Point(n, tokens, tool, (), title=title) for n, title in enumerate(titles, 1))
    return Outline("plan", tuple(points), (), "ok")


def _placed(problem: Problem, entry: Entry, prepared: Prepared, source: Source | None) -> Problem:
    """A problem of a side at its place in the experiment's file, or with the side's name."""
    option = problem.file.removeprefix("--set ")
    if source is not None:
        common = _common_sets(prepared.experiment)
        places: dict[str, Place] = {setting: ("set", path) for setting, path in common.items()}
        places |= dict.fromkeys(entry.sets, entry.at[""])
        places |= {f"{path}={value}": entry.at[path] for path, value in entry.varied.items()}
        if option not in places:
            return problem
        words = f"{entry.side}: {problem.where}: {problem.message}"
        return source.problem(places[option], words, problem.code)
    if option in entry.sets:
        return replace(problem, file=f"{entry.graph}@{option}")
    return replace(problem, file=f"{entry.name}: {problem.file}") if entry.sets else problem


# -- figures -----------------------------------------------------------------------------------

Values = npt.NDArray[np.float64]
DRAWS = 2000
LEVEL = 0.95
MS = 1e6  # nanoseconds
MB = 1e6  # bytes
EN_DASH = "\N{EN DASH}"  # in `1.44 (1.15-1.59)`, where a hyphen would be a minus


class Estimate(NamedTuple):
    """A figure; low and high: its interval, None where a single round gave it."""

    value: float
    low: float | None = None
    high: float | None = None


def resampled(groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """[DRAWS, rounds]: numbers of rounds, always the same; groups: the prompt of each round.
    Prompts are drawn with replacement, then as many rounds of each as the largest prompt has: the
    variances between prompts and between repeats both count."""
    random = np.random.default_rng(0)
    rounds_of = [np.flatnonzero(np.asarray(groups) == name) for name in sorted(set(groups))]
    sizes = np.array([len(rounds) for rounds in rounds_of])
    picked = random.integers(len(rounds_of), size=(DRAWS, len(rounds_of)))
    places = random.random((DRAWS, len(rounds_of), sizes.max()))
    table = np.stack([np.resize(rounds, sizes.max()) for rounds in rounds_of])
    within = (places * sizes[picked][..., None]).astype(np.int64)
    return np.asarray(table[picked[..., None], within].reshape(DRAWS, -1))


def estimate(groups: Sequence[int], of: Callable[[npt.NDArray[np.int64]], Values]) -> Estimate:
    """Of all rounds, and of drawn ones; of: [..., rounds] numbers -> [...]."""
    value = float(of(np.arange(len(groups))[None])[0])
    if len(groups) < 2:
        return Estimate(value)
    edge = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(of(resampled(groups)), [edge, 100 - edge])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Figure:
    """of: part and whole in one run. kind: of the rounds' quotients the median, the same with the
    lowest and highest, the largest; the quotient of the sums; the share of answers that are the
    reference's; what a probe has found. paired: quotients are the reference's / the own one.
    better: 1, -1, or 0 for neither. timed: by clocks. own: peers do not count this."""

    kind: Literal["median", "range", "largest", "sums", "same", "probe"]
    of: "Measured" = lambda run: (0, 0)
    better: int = 1
    form: str = ".2f"
    timed: bool = False
    paired: bool = False
    own: bool = False

    def words(self, numbers: Sequence[float | None], between: str = " ") -> str:
        """The value, and its interval in brackets where that has another number."""
        value, *edges = [format(number, self.form) for number in numbers if number is not None]
        return f"{value}{between}({EN_DASH.join(edges)})" if set(edges) - {value} else value

    def measure(self, runs: "Runs", reference: "Runs", prompts: Sequence[int]) -> Estimate | None:
        """Of finished rounds; None if it means nothing. prompts: the number of each round's."""
        if self.kind == "same":
            same = np.array([a.digest == b.digest for a, b in zip(runs, reference, strict=True)])
            return estimate(prompts, lambda at: same[at].mean(-1))
        groups: list[int] = []
        pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for run, other, group in zip(runs, reference, prompts, strict=True):
            unknown = self.own and not run.meter.rows
            if unknown or run.problems or (self.paired and other.problems):
                continue
            one = self.of(run)
            two = self.of(other) if self.paired else (1.0, 1.0)
            if one[1] and two[1] and not (self.paired and 0 in (one[0], two[0])):
                groups.append(group)
                pairs.append((one, two))
        if not groups:
            return None
        mine, theirs = np.array(pairs, float).swapaxes(0, 1)  # [rounds, part and whole] each
        if self.kind == "sums":
            return estimate(groups, lambda at: mine[at].sum(-2)[..., 0] / mine[at].sum(-2)[..., 1])
        each = mine[:, 0] / mine[:, 1]
        if self.paired:
            each = theirs[:, 0] / theirs[:, 1] / each
        if self.kind == "largest":
            return Estimate(float(each.max()))
        if self.kind == "range":
            return Estimate(float(np.median(each)), float(each.min()), float(each.max()))
        return estimate(groups, lambda at: np.median(each[at], axis=-1))


def _per_token(run: "SideRun") -> tuple[float, float]:
    return 1e3 * run.meter.seconds, run.meter.tokens


def _speedup(of: "Measured", kind: Any = "median") -> Figure:
    return Figure(kind, of, timed=True, paired=True)


def _milliseconds(mark: str) -> "Measured":
    return lambda run: (getattr(run, mark) / MS, float(getattr(run, mark) > 0))


def _kv(name: str) -> Figure:
    return Figure("largest", lambda run: (run.kv.get(name, 0) / MB, float(bool(run.kv))), -1)


def _counter(name: str, better: int = -1, *, own: bool = False) -> Figure:
    return Figure("median", lambda run: (getattr(run.meter, name), 1), better, ".0f", own=own)


def _score(name: str, better: int) -> Figure:
    """The mean over answers of what their texts show."""
    return Figure("sums", lambda r: (r.scores.get(name, 0), float(name in r.scores)), better)


def _overhead(run: "SideRun") -> tuple[float, float]:
    whole = run.meter.in_run + run.meter.open_ops
    return whole - run.meter.in_ops, whole


FIGURES: Mapping[str, Figure] = {
    "speedup_decode": _speedup(lambda r: ((r.last_token - r.first_token) / MS, r.decoded)),
    "speedup_ttlt": _speedup(_milliseconds("last_token")),
    "speedup_ttft": _speedup(_milliseconds("first_token")),
    "speedup_per_token": _speedup(_per_token),
    BY_PROMPT: _speedup(_per_token, "range"),
    "length_ratio": Figure("median", lambda r: (1, r.meter.tokens), 0, paired=True),
    "tau_step": Figure(
        "sums", lambda r: (sum(r.meter.lengths.elements()), r.meter.lengths.total())
    ),
    "tau_request": Figure("median", lambda r: (r.meter.tau_step, 1)),
    "acceptance_rate": Figure("sums", lambda r: (r.meter.accepted, r.meter.drafted), form=".3f"),
    "tokens_per_target_forward": Figure("sums", lambda r: (r.meter.tokens, r.meter.forwards)),
    "ms_per_token": Figure("median", _per_token, -1, timed=True),
    "ms_to_first_token": Figure("median", _milliseconds("first_token"), -1, ".0f", timed=True),
    "ms_to_last_token": Figure("median", _milliseconds("last_token"), -1, ".0f", timed=True),
    "ms_per_round": Figure("sums", lambda r: (_per_token(r)[0], r.meter.forwards), -1, timed=True),
    "overhead_share": Figure("sums", _overhead, -1, ".3f", timed=True, own=True),
    "host_reads_per_round": Figure(
        "sums", lambda r: (r.host_reads, r.meter.forwards), -1, own=True
    ),
    "tokens": _counter("tokens", better=0),
    "target_forwards": _counter("forwards"),
    "rows": _counter("rows", own=True),
    "rows_empty": _counter("padding", own=True),
    "drafter_forwards": _counter("draft_forwards", own=True),
    "drafter_rows": _counter("draft_rows", own=True),
    "drafter_rows_empty": _counter("draft_padding", own=True),
    "padding_waste": Figure("sums", lambda r: (r.meter.padding, r.meter.rows), -1, ".3f"),
    "kv_held_mb": _kv("held"),
    "kv_moved_mb": _kv("moved"),
    "same_answer": Figure("same", better=0),
    "correct": _score("correct", 1),
    "parsable": _score("parsable", 1),
    "repetition": _score("repetition", -1),
    "coverage": _score("coverage", 1),
    "part_similarity": _score("part_similarity", -1),
    "kl": Figure("probe", better=-1, form=".4f"),
    "kv_allocated_mb": _kv("allocated"),
}
