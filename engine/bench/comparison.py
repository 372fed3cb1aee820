"""Rounds of prompts through sides, and their result as plain data. Half of a round is never saved:
its other half would be measured in another state of the machine."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import chain
from statistics import mean, median
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ..errors import Code, UsageError
from ..limits import disturbance
from ..models import notes_of
from ..prepare.inputs import Prompt
from ..prepare.job import machine, model_folders, redact, threads_of, versions
from ..prepare.repeat import graph_hash
from ..record.metrics import Meter, state_figures
from ..record.run_folder import RunFolder
from ..run.core import STATUS_CODES, Status, StopSignal, drive
from ..run.scoring import probe_blends
from ..run.session import recorded
from ..run.writer import answers_of, made_with
from ..shell import complain, working
from .experiment import DRAWS, FIGURES, LEVEL, OF_SETS, Estimate, Prepared, references_of
from .peers import with_peers
from .quality import scores_of
from .question_sets import Question, published_rows
from .sides import (
    ComparedPrompt,
    GraphPair,
    SharedModels,
    Side,
    SideRun,
    answer_all,
    compare_branches,
    equality_of,
    letters,
    pairs_of,
    warm_up,
)

ROUND = "round-{:04}.json"
SAVED = TypeAdapter(ComparedPrompt)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Complete or interrupted; rounds: those of all sides; setup: what figures depend on."""

    status: Status
    sides: Sequence[Side]
    pairs: Sequence[GraphPair]
    rounds: Sequence[ComparedPrompt]
    setup: Mapping[str, Any]


def compare_jobs(prepared: Prepared, files: RunFolder | None = None) -> Comparison:
    """Answer every prompt with each side, and compare; rounds in the files are not repeated. Raises
    UsageError, ModelError, GraphError, PromptError."""
    jobs = prepared.jobs
    items = jobs[0].prompts
    with working(f"loading models for {len(jobs)} graphs ...", bar=True) as show:
        models = SharedModels()
        common = set(jobs[0].options.sets).intersection(*(job.options.sets for job in jobs))
        sides = []
        for letter, job in zip(letters(), jobs, strict=False):
            sets = tuple(setting for setting in job.options.sets if setting not in common)
            sides.append(models.side(letter, job, *model_folders(job), sets=sets))
        sides = with_peers(sides, [entry.peer for entry in prepared.entries])
        pairs = pairs_of(sides)
        both = (note for s in sides for note in (*s.job.notes, *notes_of(s.session.models)))
        for note in dict.fromkeys(both):
            complain(f"note: {note}")
        setup = _setup(sides, prepared)
        prompts = dict(enumerate(items * prepared.experiment.repeats))
        rounds: dict[int, ComparedPrompt] = {}
        if files is not None:
            setup = _begun(files, setup)
            for number, prompt in prompts.items():
                # A damaged round is measured again.
                with suppress(OSError, ValueError, TypeError):
                    text = (files.path / ROUND.format(number + 1)).read_text(encoding="utf-8")
                    rounds[number] = SAVED.validate_python({**json.loads(text), "prompt": prompt})
        for side in sides:
            for prompt in items:
                side.session.request(prompt)  # refused before anything is measured
        pending = {number: prompt for number, prompt in prompts.items() if number not in rounds}
        with StopSignal() as halt:
            warm_up(sides, list(pending.values()), halt)
            later = {key: question.later for key, question in prepared.questions.items()}
            answers = answer_all(sides, pending, halt, show, later=later)
            for number, answered in zip(pending, answers, strict=False):
                answer = _scored(answered, sides, prepared.questions)
                for pair in pairs:
                    if not pair.why_not:
                        answer.results[pair.other.letter] = compare_branches(pair, answer)
                rounds[number] = answer
                if files is not None:
                    plain = SAVED.dump_python(answer, mode="json")
                    files.write_json(ROUND.format(number + 1), plain)
        done = [rounds[number] for number in sorted(rounds)]
        return Comparison(halt.status or Status.OK, sides, pairs, done, setup=setup)


def _scored(
    answered: ComparedPrompt, sides: Sequence[Side], questions: Mapping[str, Question]
) -> ComparedPrompt:
    question = questions.get(answered.prompt.key)
    runs = {}
    for side in sides:
        run = answered.runs[side.letter]
        answers = answers_of(run.requests, side.session.prompts)
        turns = [scores_of(answer, question) for answer in answers]
        names = dict.fromkeys(chain.from_iterable(turns))
        scores = {name: mean(turn[name] for turn in turns if name in turn) for name in names}
        runs[side.letter] = replace(run, scores=scores)
    return replace(answered, runs=runs)


