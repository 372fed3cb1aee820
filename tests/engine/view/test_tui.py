"""The live view: made-up pictures at both sizes, each panel, cached documents, drafts. A replay's
keys, its bar, its plain lines, and keys as a terminal sends them."""

import io
import os
import pty
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from helpers.commands import screenshot
from rich.cells import cell_len
from rich.console import Console

from specsot.engine.errors import Code
from specsot.engine.record import run_view
from specsot.engine.record.metrics import Meter
from specsot.engine.record.recorder import Recorder
from specsot.engine.record.replay import Replay
from specsot.engine.record.run_folder import SavedRun
from specsot.engine.record.run_view import (
    BRANCH,
    FREE,
    PICKED,
    PREFIX,
    REUSED,
    TREE,
    BranchView,
    DraftTree,
    Mark,
    PoolView,
    RequestView,
    Scene,
    Snapshot,
    draft_tree,
    slot_codes,
)
from specsot.engine.shell import usable
from specsot.engine.view import panels
from specsot.engine.view.drafts import DRAFT_MARKS, drafts_legend, drafts_text, tree_lines
from specsot.engine.view.keys import Keys, Pages
from specsot.engine.view.step import PAGES, STEP_KEYS
from specsot.engine.view.tui import FRAMES, LIVE_KEYS, PLAYER_KEYS, LiveView, Player, play
from specsot.engine.view.tui import screen as keyed_screen
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import LayerStatus
from specsot.states.blend import Reused
from specsot.states.machine import Moved
from specsot.states.request import Branch, Request
from specsot.states.round import BlendSummary, VerifiedTree

STATES = ["skeleton", "expand_root", "grow_tree", "verify", "parse", "parallel_prefill"]
STATES += ["continuous_decode", "merge", "done"]


# the root 9; 11 and 12 below it, 13 and 14 below 11, 15 below 12: 11 and 14 are accepted
TREE_OF_ONE = VerifiedTree(
    "1/1", 30, 9, (-1, 11, 12, 13, 14, 15), (0, 0, 0, 1, 1, 2), (0, 1, 4), 77, 3
)
CHAIN_OF_TWO = VerifiedTree("1/2", 40, 8, (-1, 21, 22, 23, -1), (0, 0, 1, 2, 0), (0, 1), 66, 2)


def branch(index: int, stage: str = "running", text: str = "word " * 40) -> BranchView:
    finish = "stop" if stage == "done" else ""
    return BranchView("1", index, f"Title {index}", stage, finish, 12, 256, text)


def picture(branches: int = 5) -> Snapshot:
    used = [PREFIX] * 60 + [BRANCH + i for i in range(5) for _ in range(20)] + [TREE] * 20
    codes = np.array(used + [FREE] * 3916, np.int16)
    moves = [
        (Moved("parse", "parallel_prefill", "branches_ready", 1, 400_000), 0),
        (Moved("continuous_decode", "parallel_prefill", "none_running", 2, 12_300_000), 14),
        (Moved("verify", "expand_root", None, 3, 8_100_000), 9),
    ] * 5
    meter = Meter(forwards=42, rounds=34, tokens=412, drafted=100, accepted=34)
    meter.lengths.update({1: 8, 2: 20, 3: 30, 4: 16, 5: 6})
    for i, name in enumerate(STATES):
        meter.visits[name], meter.nanos[name] = i * 3, i * 10_000_000
    return Snapshot(
        "expand_root",
        tuple(moves),
        tuple(branch(i) for i in range(branches)),
        PoolView(codes, 180, 1_200_000, 150, 4200),
        meter,
        3.25,
        requests=(RequestView("1", "How do bees make honey?", "running", 5, 0, 412),),
        trees=(draft_tree(34, TREE_OF_ONE, str), draft_tree(33, CHAIN_OF_TWO, str)),
    )


def scene(requests: int = 1) -> Scene:
    ways = {"expand_root": ("grow_tree",)}
    return Scene("bim_eagle", "bim", "eagle3", "embedded", tuple(STATES), ways, requests)


def screen(width: int, height: int, snap: Snapshot, requests: int = 1) -> list[str]:
    text = screenshot(scene(requests), snap, width, height).export_text(styles=False)
    return text.rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [10, 24, 40, 60, 79, 80, 96, 100, 140, 300])
