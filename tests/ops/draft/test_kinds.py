"""Which drafter a round has: the fastest by measured times and counted tokens; rare trials."""

from collections.abc import Sequence
from itertools import groupby

import pytest

from specsot.ops.draft import kinds as kinds_file
from specsot.ops.draft.kinds import (
    DECAY,
    HELD,
    LATE,
    LEAST,
    SETTLED,
    TRIAL,
    Expectation,
    KindChooser,
    KindRecord,
    KindRecords,
    RoundTime,
)

NAMES = ("head", "table", "none")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(kinds_file, "perf_counter", lambda: seconds[0])
    return seconds


def play(
    chooser: KindChooser,
    clock: list[float],
    ms: Sequence[float],
    tokens: Sequence[int],
    *,
    rounds: int,
    branches: int = 1,
) -> list[str]:
    """The kinds of so many rounds in which each kind takes `ms` and gives `tokens`."""
    chosen = []
    for _ in range(rounds):
        owners = [*range(branches)]
        if not chooser.continues_(owners):
            chooser.choose_(owners)
        kind = chooser.chosen
        chooser.learn_([tokens[kind]] * branches, 0)
        clock[0] += ms[kind] / 1e3
        chosen.append(NAMES[kind])
    return chosen


@pytest.mark.parametrize(
    ("ms", "tokens", "best"),
    [
        ((9.0, 6.0, 5.0), (3, 1, 1), "head"),
        ((9.0, 6.0, 5.0), (3, 3, 1), "table"),
        ((9.0, 6.0, 4.0), (2, 1, 1), "none"),
    ],
)
def test_the_kind_with_most_tokens_per_millisecond_has_nearly_all_rounds(
    ms: tuple[float, ...], tokens: tuple[int, ...], best: str, clock: list[float]
) -> None:
    chooser = KindChooser(NAMES, KindRecords(), late=[0])
    played = play(chooser, clock, ms, tokens, rounds=9000)
    spans = [kind for kind, _ in groupby(played)]
    assert spans[:3] == [*NAMES] and played.index("table") == LATE, "a late kind has more rounds"
    assert played.count(best) > 8800 and set(spans[3:]) == {*NAMES}, "with trials"
    choice = chooser.choice
    assert choice.kind == played[-1]
    assert choice.ms == pytest.approx(ms[NAMES.index(choice.kind)])
    assert choice.tokens == pytest.approx(tokens[NAMES.index(choice.kind)])


def test_a_slower_kind_waits_longer_for_a_trial(clock: list[float]) -> None:
    played = play(
        KindChooser(NAMES, KindRecords()), clock, (10.0, 10.5, 30.0), (2, 2, 1), rounds=9000
    )
    assert played.count("table") > 3 * played.count("none") > 3 * TRIAL
    assert played.index("table", 3 * TRIAL) >= LEAST