def _setup(sides: Sequence[Side], prepared: Prepared) -> dict[str, Any]:
    jobs = {model_folders(side.job): side.job for side in sides}
    weights = {folders: made_with(job) for folders, job in jobs.items()}  # large files, read once
    graphs = {}
    for side in sides:
        graph = side.job.program.graph
        options = side.job.options
        made = weights[model_folders(side.job)]
        graphs[side.letter] = {
            "name": side.title,
            "file": redact(options.graph),
            "sets": list(options.sets),
            "layout": graph.layout.kind,
            "drafter": graph.drafter.kind,
            "model": redact(options.model),
            "drafter_model": redact(options.drafter_model) if graph.drafter.has_model else None,
            **{name: getattr(options, name) for name in ("dtype", "weights", "device")},
            "threads": threads_of(side.job),
            "max_new_tokens": side.session.budget,
            "seed": options.seed,
            "stop_ids": list(options.stop_ids or ()),
            "outline": side.job.outline and str(side.job.outline),
            "graph_hash": graph_hash(graph),
            "model_hash": made.model_hash,
            "drafter_hash": made.drafter_hash,
        }
    prompts = sides[0].job.prompts
    later = [turn for question in prepared.questions.values() for turn in question.later]
    text = json.dumps([*map(asdict, prompts), *later], sort_keys=True)
    return {
        "schema_version": 1,
        "command": shlex.join(["specsot", *map(redact, sides[0].job.options.argv[1:])]),
        "graphs": graphs,
        "prompts": {"count": len(prompts), "sha256": sha256(text.encode()).hexdigest()},
        "versions": versions(),
        "machine": machine(),
        "repeats": prepared.experiment.repeats,
        "probe": prepared.experiment.probe,
    }


def _begun(files: RunFolder, setup: dict[str, Any]) -> dict[str, Any]:
    """The setup of the folder, with its first command; raises UsageError for another comparison."""
    place = files.path / "setup.json"
    try:
        old = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        files.write_json("setup.json", setup)
        return setup
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: cannot be read: {error}") from None
    saved = old if isinstance(old, dict) else {}
    new = json.loads(json.dumps(setup))
    if unlike := [name for name in new if name != "command" and saved.get(name) != new[name]]:
        reason = f"holds a comparison with other {', '.join(unlike)}: name another folder"
        raise UsageError(f"{files.path}: {reason}")
    return {**setup, "command": saved.get("command", setup["command"])}


def measure(prepared: Prepared, files: RunFolder | None = None) -> dict[str, Any]:
    """All rounds, and their result as plain data; raises what `compare_jobs` raises."""
    return document_of(compare_jobs(prepared, files), prepared)