@pytest.mark.parametrize("height", [3, 12, 20, 24, 27, 28, 30, 50, 90])
def test_it_fits_its_terminal(width: int, height: int) -> None:
    for branches, requests in ((5, 1), (9, 3)):
        lines = screen(width, height, picture(branches), requests)
        assert len(lines) == height and max(map(len, lines)) <= width


@pytest.mark.parametrize("width, height", [(80, 24), (100, 30)])
def test_everything_asked_for_is_on_the_screen(width: int, height: int) -> None:
    text = "\n".join(screen(width, height, picture()))
    head = ("bim_eagle", "eagle3", "round 34", "How do bees make honey?", "Title 4", "★77")
    marks = ("✓ accepted ✗ rejected ★ bonus ◆ own ! forced", "✗ refused ■ halted", "prefix", "tree")
    figures = ("KV 180/4096 4 %", "127 tok/s", "9.81 tok/forward", "2.90", "12/256", "8.1 ms +9")
    for wanted in (*STATES, "◦ open", *head, *marks, *figures):
        assert wanted in text, wanted


def test_a_small_terminal_shows_five_branches_side_by_side() -> None:
    console = screenshot(replace(scene(), states=("schedule", *STATES, "idle")), picture(), 80, 24)
    lines = console.export_text(styles=False).split("\n")
    found = [line.index("Title") for line in lines if "Title" in line]
    assert len(found) == 5 and len(set(found)) == 1
    assert not any("idle" in line for line in lines), "nobody waits there in a run"


def test_the_current_state_is_lit_and_the_last_move_is_an_arrow() -> None:
    text = panels.states_text(scene(), picture(), times=False)
    lines = [line.plain for line in text.split("\n")]
    assert lines[1].startswith("╭▶ expand_root")
    assert lines[2].startswith("│ ◦grow_tree")
    assert lines[3].startswith("╰╴ verify")
    lit = [s for s in text.spans if s.style == panels.LIT]
    assert [text.plain[s.start : s.end].strip() for s in lit] == ["expand_root"]
    trace = panels.trace_text(picture().moves, 60, 3).plain
    assert "parse → parallel_prefill branches_ready" in trace and len(trace.split("\n")) == 3
    assert "none_running  12.3  +14" in trace


def shown(view: BranchView | list[BranchView], rows: int, width: int = 80) -> list[str]:
    views = view if isinstance(view, list) else [view]
    return panels.branches_text(views, False, width, rows).plain.split("\n")


def test_many_branches_show_those_that_run() -> None:
    views = [branch(i, "done") for i in range(6)] + [branch(6), branch(7), branch(8, "waiting")]
    lines = shown(views, 4)
    assert [line[3:5].strip() for line in lines[:3]] == ["7", "8", "9"]
    assert lines[3].strip() == "… and 6 more"


def test_text_of_a_model_cannot_touch_the_terminal() -> None:
    view = branch(0, text="ok \x1b[2J[bold]x[/bold] \u202e\x07 end")
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    console.print(panels.branches_text([view], False, 100, 1))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in shown and "\x07" not in shown and "\u202e" not in shown
    assert "[bold]x[/bold]" in shown


def test_the_end_of_a_long_text_fills_its_lines() -> None:
    text = " ".join(f"word{i}" for i in range(60))
    (line,) = shown(branch(0, text=text), 1)
    assert line.endswith("word58 word59") and len(line) > 72
    lines = shown(branch(0, text=text), 3)
    assert len(lines) == 3 and lines[-1].endswith("word59")
    assert shown(branch(0, text="just this"), 3)[-1].endswith("just this")
    wide = replace(picture(1), branches=(branch(0, text="漢字かな交じり文 " * 30),))
    lines = screen(80, 24, wide)
    assert "漢字" in "\n".join(lines) and max(map(cell_len, lines)) <= 80


def test_strip_covers_what_is_used_and_prefers_it() -> None:
    text, step = panels.strip_text(picture().pool, 40, 2)
    assert step == 3
    assert [len(row) for row in text.plain.split("\n")] == [40, 40]
    assert text.plain.count("█") == 20 and "1" in text.plain and "5" in text.plain
    codes = np.array([FREE, FREE, PREFIX, TREE, TREE, PREFIX, FREE, FREE, FREE, 7], np.int16)
    assert panels.downsample(codes, 3).tolist() == [PREFIX, TREE, FREE, 7]
    assert panels.downsample(np.zeros(4, np.int16), 2).tolist() == [FREE, FREE]


