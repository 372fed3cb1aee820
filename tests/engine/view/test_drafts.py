"""The panel of drafts and the lines on requests: trees on their side, every token with its mark."""

from dataclasses import replace

import pytest
from helpers.screens import screenshot

from specsot.engine.record.run_view import DraftTree, Mark, RequestView, draft_tree
from specsot.engine.view.drafts import DRAFT_MARKS, drafts_legend, drafts_text, tree_lines
from specsot.engine.view.panels import request_lines, requests_text
from specsot.states.round import VerifiedTree

from .test_tui import CHAIN_OF_TWO, TREE_OF_ONE, branch, picture, scene


def tree(verified: VerifiedTree = TREE_OF_ONE) -> DraftTree:
    return draft_tree(7, verified, str)


def plain(one: DraftTree, width: int = 60, rows: int = 9) -> list[str]:
    return [line.plain.rstrip() for line in tree_lines(one, width, rows)]


def test_a_tree_lies_on_its_side_the_path_in_its_first_line() -> None:
    assert plain(tree()) == [
        "9┬✓11┬✓14─★77",
        " │   └✗13",
        " └✗12─·15",
    ]


def test_what_has_no_room_is_counted_and_the_path_stays() -> None:
    assert plain(tree(), rows=2) == ["9─✓11┬✓14─★77", "     └✗13  +1 more"]
    assert plain(tree(), rows=1) == ["9─✓11─✓14─★77  +2 more"]


def test_a_chain_is_one_line_with_what_was_drafted_in_vain_behind_it() -> None:
    assert plain(tree(CHAIN_OF_TWO)) == ["8─✓21─◆66  ✗22 ·23"]
    assert plain(tree(CHAIN_OF_TWO), width=12, rows=2) == ["8─✓21─◆66", "    ✗22 ·23"]
    assert plain(tree(CHAIN_OF_TWO), width=12, rows=1) == ["8─✓21─◆66…"]


@pytest.mark.parametrize(
    "changes, marks",
    [
        ({}, "✓✓★✗✗·"),
        ({"forced": True}, "!!★✗✗·"),
        ({"path": (0, 1)}, "✓◆✗✗✗·"),
        ({"path": (0,)}, "◆✗✗···"),
        ({"num_committed": 1}, "✓✓·✗✗·"),  # the second is a stop token
        ({"num_committed": 0}, "✓··✗✗·"),
        ({"tokens": (-1,), "parents": (0,), "path": (0,)}, "◆"),
    ],
)
def test_every_token_has_its_mark(changes: dict[str, object], marks: str) -> None:
    one = tree(replace(TREE_OF_ONE, **changes))  # type: ignore[arg-type]
    assert "".join(DRAFT_MARKS[node.mark][0] for node in one.nodes) == marks


def test_marks_differ_without_colours() -> None:
    marks = [mark for mark, _, _ in DRAFT_MARKS.values()]
    assert len(set(marks)) == len(marks) == len(Mark)
    assert all(
        f"{mark} {name}" in drafts_legend(99) for mark, _, name in DRAFT_MARKS.values() if name
    )
    assert drafts_legend(24) == "✓ accepted ✗ rejected"


def test_text_of_tokens_is_shown_as_it_is_and_safe() -> None:
    texts = {9: " the", 11: "\n", 12: "\x1b[2J", 13: "", 14: "漢字", 15: " x" * 30}
    lines = [
        line.plain
        for line in tree_lines(draft_tree(1, TREE_OF_ONE, lambda n: texts.get(n, "?")), 60, 9)
    ]
    assert lines[0].startswith(" the┬✓␊") and "✓漢字" in lines[0] and "✗<13>" in lines[1]
    assert "\x1b" not in "".join(lines) and max(map(len, lines)) <= 60


@pytest.mark.parametrize("width", [14, 30, 60, 130])
def test_trees_keep_to_their_room(width: int) -> None:
    wide = [replace(tree(), name=str(i + 1)) for i in range(9)]
    for height in (1, 4, 9, 30):
        text = drafts_text(wide, [branch(i) for i in range(9)], width, height)
        lines = text.plain.split("\n")
        assert len(lines) <= height and "✓" in text.plain
    assert "1 2/5" in drafts_text(wide, [branch(0)], width, 9).plain


def test_running_branches_come_first_and_an_outline_goes_with_its_parts() -> None:
    trees = [replace(tree(), name=name) for name in ("outline", "1", "2", "3")]
    views = [branch(0, "done"), branch(1), branch(2)]
    heads = [line[:1] for line in drafts_text(trees, views, 40, 3).plain.split("\n")]
    assert heads == ["2", "3", "1"]
    assert drafts_text(trees[:1], [branch(-1)], 40, 3).plain.startswith("O 2/5")


def test_without_a_drafter_the_trace_takes_the_place() -> None:
    plain = screenshot(replace(scene(), drafter="none"), picture(), 100, 30).export_text()
    assert "drafts" not in plain and "parse → parallel_prefill branches_ready" in plain


# -- requests -------------------------------------------------------------------------------------


def requests(count: int) -> list[RequestView]:
    stages = ["done", "running", "outlining", "waiting"]
    return [
        RequestView(f"r{i}", f"Question {i}?", stages[min(i * 4 // count, 3)], 4, i % 5, 9 * i)
        for i in range(count)
    ]


def test_many_requests_have_a_mark_each() -> None:
    line = request_lines(requests(8), 80, 1).plain
    assert line == " 2/8 requests done ✓✓▶▶OO··  ▶ 2 in parts  O 2 in outlines  · 2 waiting"
    crowd = request_lines(requests(400), 80, 1).plain
    assert len(crowd) <= 80 and "100/400" in crowd and "✓▶" in crowd


def test_a_line_for_each_request_with_those_that_run_before_the_others() -> None:
    lines = requests_text(requests(8), 60, 4).plain.split("\n")
    assert [line.split()[1] for line in lines[:3]] == ["r2", "r3", "r4"]
    assert lines[3] == "  … and 5 more"
    assert lines[1] == "▶ r3     ━━━━━━──   3/4    27 Question 3?"


def test_a_refused_request_is_told_from_one_that_is_done() -> None:
    one, two = requests(2)
    line = request_lines([replace(one, refused=True), two], 60, 1).plain
    assert line.startswith(" 0/2 requests done ✗O") and "✗ 1 refused" in line


def test_a_long_question_is_cut_at_a_word() -> None:
    question = "Why " + "is the sky so very blue " * 9 + "?"
    one = [RequestView("1", question, "running", 0, 0, 0)]
    for rows in (1, 2, 3):
        lines = request_lines(one, 60, rows).plain.split("\n")
        assert len(lines) == rows and max(map(len, lines)) <= 60 and lines[-1].endswith("…")


def test_a_large_terminal_has_drafts_trace_and_requests_at_once() -> None:
    snap = replace(picture(), requests=tuple(requests(5)))
    shown = screenshot(scene(5), snap, 160, 50).export_text()
    for wanted in ("drafts", "trace · ms", "requests · parts", "sequence", "Question 4?"):
        assert wanted in shown, wanted
