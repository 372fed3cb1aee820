"""Step costs of a simulation: a linear model, fitted to the traces of real runs; and collectives.

A collective takes a constant, a delay for each of its steps round the ring, and its bytes over the
bandwidth, as in NCCL's own model. docs/cluster_simulated.md has the sources of the numbers.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...models.config import DecoderConfig
from ..errors import UsageError
from ..record.trace import Record

MIN_STEPS = 8  # of a fit


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of a step; more for a forward, for each row of the target's forward, for each
    branch with drafts, and for each row of the pool in use.

    tokens: counts of a branch's rounds by their number of committed tokens.
    error: mean absolute error of the fit, relative to the mean; steps: number of fitted steps.
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
        """Duration of one step; `rows` 0 without a forward."""
        if not rows:
            return self.step / 1e3
        work = self.row * rows + self.branch * branches + self.slot * slots
        return (self.step + self.forward + work) / 1e3

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens that a round of a branch commits."""
        return sum(int(k) * n for k, n in self.tokens.items()) / sum(self.tokens.values())

    def round_tokens(self, rng: random.Random) -> Iterator[int]:
        """Numbers of tokens committed by successive rounds, sampled by `tokens`."""
        counts, weights = zip(*((int(k), n) for k, n in self.tokens.items()), strict=True)
        while True:
            yield from rng.choices(counts, weights, k=4096)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "StepCost":
        """Saved costs; raises UsageError for another file."""
        try:
            cost = cls(**json.loads(path.read_text(encoding="utf-8")))
            usable = min(cost.step, cost.forward, cost.row, cost.branch, cost.slot) >= 0
            usable = usable and all(int(k) > 0 and n > 0 for k, n in cost.tokens.items())
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: not costs of steps: {error}") from None
        if not (usable and cost.tokens):
            raise UsageError(f"{path}: not costs of steps: they are at least 0, tokens at least 1")
        return cost


@dataclass(slots=True)
class _Step:
    """One step of a trace."""

    nanos: int = 0
    rows: int = 0
    branches: int = 0
    slots: int = 0


def _steps(records: Iterable[Record]) -> Iterator[_Step]:
    """Steps with a forward, from one `schedule` to the next."""
    start = None
    step = _Step()
    for record in records:
        if record["kind"] == "step":
            if start is not None and step.rows:
                step.nanos = record["t"] - start
                yield step
            start = record["t"]
            step = _Step()
        elif record["kind"] == "round" and start is not None:
            drafted = sum(count >= 0 for count in record["accepted"])
            step.rows = record["rows"]
            step.branches = drafted
            step.slots = record["kv"]