def asked(prefix: int, *owners: int) -> Request:
    """A request with a branch for each of these owners."""
    request = Request("1", 0, "?", [], [], frozenset(), 5, 5, prefix_owner=prefix)
    request.branches = [Branch(request, at, owner, 5) for at, owner in enumerate(owners)]
    return request


def test_codes_follow_the_slot_table() -> None:
    kv, request = KVCache(1, 1, 2, 8), asked(0, 2, 3)
    request.root = Branch(request, -1, 1, 5)
    for owner in (0, 1, 2, 3):
        kv.commit_(kv.append_([owner], [0]), [0])
    kv.append_([3, 3], [1, 2])
    found = slot_codes(kv, [request]).tolist()
    wanted = [PREFIX, run_view.OUTLINE, BRANCH, BRANCH + 1, TREE, TREE, FREE, FREE]
    assert found == wanted


def test_histogram_has_a_column_per_length() -> None:
    lines = panels.histogram_bars({1: 4, 3: 2}, 4, 18).plain.split("\n")
    assert lines[-1] == "  1  2  3  4"
    assert [line[1:3] for line in lines[:4]] == ["██"] * 4
    assert [line[7:9] for line in lines[:4]] == ["  ", "  ", "██", "██"]


TERMINAL: Any = {"force_terminal": True, "_environ": {"TERM": "xterm"}}


@pytest.mark.parametrize(
    "environ, wanted",
    [({}, True), ({"NO_COLOR": "1"}, False), ({"CI": "true"}, False), ({"CI": "false"}, True)],
)
def test_when_a_live_view_is_used(environ: dict[str, str], wanted: bool) -> None:
    assert usable(Console(file=io.StringIO(), **TERMINAL), environ) is wanted
    assert not usable(Console(file=io.StringIO(), _environ={}), environ)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert not usable(dumb, environ)


def test_the_view_only_asks_and_reads() -> None:
    recorder = Recorder(lambda ids: "")
    recorder.snapshot = picture()
    console = Console(file=io.StringIO(), **TERMINAL, width=80, height=24)
    with LiveView(recorder, scene(), console):
        sleep(0.5)
    assert recorder.snapshot_requested and FRAMES <= 8
    assert "bim_eagle" in console.file.getvalue()  # type: ignore[attr-defined]


# -- keys of all views ----------------------------------------------------------------------------


def painted(pages: Pages, snap: Snapshot, width: int = 80, height: int = 24) -> list[str]:
    """The lines of a view with keys."""
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(keyed_screen(scene(), snap, width, height, pages=pages), height=height)
    return console.export_text(styles=False).rstrip("\n").split("\n")


def titles(lines: list[str]) -> list[str]:
    return [line[line.index("Title") :].split()[1] for line in lines if "Title" in line]


def test_keys_scroll_to_every_branch() -> None:
    snap, pages = picture(15), Pages(LIVE_KEYS)
    lines = painted(pages, snap)
    (place,) = (line.strip() for line in lines if "branches 1-" in line)
    shown = titles(lines)
    assert place == f"branches 1-{len(shown)} of 15 (j/k)" and shown[0] == "0"
    assert pages.press("j") and pages.press("down")
    assert titles(painted(pages, snap))[0] == "2"
    assert pages.press("k") and pages.press("page down")
    assert titles(painted(pages, snap))[0] == str(1 + len(shown)), "a page is what is visible"
    pages.press("end")
    lines = painted(pages, snap)
    assert titles(lines)[-1] == "14" and "-15 of 15 (j/k)" in "\n".join(lines)
    pages.press("j")
    pages.press("k")
    assert titles(painted(pages, snap))[-1] == "13", "no key is lost at the end"
    pages.press("home")
    assert titles(painted(pages, snap)) == shown
    assert "(j/k)" not in "\n".join(painted(Pages(LIVE_KEYS), picture(3)))
    assert "(j/k)" not in "\n".join(screen(80, 24, snap)), "a picture without keys"


