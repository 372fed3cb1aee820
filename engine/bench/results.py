"""The folder that a comparison is kept in, round by round: an interrupted one goes on from there.

A round is one prompt through every graph. Half of one is never kept: its other half would be
measured on another day's machine.
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
from ..prepare.repeat import graph_hash
from ..record.metrics import Meter
from ..record.run_folder import BestEffortRunFolder
from ..run.runner import Status
from ..run.writer import made_with
from .comparison import Comparison, document, graph_facts, rows_of
from .equality import BranchAnswer, BranchComparison, Difference, GraphPair
from .sides import ComparedPrompt, Cost, Moments, PoolUse, Side, SideRun
from .tables import comparison_page, csv_text

SETUP = "setup.json"
RESULT = "result.json"
TABLE = "table.csv"
PAGE = "table.md"
SCHEMA = 1
COMMAND = "command"


def setup_of(
    sides: Sequence[Side], prompts: Sequence[Prompt], argv: Sequence[str]
) -> dict[str, Any]:
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


class ResultsFolder:
    """Setup, rounds and tables of one comparison.

    Raises:
        UsageError: the folder holds another one.
    """

    def __init__(self, files: BestEffortRunFolder, setup: Mapping[str, Any]) -> None:
        self.files = files
        self.setup = setup
        self._begin()

    def _begin(self) -> None:
        """Raises UsageError if the folder holds another comparison."""
        place = self.files.path / SETUP
        try:
            old = json.loads(place.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.files.write_json(SETUP, self.setup)
            return
        except (OSError, ValueError) as error:
            raise UsageError(f"{place}: cannot be read: {error}") from None
        new = json.loads(json.dumps(self.setup))
        saved = old if isinstance(old, dict) else {}
        self.setup = {**self.setup, COMMAND: saved.get(COMMAND, self.setup[COMMAND])}
        unlike = [name for name in new if name != COMMAND and saved.get(name) != new[name]]
        if unlike:
            what = ", ".join(unlike)
            reason = f"holds a comparison with other {what}: name another folder"
            raise UsageError(f"{self.files.path}: {reason}")

    def kept(
        self, prompts: Sequence[Prompt], pairs: Sequence[GraphPair]
    ) -> dict[int, tuple[ComparedPrompt, list[BranchComparison]]]:
        """The rounds that are there, by the number of their prompt; damaged ones are not."""
        rounds = {}
        for number, prompt in enumerate(prompts):
            try:
                text = (self.files.path / _name(number)).read_text(encoding="utf-8")
                rounds[number] = _read(json.loads(text), prompt, pairs)
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return rounds

    def add(self, number: int, round_: ComparedPrompt, results: Sequence[BranchComparison]) -> None:
        """Keep a round."""
        self.files.write_json(_name(number), _plain(round_, results))

    def finish(self, comparison: Comparison, title: str, notes: Sequence[str]) -> None:
        """The tables, of all rounds that there are."""
        rows = rows_of(comparison)
        setup = self.setup
        facts = {COMMAND: f"`{setup[COMMAND]}`", "prompts": setup["prompts"]["count"]}
        facts |= {"status": comparison.status, **setup["machine"], **setup["versions"]}
        facts["a busy loop got of a CPU"] = f"{comparison.cpu_share:.0%}"
        self.files.write_text(TABLE, csv_text(rows))
        self.files.write_text(PAGE, comparison_page(title, rows, facts, notes))
        self.files.write_json(RESULT, {**document(comparison), "setup": setup})


def _name(number: int) -> str:
    return f"round-{number + 1:04}.json"


def _plain(round_: ComparedPrompt, results: Sequence[BranchComparison]) -> dict[str, Any]:
    return {
        "prompt": round_.prompt.key,
        "cpu_share": round_.cpu_share,
        "runs": {
            letter: {
                "status": run.status,
                "problems": list(run.problems),
                "meter": {name: getattr(run.cost.meter, name) for name in _sums(Meter())},
                "pools": {name: vars(use) for name, use in run.cost.pools.items()},
                "moments": vars(run.cost.moments),
                "digest": run.digest,
            }
            for letter, run in round_.runs.items()
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


def _sums(value: Any) -> list[str]:
    """The fields of figures that add up: numbers, and numbers by name."""
    values = {figure.name: getattr(value, figure.name) for figure in fields(value)}
    return [name for name, figure in values.items() if isinstance(figure, int | Counter)]


def _filled(value: Any, plain: Mapping[str, Any]) -> Any:
    for name in _sums(value):
        number = plain[name]
        if isinstance(getattr(value, name), Counter):
            numbers = name == "lengths"  # JSON has no keys but strings
            number = Counter({int(key) if numbers else key: n for key, n in number.items()})
        setattr(value, name, number)
    return value


def _read(
    plain: Mapping[str, Any], prompt: Prompt, pairs: Sequence[GraphPair]
) -> tuple[ComparedPrompt, list[BranchComparison]]:
    runs = {}
    for letter, run in plain["runs"].items():
        pools = {name: _filled(PoolUse(), use) for name, use in run["pools"].items()}
        moments = _filled(Moments(), run["moments"])
        cost = Cost(_filled(Meter(), run["meter"]), pools, moments)
        status = Status(run["status"])
        runs[letter] = SideRun(status, cost, run["problems"], digest=run["digest"])
    round_ = ComparedPrompt(prompt, runs, plain["cpu_share"])
    by_letters = {(pair.reference.letter, pair.other.letter): pair for pair in pairs}
    results = [
        BranchComparison(
            by_letters[result["pair"][0], result["pair"][1]],
            round_,
            result["branch"],
            BranchAnswer(result["result"]),
            result["tokens"],
            result["difference"] and Difference(**result["difference"]),
        )
        for result in plain["results"]
    ]
    return round_, results