def _tokens(records: Iterable[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        for committed, accepted in zip(
            record.get("committed", ()), record.get("accepted", ()), strict=True
        ):
            if record["kind"] == "round" and accepted >= 0 and committed > 0:
                counts[str(committed)] = counts.get(str(committed), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))


def fit(records: list[Record]) -> StepCost:
    """Non-negative costs fitted to the steps of a trace by least squares.

    Steps longer than four times the median are left out as disturbed.

    Raises:
        UsageError: the trace has too few steps.
    """
    rounds = [record for record in records if record["kind"] in ("step", "round")]
    steps = list(_steps(rounds))
    if len(steps) < MIN_STEPS:
        raise UsageError(
            f"the trace has {len(steps)} steps with a forward, a fit needs {MIN_STEPS}"
        )
    limit = 4 * float(np.median([step.nanos for step in steps]))
    steps = [step for step in steps if step.nanos <= limit]
    millis_S = np.array([step.nanos for step in steps]) / 1e6
    features_S4 = np.array([[1, s.rows, s.branches, s.slots] for s in steps], float)
    weights_4 = _non_negative(features_S4, millis_S)
    forward, row, branch, slot = map(float, weights_4)
    return StepCost(
        step=0.0,
        forward=forward,
        row=row,
        branch=branch,
        slot=slot,
        tokens=_tokens([record for record in rounds if record["kind"] == "round"]) or {"1": 1},
        error=float(np.abs(features_S4 @ weights_4 - millis_S).mean() / millis_S.mean()),
        steps=len(steps),
    )


def _non_negative(features_SF: Any, target_S: Any) -> Any:
    """Least squares; features with negative coefficients are removed, the most negative first."""
    columns = list(range(features_SF.shape[1]))
    weights_F = np.zeros(features_SF.shape[1])
    while columns:
        part = np.linalg.lstsq(features_SF[:, columns], target_S, rcond=None)[0]
        if (part >= 0).all():
            weights_F[columns] = part
            break
        columns.pop(int(part.argmin()))
    return weights_F


@dataclass(frozen=True, slots=True)
class Link:
    """base: seconds of any collective; hop: of each step; bandwidth: bytes a second, one way."""

    name: str
    base: float
    hop: float
    bandwidth: float

    def all_reduce(self, size: int, ranks: int) -> float:
        """Seconds of a sum of `size` bytes over the ranks."""
        if ranks == 1:
            return 0.0
        share = 2 * (ranks - 1)
        return self.base + share * self.hop + share / ranks * size / self.bandwidth

    def all_gather(self, size: int, ranks: int) -> float:
        """Seconds of a gather of `size` bytes in all."""
        if ranks == 1:
            return 0.0
        return self.base + (ranks - 1) * (self.hop + size / ranks / self.bandwidth)

    def send(self, size: int) -> float:
        """Seconds of a transfer between two workers."""
        return self.base + self.hop + size / self.bandwidth


LINKS = {
    link.name: link
    for link in (
        Link("loopback", 0.0, 0.9e-3, 0.32e9),
        Link("10gbe", 0.0, 25e-6, 1.25e9),
        Link("100gbe", 3.6e-6, 2.7e-6, 12.5e9),
        Link("nvlink", 3.6e-6, 0.47e-6, 450e9),
    )
}


def link_of(text: str) -> Link:
    """`loopback`, `10gbe`, `100gbe`, `nvlink`, or microseconds a step and GB/s, as in `25:1.25`.

    Raises:
        UsageError: another text.
    """
    if text in LINKS:
        return LINKS[text]
    numbers = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text)
    if numbers is None or float(numbers[2]) == 0:
        raise UsageError(f"--link {text}: {', '.join(LINKS)}, or MICROSECONDS:GB_PER_SECOND")
    return Link(text, 0.0, float(numbers[1]) / 1e6, float(numbers[2]) * 1e9)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a target: layers, hidden size, bytes of a token's keys and values, vocabulary, bytes
    of a number."""

    layers: int
    hidden: int
    kv_bytes: int
    vocabulary: int
    itemsize: int = 4

    @classmethod
    def of(cls, config: DecoderConfig, itemsize: int) -> "ModelShape":
        """The sizes of a checkpoint."""
        kv_bytes = 2 * config.num_layers * config.kv_heads * config.head_dim * itemsize
        return cls(
            layers=config.num_layers,
            hidden=config.hidden_size,
            kv_bytes=kv_bytes,
            vocabulary=config.vocab_size,
            itemsize=itemsize,
        )


SHAPES = {
    "llama-8b": ModelShape(32, 4096, 2 * 32 * 8 * 128 * 2, 128256, 2),
    "llama-70b": ModelShape(80, 8192, 2 * 80 * 8 * 128 * 2, 128256, 2),
}


@dataclass(frozen=True, slots=True)
class GroupCost(StepCost):
    """Steps of a tensor-parallel group: a rank computes its part of a forward, plus two all-reduces
    a layer and one gather of the logits. Every rank drafts for itself."""

    ranks: int = 1
    link: Link = LINKS["nvlink"]
    shape: ModelShape = SHAPES["llama-8b"]
    tree: int = 1

    @classmethod
    def of_steps(
        cls, cost: StepCost, ranks: int, link: Link, shape: ModelShape, tree: int
    ) -> "GroupCost":
        """The costs of a group from those of one worker.

        Args:
            tree: rows of a branch in a round, all with logits.
        """
        return cls(
            **{f.name: getattr(cost, f.name) for f in fields(StepCost)},
            ranks=ranks,
            link=link,
            shape=shape,
            tree=tree,
        )

    def seconds(self, rows: int, branches: int, slots: int) -> float:
        if not rows:
            return self.step / 1e3
        work = (self.forward + self.row * rows + self.slot * slots) / self.ranks
        collectives = self.collectives(rows, max(branches * self.tree, 1))
        return (self.step + work + self.branch * branches) / 1e3 + collectives

    def collectives(self, rows: int, logits_rows: int) -> float:
        """Seconds of a forward's collectives; `logits_rows` of its rows have logits."""
        shape = self.shape
        size = self.shape.itemsize
        layer = self.link.all_reduce(rows * shape.hidden * size, self.ranks)
        logits = self.link.all_gather(logits_rows * shape.vocabulary * size, self.ranks)
        return 2 * shape.layers * layer + logits
