"""The figures of a row: their parts, their direction (docs/metrics.md), and bootstrap intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


class Estimate(NamedTuple):
    """A figure; low and high: its interval, None where a single round gave it."""

    value: float
    low: float | None = None
    high: float | None = None


def resampled(groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """[DRAWS, rounds]: numbers of rounds, always the same; groups: the prompt of each round.

    Prompts are drawn with replacement, then as many rounds of each as the largest prompt has:
    the variance between prompts and the variance between repeats both count.
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
    """Of all rounds, and of drawn ones; of: [..., rounds] numbers -> [...]."""
    value = float(of(np.arange(len(groups))[None])[0])
    if len(groups) < 2:
        return Estimate(value)
    edge = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(of(resampled(groups)), [edge, 100 - edge])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a row.

    kind: how runs come together: the median over rounds of the reference's quotient / the own one;
    the quotient of the sums; the median of the quotients; the largest; the share of answers that
    are the reference's; what a probe has found.
    of: part and whole in one run. better: 1 if more of it is, -1 if less, 0 if neither.
    form: how tables write it. timed: by clocks, so that it is another each time.
    """

    kind: Literal["paired", "sums", "median", "largest", "same", "probe"]
    of: "Callable[[Cost], Quotient]" = lambda cost: (0, 0)
    better: int = 1
    form: str = ".2f"
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
        pairs: list[tuple[Quotient, Quotient]] = []
        paired = self.kind == "paired"
        for run, other, group in zip(runs, reference, prompts, strict=True):
            if run.problems or (paired and other.problems):
                continue
            one = self.of(run.cost)
            two = self.of(other.cost) if paired else (1.0, 1.0)
            if one[1] and two[1] and not (paired and 0 in (one[0], two[0])):
                groups.append(group)
                pairs.append((one, two))
        values = np.array(pairs, float).reshape(-1, 2, 2)
        return groups, values[:, 0], values[:, 1]


def _first_token(cost: "Cost") -> Quotient:
    return cost.moments.first_token / MS, float(cost.moments.first_token > 0)


def _last_token(cost: "Cost") -> Quotient:
    return cost.moments.last_token / MS, float(cost.moments.last_token > 0)


def _decode(cost: "Cost") -> Quotient:
    return (cost.moments.last_token - cost.moments.first_token) / MS, cost.moments.decoded


def _per_token(cost: "Cost") -> Quotient:
    return 1e3 * cost.meter.seconds, cost.meter.tokens


def _tau(cost: "Cost") -> Quotient:
    lengths = cost.meter.lengths
    return sum(n * count for n, count in lengths.items()), lengths.total()


def _overhead(meter: "Meter") -> Quotient:
    whole = meter.in_run + meter.open_ops
    return whole - meter.in_ops, whole


def _ours(of: "Callable[[Meter], Quotient]") -> "Callable[[Cost], Quotient]":
    """Of what only our own engine counts."""
    return lambda cost: of(cost.meter) if cost.meter.rows else (0.0, 0.0)


def _host_reads(cost: "Cost") -> Quotient:
    return cost.moments.host_reads, cost.meter.forwards if cost.meter.rows else 0


def _kv(of: Callable[[Any], float]) -> "Callable[[Cost], Quotient]":
    """Summed over pools, in MB."""
    return lambda cost: (sum(map(of, cost.pools.values())) / MB, float(bool(cost.pools)))


PER_TOKEN = "speedup_per_token"
FIGURES: Mapping[str, Figure] = {
    "speedup_decode": Figure("paired", _decode, timed=True),
    "speedup_ttlt": Figure("paired", _last_token, timed=True),
    "speedup_ttft": Figure("paired", _first_token, timed=True),
    PER_TOKEN: Figure("paired", _per_token, timed=True),
    "length_ratio": Figure("paired", lambda c: (1, c.meter.tokens), 0),
    "tau_step": Figure("sums", _tau),
    "tau_request": Figure("median", lambda c: (c.meter.tau_step, 1)),
    "acceptance_rate": Figure("sums", _ours(lambda m: (m.accepted, m.drafted)), form=".3f"),
    "tokens_per_target_forward": Figure("sums", lambda c: (c.meter.tokens, c.meter.forwards)),
    "ms_per_token": Figure("median", _per_token, -1, timed=True),
    "ms_to_first_token": Figure("median", _first_token, -1, ".0f", timed=True),
    "ms_to_last_token": Figure("median", _last_token, -1, ".0f", timed=True),
    "ms_per_round": Figure("sums", lambda c: (_per_token(c)[0], c.meter.forwards), -1, timed=True),
    "overhead_share": Figure("sums", _ours(_overhead), -1, ".3f", timed=True),
    "host_reads_per_round": Figure("sums", _host_reads, -1),
    "tokens": Figure("median", lambda c: (c.meter.tokens, 1), 0, ".0f"),
    "target_forwards": Figure("median", lambda c: (c.meter.forwards, 1), -1, ".0f"),
    "rows": Figure("median", _ours(lambda m: (m.rows, 1)), -1, ".0f"),
    "rows_empty": Figure("median", _ours(lambda m: (m.padding, 1)), -1, ".0f"),
    "drafter_forwards": Figure("median", _ours(lambda m: (m.draft_forwards, 1)), -1, ".0f"),
    "drafter_rows": Figure("median", _ours(lambda m: (m.draft_rows, 1)), -1, ".0f"),
    "drafter_rows_empty": Figure("median", _ours(lambda m: (m.draft_padding, 1)), -1, ".0f"),
    "padding_waste": Figure("sums", _ours(lambda m: (m.padding, m.rows)), -1, ".3f"),
    "kv_held_mb": Figure("largest", _kv(lambda pool: pool.peak_bytes), -1),
    "kv_moved_mb": Figure("largest", _kv(lambda pool: pool.moved_bytes.total()), -1),
    "same_answer": Figure("same", better=0),
    "kl": Figure("probe", better=-1, form=".4f"),
    "kv_allocated_mb": Figure("largest", _kv(lambda pool: pool.allocated_bytes), -1),
}
GAINS: Mapping[str, Figure] = {  # of `specsot compare`: how much less a side costs than the first
    PER_TOKEN: FIGURES[PER_TOKEN],
    "fewer_rounds": Figure("paired", lambda c: (c.meter.rounds, 1)),
    "more_tokens_per_round": Figure("paired", lambda c: (c.meter.rounds, c.meter.tokens)),
}
