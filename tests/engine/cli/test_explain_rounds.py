"""`--explain-rounds` on tiny models: what is printed where, and the lines to the letter."""

import json
from math import nan
from typing import Any

import pytest

from specsot.engine.errors import Code
from specsot.engine.view.lines import blocks, piece
from specsot.ops.draft.gamma import GammaRecord
from specsot.ops.verify.verify import DraftFigures
from specsot.states.round import FinalToken, RoundSummary, VerifiedTree

WORDS = ["Paris", ",", "Rome", "and", "is"]
UNTRIED = DraftFigures(None, -9.0, None, None, None, None, None)


def decode(ids: Any) -> str:
    return "".join(WORDS[token] if token < len(WORDS) else "" for token in ids)


def judged(score: float, p: float, q: float, r: float) -> DraftFigures:
    return DraftFigures(None, score, None, p, q, r, min(1.0, p / q))


def matched(score: float, coin: float | None, draw: int) -> DraftFigures:
    return DraftFigures(draw, score, coin, None, None, None, None)


def explained(
    rule: str,
    drafts: tuple[tuple[int, int, DraftFigures], ...],
    path: tuple[int, ...],
    came: FinalToken,
    *,
    branch: str = "1/1",
    final: int = 3,
    committed: int,
    finish: str | None = None,
) -> VerifiedTree:
    """A tree below token 4 at position 10; drafts: parent, token and figures of each."""
    return VerifiedTree(
        branch,
        10,
        4,
        (4, *(token for _, token, _ in drafts)),
        (0, *(parent for parent, _, _ in drafts)),
        (0, *path),
        final,
        committed,
        rule=rule,
        came=came,
        finish=finish,
        figures=tuple(figures for *_, figures in drafts),
    )


def shown(told: VerifiedTree, *gamma: GammaRecord) -> list[str]:
    counts = ((told.branch,), (told.num_committed,), (len(told.path) - 1,))
    summary = RoundSummary(*counts, len(told.drafts), 9, 0, 5, gamma=gamma, trees=(told,))
    (block,) = blocks(7, summary, decode)
    return block.splitlines()


def test_a_chain_under_rejection() -> None:
    drafts = (
        (0, 0, judged(-0.163, 0.9, 0.85, 0.5)),
        (1, 1, judged(-0.491, 0.72, 0.72, 0.25)),
        (2, 2, judged(-0.877, 0.4216, 0.68, 0.75)),
        (3, 4, UNTRIED),
    )
    told = explained("chain", drafts, (1, 2), FinalToken.RESIDUAL, committed=3)
    assert shown(told, GammaRecord(0.5, 0.25, 4.0, 4.0, 4, 4, 2)) == [
        "round 7  1/1  chain of 4, rejection (chain)",
        '  [10] "is"     root',
        '  [11] "Paris"  accepted     score -0.163    p 0.9       q 0.85      r 0.5       p/q 1.06',
        '  [12] ","      accepted     score -0.491    p 0.72      q 0.72      r 0.25      p/q 1',
        '  [13] "Rome"   rejected     score -0.877    p 0.422     q 0.68      r 0.75      p/q 0.62',
        '  [14] "is"     not reached  score -9',
        '  [13] "and"    final: drawn from what the rejection leaves of p',
        "  accepted 2 of 4 drafts, committed 3 tokens",
        "  length: gamma 4, cut to 4; entropy 0.5, of its reference 0.25, smoothed 4",
    ]


def test_a_tree_under_match() -> None:
    drafts = (
        (0, 0, matched(-0.1, 1.25, 0)),
        (0, 2, matched(-2.0, -0.5, 0)),
        (1, 1, matched(-0.5, 0.75, 3)),
        (2, 4, matched(-2.5, 0.75, 1)),
    )
    told = explained("match", drafts, (1,), FinalToken.TARGET, branch="2/outline", committed=2)
    assert shown(told) == [
        "round 7  2/outline  tree of 4, match",
        '  [10] "is"       root',
        '    [11] "Paris"  accepted     score -0.1      coin 1.25      target "Paris"',
        '      [12] ","    rejected     score -0.5      coin 0.75      target "and"',
        '      [12] "and"  final: the target\'s own',
        '    [11] "Rome"   rejected     score -2        coin -0.5      target "Paris"',
        '      [12] "is"   not reached  score -2.5',
        "  accepted 1 of 4 drafts, committed 2 tokens",
    ]


