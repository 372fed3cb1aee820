"""The result of an experiment: a row of figures for each side at each point, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from ..limits import disturbance
from ..prepare.inputs import Prompt
from ..record.metrics import state_figures
from ..run.blend_probe import probe_blends
from ..run.runner import StopSignal, drive, recorded
from .comparison import Comparison, equal_branches
from .experiment import RESULT_SCHEMA, Entry, Experiment
from .figures import DRAWS, FIGURES, LEVEL, Estimate, acceptance_by_depth
from .sides import ComparedPrompt, Side, SideRun, letters


@dataclass(frozen=True, slots=True)
class Row:
    """One side at one point. reference: the letter of the row that its ratios are taken to."""

    letter: str
    side: str
    varied: Mapping[str, str]
    reference: str
    equal: str
    figures: Mapping[str, Estimate]
    accepted: Sequence[float]
    states: Mapping[str, float]

    @property
    def label(self) -> str:
        """Tells it from all other rows, whatever their order is."""
        return " ".join((self.side, *(f"{path}={value}" for path, value in self.varied.items())))

    def document(self) -> dict[str, Any]:
        """Rounded to what a clock can tell."""
        found = {
            name: [None if one is None else float(f"{one:.6g}") for one in asdict(value).values()]
            for name, value in self.figures.items()
        }
        return {
            "side": self.side,
            "varied": dict(self.varied),
            "reference": self.reference,
            "equal": self.equal,
            "figures": found,
            "acceptance_by_depth": [round(share, 4) for share in self.accepted],
            "ms_per_visit": {name: round(ms, 4) for name, ms in self.states.items()},
        }


def kept_rows(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a kept result."""
    return [
        Row(
            letter,
            row["side"],
            row["varied"],
            row["reference"],
            row["equal"],
            {name: Estimate(*values) for name, values in row["figures"].items()},
            row["acceptance_by_depth"],
            row["ms_per_visit"],
        )
        for letter, row in zip(letters(), result["rows"].values(), strict=False)
    ]


def rows_of(
    comparison: Comparison,
    entries: Sequence[Entry],
    references: Sequence[int],
    probed: Mapping[str, float],
) -> list[Row]:
    """All rows, if any prompt was answered by every side; probed: `kl` by letter."""
    rounds = comparison.prompts
    sides = comparison.sides
    keys = {key: n for n, key in enumerate(dict.fromkeys(item.prompt.key for item in rounds))}
    prompts = [keys[item.prompt.key] for item in rounds]
    rows = []
    for entry, side, at in zip(entries, sides, references, strict=True) if rounds else ():
        runs = _runs(rounds, side)
        reference = _runs(rounds, sides[at])
        figures = {name: item.measure(runs, reference, prompts) for name, item in FIGURES.items()}
        if side.letter in probed:
            figures["kl"] = Estimate(probed[side.letter])
        meter = comparison.total(side).meter
        rows.append(
            Row(
                side.letter,
                entry.side,
                entry.varied,
                sides[at].letter,
                equal_branches(comparison, side),
                {name: item for name, item in figures.items() if item is not None},
                acceptance_by_depth(meter),
                _visits(state_figures(meter)),
            )
        )
    return rows


def _runs(rounds: Sequence[ComparedPrompt], side: Side) -> list[SideRun]:
    return [prompt.runs[side.letter] for prompt in rounds]


def _visits(states: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Milliseconds of a visit to each state that computes anything."""
    return {
        name: state["milliseconds_per_visit"]
        for name, state in states.items()
        if state["milliseconds"]
    }


def noise_of(comparison: Comparison, references: Sequence[int]) -> dict[str, Any]:
    """The disturbance of the machine, and the spread of repeats of one prompt.

    spread: of each prompt's repeats (longest - shortest) / median in the reference's time per
    token, the median over prompts; None without repeats.
    """
    rounds = comparison.prompts
    first = comparison.sides[references[0]].letter
    shares = [prompt.cpu_share for prompt in rounds]
    times = dict[str, list[float]]()
    for prompt in rounds:
        meter = prompt.runs[first].cost.meter
        times.setdefault(prompt.prompt.key, []).append(meter.seconds / max(meter.tokens, 1))
    many = [seconds for seconds in times.values() if len(seconds) > 1]
    spreads = [(max(seconds) - min(seconds)) / median(seconds) for seconds in many]
    return {
        "cpu_share": round(median(shares), 3) if shares else None,
        "cpu_share_lowest": round(min(shares), 3) if shares else None,
        "spread": round(median(spreads), 3) if spreads else None,
        "disturbed": bool(shares) and disturbance(median(shares)) is not None,
    }


def document(
    experiment: Experiment,
    comparison: Comparison,
    rows: Sequence[Row],
    setup: Mapping[str, Any],
    references: Sequence[int],
) -> dict[str, Any]:
    """Everything, for files and `--json`."""
    return {
        "schema_version": RESULT_SCHEMA,
        "experiment": experiment.model_dump(mode="json", exclude_defaults=True),
        "status": str(comparison.status),
        "setup": dict(setup),
        "rounds": len(comparison.prompts),
        "interval": {"level": LEVEL, "draws": DRAWS},
        "noise": noise_of(comparison, references),
        "rows": {row.label: row.document() for row in rows},
        "problems": comparison.problems,
        "differences": comparison.failures,
    }


def probe_all(
    sides: Sequence[Side], prompts: Sequence[Prompt], halt: StopSignal
) -> dict[str, float]:
    """KL(full || blended) of first tokens, in nats, by the letters of the sides that blend."""
    divergences = {
        side.letter: _divergences(side, prompts, halt) for side in sides if _blends(side)
    }
    return {letter: mean(values) for letter, values in divergences.items() if values}


def _blends(side: Side) -> bool:
    return side.peer is None and side.job.program.graph.blend is not None


def _divergences(side: Side, prompts: Sequence[Prompt], halt: StopSignal) -> list[float]:
    divergences: list[float] = []
    for prompt in prompts:
        if halt.status is not None:
            return []
        run, recorder = recorded(side.session, [prompt], None)
        probed = probe_blends(run)
        drive(run, recorder, max_rounds=side.job.program.graph.limits.max_rounds, stop=halt)
        divergences += probed.kl
        run.close()
    return divergences