def document_of(comparison: Comparison, prepared: Prepared) -> dict[str, Any]:
    """A row for each side at each point, with figures [value, low, high] (docs/cli.md)."""
    rounds = comparison.rounds
    references = references_of(prepared.experiment, prepared.entries)
    # Of each prompt's repeats, in the reference's time per token.
    times = dict[str, list[float]]()
    for one in rounds:
        meter = one.runs[comparison.sides[references[0]].letter].meter
        times.setdefault(one.prompt.key, []).append(meter.seconds / max(meter.tokens, 1))
    shares = [one.cpu_share for one in rounds]
    spreads = [(max(t) - min(t)) / median(t) for t in times.values() if len(t) > 1]
    equality = [equality_of(pair, rounds) for pair in comparison.pairs]
    equal = {
        pair["graph"]: ("!" if pair["different"] else "")
        + "{equal}/{branches} ={reference}".format_map(pair)
        for pair in equality
        if pair["compared"]
    }
    failures = sum(pair["different"] for pair in equality if pair.get("promised"))
    problems = [line for one in rounds for run in one.runs.values() for line in run.problems]
    code = Code.UNEQUAL if failures else Code.FAILED if problems else Code.OK
    if comparison.status is not Status.OK:
        code = STATUS_CODES[comparison.status]
    divergences = {}
    if prepared.experiment.probe and rounds and not code:
        divergences = _divergences(comparison.sides, prepared.prompts.items)
    keys = [one.prompt.key for one in rounds]
    prompts = [keys.index(key) for key in keys]
    rows: dict[str, dict[str, Any]] = {}
    set_of = prepared.experiment.set_of
    shown = dict.fromkeys((*prepared.experiment.figures, *(OF_SETS if set_of else ())))
    sampled = any(side.job.program.graph.sampling.temperature for side in comparison.sides)
    sides = zip(prepared.entries, comparison.sides, references, strict=True)
    for entry, side, at in sides if rounds else ():
        reference = comparison.sides[at]
        mine, theirs = ([one.runs[s.letter] for one in rounds] for s in (side, reference))
        measured = {name: figure.measure(mine, theirs, prompts) for name, figure in FIGURES.items()}
        figures = {name: figure for name, figure in measured.items() if figure is not None}
        if side.letter in divergences:
            figures["kl"] = Estimate(divergences[side.letter])
        meter = Meter()
        for run in mine:
            meter.add(run.meter)
        label = " ".join((entry.side, *(f"{path}={value}" for path, value in entry.varied.items())))
        rows[f"{label} ({side.letter})" if label in rows else label] = {
            "side": entry.side,
            "varied": dict(entry.varied),
            "reference": reference.letter,
            "equal": equal.get(side.letter, "-"),
            "figures": {
                name: [None if n is None else float(f"{n:.6g}") for n in figure]
                for name, figure in figures.items()
            },
            "categories": _by_category(shown, rounds, mine, theirs),
            "acceptance_by_depth": acceptance_by_depth(meter.lengths),
            "ms_per_visit": {
                name: round(state["milliseconds_per_visit"], 4)
                for name, state in state_figures(meter).items()
                if state["milliseconds"]
            },
        }
    return {
        "schema_version": 1,
        "experiment": prepared.experiment.model_dump(mode="json", exclude_defaults=True),
        "status": str(comparison.status),
        "exit_code": int(code),
        "setup": dict(comparison.setup),
        "rounds": len(rounds),
        "interval": {"level": LEVEL, "draws": DRAWS},
        "noise": {
            "cpu_share": round(median(shares), 3) if shares else None,
            "cpu_share_lowest": round(min(shares), 3) if shares else None,
            "spread": round(median(spreads), 3) if spreads else None,
            "disturbed": bool(shares) and disturbance(median(shares)) is not None,
        },
        "rows": rows,
        "published": [*published_rows(set_of, sampled)],
        "equality": equality,
        "problems": problems,
        "differences": failures,
    }


def _by_category(
    names: Iterable[str],
    rounds: Sequence[ComparedPrompt],
    mine: Sequence[SideRun],
    theirs: Sequence[SideRun],
) -> dict[str, dict[str, float]]:
    """The shown figures of the questions of each category; empty if they have none."""
    found: dict[str, dict[str, float]] = {}
    for category in dict.fromkeys(one.prompt.category for one in rounds):
        at = [n for n, one in enumerate(rounds) if one.prompt.category == category]
        own, reference = ([runs[n] for n in at] for runs in (mine, theirs))
        measured = {name: FIGURES[name].measure(own, reference, at) for name in names}
        found[category] = {
            name: float(f"{figure.value:.6g}")
            for name, figure in measured.items()
            if figure is not None and figure.value is not None
        }
    return {} if found.keys() <= {""} else found


def acceptance_by_depth(lengths: Counter[int]) -> list[float]:
    """Of branch-rounds with n accepted drafts, the share with one more. lengths: committed."""
    reached = np.array([lengths[n] for n in range(1, max(lengths, default=0) + 1)])[::-1].cumsum()
    return [round(share, 4) for share in (reached[:-1] / reached[1:])[::-1].tolist()]


def _divergences(sides: Sequence[Side], prompts: Sequence[Prompt]) -> dict[str, float]:
    """KL(full || blended) of first tokens, in nats, of the sides that blend."""
    means = {}
    with working("comparing what is blended with full prefills ..."), StopSignal() as halt:
        for side in (side for side in sides if side.blends):
            values: list[float] = []
            for prompt in prompts:
                run, recorder = recorded(side.session, [prompt], None)
                probed = probe_blends(run, recorder)
                drive(run, recorder, max_rounds=side.job.program.graph.limits.max_rounds, stop=halt)
                values += probed.kl
                run.close()
            if values and halt.status is None:
                means[side.letter] = mean(values)
    return means