@pytest.mark.parametrize(
    ("committed", "finish", "end", "totals"),
    [
        (2, None, "a bonus after a path accepted to its end", "2 tokens"),
        (1, "stop", "a bonus after a path accepted to its end; a stop token", "1 token; the "),
        (0, "stop", "dropped, the answer ends before it", "0 tokens; the branch ends (stop)"),
        (1, "length", "dropped, the answer ends before it", "1 token; the branch ends (length)"),
        (2, "length", "a bonus after a path accepted to its end", "ends (length)"),
    ],
)
def test_a_branch_that_ends(committed: int, finish: str | None, end: str, totals: str) -> None:
    drafts = ((0, 0, matched(-0.1, None, 0)),)
    told = explained("match", drafts, (1,), FinalToken.BONUS, committed=committed, finish=finish)
    *_, final, last = shown(told)
    assert final == f'  [12] "and"    final: {end}'
    assert last.startswith("  accepted 1 of 1 draft, committed ") and totals in last
    assert '[11] "Paris"  accepted     score -0.1      target "Paris"' in shown(told)[2]


def test_nothing_drafted_and_a_policy_without_entropy() -> None:
    told = explained("chain", (), (), FinalToken.TARGET, final=9, committed=1)
    assert shown(told, GammaRecord(nan, nan, nan, 2.0, 2, 0, 0)) == [
        "round 7  1/1  no drafts",
        '  [10] "is"  root',
        "  [11] <9>   final: the target's own",
        "  accepted 0 of 0 drafts, committed 1 token",
        "  length: gamma 2, cut to 0; smoothed 2",
    ]


def test_the_text_of_a_token_is_what_it_adds() -> None:
    def words(ids: Any) -> str:
        return " ".join(f"w{token}" for token in ids)

    assert piece(words, 3, 5) == '" w5"' and piece(words, None, 5) == '"w5"'
    assert piece(lambda ids: "a\n" * len(ids), 1, 1) == '"a\u240a"'
    assert piece(lambda ids: "\x1b[2J", None, 1) == '"\u241b[2J"'


# -- the command ----------------------------------------------------------------------------------


def rounds_of(shell: Any) -> list[Any]:
    return [r for r in shell.lines("trace.jsonl") if r["kind"] == "round"]


def explained_trees(shell: Any) -> list[tuple[int, str, Any]]:
    """(round, branch, tree) of every tree with its rule in a trace."""
    return [
        (record["round"], branch, tree)
        for record in rounds_of(shell)
        for branch, tree in zip(record["branches"], record.get("trees", ()), strict=False)
        if "rule" in tree
    ]


def test_every_round_of_every_branch_is_printed_and_kept(shell: Any) -> None:
    assert shell.run() == Code.OK
    digest, answer = shell.digest, shell.out
    assert "round 2" not in shell.err and not explained_trees(shell)
    assert shell.run(explain_rounds=True) == Code.OK
    assert shell.digest == digest and shell.out == answer
    assert shell.read("metrics.json")["host_reads"]["per_round"] == 1.0
    told = explained_trees(shell)
    heads = [line for line in shell.err.splitlines() if line.startswith("round ")]
    assert [h.split()[1:3] for h in heads] == [[str(n), name] for n, name, _ in told]
    assert len(told) == shell.read("metrics.json")["branch_rounds"]
    assert all(len(tree["figures"]) == len(tree["tokens"]) for *_, tree in told)
    assert shell.run(explain_rounds=True, quiet=True) == Code.OK
    assert not shell.err and explained_trees(shell)
    assert shell.run(explain_rounds=True, as_json=True) == Code.OK
    assert json.loads(shell.out)["digest"] == shell.digest and "round 2" in shell.err


