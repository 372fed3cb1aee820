"""Which of several drafters drafts in a round: the one with the most tokens per millisecond, by
counted acceptance and measured times of whole rounds. All numbers are on the host.

Kinds are numbers. Rounds of 1, 2 to 3, 4 to 7 ... branches are measured apart."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean
from time import perf_counter

from ..types import DraftSize

TIMES = 11  # the time of a round is the mean over these many rounds,
LONGEST = 2  # without this many that took longest: the machine did something else
DECAY = 0.98  # of the counts of a kind when it is counted again
SHARE = 0.002  # loss by trials of a kind that was often timed, as a share of the rounds
LEAST = 16  # fewest rounds between two trials of a kind
OPTIMISM = 0.5  # standard errors that a trial adds to the counted tokens
STAY = 0.98  # least rate of the current kind, relative to the fastest, that keeps it
HOPELESS = 0.85  # a kind is given up whose rate is surely below this part of the fastest one's
SURELY = 2.0  # standard errors of its tokens


@dataclass(slots=True)
class KindRecord:
    """What rounds of one kind gave. weight, tokens, squares: decayed sums over its branches, of
    one, of tokens, and of their squares. times: milliseconds of the last rounds; ms: their mean,
    since the median would leave out the drafts of a kind that drafts in a few rounds only; waited:
    rounds of others since; known: how well its times are known, 0 to TIMES, from these or from
    another number of branches."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    waited: int = 0
    known: int = 0
    ms: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))

    def time_(self, ms: float) -> None:
        self.times.append(ms)
        self.known = min(self.known + 1, TIMES)
        kept = max(len(self.times) - LONGEST, (len(self.times) + 1) // 2)
        self.ms = fmean(sorted(self.times)[:kept])

    def count_(self, tokens: Sequence[int]) -> None:
        """Tokens that branches got from one target forward each."""
        self.weight = DECAY * self.weight + len(tokens)
        self.tokens = DECAY * self.tokens + sum(tokens)
        self.squares = DECAY * self.squares + sum(count * count for count in tokens)

    @property
    def rate(self) -> float:
        """Expected tokens of a branch per millisecond of a round; 0 if they are not known."""
        return self.tokens / self.weight / self.ms if self.weight and self.ms > 0 else 0.0

    def optimistic_rate(self, optimism: float, least_spread: float) -> float:
        """The rate with `optimism` standard errors more tokens, whose variance is `least_spread` or
        more."""
        if not self.rate:
            return 0.0
        mean = self.tokens / self.weight
        spread = max(self.squares / self.weight - mean * mean, least_spread)
        return (mean + optimism * sqrt(spread / self.weight)) / self.ms


@dataclass(slots=True)
class KindRecords:
    """What all runs of a session count. of: by the number of bits of the number of branches;
    rounds: of all kinds; refused: requests since a late kind was last allowed."""

    of: dict[int, list[KindRecord]] = field(default_factory=dict)
    rounds: int = 0
    refused: int = 0


class KindChooser:
    """The kind of each round: `choose_` starts a round, `learn_` ends it. late: kinds whose first
    round may read what was committed before; it is not timed, and their trials have two rounds.
    choice: the kind's name, the size of its trees, and what is expected of the round; by_owner: as
    of `Chooser`, unused."""

    def __init__(
        self, names: Sequence[str], records: KindRecords, late: Collection[int] = ()
    ) -> None:
        self.names = names
        self.records = records
        self.late = late
        self.chosen = -1
        self.choice = DraftSize(0, 0, 0.0, 0.0)
        self.by_owner: dict[int, tuple[float, float]] = {}
        self._trial = 0  # rounds of the current trial that are left
        self._is_timed = False  # whether the time of this round says what the kind takes
        self._bits = 0
        self._current = -1  # the kind of the last round that was not a trial
        self._owners: Sequence[int] = ()
        self._start = 0.0

    @property
    def record(self) -> KindRecord:
        """Of the kind and the number of branches of this round."""
        return self.records.of[self._bits][self.chosen]

    def choose_(self, owners: Sequence[int], *, is_late: bool = True) -> int:
        """The kind for a round of these branches. The round before ends: it is timed, unless none
        of its branches goes on, so that the time may be that of waiting. is_late: allow late kinds.
        """
        now = perf_counter()
        if self._is_timed and not set(owners).isdisjoint(self._owners):
            self._time_(1e3 * (now - self._start))
        before = self._bits, self.chosen
        self._bits = len(owners).bit_length()
        self._owners = owners
        self._start = now
        if self._bits not in self.records.of:
            self.records.of[self._bits] = self._first_records()
        self.records.rounds += 1
        records = self.records.of[self._bits]
        kinds = [kind for kind in range(len(records)) if is_late or kind not in self.late]
        self._trial = self._trial - 1 if before[0] == self._bits else 0
        if self._trial <= 0 or self.chosen not in kinds:
            self.chosen = self._next(records, kinds)
            self._trial = self._rounds(self.chosen) if (self._bits, self.chosen) != before else 0
        self._is_timed = self.chosen == before[1] or self.chosen not in self.late
        for kind, record in enumerate(records):
            record.waited = 0 if kind == self.chosen else record.waited + 1
        ms = records[self.chosen].ms
        tokens = len(owners) * records[self.chosen].rate * ms
        self.choice = DraftSize(0, 0, tokens, ms, kind=self.names[self.chosen])
        return self.chosen

    def _rounds(self, kind: int) -> int:
        """Of a trial."""
        return 2 if kind in self.late else 1

    def _first_records(self) -> list[KindRecord]:
        """Of a new number of branches: the figures of the nearest one, half as well known, but no
        times."""
        if not self.records.of:
            return [KindRecord() for _ in self.names]
        nearest = min(self.records.of, key=lambda bits: abs(bits - self._bits))
        return [
            replace(one, waited=0, known=one.known // 2, times=deque(maxlen=TIMES))
            for one in self.records.of[nearest]
        ]

    def _time_(self, ms: float) -> None:
        """Time the kind of this round; times that others had with another number of branches change
        in proportion."""
        record = self.record
        if record.ms and not record.times:
            factor = ms / record.ms
            for one in self.records.of[self._bits]:
                one.ms *= 1.0 if one.times else factor
        record.time_(ms)

    def _next(self, records: Sequence[KindRecord], kinds: Sequence[int]) -> int:
        """A kind that was never timed; else one that is due for a trial, the longest unused one
        first: the slower a kind seems, and the better it is known, the longer it waits; else the
        current one, or one that is clearly faster."""
        rates = {kind: records[kind].rate for kind in kinds}
        if not all(rates.values()):
            return next(kind for kind in kinds if not rates[kind])
        fastest = max(kinds, key=rates.__getitem__)
        due = [kind for kind in kinds if kind != fastest and records[kind].waited >= LEAST]
        for kind in sorted(due, key=lambda kind: -records[kind].waited):
            loss = 1 - records[kind].optimistic_rate(OPTIMISM, 0.1) / rates[fastest]
            wait = loss * self._rounds(kind) / SHARE * (1 + records[kind].known) / (1 + TIMES)
            if records[kind].waited >= wait:
                return kind
        if rates.get(self._current, 0.0) < STAY * rates[fastest]:
            self._current = fastest
        return self._current

    def is_hopeless(self, kind: int) -> bool:
        """Whether a kind is surely slower than another one with every number of branches with which
        it was timed."""
        tried = [records for records in self.records.of.values() if records[kind].times]
        return bool(tried) and all(
            records[kind].optimistic_rate(SURELY, 1.0) < HOPELESS * max(one.rate for one in records)
            for records in tried
        )

    def learn_(self, tokens: Sequence[int]) -> None:
        """Tokens that each branch of the round got."""
        self.record.count_(tokens)

    def learn_of_(self, kind: int, tokens: int) -> None:
        """Tokens that a branch would have got from another kind."""
        self.records.of[self._bits][kind].count_([tokens])
