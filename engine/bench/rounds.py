"""Rounds of prompts through sides, measured, and saved in a folder that a later call completes.

A round is one prompt through every side. Half of one is never saved: its other half would be
measured in another state of the machine.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from typing import Any

from ..errors import UsageError
from ..prepare.environment import machine, model_folders, redact, versions
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..prepare.repeat import graph_hash
from ..record.metrics import Meter
from ..record.run_folder import BestEffortRunFolder
from ..run.runner import Status, StopSignal
from ..run.writer import made_with
from ..shell import complain
from ..terminal import measuring
from .comparison import SCHEMA, Comparison, graph_facts
from .equality import BranchAnswer, BranchComparison, Difference, GraphPair, judge_prompt, pairs_of
from .experiment import Prepared
from .peers import with_peers
from .sides import (
    ComparedPrompt,
    Cost,
    Moments,
    PoolUse,
    Side,
    SideRun,
    answer_all,
    load_sides,
    loading_notes,
    warm_up,
)

SETUP = "setup.json"
COMMAND = "command"
WARM_UP = 2  # rounds of the first prompt that no figure counts
WARM_UP_OF_EXPERIMENTS = 16


def compare_jobs(
    jobs: Sequence[Job],
    files: BestEffortRunFolder | None = None,
    prepared: Prepared | None = None,
) -> Comparison:
    """Load the models, answer the jobs' prompts with each graph, and compare the answers.

    Rounds that the files already contain are not measured again.

    Args:
        prepared: the experiment of the jobs: all prompts are repeated, peers answer, the order of
            the sides is drawn, and more is warmed up.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    with measuring(f"loading models for {len(jobs)} graphs ...") as show:
        sides = load_sides(jobs)
        prompts = [*jobs[0].prompts]
        setup: dict[str, Any] = {}
        if prepared is not None:
            sides = with_peers(sides, [entry.peer for entry in prepared.entries])
            prompts *= prepared.experiment.repeats
        pairs = pairs_of(sides)
        for note in loading_notes(sides):
            complain(f"note: {note}")
        if files is not None or prepared is not None:
            setup = _setup(sides, jobs[0].prompts, jobs[0].options.argv)
        rounds = {}
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
        with StopSignal() as halt:
            if prepared is None:
                warm_up(sides, pending, halt, rounds=WARM_UP)
                answers = answer_all(sides, pending, halt, show)
            else:
                warm_up(sides, pending, halt, rounds=WARM_UP_OF_EXPERIMENTS, collect=True)
                answers = answer_all(sides, pending, halt, show, numbers=missing)
            for number, answer in zip(missing, answers, strict=False):
                rounds[number] = answer, judge_prompt(answer, pairs)
                if files is not None:
                    files.write_json(_name(number), _round_document(*rounds[number]))
        done = [rounds[number] for number in sorted(rounds)]
        return Comparison(
            status=halt.status or Status.OK,
            sides=sides,
            pairs=pairs,
            prompts=[answer for answer, _ in done],
            results=[branch for _, judged in done for branch in judged],
            setup=setup,
        )


def _setup(sides: Sequence[Side], prompts: Sequence[Prompt], argv: Sequence[str]) -> dict[str, Any]:
    """Everything that the figures depend on; raises ModelError."""
    jobs = {model_folders(side.job): side.job for side in sides}
    weights = {folders: made_with(job) for folders, job in jobs.items()}  # large files, read once
    prompt_text = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    return {
        "schema_version": SCHEMA,
        COMMAND: shlex.join(["specsot", *map(redact, argv[1:])]),
        "graphs": {
            side.letter: {
                **graph_facts(side),
                "seed": side.job.options.seed,
                "stop_ids": list(side.job.options.stop_ids or ()),
                "outline": side.job.outline and str(side.job.outline),
                "graph_hash": graph_hash(side.job.program.graph),
                "model_hash": weights[model_folders(side.job)].model_hash,
                "drafter_hash": weights[model_folders(side.job)].drafter_hash,
            }
            for side in sides
        },
        "prompts": {"count": len(prompts), "sha256": sha256(prompt_text.encode()).hexdigest()},
        "versions": versions(),
        "machine": machine(),
    }


def _begun(files: BestEffortRunFolder, setup: dict[str, Any]) -> dict[str, Any]:
    """The setup of the folder, with the command that began it.

    Raises:
        UsageError: the folder holds another comparison.
    """
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


def _name(number: int) -> str:
    return f"round-{number + 1:04}.json"


def _sums(value: Any) -> dict[str, Any]:
    """The fields of figures that add up: numbers, and numbers by name."""
    values = {figure.name: getattr(value, figure.name) for figure in fields(value)}
    return {name: number for name, number in values.items() if isinstance(number, int | Counter)}


def _round_document(answer: ComparedPrompt, results: Sequence[BranchComparison]) -> dict[str, Any]:
    return {
        "prompt": answer.prompt.key,
        "cpu_share": answer.cpu_share,
        "runs": {
            letter: {
                "status": run.status,
                "problems": list(run.problems),
                "meter": _sums(run.cost.meter),
                "pools": {name: vars(use) for name, use in run.cost.pools.items()},
                "moments": vars(run.cost.moments),
                "digest": run.digest,
            }
            for letter, run in answer.runs.items()
        },
        "results": [
            {
                "pair": [result.pair.reference.letter, result.pair.other.letter],
                "branch": result.branch,
                "result": result.result,
                "tokens": result.tokens,
                "difference": result.difference and asdict(result.difference),
            }
            for result in results
        ],
    }


def _saved_rounds(
    files: BestEffortRunFolder, prompts: Sequence[Prompt], pairs: Sequence[GraphPair]
) -> dict[int, tuple[ComparedPrompt, list[BranchComparison]]]:
    """The rounds of the folder, by the number of their prompt, without damaged ones."""
    rounds = {}
    for number, prompt in enumerate(prompts):
        try:
            text = (files.path / _name(number)).read_text(encoding="utf-8")
            rounds[number] = _read_round(json.loads(text), prompt, pairs)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return rounds


def _filled(value: Any, plain: Mapping[str, Any]) -> Any:
    for name, usual in _sums(value).items():
        number = plain[name]
        if isinstance(usual, Counter):
            of_numbers = name == "lengths"  # JSON has no keys but strings
            number = Counter({int(key) if of_numbers else key: n for key, n in number.items()})
        setattr(value, name, number)
    return value


def _read_round(
    plain: Mapping[str, Any], prompt: Prompt, pairs: Sequence[GraphPair]
) -> tuple[ComparedPrompt, list[BranchComparison]]:
    runs = {}
    for letter, run in plain["runs"].items():
        pools = {name: _filled(PoolUse(), use) for name, use in run["pools"].items()}
        moments = _filled(Moments(), run["moments"])
        cost = Cost(_filled(Meter(), run["meter"]), pools, moments)
        runs[letter] = SideRun(Status(run["status"]), cost, run["problems"], digest=run["digest"])
    answer = ComparedPrompt(prompt, runs, plain["cpu_share"])
    by_letters = {(pair.reference.letter, pair.other.letter): pair for pair in pairs}
    results = [
        BranchComparison(
            pair=by_letters[result["pair"][0], result["pair"][1]],
            prompt=answer,
            branch=result["branch"],
            result=BranchAnswer(result["result"]),
            tokens=result["tokens"],
            difference=result["difference"] and Difference(**result["difference"]),
        )
        for result in plain["results"]
    ]
    return answer, results
