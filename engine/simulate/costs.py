"""Step costs of a simulation: a linear model, fitted to the traces of real runs; and collectives as
in NCCL's own model. docs/cluster_simulated.md has the sources of the numbers."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from ...states.yaml.source import number_of
from ..errors import UsageError
from ..record.recorder import Record

MIN_STEPS = 8  # of a fit


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of a step; more for a forward, each row of the target's forward, each branch
    with drafts, and each row of the pool in use. tokens: a branch's rounds by their number of
    committed tokens. error: mean absolute error of the fit, relative to the mean; steps: of it."""

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
            if not (usable and cost.tokens):
                raise ValueError("they are at least 0, tokens at least 1")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: invalid costs of steps: {error}") from None
        return cost


def fit(records: Iterable[Record]) -> StepCost:
    """Non-negative costs, fitted by least squares to steps with a forward, from one `schedule` to
    the next, if no longer than four times the median. Raises UsageError: the trace has too few."""
    steps = list[tuple[int, ...]]()  # nanoseconds, 1, rows, branches with drafts, slots in use
    tokens = Counter[int]()
    start: int | None = None
    forward: tuple[int, ...] = ()
    for record in records:
        if record["kind"] == "step":
            if start is not None and forward:
                steps.append((record["t"] - start, 1, *forward))
            start = record["t"]
            forward = ()
        elif record["kind"] == "round":
            rounds = zip(record["committed"], record["accepted"], strict=True)
            lengths = [committed for committed, accepted in rounds if accepted >= 0]
            tokens.update(length for length in lengths if length)
            if start is not None and record["rows"]:
                forward = (record["rows"], len(lengths), record["kv"])
    if len(steps) < MIN_STEPS:
        found = f"{number_of(len(steps), 'step')} with a forward"
        raise UsageError(f"the trace has {found}, a fit needs {MIN_STEPS}")
    values_S5 = np.array(steps, float)
    values_S5 = values_S5[values_S5[:, 0] <= 4 * np.median(values_S5[:, 0])]
    millis_S = values_S5[:, 0] / 1e6
    weights_4, _ = nnls(values_S5[:, 1:], millis_S)
    error = float(np.abs(values_S5[:, 1:] @ weights_4 - millis_S).mean() / millis_S.mean())
    counts = {str(length): tokens[length] for length in sorted(tokens)} or {"1": 1}
    costs = dict(zip(("forward", "row", "branch", "slot"), map(float, weights_4), strict=True))
    return StepCost(step=0.0, tokens=counts, error=error, steps=len(values_S5), **costs)


class Link(NamedTuple):
    """base: seconds of any collective; hop: of each step; bandwidth: bytes a second, one way."""

    name: str
    base: float
    hop: float
    bandwidth: float

    def all_reduce(self, size: int, ranks: int) -> float:
        """Seconds of a sum of `size` bytes over the ranks."""
        share = 2 * (ranks - 1)
        seconds = self.base + share * self.hop + share / ranks * size / self.bandwidth
        return seconds if ranks > 1 else 0.0

    def all_gather(self, size: int, ranks: int) -> float:
        """Seconds of a gather of `size` bytes in all."""
        seconds = self.base + (ranks - 1) * (self.hop + size / ranks / self.bandwidth)
        return seconds if ranks > 1 else 0.0

    def send(self, size: int) -> float:
        """Seconds of a transfer between two workers."""
        return self.base + self.hop + size / self.bandwidth


LINKS = {
    "loopback": Link("loopback", 0.0, 0.9e-3, 0.32e9),
    "10gbe": Link("10gbe", 0.0, 25e-6, 1.25e9),
    "100gbe": Link("100gbe", 3.6e-6, 2.7e-6, 12.5e9),
    "nvlink": Link("nvlink", 3.6e-6, 0.47e-6, 450e9),
}


class ModelShape(NamedTuple):
    """Sizes of a target; kv_bytes: keys and values of a token; itemsize: bytes of a number."""

    layers: int
    hidden: int
    kv_bytes: int
    vocabulary: int
    itemsize: int = 4


SHAPES = {
    "llama-8b": ModelShape(32, 4096, 2 * 32 * 8 * 128 * 2, 128256, itemsize=2),
    "llama-70b": ModelShape(80, 8192, 2 * 80 * 8 * 128 * 2, 128256, itemsize=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost(StepCost):
    """Steps of a tensor-parallel group: a rank computes its part of a forward, plus two all-reduces
    a layer and one gather of the logits. Every rank drafts. tree: rows of a branch in a round."""

    ranks: int
    link: Link
    shape: ModelShape
    tree: int

    def seconds(self, rows: int, branches: int, slots: int) -> float:
        if not rows:
            return self.step / 1e3
        work = (self.forward + self.row * rows + self.slot * slots) / self.ranks
        shape = self.shape
        layer = self.link.all_reduce(rows * shape.hidden * shape.itemsize, self.ranks)
        logits_size = max(branches * self.tree, 1) * shape.vocabulary * shape.itemsize
        collectives = 2 * shape.layers * layer + self.link.all_gather(logits_size, self.ranks)
        return (self.step + work + self.branch * branches) / 1e3 + collectives
