"""What a step costs, in milliseconds: a linear model, fitted to the traces of real runs."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..record.trace import Record

LEAST = 8  # steps that a fit needs


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of a step: of any step; of one with a forward; and more for each row of the
    target's forward, for each branch that is drafted for, and for each row of the pool in use.

    tokens: how often a branch's round committed so many tokens, by number.
    error: mean absolute error of the fit, as a share of the mean; steps: that it was fitted to.
    """

    step: float = 0.2
    forward: float = 4.0
    row: float = 0.05
    branch: float = 0.2
    slot: float = 0.0
    tokens: Mapping[str, int] = field(default_factory=lambda: {"1": 1})
    error: float = 0.0
    steps: int = 0

    def seconds(self, rows: int, branches: int, slots: int) -> float:
        """Of one step; `rows` 0 without a forward."""
        if not rows:
            return self.step / 1e3
        work = self.row * rows + self.branch * branches + self.slot * slots
        return (self.step + self.forward + work) / 1e3

    @property
    def mean_tokens(self) -> float:
        """Tokens that a round of a branch commits."""
        return sum(int(k) * n for k, n in self.tokens.items()) / sum(self.tokens.values())

    def drawn(self, chance: random.Random) -> Iterator[int]:
        """Tokens that rounds commit, one after another, as often as they were seen."""
        counts, weights = zip(*((int(k), n) for k, n in self.tokens.items()), strict=True)
        while True:
            yield from chance.choices(counts, weights, k=4096)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "StepCost":
        """Raises UsageError: it is no such file."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            usable = min(found.step, found.forward, found.row, found.branch, found.slot) >= 0
            usable = usable and all(int(k) > 0 and n > 0 for k, n in found.tokens.items())
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: no costs of steps: {error}") from None
        if not (usable and found.tokens):
            raise UsageError(f"{path}: no costs of steps: they are at least 0, tokens at least 1")
        return found


@dataclass(slots=True)
class _Step:
    """What a trace tells of one step."""

    nanos: int = 0
    rows: int = 0
    branches: int = 0
    slots: int = 0


def _steps(records: Iterable[Record]) -> Iterator[_Step]:
    """Steps with a forward, from one `schedule` to the next."""
    begun = None
    step = _Step()
    for record in records:
        if record["kind"] == "step":
            if begun is not None and step.rows:
                step.nanos = record["t"] - begun
                yield step
            begun = record["t"]
            step = _Step()
        elif record["kind"] == "round" and begun is not None:
            drafted = sum(count >= 0 for count in record["accepted"])
            step.rows = record["rows"]
            step.branches = drafted
            step.slots = record["kv"]


def _tokens(records: Iterable[Record]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in records:
        for taken, accepted in zip(
            record.get("committed", ()), record.get("accepted", ()), strict=True
        ):
            if record["kind"] == "round" and accepted >= 0 and taken > 0:
                found[str(taken)] = found.get(str(taken), 0) + 1
    return dict(sorted(found.items(), key=lambda one: int(one[0])))


def fit(records: list[Record]) -> StepCost:
    """The costs that explain the steps of a trace best; none of them is negative.

    Steps that took more than four times the median of all are left out: something else ran then.

    Raises:
        UsageError: the trace has too few steps.
    """
    rounds = [one for one in records if one["kind"] in ("step", "round")]
    steps = list(_steps(rounds))
    if len(steps) < LEAST:
        raise UsageError(f"the trace has {len(steps)} steps with a forward, a fit needs {LEAST}")
    limit = 4 * float(np.median([one.nanos for one in steps]))
    some = [one for one in steps if one.nanos <= limit]
    millis_S = np.array([one.nanos for one in some]) / 1e6
    known_S4 = np.array([[1, one.rows, one.branches, one.slots] for one in some], float)
    found = _not_negative(known_S4, millis_S)
    wrong = float(np.abs(known_S4 @ found - millis_S).mean() / millis_S.mean())
    forward, row, branch, slot = map(float, found)
    told = _tokens([one for one in rounds if one["kind"] == "round"]) or {"1": 1}
    return StepCost(0.0, forward, row, branch, slot, told, wrong, len(some))


def _not_negative(known_SF: Any, wanted_S: Any) -> Any:
    """Least squares without negative coefficients: those are left out, the worst one first."""
    inside = list(range(known_SF.shape[1]))
    found_F = np.zeros(known_SF.shape[1])
    while inside:
        part = np.linalg.lstsq(known_SF[:, inside], wanted_S, rcond=None)[0]
        if (part >= 0).all():
            found_F[inside] = part
            break
        inside.pop(int(part.argmin()))
    return found_F
