"""Drafters that take turns: the tokens are the target's own, and all drafters follow the text."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.metrics import Meter
from specsot.engine.run.api import open_session, token_digest
from specsot.engine.run.session import perform
from specsot.ops.draft import kinds as kinds_file
from specsot.ops.draft.kinds import Expectation, KindChooser
from specsot.ops.draft.ngram import HostTree
from specsot.ops.draft.recycle import RecycleTable
from specsot.ops.draft.suffix import SuffixTexts
from specsot.states import auto as auto_file
from specsot.states.auto import matched
from specsot.states.commit import Committer
from specsot.states.drafters.recycle import RecycleDrafter
from specsot.states.yaml.source import GraphError

PROMPTS = [Prompt("1", "Tell me about honey bees."), Prompt("2", "Plan a weekend camping trip.")]
HEAD = "num_draft_tokens: 6, draft_depth: 3, top_k: 4"
OTHERS = "or: [recycle, {kind: suffix, num_draft_tokens: 5}, none]"
WITHOUT = "drafter.or: takes drafters without a model (none,"
HOT = "sampling={temperature: 1.3, top_p: 0.95}"


def played(*sets: str, prompts: Sequence[Prompt] = PROMPTS) -> tuple[str, Meter, list[Any]]:
    """The digest, the counters and the records of the rounds of a run."""
    session = open_session("bim_plain", sets=sets, threads=1, max_new_tokens=24)
    records: list[Any] = []
    run, recorder, _ = perform(session, prompts, write=records.append)
    digest = token_digest(run.answers)
    run.close()
    return digest, recorder.meter, [one for one in records if one.get("trees")]


def in_turn(monkeypatch: pytest.MonkeyPatch, *kinds: int) -> None:
    """The kinds with these numbers have the rounds, in this order, again and again."""
    turns = cycle(kinds)
    monkeypatch.setattr(kinds_file, "HELD", 1)
    monkeypatch.setattr(kinds_file, "TRIAL", 1)
    monkeypatch.setattr(KindChooser, "_next", lambda *_: next(turns))


def trees_of(rounds: list[Any]) -> dict[Any, Any]:
    """The drafted trees by branch, position and root token; not those that a grammar forces."""
    return {
        (name, tree["at"], tree["root"]): (tree["tokens"], tree.get("parents"))
        for one in rounds
        for name, tree in zip(one["branches"], one["trees"], strict=False)
        if tree["tokens"] and not tree.get("forced")
    }


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("main", [f"eagle3, {HEAD}", "dflash, grow: ddtree", "vanilla", "recycle"])
def test_tokens_are_those_of_plain_decoding(main: str, layout: str) -> None:
    sets = (f"layout.kind={layout}", HOT)
    digest, meter, rounds = played(f"drafter={{kind: {main}, {OTHERS}}}", *sets)
    assert digest == played(*sets)[0] != played(f"layout.kind={layout}")[0]
    assert meter.kinds.total() == meter.rounds == len(rounds)
    assert meter.kinds.keys() == {main.partition(",")[0], "recycle", "suffix", "none"}
    kinds = Counter(choice["kind"] for one in rounds for choice in one["choices"])
    assert kinds == meter.kinds


@pytest.mark.parametrize("layout", ["bim", "batching"])
@pytest.mark.parametrize("main", [f"eagle3, {HEAD}", "dflash, block_size: 4", "vanilla"])
def test_a_drafter_reads_the_rounds_without_it_before_it_drafts_again(
    main: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = f"layout.kind={layout}"
    digest, _, alone = played(f"drafter={{kind: {main}}}", layout)
    in_turn(monkeypatch, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1)
    found, meter, rounds = played(f"drafter={{kind: {main}, or: [none]}}", layout)
    assert found == digest and min(meter.kinds.values()) > 5
    expected = trees_of(alone)
    mine = trees_of(rounds)
    shared = mine.keys() & expected.keys()
    assert len(shared) > 9
    assert {key: mine[key] for key in shared} == {key: expected[key] for key in shared}


def test_candidates_are_kept_of_rounds_of_other_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KindChooser, "_next", lambda *_: 0)
    monkeypatch.setattr(auto_file, "SHARE", 0.0)
    put: list[Any] = []
    monkeypatch.setattr(RecycleTable, "put_", lambda *known, **_: put.append(known))
    learn = RecycleDrafter.learn
    rounds: list[Any] = []
    monkeypatch.setattr(
        RecycleDrafter, "learn", lambda *all_: (rounds.append(all_), learn(*all_))[1]
    )
    counts = []
    for opening in (1000, 0):  # later, as far as it costs little
        put.clear()
        rounds.clear()
        monkeypatch.setattr(auto_file, "OPENING", opening)
        _, meter, _ = played(f"drafter={{kind: eagle3, {HEAD}, or: [recycle]}}")
        counts.append(len(put))
    assert counts[0] >= meter.drafted + meter.lengths.total(), "every row of every round"
    assert 0 < counts[1] < counts[0] / 2 and len(rounds) == 1


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("main", [f"eagle3, {HEAD}", "vanilla"])
def test_a_drafter_that_is_surely_slower_reads_some_requests_only(
    main: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are not drafted for, next to one that is; their rows are cached all the same."""
    prompts = [Prompt(str(n), PROMPTS[n % 2].text) for n in range(6)]
    sets = (f"layout.kind={layout}", "layout.max_num_branches=6")
    expected = played(*sets, prompts=prompts)[0]
    monkeypatch.setattr(KindChooser, "is_surely_slower", lambda *_: True)
    monkeypatch.setattr(auto_file, "AGAIN", 2)
    drafted: list[tuple[bool, ...]] = []
    choose_ = KindChooser.choose_

    def seen_(
        self: KindChooser, owners: Sequence[int], expected: Any, *, is_late: bool = True
    ) -> int:
        rounds = choose_(self, owners, expected, is_late=is_late)
        drafted.append((is_late, self.chosen == 0))
        return rounds

    monkeypatch.setattr(KindChooser, "choose_", seen_)
    digest, _, _ = played(f"drafter={{kind: {main}, or: [recycle, none]}}", *sets, prompts=prompts)
    assert digest == expected
    assert (False, False) in drafted and (False, True) not in drafted
    assert (True, True) in drafted, "while only branches that it reads are active"


