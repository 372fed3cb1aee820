"""Which of several drafters drafts in a round: the one with the most tokens per millisecond, by
counted acceptance and measured times of whole rounds. All numbers are on the host.

Kinds are numbers. Rounds of 1, 2 to 3, 4 to 7 ... branches are measured apart."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from time import perf_counter

import numpy as np

from ..types import DraftSize

TIMES = 11  # rounds after which a kind was often timed
SETTLED = 7  # timed rounds that say what is usual, and weight of all earlier ones
SHORTEST = 1e-6  # milliseconds; a clock may show none
DECAY = 0.99  # of the counts of a kind, for each round of it
FADING = 0.95  # of its recent counts, for each round of any kind
STEADY = 10.0  # weight of the mean of all counts, in recent counts of a branch
LONGEST = 1.4  # times the mean of its span: one round that is longer is left out
SHARE = 0.0004  # loss by trials of a kind that was often timed, as a share of the rounds
LEAST = 16  # fewest rounds between two trials of a kind
OPTIMISM = 0.5  # standard errors that a trial adds to the counted tokens
FOLLOWED = 0.3  # part of a change of the times that counts as one of the machine's pace,
SWITCHED = 0.5  # of a change where kinds change,
SUDDEN = 1.5  # at most by this factor in a span
TRIAL = 4  # rounds of a trial,
LATE = 6  # of a late kind
CLOSE = 0.1  # of the time between two trials, for a kind that seems as fast as the fastest one
NEAR = 0.2  # gap to the fastest one that makes this time longer by all of it
HELD = 8  # least rounds of the current kind from one decision to the next
LONGER = 4  # added to them after each decision that changed nothing,
SPAN = 40.0  # while they take fewer milliseconds in all
STAY = 0.98  # least rate of the current kind, relative to the fastest, that keeps it
WORTH = 0.9  # of the same where the rate of one of them is that of this round alone
SLOWER = 0.85  # a kind is given up whose rate is surely below this part of the fastest one's
UNTRIED = 0.7  # of the same where it has only the figures of another number of branches
SURELY = 2.0  # standard errors of its tokens


def _clipped(factor: float) -> float:
    return min(max(factor, 1 / SUDDEN), SUDDEN)


@dataclass(slots=True)
class RoundTime:
    """Times of rounds of one kind with a similar number of drafts in all. ms: the usual
    milliseconds; timed: the rounds that say so, at most SETTLED; sample: the last measured time.
    weight: decayed count of the rounds."""

    ms: float = 0.0
    timed: int = 0
    sample: float = 0.0
    weight: float = 0.0

    def time_(self, ms: float, rounds: int) -> None:
        """Add the rounds of one span, of `ms` each. Of one that was often timed the usual time
        moves towards the median of itself and the last two samples: one span in which other
        programs ran changes nothing."""
        if not self.timed:
            self.ms = ms
        target = sorted((self.ms, self.sample, ms))[1] if self.timed == SETTLED else ms
        self.ms *= (target / self.ms) ** (rounds / (self.timed + rounds))
        self.sample = ms
        self.timed = min(self.timed + rounds, SETTLED)


@dataclass(slots=True)
class KindRecord:
    """What rounds of one kind gave. weight, tokens, squares: decayed sums over its branches, of
    one, of tokens, and of their squares; recent_weight, recent_tokens: of the last rounds. times:
    by the number of bits of the drafts of a round. first: the milliseconds of the first round after
    one of another kind, which are in no mean. waited: rounds of others since; known: how well its
    times are known, 0 to TIMES, from these or from another number of branches."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    recent_weight: float = 0.0
    recent_tokens: float = 0.0
    waited: int = 0
    known: int = 0
    times: dict[int, RoundTime] = field(default_factory=dict)
    first: float = 0.0

    @property
    def ms(self) -> float:
        """Milliseconds of a round, by the sizes that its last rounds had; 0 if none was timed."""
        rounds = sum([one.weight for one in self.times.values()])
        return sum([one.weight * one.ms for one in self.times.values()]) / rounds if rounds else 0.0

    def ms_with(self, drafts: int) -> float:
        """Milliseconds of a round with so many drafts, between those that were timed."""
        sizes = sorted(self.times)
        middles = [0.75 * 2**size if size else 0.0 for size in sizes]
        return float(np.interp(drafts, middles, [self.times[size].ms for size in sizes]))

    @property
    def timed(self) -> int:
        return max([one.timed for one in self.times.values()], default=0)

    def count_(self, tokens: Sequence[float], rounds: int = 1) -> None:
        """Add the tokens of branches in `rounds` rounds, one number per branch and round."""
        kept = DECAY**rounds
        self.weight = kept * self.weight + len(tokens)
        self.tokens = kept * self.tokens + sum(tokens)
        self.squares = kept * self.squares + sum([count * count for count in tokens])
        self.recent_weight += len(tokens)
        self.recent_tokens += sum(tokens)

    @property
    def rate(self) -> float:
        """Expected tokens of a branch per millisecond of a round; 0 if they are not known. The last
        rounds say what to expect, and while there are few, the mean of all."""
        ms = self.ms
        if not self.weight or not ms:
            return 0.0
        known = min(self.weight, STEADY)
        tokens = self.recent_tokens + known * self.tokens / self.weight
        return tokens / (self.recent_weight + known) / ms

    def optimistic(self, optimism: float, least_spread: float) -> float:
        """Expected tokens of a branch and `optimism` standard errors more (below 0: less); their
        variance is `least_spread` or more."""
        mean = self.tokens / self.weight
        spread = max(self.squares / self.weight - mean * mean, least_spread)
        return mean + optimism * sqrt(spread / self.weight)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What tokens each branch can expect of the next round, and the drafts of all trees."""

    tokens: list[float]
    drafts: int

    def rate(self, record: KindRecord) -> float:
        """Expected tokens of a branch per millisecond."""
        return sum(self.tokens) / len(self.tokens) / record.ms_with(self.drafts)


Expected = Mapping[int, Expectation]
NOTHING: Expected = {}


@dataclass(slots=True)
class Allowance:
    """Milliseconds for work besides the rounds. It is due when those that it took are saved."""

    saved: float = 0.0

    @property
    def is_due(self) -> bool:
        return self.saved >= 0

    def spend_(self, start: float, factor: float = 1.0) -> None:
        """The work has been done since `start` (of `perf_counter`); factor: its whole cost,
        relative to this time."""
        self.saved -= factor * 1e3 * (perf_counter() - start)


@dataclass(slots=True)
class KindRecords:
    """What all runs of a session count. of: by the number of bits of the number of branches;
    pace: the time of a round of any kind now, relative to the recorded times, since other programs
    may slow the machine down. rounds, spent: of all kinds, and their milliseconds by number of
    branches, as in `of`; refused: requests since a late kind was last allowed; again: of how many
    requests it is allowed for one; learning, probing, expecting: of all drafters together."""

    of: dict[int, list[KindRecord]] = field(default_factory=dict)
    pace: float = 1.0
    rounds: int = 0
    spent: dict[int, float] = field(default_factory=dict)
    refused: int = 0
    again: int = 0
    learning: Allowance = field(default_factory=Allowance)
    probing: Allowance = field(default_factory=Allowance)
    expecting: Allowance = field(default_factory=Allowance)


@dataclass(slots=True)
class Span:
    """Rounds of the same branches (`owners`) that have one of the allowed `kinds`. is_switch: they
    had another kind before; is_apart: the first round takes longer than the others do. left: rounds
    that have not started; starts: of those that have, in seconds; drafts: of all their trees;
    tokens: what their branches got."""

    owners: list[int]
    kinds: list[int]
    is_switch: bool
    is_apart: bool
    left: int
    starts: list[float]
    is_trial: bool = False
    drafts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def times(self, now: float | None) -> list[float]:
        """Milliseconds of its rounds. now: the end of the last one; without it, it is left out."""
        ends = self.starts[1:] if now is None else [*self.starts[1:], now]
        return [1e3 * (end - start) for start, end in zip(self.starts, ends, strict=False)]


class KindChooser:
    """The kind of each round. `choose_` starts a span of rounds, `continues_` each later round of
    it, and `learn_` ends a round. The rounds of a span are timed and counted together. Where kinds
    change, the difference of their times is theirs; else it is a change of the machine's pace.

    late: kinds whose first round reads what was committed before, so that a longer trial is better.
    expecting: kinds that can tell the tokens of their next round; `expected` has what they told.
    They draft in the rounds of which they expect most, and have no part in other decisions.
    choice: the kind's name, the size of its trees, and what is expected of the round."""

    def __init__(
        self,
        names: Sequence[str],
        records: KindRecords,
        late: Collection[int] = (),
        expecting: Collection[int] = (),
    ) -> None:
        self.names = names
        self.records = records
        self.late = late
        self.expecting = expecting
        self.chosen = -1
        self.choice = DraftSize(0, 0, 0.0, 0.0)
        self._bits = 0
        self._current = -1  # the kind of rounds without a trial or a kind that expects more
        self._held = HELD  # rounds of a span of it
        self._span = Span([], [], is_switch=False, is_apart=False, left=0, starts=[])

    @property
    def record(self) -> KindRecord:
        """Of the kind and the number of branches of this round."""
        return self.records.of[self._bits][self.chosen]

    def continues_(self, owners: list[int], expected: Expected = NOTHING) -> bool:
        """Whether the next round, of these branches, belongs to the span; it has started then."""
        span = self._span
        if not span.left or owners != span.owners:
            return False
        if not span.is_trial and self._faster(expected, span.kinds) is not None:
            return False
        self._count_expected_(expected)
        span.left -= 1
        span.starts.append(perf_counter())
        return True

    def choose_(
        self, owners: list[int], expected: Expected = NOTHING, *, is_late: bool = True
    ) -> int:
        """Start a span; returns how many rounds it has at most. is_late: allow late kinds."""
        now = perf_counter()
        goes_on = not set(owners).isdisjoint(self._span.owners)  # else the program may have waited
        before = self.chosen
        usual = self._current
        self.finish_(now if goes_on else None)
        self._bits = len(owners).bit_length()
        is_new = self._bits not in self.records.of
        if is_new:
            self.records.of[self._bits] = self._first_records()
        records = self.records.of[self._bits]
        kinds = [kind for kind in range(len(records)) if is_late or kind not in self.late]
        self._count_expected_(expected)
        self.chosen = self._next(records, kinds)
        is_trial = self.chosen != self._current
        faster = None if is_trial else self._faster(expected, kinds)
        if faster is not None:
            self.chosen = faster
        ms = records[self.chosen].ms * self.records.pace
        if is_new or self._current != usual:
            self._held = HELD
        elif self._held * ms < SPAN:
            self._held += LONGER
        rounds = self._trial(self.chosen) if is_trial else self._held
        is_apart = self.chosen != before
        is_switch = goes_on and is_apart
        self._span = Span(
            owners, kinds, is_switch, is_apart, left=rounds - 1, starts=[now], is_trial=is_trial
        )
        tokens = len(owners) * records[self.chosen].rate * records[self.chosen].ms
        self.choice = DraftSize(0, 0, tokens, ms, kind=self.names[self.chosen])
        return rounds

    def finish_(self, now: float | None = None) -> None:
        """End the span. now: the end of its last round; None if it is not known."""
        span = self._span
        rounds = len(span.starts)
        if not rounds:
            return
        times = span.times(now)
        self.records.spent[self._bits] = self.records.spent.get(self._bits, 0.0) + sum(times)
        if span.is_apart and times and span.is_switch:
            self.record.first = times[0] / self.records.pace
        of_size: dict[int, list[float]] = {}
        timed = list(zip(times, span.drafts, strict=False))
        for ms, drafts in timed[1:] if span.is_apart else timed:
            of_size.setdefault(drafts.bit_length(), []).append(ms)
        for size, like in of_size.items():
            if len(like) > 1 and max(like) > LONGEST * sum(like) / len(like):
                like.remove(max(like))  # the machine may have done other work
            self._time_(sum(like) / len(like), len(like), size)
        if self.chosen not in self.expecting:
            self.record.count_(span.tokens, rounds)
        for kind, record in enumerate(self.records.of[self._bits]):
            record.waited = 0 if kind == self.chosen else record.waited + rounds
            record.recent_weight *= FADING**rounds
            record.recent_tokens *= FADING**rounds
        self.records.rounds += rounds
        self._span = replace(span, left=0, starts=[], drafts=[], tokens=[])

    def _count_expected_(self, expected: Expected) -> None:
        """Count what kinds expect of all rounds, in place of the tokens of their own rounds."""
        for kind, each in expected.items():
            self.records.of[self._bits][kind].count_(each.tokens)

    def _faster(self, expected: Expected, kinds: Collection[int]) -> int | None:
        """A kind that is clearly faster in this round than the chosen one: one that expects much of
        it, or any kind if the chosen one expects little."""
        records = self.records.of[self._bits]
        rates = {kind: records[kind].rate for kind in kinds}
        for kind, each in expected.items():
            if records[kind].times:
                rates[kind] = each.rate(records[kind])
        others = rates if self.chosen in expected else expected
        fastest = max(others, key=lambda kind: rates[kind], default=self.chosen)
        return fastest if rates[self.chosen] < WORTH * rates[fastest] else None

    def _first_records(self) -> list[KindRecord]:
        """Of a new number of branches: the figures of the nearest one, half as well known, those of
        late kinds not known, but no times."""
        if not self.records.of:
            return [KindRecord() for _ in self.names]
        nearest = min(self.records.of, key=lambda bits: abs(bits - self._bits))
        return [
            replace(
                one,
                waited=0,
                known=0 if kind in self.late else one.known // 2,
                times={size: replace(times, timed=0) for size, times in one.times.items()},
            )
            for kind, one in enumerate(self.records.of[nearest])
        ]

    def _time_(self, ms: float, rounds: int, size: int) -> None:
        """Time the kind of this span; times that were measured with another number of branches
        change in proportion."""
        ms = max(ms / self.records.pace, SHORTEST)
        record = self.record
        time = record.times.setdefault(size, RoundTime())
        if record.ms and not record.timed:
            factor = ms / (time.ms or record.ms)
            for one in self.records.of[self._bits]:
                for other in one.times.values():
                    other.ms *= 1.0 if other.timed else factor
        for other in record.times.values():
            other.weight *= DECAY**rounds
        time.weight += rounds
        record.known = min(record.known + rounds, TIMES)
        is_settled = time.timed == SETTLED
        change = _clipped(ms / time.ms) if is_settled else 1.0
        if not is_settled or self._span.is_switch:
            time.time_(ms, rounds)
            self.records.pace *= change**SWITCHED
        else:
            self.records.pace *= change ** (1 - (1 - FOLLOWED) ** rounds)

    def _next(self, records: Sequence[KindRecord], kinds: Sequence[int]) -> int:
        """A kind that was never timed; else one that is due for a trial, the longest unused one
        first: the slower a kind seems, and the better it is known, the longer it waits; else the
        current one, or one that is clearly faster."""
        rates = {kind: records[kind].rate for kind in kinds}
        if not all(rates.values()):
            return next(kind for kind in kinds if not rates[kind])
        usual = [kind for kind in kinds if kind not in self.expecting] or kinds
        fastest = max(usual, key=rates.__getitem__)
        due = [kind for kind in kinds if kind != fastest and records[kind].waited >= LEAST]
        for kind in sorted(due, key=lambda kind: -records[kind].waited):
            record = records[kind]
            rounds = self._trial(kind)
            tokens = rounds * record.optimistic(OPTIMISM, 0.1)
            loss = record.first + (rounds - 1) * record.ms - tokens / rates[fastest]
            gap = 1 - tokens / rounds / record.ms / rates[fastest]
            patience = min(CLOSE + max(gap, 0.0) / NEAR, 1.0) * (1 + record.known) / (1 + TIMES)
            wait = loss / records[fastest].ms / SHARE * patience
            if record.waited >= wait:
                return kind
        if self._current not in usual or rates[self._current] < STAY * rates[fastest]:
            self._current = fastest
        return self._current

    def _trial(self, kind: int) -> int:
        """Rounds of a trial."""
        return LATE if kind in self.late else TRIAL

    def is_surely_slower(self, kind: int) -> bool:
        """Whether a kind is surely slower than another one with every number of branches that is
        usual: with which a kind was timed often."""
        of = self.records.of.values()
        usual = [records for records in of if any(one.timed == SETTLED for one in records)]
        return bool(usual) and all(
            records[kind].rate > 0
            and records[kind].optimistic(SURELY, 1.0) / records[kind].ms
            < (SLOWER if records[kind].timed else UNTRIED)
            * max(
                one.optimistic(-SURELY, 0.0) / one.ms
                for other, one in enumerate(records)
                if one.rate and other not in self.expecting
            )
            for records in usual
        )

    def gain(self, kind: int) -> float:
        """The share of the time that is saved if a kind drafts in all rounds in which it is the
        fastest; 1 if nothing is known."""
        total = sum(self.records.spent.values())
        if not total:
            return 1.0
        saved = 0.0
        for bits, spent in self.records.spent.items():
            records = self.records.of[bits]
            rate = records[kind].rate
            rates = [
                one.rate
                for other, one in enumerate(records)
                if other != kind and other not in self.expecting
            ]
            others = max(rates, default=0.0)
            saved += spent * max(1 - others / rate if rate else 1.0, 0.0)
        return saved / total

    def learn_(self, tokens: Sequence[int], drafts: int) -> None:
        """Tokens that each branch of the round got, and the drafts of all trees."""
        self._span.tokens += tokens
        self._span.drafts.append(drafts)

    def learn_of_(self, kind: int, tokens: int) -> None:
        """Tokens that a branch would have got from another kind."""
        self.records.of[self._bits][kind].count_([tokens])
