"""The figures of a row: their parts, their direction (docs/metrics.md), and bootstrap intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..record.metrics import Meter
    from .sides import Cost, SideRun

Values = npt.NDArray[np.float64]
Quotient = tuple[float, float]  # with a whole of 0 where it means nothing
DRAWS = 2000
LEVEL = 0.95
MS = 1e6  # nanoseconds
MB = 1e6  # bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure; low and high: its interval, None where a single round gave it."""

    value: float
    low: float | None = None
    high: float | None = None


def resampled(groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """[DRAWS, rounds]: numbers of rounds; groups: the prompt of each round.

    Prompts are drawn with replacement, then as many rounds of each as the largest prompt has:
    the variance between prompts and the variance between repeats both count.
    The draws are always the same.
    """
    random = np.random.default_rng(0)
    rounds_of = [np.flatnonzero(np.asarray(groups) == name) for name in sorted(set(groups))]
    sizes = np.array([len(rounds) for rounds in rounds_of])
    picked = random.integers(len(rounds_of), size=(DRAWS, len(rounds_of)))
    places = random.random((DRAWS, len(rounds_of), sizes.max()))
    table = np.stack([np.resize(rounds, sizes.max()) for rounds in rounds_of])
    within = (places * sizes[picked][..., None]).astype(np.int64)
    numbers: npt.NDArray[np.int64] = table[picked[..., None], within].reshape(DRAWS, -1)
    return numbers


def estimate(groups: Sequence[int], of: Callable[[npt.NDArray[np.int64]], Values]) -> Estimate:
    """What `of` makes of all rounds, and of drawn ones; of: [..., rounds] numbers -> [...]."""
    value = float(of(np.arange(len(groups))[None])[0])
    if len(groups) < 2:
        return Estimate(value)
    edge = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(of(resampled(groups)), [edge, 100 - edge])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a row.

    of: part and whole in one run. kind: how runs come together: the median over rounds of the
    reference's quotient / the own one; the quotient of the sums; the median of the quotients; the
    largest; the share of answers that are the reference's; what a probe has found.
    better: 1 if more of it is, -1 if less, 0 if neither.
    form: how tables write it. timed: by clocks, so that it is another each time.
    """

    kind: Literal["paired", "sums", "median", "largest", "same", "probe"]
    of: "Callable[[Cost], Quotient]"
    better: int
    form: str
    timed: bool = False

    def measure(
        self, runs: "Sequence[SideRun]", reference: "Sequence[SideRun]", prompts: Sequence[int]
    ) -> Estimate | None:
        """Of the rounds that were finished; None if there is none where it means something.

        prompts: the number of each round's prompt.
        """
        if self.kind == "same":
            same = np.array([a.digest == b.digest for a, b in zip(runs, reference, strict=True)])
            return estimate(prompts, lambda at: same[at].mean(-1))
        groups, mine, theirs = self.quotients(runs, reference, prompts)
        if not groups:
            return None
        if self.kind == "sums":
            return estimate(groups, lambda at: mine[at].sum(-2)[..., 0] / mine[at].sum(-2)[..., 1])
        each = mine[:, 0] / mine[:, 1]
        if self.kind == "largest":
            return Estimate(float(each.max()))
        if self.kind == "paired":
            each = theirs[:, 0] / theirs[:, 1] / each
        return estimate(groups, lambda at: np.median(each[at], axis=-1))

    def quotients(
        self, runs: "Sequence[SideRun]", reference: "Sequence[SideRun]", prompts: Sequence[int]
    ) -> tuple[list[int], Values, Values]:
        """The prompts of the rounds with a figure, and [rounds, part and whole] of this side and of
        the reference, which is 1 / 1 unless rounds are paired."""
        groups: list[int] = []
        mine: list[Quotient] = []
        theirs: list[Quotient] = []
        paired = self.kind == "paired"
        for run, other, group in zip(runs, reference, prompts, strict=True):
            if run.problems or (paired and other.problems):
                continue
            one = self.of(run.cost)
            two = self.of(other.cost) if paired else (1.0, 1.0)
            if one[1] and two[1] and not (paired and 0 in (one[0], two[0])):
                groups.append(group)
                mine.append(one)
                theirs.append(two)
        return groups, np.array(mine, float), np.array(theirs, float)


def _moment(nanos: int) -> Quotient:
    return nanos / MS, float(nanos > 0)


def _decode(cost: "Cost") -> Quotient:
    moments = cost.moments
    return (moments.last_token - moments.first_token) / MS, moments.decoded


def _per_token(cost: "Cost") -> Quotient:
    return 1e3 * cost.meter.seconds, cost.meter.tokens


def _tau(cost: "Cost") -> Quotient:
    lengths = cost.meter.lengths
    return sum(n * count for n, count in lengths.items()), lengths.total()


def _overhead(meter: "Meter") -> Quotient:
    whole = meter.in_run + meter.open_ops
    return whole - meter.in_ops, whole


def _ours(of: "Callable[[Meter], Quotient]") -> "Callable[[Cost], Quotient]":
    """Of what only our own engine tells."""
    return lambda cost: of(cost.meter) if cost.meter.rows else (0.0, 0.0)


def _kv(of: Callable[[Any], float]) -> "Callable[[Cost], Quotient]":
    """Summed over pools, in MB."""
    return lambda cost: (sum(map(of, cost.pools.values())) / MB, float(bool(cost.pools)))


FIGURES: Mapping[str, Figure] = {
    "speedup_decode": Figure("paired", _decode, 1, ".2f", timed=True),
    "speedup_ttlt": Figure("paired", lambda c: _moment(c.moments.last_token), 1, ".2f", timed=True),
    "speedup_ttft": Figure(
        "paired", lambda c: _moment(c.moments.first_token), 1, ".2f", timed=True
    ),
    "speedup_per_token": Figure("paired", _per_token, 1, ".2f", timed=True),
    "length_ratio": Figure("paired", lambda c: (1, c.meter.tokens), 0, ".2f"),
    "tau_step": Figure("sums", _tau, 1, ".2f"),
    "tau_request": Figure("median", lambda c: (c.meter.tau_step, 1), 1, ".2f"),
    "acceptance_rate": Figure("sums", _ours(lambda m: (m.accepted, m.drafted)), 1, ".3f"),
    "tokens_per_target_forward": Figure(
        "sums", lambda c: (c.meter.tokens, c.meter.forwards), 1, ".2f"
    ),
    "ms_per_token": Figure("median", _per_token, -1, ".2f", timed=True),
    "ms_to_first_token": Figure(
        "median", lambda c: _moment(c.moments.first_token), -1, ".0f", timed=True
    ),
    "ms_to_last_token": Figure(
        "median", lambda c: _moment(c.moments.last_token), -1, ".0f", timed=True
    ),
    "ms_per_round": Figure(
        "sums", lambda c: (1e3 * c.meter.seconds, c.meter.forwards), -1, ".2f", timed=True
    ),
    "overhead_share": Figure("sums", _ours(_overhead), -1, ".3f", timed=True),
    "host_reads_per_round": Figure(
        "sums",
        lambda c: (c.moments.host_reads, c.meter.forwards) if c.meter.rows else (0, 0),
        -1,
        ".2f",
    ),
    "tokens": Figure("median", lambda c: (c.meter.tokens, 1), 0, ".0f"),
    "target_forwards": Figure("median", lambda c: (c.meter.forwards, 1), -1, ".0f"),
    "rows": Figure("median", _ours(lambda m: (m.rows, 1)), -1, ".0f"),
    "rows_empty": Figure("median", _ours(lambda m: (m.padding, 1)), -1, ".0f"),
    "drafter_forwards": Figure("median", _ours(lambda m: (m.draft_forwards, 1)), -1, ".0f"),
    "drafter_rows": Figure("median", _ours(lambda m: (m.draft_rows, 1)), -1, ".0f"),
    "drafter_rows_empty": Figure("median", _ours(lambda m: (m.draft_padding, 1)), -1, ".0f"),
    "padding_waste": Figure("sums", _ours(lambda m: (m.padding, m.rows)), -1, ".3f"),
    "kv_held_mb": Figure("largest", _kv(lambda pool: pool.peak_bytes), -1, ".2f"),
    "kv_moved_mb": Figure("largest", _kv(lambda pool: pool.moved_bytes.total()), -1, ".2f"),
    "same_answer": Figure("same", lambda c: (0, 0), 0, ".2f"),
    "kl": Figure("probe", lambda c: (0, 0), -1, ".4f"),
    "kv_allocated_mb": Figure("largest", _kv(lambda pool: pool.allocated_bytes), -1, ".2f"),
}
PER_TOKEN = "speedup_per_token"
GAINS: Mapping[str, Figure] = {  # of `specsot compare`: how much less a side costs than the first
    PER_TOKEN: FIGURES[PER_TOKEN],
    "fewer_rounds": Figure("paired", lambda c: (c.meter.rounds, 1), 1, ".2f"),
    "more_tokens_per_round": Figure("paired", lambda c: (c.meter.rounds, c.meter.tokens), 1, ".2f"),
}