@pytest.mark.parametrize("is_slow", [False, True])
def test_suffixes_can_be_the_only_other_drafter(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draft for all requests that the main drafter does not read."""
    prompts = [Prompt(str(n), PROMPTS[n % 2].text) for n in range(6)]
    expected = played(prompts=prompts)[0]
    monkeypatch.setattr(KindChooser, "is_surely_slower", lambda *_: is_slow)
    block = f"drafter={{kind: eagle3, {HEAD}, or: [suffix]}}"
    digest, meter, _ = played(block, prompts=prompts)
    assert digest == expected
    assert meter.kinds.keys() == ({"suffix"} if is_slow else {"eagle3", "suffix"})


def test_a_drafter_that_saves_nothing_reads_fewer_and_fewer_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = open_session("bim_auto", threads=1, max_new_tokens=8)
    run, _, _ = perform(session, PROMPTS[:1])
    drafter = run.board["drafter"]
    monkeypatch.setattr(KindChooser, "is_surely_slower", lambda *_: False)
    read = []
    for gain in (0.5, *[0.0] * 99, 0.5, 0.5, *[0.05] * 9):
        monkeypatch.setattr(KindChooser, "gain", lambda *_, gain=gain: gain)
        read.append(drafter.reads())
    run.close()
    numbers = [number for number, is_read in enumerate(read) if is_read]
    assert numbers[:6] == [0, 4, 12, 28, 60, 92], "nothing saved"
    assert numbers[6:] == [100, 101, 105, 109], "much saved, then little"


def test_rows_of_a_request_without_the_drafter_are_of_no_use_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second request has the same prompt, and the drafter reads all of it again; the third one
    continues after the rows of the first."""
    text = 9 * "Tell me about honey bees, and about the flowers that they like best. "
    prompts = [Prompt(key, text) for key in "123"]
    sets = ("layout.max_num_branches=1", f"drafter={{kind: eagle3, {HEAD}, or: [none]}}")
    monkeypatch.setattr(KindChooser, "_next", lambda self, records, kinds: kinds[0])
    monkeypatch.setattr(auto_file, "AGAIN", 2)
    reused: list[int] = []
    trees = []
    for is_slow in (False, True):
        monkeypatch.setattr(KindChooser, "is_surely_slower", lambda *_, is_slow=is_slow: is_slow)
        session = open_session("autoregressive", sets=sets, threads=1, max_new_tokens=24)
        records: list[Any] = []
        run, _, _ = perform(session, prompts, write=records.append)
        reused.append(run.manager.prefixes.figures.reused)
        trees.append(trees_of([one for one in records if one.get("trees")]))
        run.close()
    assert reused[0] > 1.9 * reused[1] > 0
    assert 0 < len(trees[1]) < len(trees[0]) and trees[1].items() <= trees[0].items()


def test_what_another_drafter_would_have_given_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trees are compared with the text: here one that an earlier answer has."""
    in_turn(monkeypatch, 0)
    monkeypatch.setattr(auto_file, "SHARE", 1e6)  # always due
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(KindChooser, "learn_of_", lambda self, *kind: found.append(kind))
    block = "drafter={kind: suffix, or: [none, recycle]}"
    twice = [Prompt(key, "Tell me about honey bees.") for key in "12"]
    played(block, "layout.max_num_branches=1", prompts=twice)
    assert {kind for kind, _ in found} == {2} and max(tokens for _, tokens in found) > 4


def test_suffixes_know_what_to_expect_of_rounds_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They follow a text that others draft: an answer that is given again is expected."""
    in_turn(monkeypatch, 0)
    monkeypatch.setattr(auto_file, "SHARE", 1e6)  # always due
    expected: list[Expectation] = []
    monkeypatch.setattr(
        KindChooser, "_count_expected_", lambda self, each: expected.extend(each.values())
    )
    counted: list[Any] = []
    monkeypatch.setattr(SuffixTexts, "count_", lambda *known: counted.append(known))
    block = "drafter={kind: recycle, or: [none, suffix]}"
    twice = [Prompt(key, "Tell me about honey bees.") for key in "12"]
    _, meter, _ = played(block, "layout.max_num_branches=1", prompts=twice)
    assert meter.kinds.keys() == {"recycle"} and len(expected) == len(counted) > 9
    half = len(expected) // 2
    assert sum(one.drafts > 0 for one in expected[half:]) > half / 2
    assert max(one.tokens[0] for one in expected[half:]) > 4


def test_suffixes_forget_texts_between_expecting_and_drafting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text of one branch may end what another one matched in the same round."""
    in_turn(monkeypatch, 1)
    monkeypatch.setattr(auto_file, "SHARE", 1e6)  # always due
    prompts = [Prompt(str(n), PROMPTS[n % 2].text) for n in range(6)]
    block = "drafter={kind: recycle, or: [{kind: suffix, most_tokens: 120}]}"
    digest, meter, _ = played(block, prompts=prompts)
    assert digest == played(prompts=prompts)[0] and meter.kinds.keys() == {"suffix"}


@pytest.mark.parametrize(
    ("drafter", "reads"),
    [("none", False), ("suffix", False), ("vanilla", True), ("recycle, or: [none]", False)],
)
def test_rows_are_shown_to_drafters_that_read_them(
    drafter: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    commit_ = Committer.commit_

    def seen_(self: Committer, *batch: Any, **results: Any) -> Any:
        observe = type(self.drafter).observe

        def both(rows: Any) -> None:
            shown.append(rows)
            observe(self.drafter, rows)

        monkeypatch.setattr(self.drafter, "observe", both)
        return commit_(self, *batch, **results)

    monkeypatch.setattr(Committer, "commit_", seen_)
    played(f"drafter={{kind: {drafter}}}", prompts=PROMPTS[:1])
    assert bool(shown) == reads


def test_the_matched_drafts_of_a_tree() -> None:
    tree = HostTree((5, 6, 7, 5), (-1, -1, 1, 2), (1, 1, 2, 3), (0.0,) * 4)
    assert [matched(tree, text) for text in ([], [9], [5, 5], [6, 7, 5, 4])] == [0, 0, 1, 3]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            "drafter.or=[eagle2]",
            WITHOUT,
        ),
        (
            "drafter.or=[recicle]",
            WITHOUT,
        ),
        (
            "drafter.or=[{kind: recycle, rows_per_round: 3}]",
            WITHOUT,
        ),
        ("drafter.or=[{kind: suffix, top_k: 3}]", "drafter.or: suffix.top_k: unknown key"),
        ("drafter={kind: none, or: [recycle]}", "unknown key 'or'"),
        (
            "sampling={accept: rejection, temperature: 1}",
            "the text depends on the drafter, which `or` chooses by measured times",
        ),
    ],
)
def test_what_cannot_take_turns_is_an_error(sets: str, message: str) -> None:
    with pytest.raises(GraphError) as error:
        open_graph("bim_auto", [sets])
    assert message in str(error.value) and len(error.value.problems) == 1
