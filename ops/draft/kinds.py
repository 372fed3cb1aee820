"""Which of several drafters drafts in a round: the one with the most tokens per millisecond, by
counted acceptance and measured times of whole rounds. All numbers are on the host.

Kinds are numbers. Rounds of 1, 2 to 3, 4 to 7 ... branches are measured apart."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from statistics import fmean, median
from time import perf_counter

from ..types import DraftSize

TIMES = 11  # last rounds of a kind that say what is usual
LONGEST = 2.0  # times the usual time: a longer round counts as this long
DECAY = 0.97  # of the counts and times of a kind when it is counted again
SHARE = 0.0015  # loss by trials of a kind that was often timed, as a share of the rounds
LEAST = 16  # fewest rounds between two trials of a kind
OPTIMISM = 0.5  # standard errors that a trial adds to the counted tokens
FOLLOWED = 0.3  # part of a change of the times that counts as one of the machine's pace,
SUDDEN = 1.5  # at most by this factor in a round
HELD = 8  # rounds of the current kind from one decision to the next
STAY = 0.98  # least rate of the current kind, relative to the fastest, that keeps it
SLOWER = 0.85  # a kind is given up whose rate is surely below this part of the fastest one's
UNTRIED = 0.5  # of the same where it has only the figures of another number of branches
SURELY = 2.0  # standard errors of its tokens


def _clipped(factor: float) -> float:
    return min(max(factor, 1 / SUDDEN), SUDDEN)


@dataclass(slots=True)
class KindRecord:
    """What rounds of one kind gave. weight, tokens, squares: decayed sums over its branches, of
    one, of tokens, and of their squares. timed, spent: decayed sums of rounds and of milliseconds;
    ms: their ratio. times: milliseconds of the last rounds; usual: the middle of them, from which
    they differ equally in both directions; new: how many came after it. waited: rounds of others
    since; known: how well its times are known, 0 to TIMES, from these or from another number of
    branches."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    waited: int = 0
    known: int = 0
    timed: float = 0.0
    spent: float = 0.0
    ms: float = 0.0
    usual: float = 0.0
    new: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))

    def time_(self, ms: float, *, is_trial: bool) -> None:
        self.times.append(ms)
        self.known = min(self.known + 1, TIMES)
        self.new += 1
        if is_trial or self.new == HELD or len(self.times) < TIMES:
            self.new = 0
            middle = median(self.times)
            self.usual = middle * exp(fmean([log(_clipped(ms / middle)) for ms in self.times]))
        self.timed = DECAY * self.timed + 1
        self.spent = DECAY * self.spent + min(ms, LONGEST * self.usual)
        self.ms = self.spent / self.timed

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
    pace: the time of a round of any kind now, relative to the recorded times, since other programs
    may slow the machine down. rounds: of all kinds; refused: requests since a late kind was last
    allowed."""

    of: dict[int, list[KindRecord]] = field(default_factory=dict)
    pace: float = 1.0
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
        self._left = 0  # rounds until the next decision
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
        self._left = self._left - 1 if before[0] == self._bits else 0
        if self._left <= 0 or (self.chosen in self.late and not is_late):
            kinds = [kind for kind in range(len(records)) if is_late or kind not in self.late]
            self.chosen = self._next(records, kinds)
            is_new = (self._bits, self.chosen) != before
            self._left = self._rounds(self.chosen) if is_new else 1
            if self.chosen == self._current:
                self._left = HELD
        self._is_timed = self.chosen == before[1] or self.chosen not in self.late
        for kind, record in enumerate(records):
            record.waited = 0 if kind == self.chosen else record.waited + 1
        ms = records[self.chosen].ms * self.records.pace
        tokens = len(owners) * records[self.chosen].rate * records[self.chosen].ms
        self.choice = DraftSize(0, 0, tokens, ms, kind=self.names[self.chosen])
        return self.chosen

    def _rounds(self, kind: int) -> int:
        """Of a trial."""
        return 2 if kind in self.late else 1

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
                timed=0.0,
                spent=0.0,
                known=0 if kind in self.late else one.known // 2,
                times=deque(maxlen=TIMES),
            )
            for kind, one in enumerate(self.records.of[nearest])
        ]

    def _time_(self, ms: float) -> None:
        """Time the kind of this round; times that others had with another number of branches change
        in proportion."""
        ms /= self.records.pace
        record = self.record
        if record.ms and not record.times:
            factor = ms / record.ms
            for one in self.records.of[self._bits]:
                one.ms *= 1.0 if one.times else factor
        if len(record.times) == TIMES:
            self.records.pace *= _clipped(ms / record.usual) ** FOLLOWED
        record.time_(ms, is_trial=self.chosen != self._current)

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

    def is_surely_slower(self, kind: int) -> bool:
        """Whether a kind is surely slower than another one with every number of branches that is
        usual: with which a kind was timed TIMES times."""
        of = self.records.of.values()
        usual = [records for records in of if any(len(one.times) == TIMES for one in records)]
        return bool(usual) and all(
            0
            < records[kind].optimistic_rate(SURELY, 1.0)
            < (SLOWER if records[kind].times else UNTRIED) * max(one.rate for one in records)
            for records in usual
        )

    def learn_(self, tokens: Sequence[int]) -> None:
        """Tokens that each branch of the round got."""
        self.record.count_(tokens)

    def learn_of_(self, kind: int, tokens: int) -> None:
        """Tokens that a branch would have got from another kind."""
        self.records.of[self._bits][kind].count_([tokens])