def test_drafts_and_requests_are_scrolled_too() -> None:
    trees = tuple(replace(tree(TREE_OF_ONE), name=str(n + 1)) for n in range(15))
    snap, pages = replace(picture(15), trees=trees), Pages(LIVE_KEYS)
    before = "\n".join(painted(pages, snap))
    pages.press("j")
    after = "\n".join(painted(pages, snap))
    assert "drafts 1-" in before and "drafts 2-" in after
    text = drafts_text(trees, snap.branches, 40, 4, pages).plain
    assert [line[:2] for line in text.split("\n")] == ["2 ", "3 ", "4 ", "5 "]
    assert text.endswith("drafts 2-5 of 15 (j/k)")
    text = panels.requests_text(requests(8), 60, 4, pages).plain
    assert text.endswith("requests 2-4 of 8 (j/k)") and text.split()[1] == "r3"


@pytest.mark.parametrize("keys, names", [(LIVE_KEYS, {}), (STEP_KEYS, PAGES), (PLAYER_KEYS, {})])
def test_the_help_has_every_key_and_panel_on_a_small_terminal(keys: Any, names: Any) -> None:
    pages = Pages(keys, names)
    assert not pages.press("x") and not pages.press("")
    usual = painted(pages, picture())
    assert usual[-1].endswith("? help") and keys[0].hint in usual[-1]
    pages.press("?")
    lines = painted(pages, picture())
    pages.press("end")
    text = "\n".join([*lines, *painted(pages, picture())])
    wanted = [*panels_of_the_help(), *(key.keys for key in keys), *(key.does for key in keys)]
    for one in (*wanted, *names, *names.values(), "this help; Esc closes it"):
        assert one in text, one
    assert "…" not in text and "╭─ help" in lines[1]
    for close in ("?", "\x1b", "q"):
        pages.help = True
        assert pages.press(close) and not pages.help
    assert painted(pages, picture()) == usual


def panels_of_the_help() -> list[str]:
    """The titles of panels on a large screen."""
    text = "\n".join(screen(160, 50, replace(picture(), requests=tuple(requests(5))), 5))
    names = ["states", "trace", "drafts", "branches", "requests", "sequence", "accepted"]
    assert all(f"─ {name} " in text for name in names)
    return names


@pytest.mark.parametrize("width", [8, 20, 40, 60, 80, 120])
def test_hints_fit_and_name_the_pages(width: int) -> None:
    pages = Pages(STEP_KEYS, PAGES)
    pages.press("3")
    hints = pages.hints(width).plain
    assert len(hints) <= width and hints.endswith("? help")
    listed = "0 picture 1 board 2 text [3 tree] 4 rows"
    assert (listed in hints) == (width >= 80) and ("Enter step" in hints) == (width >= 20)
    assert width < 80 or ("c run" in hints and "q quit" in hints)