def test_rounds_and_branches_are_selected(shell: Any) -> None:
    def heads(**options: Any) -> list[tuple[int, str]]:
        assert shell.run(explain_rounds=True, **options) == Code.OK
        lines = [line.split() for line in shell.err.splitlines() if line.startswith("round ")]
        return [(int(number), name) for _, number, name, *_ in lines]

    every = heads()
    digest, kept = shell.digest, explained_trees(shell)
    first, last = every[0][0] + 1, every[0][0] + 3
    assert {"1/1", "1/2"} < {name for _, name in every} and (last, "1/1") in every
    for options, wanted in (
        ({"rounds": f"{first}:{last}"}, [one for one in every if first <= one[0] <= last]),
        ({"rounds": f"{last}"}, [one for one in every if one[0] == last]),
        ({"branches": (2,)}, [one for one in every if one[1] == "1/2"]),
        ({"branches": (1, 9), "rounds": f"{last}"}, [(last, "1/1")]),
        ({"branches": (9,)}, []),
    ):
        assert heads(**options) == wanted, options
        assert explained_trees(shell) == kept and shell.digest == digest, "the trace has all"
    outline = heads(outline=None, branches=(0,), max_new_tokens=4)
    assert outline and {name for _, name in outline} == {"1/outline"}


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"branches": (1,)}, "--branch selects rounds of --explain-rounds: give both"),
        ({"rounds": "1:2"}, "--rounds selects rounds of --explain-rounds: give both"),
        ({"rounds": "5:2", "explain_rounds": True}, "--rounds 5:2: a round, or the first and last"),
        ({"rounds": "x", "explain_rounds": True}, "--rounds x: a round, or the first and last"),
    ],
)
def test_what_selects_no_rounds_is_refused(options: Any, fault: str, shell: Any) -> None:
    assert shell.run(**options) == Code.USAGE
    assert shell.err.startswith(f"specsot: {fault}") and shell.err.count("\n") == 1


def test_a_repeated_run_can_be_explained(shell: Any) -> None:
    sets = ("sampling.temperature=0.9", "sampling.accept=rejection")
    assert shell.run(sets=sets) == Code.OK
    assert shell.repeat(explain_rounds=True) == Code.OK and "rejection (topk)" in shell.err
    assert shell.repeat() == Code.OK and "rejection (topk)" not in shell.err


@pytest.mark.parametrize("accept", ["match", "rejection"])
def test_an_outline_under_a_grammar(accept: str, shell: Any) -> None:
    """The host walks with the grammar, and takes the best legal token whatever `accept` says."""
    sets = ("sampling.temperature=0.9", f"sampling.accept={accept}")
    code = shell.run(explain_rounds=True, outline=None, sets=sets, max_new_tokens=8)
    assert code == Code.OK
    told = explained_trees(shell)
    outline = [tree for _, name, tree in told if name.endswith("outline")]
    assert outline and all(tree["rule"] == "grammar" for tree in outline)
    marks = set()
    for tree in outline:
        path = [0, *tree["path"]]
        parents = tree.get("parents", range(len(tree["tokens"])))
        rows = zip(tree["tokens"], parents, tree["figures"], strict=True)
        for node, (token, parent, found) in enumerate(rows, 1):
            if token < 0:
                continue
            reached = parent in path
            assert found["p"] is found["q"] is found["r"] is None and found["coin"] is not None
            assert (found["draw"] is not None) == reached
            assert (node in path) == (reached and found["draw"] == token)
            marks.add((reached, node in path))
    assert {(True, True), (False, False)} <= marks
    assert "under a grammar" in shell.err
    assert all(tree["rule"] != "grammar" for *_, tree in told if tree not in outline)
