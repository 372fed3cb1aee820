"""Rounds of prompts through sides, and what they show: costs, ratios, rows, and the exit code.

A round is one prompt through every side. It is saved in a folder that a later call completes; half
of one never is: its other half would be measured in another state of the machine.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from statistics import mean, median
from typing import Any

import numpy as np

from ..errors import Code, UsageError
from ..limits import disturbance
from ..models import notes_of
from ..prepare.inputs import Prompt
from ..prepare.job import Job, machine, model_folders, redact, threads_of, versions
from ..prepare.repeat import graph_hash
from ..record.metrics import state_figures
from ..record.run_folder import RunFolder
from ..run.core import STATUS_CODES, Status, StopSignal, drive
from ..run.scoring import probe_blends
from ..run.session import recorded
from ..run.writer import made_with
from ..shell import complain, measuring, working
from .experiment import DRAWS, FIGURES, GAINS, LEVEL, PER_TOKEN, Estimate, Prepared, references_of
from .peers import with_peers
from .sides import (
    CUT,
    END,
    RUNS,
    BranchAnswer,
    BranchComparison,
    ComparedPrompt,
    Cost,
    Difference,
    GraphPair,
    SharedModels,
    Side,
    SideRun,
    answer_all,
    compare_branches,
    counts,
    letters,
    pairs_of,
    total,
    warm_up,
)

SCHEMA = 1
SETUP = "setup.json"
ROUND = "round-{:04}.json"
COMMAND = "command"
WARM_UP = 2  # rounds of the first prompt that no figure counts
WARM_UP_OF_EXPERIMENTS = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """Complete or up to an interruption; prompts: those that every graph has answered. setup:
    everything that the figures depend on; empty where nothing is saved."""

    status: Status
    sides: list[Side]
    pairs: list[GraphPair]
    prompts: list[ComparedPrompt]
    setup: Mapping[str, Any] = field(default_factory=dict)

    @property
    def results(self) -> list[BranchComparison]:
        return [branch for prompt in self.prompts for branch in prompt.results]

    def branches(self, pair: GraphPair) -> list[BranchComparison]:
        return [branch for branch in self.results if branch.pair is pair]

    def of(self, prompt: ComparedPrompt) -> "Comparison":
        return replace(self, prompts=[prompt])

    def runs(self, side: Side) -> list[SideRun]:
        return [prompt.runs[side.letter] for prompt in self.prompts]

    def total(self, side: Side) -> Cost:
        return total(self.runs(side))

    @property
    def differences(self) -> list[BranchComparison]:
        """Every branch that differs by itself, numeric ties included."""
        kinds = (BranchAnswer.DIFFERENT, BranchAnswer.TIE)
        return [branch for branch in self.results if branch.result in kinds]

    @property
    def failures(self) -> int:
        """Branches that differ though equality was promised."""
        different = BranchAnswer.DIFFERENT
        return sum(branch.pair.promised for branch in self.results if branch.result is different)

    @property
    def problems(self) -> list[str]:
        runs = [run for prompt in self.prompts for run in prompt.runs.values()]
        return [line for run in runs for line in run.problems]

    @property
    def cpu_share(self) -> float:
        """What a busy loop got of a CPU before each prompt, the median."""
        return median([prompt.cpu_share for prompt in self.prompts] or [1.0])

    @property
    def code(self) -> int:
        """The exit code: a stopped comparison, then a broken promise, then refused answers."""
        if self.status is not Status.OK:
            return STATUS_CODES[self.status]
        return Code.UNEQUAL if self.failures else Code.FAILED if self.problems else Code.OK

    def equal_branches(self, side: Side) -> str:
        """The number of branches equal to those of the reference; `-` for a reference."""
        for pair in self.pairs:
            if pair.other is side and not pair.why_not:
                number = counts(self.branches(pair))
                bad = "!" if number["different"] else ""
                return f"{bad}{number['equal']}/{number['branches']} ={pair.reference.letter}"
        return "-"

    def gains(self, side: Side) -> dict[str, list[float]]:
        """Cost of the first graph / of this one, by name and prompt; above 1 this one is better."""
        by_name: dict[str, list[float]] = {}
        first = self.runs(self.sides[0])
        for name, figure in GAINS.items():
            _, mine, theirs = figure.quotients(self.runs(side), first, range(len(first)))
            if len(mine):
                ratios = theirs[:, 0] / theirs[:, 1] / (mine[:, 0] / mine[:, 1])
                by_name[name] = ratios.tolist()
        return by_name

    def best_line(self) -> str:
        """The graph with the least time per token, and its wins over the second; none with
        different tokens or an unfinished answer."""
        bad = (BranchAnswer.DIFFERENT, BranchAnswer.UNFINISHED)
        unlike = {one.pair.other.letter for one in self.results if one.result in bad}
        rated = [
            (median(ratios), side)
            for side in self.sides
            if side.letter not in unlike and (ratios := self.gains(side).get(PER_TOKEN))
        ]
        if len(rated) < 2:
            return ""
        (speed, best), (_, second), *_ = sorted(rated, key=lambda one: -one[0])
        costs = [
            [run.meter.seconds / (run.meter.tokens or np.inf) for run in self.runs(side)]
            for side in (best, second)
        ]
        wins = sum(0 < one < other for one, other in zip(*costs, strict=True))
        first = self.sides[0].letter
        line = f"best: {best.letter} {best.name}: {speed:.2f} x {first} in time per token"
        return f"{line}, faster than {second.letter} in {wins} of {len(self.prompts)} prompts"

    def document(self) -> dict[str, Any]:
        """The JSON document of `--json` (docs/cli.md)."""
        equality = []
        for pair in self.pairs:
            finding: dict[str, Any] = {"compared": False, "reason": pair.why_not}
            if not pair.why_not:
                finding = {"compared": True, "promised": pair.promised}
                finding |= counts(self.branches(pair))
            letters = {"reference": pair.reference.letter, "graph": pair.other.letter}
            equality.append({**letters, **finding})
        return {
            "schema_version": SCHEMA,
            "status": str(self.status),
            "exit_code": int(self.code),
            "graphs": {side.letter: graph_facts(side) for side in self.sides},
            "equality": equality,
            "prompts": [self._prompt(prompt) for prompt in self.prompts],
            "total": {s.letter: self.total(s).document() for s in self.sides if self.prompts},
            "problems": self.problems,
            "cpu_share": round(self.cpu_share, 3),
            "table": self.table(),
        }

    def _prompt(self, prompt: ComparedPrompt) -> dict[str, Any]:
        runs = prompt.runs.items()
        return {
            "id": prompt.prompt.key,
            "prompt": prompt.prompt.text,
            "graphs": {k: {"status": str(run.status), **run.document()} for k, run in runs},
            "equality": [
                {
                    "reference": pair.reference.letter,
                    "graph": pair.other.letter,
                    "branches": [_branch(one) for one in self.of(prompt).branches(pair)],
                }
                for pair in self.pairs
                if not pair.why_not
            ],
        }

    def table(self) -> list[dict[str, Any]]:
        """A row of figures for each graph; the same keys in all."""
        settings = [dict(text.split("=", 1) for text in side.sets) for side in self.sides]
        paths = dict.fromkeys(path for own in settings for path in own)
        rows = []
        for side, own in zip(self.sides, settings, strict=True) if self.prompts else ():
            cost = self.total(side)
            meter = cost.meter
            row: dict[str, Any] = {"side": side.letter, "graph": side.title}
            row |= {path: own.get(path, "") for path in paths}
            row |= {"prompts": len(self.prompts), "equal": self.equal_branches(side)}
            row |= {"tau_step": meter.tau_step, "target_forwards": meter.forwards}
            row |= {"rounds": meter.rounds, "tokens": meter.tokens, "seconds": meter.seconds}
            per_token = 1000 * meter.seconds / meter.tokens if meter.tokens else None
            row["milliseconds_per_token"] = per_token
            for name, ratios in self.gains(side).items():
                row[name] = median(ratios)
                row |= {f"{name}_lowest": min(ratios), f"{name}_highest": max(ratios)}
            row["kv_peak_bytes"] = sum(pool.peak_bytes for pool in cost.pools.values())
            row["kv_moved_bytes"] = sum(p.moved_bytes.total() for p in cost.pools.values())
            rows.append({**row, "padding_waste": meter.padding_waste})
        return rows


def graph_facts(side: Side) -> dict[str, Any]:
    graph = side.job.program.graph
    options = side.job.options
    return {
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
    }


def _branch(branch: BranchComparison) -> dict[str, Any]:
    plain = {"branch": branch.branch, "result": str(branch.result), "tokens": branch.tokens}
    if branch.difference is None:
        return plain
    difference = asdict(branch.difference)
    decode = branch.pair.reference.session.prompts.decode
    for key, token in (("reference", difference["reference"]), ("graph", difference.pop("other"))):
        end = {END: "stop", CUT: "length"}.get(token)  # how the answer ended instead
        text = decode([token]) if end is None else None
        difference[key] = {"id": None if end else token, "text": text, "end": end}
    return {**plain, "difference": difference}


# -- experiments -------------------------------------------------------------------------------


def experiment_document(comparison: Comparison, prepared: Prepared) -> dict[str, Any]:
    """The result of an experiment as plain data: a row for each side at each point, with figures
    [value, low, high]."""
    rounds = comparison.prompts
    references = references_of(prepared.experiment, prepared.entries)
    # Of each prompt's repeats, in the reference's time per token.
    times = dict[str, list[float]]()
    for prompt in rounds:
        meter = prompt.runs[comparison.sides[references[0]].letter].meter
        times.setdefault(prompt.prompt.key, []).append(meter.seconds / max(meter.tokens, 1))
    shares = [prompt.cpu_share for prompt in rounds]
    spreads = [(max(t) - min(t)) / median(t) for t in times.values() if len(t) > 1]
    return {
        "schema_version": SCHEMA,
        "experiment": prepared.experiment.model_dump(mode="json", exclude_defaults=True),
        "status": str(comparison.status),
        "setup": dict(comparison.setup),
        "rounds": len(rounds),
        "interval": {"level": LEVEL, "draws": DRAWS},
        "noise": {
            "cpu_share": round(median(shares), 3) if shares else None,
            "cpu_share_lowest": round(min(shares), 3) if shares else None,
            "spread": round(median(spreads), 3) if spreads else None,
            "disturbed": bool(shares) and disturbance(median(shares)) is not None,
        },
        "rows": _rows(comparison, prepared, references) if rounds else {},
        "problems": comparison.problems,
        "differences": comparison.failures,
    }


def _rows(
    comparison: Comparison, prepared: Prepared, references: Sequence[int]
) -> dict[str, dict[str, Any]]:
    sides = comparison.sides
    keys = [answer.prompt.key for answer in comparison.prompts]
    prompts = [keys.index(key) for key in keys]
    probed = sides if prepared.experiment.probe and not comparison.code else []
    divergences = _divergences(probed, prepared.prompts.items)
    rows = {}
    for entry, side, at in zip(prepared.entries, sides, references, strict=True):
        runs = (comparison.runs(side), comparison.runs(sides[at]))
        figures = {name: figure.measure(*runs, prompts) for name, figure in FIGURES.items()}
        if side.letter in divergences:
            figures["kl"] = Estimate(divergences[side.letter])
        meter = comparison.total(side).meter
        label = " ".join((entry.side, *(f"{path}={value}" for path, value in entry.varied.items())))
        rows[label] = {
            "side": entry.side,
            "varied": dict(entry.varied),
            "reference": sides[at].letter,
            "equal": comparison.equal_branches(side),
            "figures": {
                name: [None if n is None else float(f"{n:.6g}") for n in figure]
                for name, figure in figures.items()
                if figure is not None
            },
            "acceptance_by_depth": acceptance_by_depth(meter.lengths),
            "ms_per_visit": {
                name: round(state["milliseconds_per_visit"], 4)
                for name, state in state_figures(meter).items()
                if state["milliseconds"]
            },
        }
    return rows


def acceptance_by_depth(lengths: Counter[int]) -> list[float]:
    """Of the branch-rounds whose first n drafts were accepted, the share whose next one was too;
    lengths: branch-rounds by committed tokens."""
    reached = np.array([lengths[n] for n in range(1, max(lengths, default=0) + 1)])[::-1].cumsum()
    return [round(share, 4) for share in (reached[:-1] / reached[1:])[::-1].tolist()]


def _divergences(sides: Sequence[Side], prompts: Sequence[Prompt]) -> dict[str, float]:
    """KL(full || blended) of first tokens, in nats, of the sides that blend."""
    if not sides:
        return {}
    means = {}
    with working("comparing what is blended with full prefills ..."), StopSignal() as halt:
        for side in (side for side in sides if side.blends):
            values: list[float] = []
            for prompt in prompts:
                run, recorder = recorded(side.session, [prompt], None)
                probed = probe_blends(run, recorder)
                limit = side.job.program.graph.limits.max_rounds
                drive(run, recorder, max_rounds=limit, stop=halt)
                values += probed.kl
                run.close()
            if values and halt.status is None:
                means[side.letter] = mean(values)
    return means


# -- rounds ------------------------------------------------------------------------------------


def compare_jobs(
    jobs: Sequence[Job], files: RunFolder | None = None, prepared: Prepared | None = None
) -> Comparison:
    """Answer the jobs' prompts with each graph, and compare; rounds in the files are not repeated.
    prepared: an experiment: prompts are repeated, peers answer, the sides are shuffled, and more is
    warmed up. Raises UsageError, ModelError, GraphError, PromptError."""
    with measuring(f"loading models for {len(jobs)} graphs ...") as show:
        models = SharedModels()
        common = set(jobs[0].options.sets).intersection(*(job.options.sets for job in jobs))
        sides = []
        for letter, job in zip(letters(), jobs, strict=False):
            sets = tuple(setting for setting in job.options.sets if setting not in common)
            sides.append(models.side(letter, job, *model_folders(job), sets=sets))
        prompts = [*jobs[0].prompts]
        setup: dict[str, Any] = {}
        if prepared is not None:
            sides = with_peers(sides, [entry.peer for entry in prepared.entries])
            prompts *= prepared.experiment.repeats
        pairs = pairs_of(sides)
        both = (note for s in sides for note in (*s.job.notes, *notes_of(s.session.models)))
        for note in dict.fromkeys(both):
            complain(f"note: {note}")
        if files is not None or prepared is not None:
            setup = _setup(sides, jobs[0].prompts, jobs[0].options.argv)
        rounds: dict[int, ComparedPrompt] = {}
        if files is not None:
            if prepared is not None:
                experiment = prepared.experiment
                setup |= {"repeats": experiment.repeats, "probe": experiment.probe}
            setup = _begun(files, setup)
            rounds = _saved_rounds(files, prompts, pairs)
        for side in sides:
            for prompt in jobs[0].prompts:
                side.session.request(prompt)  # refused before anything is measured
        missing = [number for number in range(len(prompts)) if number not in rounds]
        pending = [prompts[number] for number in missing]
        drawn = prepared is not None
        with StopSignal() as halt:
            warm_rounds = WARM_UP_OF_EXPERIMENTS if drawn else WARM_UP
            warm_up(sides, pending, halt, rounds=warm_rounds, collect=drawn)
            answers = answer_all(sides, pending, halt, show, numbers=missing if drawn else ())
            for number, answer in zip(missing, answers, strict=False):
                for pair in pairs:
                    answer.results.extend(compare_branches(pair, answer))
                rounds[number] = answer
                if files is not None:
                    files.write_json(ROUND.format(number + 1), _round_document(answer))
        done = [rounds[number] for number in sorted(rounds)]
        return Comparison(halt.status or Status.OK, sides, pairs, done, setup=setup)


def _setup(sides: Sequence[Side], prompts: Sequence[Prompt], argv: Sequence[str]) -> dict[str, Any]:
    jobs = {model_folders(side.job): side.job for side in sides}
    weights = {folders: made_with(job) for folders, job in jobs.items()}  # large files, read once
    prompt_text = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    graphs = {}
    for side in sides:
        options = side.job.options
        made = weights[model_folders(side.job)]
        outline = side.job.outline and str(side.job.outline)
        stop_ids = list(options.stop_ids or ())
        hashes = {"model_hash": made.model_hash, "drafter_hash": made.drafter_hash}
        hashes = {"graph_hash": graph_hash(side.job.program.graph), **hashes}
        facts: dict[str, Any] = {"seed": options.seed, "stop_ids": stop_ids, "outline": outline}
        graphs[side.letter] = {**graph_facts(side), **facts, **hashes}
    return {
        "schema_version": SCHEMA,
        COMMAND: shlex.join(["specsot", *map(redact, argv[1:])]),
        "graphs": graphs,
        "prompts": {"count": len(prompts), "sha256": sha256(prompt_text.encode()).hexdigest()},
        "versions": versions(),
        "machine": machine(),
    }


def _begun(files: RunFolder, setup: dict[str, Any]) -> dict[str, Any]:
    """The setup of the folder, with its first command; raises UsageError for another comparison."""
    place = files.path / SETUP
    try:
        old = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        files.write_json(SETUP, setup)
        return setup
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: cannot be read: {error}") from None
    saved = old if isinstance(old, dict) else {}
    new = json.loads(json.dumps(setup))
    unlike = [name for name in new if name != COMMAND and saved.get(name) != new[name]]
    if unlike:
        reason = f"holds a comparison with other {', '.join(unlike)}: name another folder"
        raise UsageError(f"{files.path}: {reason}")
    return {**setup, COMMAND: saved.get(COMMAND, setup[COMMAND])}


def _round_document(answer: ComparedPrompt) -> dict[str, Any]:
    return {
        "prompt": answer.prompt.key,
        "cpu_share": answer.cpu_share,
        "runs": RUNS.dump_python(dict(answer.runs), mode="json"),
        "results": [
            {
                "pair": [result.pair.reference.letter, result.pair.other.letter],
                "branch": result.branch,
                "result": result.result,
                "tokens": result.tokens,
                "difference": result.difference and asdict(result.difference),
            }
            for result in answer.results
        ],
    }


def _saved_rounds(
    files: RunFolder, prompts: Sequence[Prompt], pairs: Sequence[GraphPair]
) -> dict[int, ComparedPrompt]:
    """By the number of their prompt, without damaged ones."""
    by_letters = {(pair.reference.letter, pair.other.letter): pair for pair in pairs}
    rounds = {}
    for number, prompt in enumerate(prompts):
        try:
            plain = json.loads((files.path / ROUND.format(number + 1)).read_text(encoding="utf-8"))
            answer = ComparedPrompt(prompt, RUNS.validate_python(plain["runs"]), plain["cpu_share"])
            for result in plain["results"]:
                one = BranchComparison(
                    pair=by_letters[result["pair"][0], result["pair"][1]],
                    prompt=answer,
                    branch=result["branch"],
                    result=BranchAnswer(result["result"]),
                    tokens=result["tokens"],
                    difference=result["difference"] and Difference(**result["difference"]),
                )
                answer.results.append(one)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        rounds[number] = answer
    return rounds