def test_the_live_view_reads_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    recorder = Recorder(lambda ids: "")
    recorder.snapshot = picture(15)
    console = Console(file=io.StringIO(), **TERMINAL, width=80, height=24)

    def seen(words: str) -> bool:
        until = monotonic() + 20
        while words not in console.file.getvalue() and monotonic() < until:  # type: ignore[attr-defined]
            sleep(0.02)
        return words in console.file.getvalue()  # type: ignore[attr-defined]

    with open(inner, encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with LiveView(recorder, scene(), console) as view:
            assert seen("branches 1-") and seen("Ctrl-C stop · ? help")
            os.write(outer, b"j")
            assert seen("branches 2-")
            os.write(outer, b"?")
            assert seen("stop the run and save what is finished")
            os.write(outer, b"?")
            os.write(outer, b"x\n")
            assert view.read(20.0) == "x" and view.read(20.0) == "enter", "keys of a pause are left"
            assert not view.pages.help
    os.close(outer)


# -- cached documents -----------------------------------------------------------------------------

BLENDED = BlendSummary((0, 1, 2, 2), (370, 370, 97, 97), (47,), 320, 0, 50, ((320, 50),))


def test_every_layer_has_a_cell_with_its_rows_or_of_a_deep_model_a_letter() -> None:
    line = panels.layers_line(BLENDED, 100)
    assert line.plain == "layers F370 C370 A97 A97  cached 320 · picked 47 · fresh 50"
    styles = [str(span.style) for span in line.spans]
    wanted = [panels.STATUS_STYLES[LayerStatus(status)] for status in BLENDED.plan]
    assert [style for style in styles if style in wanted] == wanted
    deep = replace(BLENDED, plan=(0, 1, *[2] * 38), live=(370, 370, *[97] * 38))
    line = panels.layers_line(deep, 60)
    assert line.plain == "layers FC" + "A" * 38 and line.cell_len <= 60
    assert panels.layers_line(deep, 20).cell_len == 20


@pytest.mark.parametrize(("width", "height"), [(110, 34), (80, 24)])
def test_layers_are_shown_where_rows_were_cached(width: int, height: int) -> None:
    snap = picture()
    before, after = (screen(width, height, one) for one in (snap, replace(snap, blend=BLENDED)))
    assert "layers" not in "\n".join(before) and "F370 C370 A97" in "\n".join(after)
    assert len(after) == len(before)


def test_cached_rows_are_told_from_recomputed_ones() -> None:
    pool, request = KVCache(1, 1, 2, 16), asked(3, 4)
    pool.commit_(pool.append_([4] * 6, list(range(6))), list(range(6)))
    codes = slot_codes(pool, [request], {4: Reused({1, 2, 3, 4}, {2})})
    wanted = [BRANCH, REUSED, PICKED, REUSED, REUSED, BRANCH]
    assert codes[:6].tolist() == wanted and not codes[6:].any()
    assert slot_codes(pool, [request], {9: Reused({1}, {1})})[:6].tolist() == [BRANCH] * 6
    assert np.unique([panels.cell_of(code)[0] for code in (BRANCH, REUSED, PICKED)]).size == 3


# -- drafts ---------------------------------------------------------------------------------------


def tree(verified: VerifiedTree = TREE_OF_ONE) -> DraftTree:
    return draft_tree(7, verified, str)


def plain(one: DraftTree, width: int = 60, rows: int = 9) -> list[str]:
    return [line.plain.rstrip() for line in tree_lines(one, width, rows)]


def test_a_tree_lies_on_its_side_the_path_in_its_first_line_which_stays() -> None:
    assert plain(tree()) == ["9┬✓11┬✓14─★77", " │   └✗13", " └✗12─·15"]
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
    named = [f"{mark} {name}" for mark, _, name in DRAFT_MARKS.values() if name]
    assert drafts_legend(99) == " ".join(named)
    assert drafts_legend(24) == "✓ accepted ✗ rejected"


def test_text_of_tokens_is_shown_as_it_is_and_safe() -> None:
    texts = {9: " the", 11: "\n", 12: "\x1b[2J", 13: "", 14: "漢字", 15: " x" * 30}
    lines = plain(draft_tree(1, TREE_OF_ONE, lambda token: texts.get(token, "?")))
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
    without = screenshot(replace(scene(), drafter="none"), picture(), 100, 30).export_text()
    assert "drafts" not in without and "parse → parallel_prefill branches_ready" in without


# -- requests -------------------------------------------------------------------------------------


def requests(count: int) -> list[RequestView]:
    stages = ["done", "running", "outlining", "waiting"]
    return [
        RequestView(f"r{i}", f"Question {i}?", stages[min(i * 4 // count, 3)], 4, i % 5, 9 * i)
        for i in range(count)
    ]


def test_many_requests_have_a_mark_each() -> None:
    line = panels.request_lines(requests(8), 80, 1).plain
    assert line == " 2/8 requests done ✓✓▶▶OO··  ▶ 2 in parts  O 2 in outlines  · 2 waiting"
    crowd = panels.request_lines(requests(400), 80, 1).plain
    assert len(crowd) <= 80 and "100/400" in crowd and "✓▶" in crowd
    one, two = requests(2)
    line = panels.request_lines([replace(one, refused=True), two], 60, 1).plain
    assert line.startswith(" 0/2 requests done ✗O") and "✗ 1 refused" in line


def test_a_line_for_each_request_with_those_that_run_before_the_others() -> None:
    lines = panels.requests_text(requests(8), 60, 4).plain.split("\n")
    assert [line.split()[1] for line in lines[:3]] == ["r2", "r3", "r4"]
    assert lines[3] == "  … and 5 more"
    assert lines[1] == "▶ r3     ━━━━━━──   3/4    27 Question 3?"


def test_a_long_question_is_cut_at_a_word() -> None:
    question = "Why " + "is the sky so very blue " * 9 + "?"
    one = [RequestView("1", question, "running", 0, 0, 0)]
    for rows in (1, 2, 3):
        lines = panels.request_lines(one, 60, rows).plain.split("\n")
        assert len(lines) == rows and max(map(len, lines)) <= 60 and lines[-1].endswith("…")


def test_a_large_terminal_has_drafts_trace_and_requests_at_once() -> None:
    text = "\n".join(screen(160, 50, replace(picture(), requests=tuple(requests(5))), 5))
    for wanted in ("drafts", "trace · ms", "requests · parts", "sequence", "Question 4?"):
        assert wanted in text, wanted


# -- the player ------------------------------------------------------------------------------------


@pytest.fixture
def replay(shell: Any) -> Replay:
    assert shell.run(max_new_tokens=8) == Code.OK
    return Replay(SavedRun(shell.latest))


def test_forwards_back_and_at_any_speed(replay: Replay) -> None:
    player, last = Player(replay), len(replay) - 1
    assert player.playing and player.frame == 0
    half = (replay.times[-1] - replay.times[0]) / 2e9
    player.pass_time(half)
    middle = player.frame
    assert 0 < middle < last and replay.times[middle] <= player.at < replay.times[middle + 1]
    assert player.press("right") and player.frame == middle + 1 and not player.playing
    player.pass_time(9.0)
    assert player.frame == middle + 1, "it pauses"
    player.press("left")
    assert player.frame == middle
    for key, wanted in (("home", 0), ("left", 0), ("end", last), ("l", last)):
        player.press(key)
        assert player.frame == wanted, key
    player.press(" ")
    assert player.playing and player.frame == 0, "from the end it begins anew"
    player.press("down")
    assert player.speed == 0.5
    player.pass_time(half)
    assert player.at == pytest.approx(replay.times[0] + half * 0.5e9)
    player.pass_time(1e6)
    assert player.frame == last and not player.playing
    assert not player.press("q")


def test_from_round_to_round_and_the_bar_says_where_in_any_width(replay: Replay) -> None:
    player, seen = Player(replay), []
    for _ in range(4):
        player.press("page down")
        seen.append(replay.snapshot(player.frame).meter.forwards)
    assert seen == [1, 2, 3, 4]
    player.press("page up")
    assert replay.snapshot(player.frame).meter.forwards == 3
    player = Player(replay)
    for width in (20, 40, 80, 160):
        assert player.bar(width).cell_len <= width
    bar = player.bar(160).plain
    assert f"step 1/{len(replay)}" in bar and " 1x " in bar and "q quit" in bar


def test_in_a_replay_keys_scroll_and_open_the_help(replay: Replay) -> None:
    player = Player(replay)
    at, speed = player.frame, player.speed
    player.pages.last = 3
    for key, first in (("j", 1), ("j", 2), ("k", 1)):
        assert player.press(key) and player.pages.first == first
    assert player.press("?") and player.pages.help
    assert player.press("q") and not player.pages.help
    assert (player.frame, player.speed, player.playing) == (at, speed, True)
    assert not player.press("q")


def test_it_is_played_until_a_key_or_to_its_end(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    console = Console(file=out, **TERMINAL, width=90, height=24)
    player, keys = Player(replay), Keys(io.StringIO())
    keys.available = True
    typed = ["end", "left", "", "q"]
    monkeypatch.setattr(keys, "read", lambda seconds: typed.pop(0))
    play(player, console, keys)
    assert player.frame == len(replay) - 2 and f"step {len(replay) - 1}/" in out.getvalue()
    player = Player(replay, speed=1000)
    began = monotonic()
    play(player, console, Keys(io.StringIO()))
    assert player.frame == len(replay) - 1 and monotonic() - began < 5


def test_keys_of_a_terminal() -> None:
    outer, inner = pty.openpty()
    with open(inner, encoding="utf-8") as stream, Keys(stream) as keys:
        assert keys.available and keys.read(0.0) == ""
        os.write(outer, b"\x1b[C\x1b[5~ q\x1bOA\x1b[99~")
        found = [keys.read(1.0) for _ in range(5)]
        assert found == ["right", "page up", " ", "q", "up"]
        assert keys.read(0.1) == "\x1b" and keys.read(0.0) == ""
    assert not keys.available
    os.close(outer)
    with Keys(io.StringIO("q")) as keys:
        assert not keys.available and keys.read(0.01) == ""