def test_a_choice_follows_when_times_change(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    play(chooser, clock, (9.0, 6.0, 5.0), (3, 1, 1), rounds=50)
    played = play(chooser, clock, (20.0, 6.0, 5.0), (3, 1, 1), rounds=800)
    assert played[-60:].count("none") > 50 and played.count("head") < 700


def test_a_machine_that_is_slower_for_a_while_changes_no_choice(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    play(chooser, clock, (5.0, 6.0, 4.9), (2, 2, 1), rounds=300)
    assert play(chooser, clock, (8.0, 9.6, 7.84), (2, 2, 1), rounds=300).count("head") > 285
    assert play(chooser, clock, (5.0, 6.0, 4.9), (2, 2, 1), rounds=300).count("head") > 285
    assert chooser.choice.ms == pytest.approx(5.0, rel=0.05)


def test_where_kinds_change_the_difference_of_their_times_is_theirs(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    play(chooser, clock, (5.0, 6.0, 5.2), (2, 1, 2), rounds=900)
    trials = chooser.records.of[1][2].times[0]
    assert trials.timed == SETTLED and trials.ms == pytest.approx(5.2)
    played = play(chooser, clock, (5.0, 6.0, 5.8), (2, 1, 2), rounds=1500)
    assert played.count("none") > 2 * TRIAL
    play(chooser, clock, (5.0, 6.0, 5.8), (2, 1, 2), rounds=60)
    head = chooser.records.of[1][0]
    assert trials.ms > 1.05 * head.ms and chooser.records.pace * head.ms == pytest.approx(5.0, 0.02)


def test_one_slow_trial_changes_no_usual_time(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    play(chooser, clock, (5.0, 6.0, 5.2), (2, 1, 2), rounds=900)
    record = chooser.records.of[1][2].times[0]
    played: list[str] = []
    while played[-TRIAL:] != TRIAL * ["none"]:
        ms = 9.0 if chooser.chosen == 2 else 5.2
        played += play(chooser, clock, (5.0, 6.0, ms), (2, 1, 2), rounds=1)
    play(chooser, clock, (5.0, 6.0, 5.2), (2, 1, 2), rounds=TRIAL)
    assert record.sample > 6 and record.ms == pytest.approx(5.2)


def test_tokens_that_a_kind_would_have_given_count(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    play(chooser, clock, (5.0, 6.0, 5.0), (2, 1, 1), rounds=30)
    for _ in range(30):
        chooser.learn_of_(1, 8)
    assert play(chooser, clock, (5.0, 6.0, 5.0), (2, 8, 1), rounds=HELD + 1)[-1] == "table"
    record = chooser.records.of[1][1]
    assert record.tokens / record.weight > 6 and record.weight < 1 / (1 - DECAY)


def test_runs_share_figures_and_a_new_number_of_branches_begins_with_the_nearest(
    clock: list[float],
) -> None:
    records = KindRecords()
    play(KindChooser(NAMES, records), clock, (9.0, 6.0, 5.0), (3, 1, 1), rounds=20)
    again = KindChooser(NAMES, records)
    assert play(again, clock, (9.0, 6.0, 5.0), (3, 1, 1), rounds=1) == ["head"]
    played = play(again, clock, (45.0, 12.0, 10.0), (3, 1, 1), rounds=HELD + 1, branches=8)
    assert {*played} == {"head"} and set(records.of) == {1, 4}
    assert [record.ms for record in records.of[4]] == pytest.approx([45.0, 30.0, 25.0]), "5 times"
    played = play(again, clock, (45.0, 12.0, 10.0), (3, 1, 1), rounds=2000, branches=8)
    assert played.index("none") >= LEAST and played[-1] == "none", "found by a trial"


@pytest.mark.parametrize(("ms", "most"), [(1.5, 28), (4.0, 12), (50.0, HELD)])
def test_short_rounds_have_longer_spans(ms: float, most: int, clock: list[float]) -> None:
    chooser = KindChooser(["none"], KindRecords())
    for branches in (1, 4):
        spans: list[int] = []
        for _ in range(400):
            if not chooser.continues_([*range(branches)]):
                spans.append(0)
                chooser.choose_([*range(branches)])
            spans[-1] += 1
            chooser.learn_([1] * branches, 0)
            clock[0] += ms / 1e3
        assert max(spans) == spans[-2] == most and min(spans[1:-1]) >= HELD


def test_neither_the_first_round_of_a_kind_nor_waiting_is_timed(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    for kind, times in enumerate([TRIAL * [9.0], [70.0, 5.0, 4.0, 900.0]]):
        for ms in times:
            assert (chooser.continues_([0]) or chooser.choose_([0])) and chooser.chosen == kind
            chooser.learn_([2], 0)
            clock[0] += ms / 1e3
    assert not chooser.continues_([1]) and chooser.choose_([1]) and chooser.chosen == 2
    record = chooser.records.of[1][1]
    assert (record.ms, record.first) == pytest.approx((4.5, 70.0))
    assert (record.weight, record.tokens, record.waited) == (4, 8, 0)


def test_a_round_in_which_the_machine_did_other_work_is_left_out(clock: list[float]) -> None:
    chooser = KindChooser(["none"], KindRecords())
    play(chooser, clock, [5.0], [1], rounds=30)
    clock[0] += 0.3
    play(chooser, clock, [5.0], [1], rounds=30)
    assert chooser.record.ms == pytest.approx(5.0) and chooser.records.pace == pytest.approx(1.0)


def test_a_late_kind_that_was_clearly_slower_is_surely_slower(clock: list[float]) -> None:
    chooser = KindChooser(NAMES, KindRecords(), late=[0])
    assert not chooser.is_surely_slower(0)
    play(chooser, clock, (24.0, 6.0, 5.0), (3, 1, 1), rounds=2)
    assert not chooser.is_surely_slower(0), "nothing else was tried"
    play(chooser, clock, (24.0, 6.0, 5.0), (3, 1, 1), rounds=4)
    assert not chooser.is_surely_slower(0), "one trial says little about its tokens"
    play(chooser, clock, (24.0, 6.0, 5.0), (3, 1, 1), rounds=900)
    assert chooser.is_surely_slower(0) and not chooser.is_surely_slower(2)
    for _ in range(900):
        clock[0] += 5e-3
        assert chooser.choose_([1], is_late=False) and chooser.chosen != 0
    play(chooser, clock, (24.0, 6.0, 5.0), (9, 1, 1), rounds=900, branches=4)
    assert not chooser.is_surely_slower(0), "it is the best for four branches"


def test_the_gain_of_a_kind_counts_the_rounds_in_which_it_is_the_fastest(
    clock: list[float],
) -> None:
    chooser = KindChooser(NAMES, KindRecords())
    assert chooser.gain(0) == 1.0, "nothing is known"
    play(chooser, clock, (10.0, 30.0, 5.0), (4, 1, 1), rounds=300)
    assert chooser.gain(0) == pytest.approx(0.5, abs=0.01) and chooser.gain(2) == 0.0
    play(chooser, clock, (30.0, 30.0, 5.0), (4, 1, 1), rounds=900, branches=4)
    assert 0.0 < chooser.gain(0) < 0.25, "the slower, the more of the time is with four branches"


def test_a_kind_that_is_hardly_slower_stays(clock: list[float]) -> None:
    played = play(KindChooser(NAMES, KindRecords()), clock, (5.05, 5.0, 9.0), (1, 1, 1), rounds=200)
    assert played.count("table") > 150
    chooser = KindChooser(NAMES, KindRecords())
    play(chooser, clock, (4.9, 5.0, 9.0), (1, 1, 1), rounds=50)
    assert play(chooser, clock, (5.05, 5.0, 9.0), (1, 1, 1), rounds=80).count("table") < 20


def test_a_kind_drafts_in_the_rounds_of_which_it_expects_much(clock: list[float]) -> None:
    """Other rounds are drafted by the fastest of the others, whatever its mean is."""
    chooser = KindChooser(NAMES, KindRecords(), expecting=[1])
    chosen: list[tuple[bool, str]] = []
    for number in range(600):
        is_match = number % 20 >= 11
        expected = {1: Expectation([4.0 if is_match else 1.0], 8 * is_match)}
        if not chooser.continues_([0], expected):
            chooser.choose_([0], expected)
        kind = chooser.chosen
        is_drafted = kind == 1 and is_match
        chooser.learn_([4 if is_drafted else 1], 8 * is_drafted)
        clock[0] += (9.0, 7.0 if is_drafted else 5.6, 5.0)[kind] / 1e3
        chosen.append((is_match, NAMES[kind]))
    counts = [chosen[200:].count(pair) for pair in ((True, "table"), (False, "none"))]
    assert counts[0] > 160 and counts[1] > 200, "of 180 and 220"
    record = chooser.records.of[1][1]
    assert record.tokens / record.weight == pytest.approx(1 + 3 * 9 / 20, rel=0.1), "of all rounds"
    assert [record.times[size].ms for size in (0, 4)] == pytest.approx([5.6, 7.0], rel=0.05)
    assert record.ms_with(6) == pytest.approx(6.3, rel=0.05), "between them"


def test_larger_trees_do_not_count_as_a_slower_machine(clock: list[float]) -> None:
    chooser = KindChooser(["table"], KindRecords())
    for number in range(200):
        drafts = 0 if number < 100 else 8
        if not chooser.continues_([0]):
            chooser.choose_([0])
        chooser.learn_([1], drafts)
        clock[0] += (9.0 if drafts else 5.0) / 1e3
    assert chooser.records.pace == pytest.approx(1.0)
    times = chooser.record.times
    assert (times[0].ms, times[4].ms) == pytest.approx((5.0, 9.0))
    assert chooser.record.ms == pytest.approx(9.0, rel=0.2), "as in the last rounds"


def test_a_slower_machine_is_seen_where_kinds_take_turns(clock: list[float]) -> None:
    """Rounds also take longer as a text grows: a kind that waits must not seem faster for it."""
    chooser = KindChooser(NAMES, KindRecords(), expecting=[1])
    for number in range(900):
        slower = 2.0 if number >= 450 else 1.0
        expected = {1: Expectation([4.0 if number % 8 < 4 else 1.0], 0)}
        if not chooser.continues_([0], expected):
            chooser.choose_([0], expected)
        chooser.learn_([1], 0)
        clock[0] += slower * (9.0, 6.0, 5.0)[chooser.chosen] / 1e3
    ms = [record.ms for record in chooser.records.of[1]]
    assert chooser.records.pace == pytest.approx(2.0, rel=0.15)
    assert ms == pytest.approx([9.0, 6.0, 5.0], rel=0.15)


def test_recent_rounds_weigh_more_and_are_forgotten() -> None:
    record = KindRecord(times={0: RoundTime(ms=1.0, timed=1, weight=1.0)})
    record.count_([1, 3] * 40)
    record.recent_weight = record.recent_tokens = 0.0
    assert record.rate == pytest.approx(2.0)
    record.count_(20 * [4])
    assert record.rate > 3.0
    record.recent_weight *= 1e-6
    record.recent_tokens *= 1e-6
    assert record.rate == pytest.approx(2.4, abs=0.1), "the mean of all"


def test_what_a_kind_expects_ends_no_span_for_a_kind_that_is_not_allowed(
    clock: list[float],
) -> None:
    chooser = KindChooser(NAMES, KindRecords(), late=[0], expecting=[1])
    play(chooser, clock, (5.0, 6.0, 5.0), (2, 1, 1), rounds=60)
    expected = {1: Expectation([1.0], 0)}
    spans = 0
    for _ in range(80):
        if not chooser.continues_([7], expected):
            chooser.choose_([7], expected, is_late=False)
            spans += 1
        assert chooser.chosen != 0
        chooser.learn_([1], 0)
        clock[0] += 5e-3
    assert spans < 20, "no new one in each round"
