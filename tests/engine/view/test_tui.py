"""The live view: made-up pictures at both sizes, every panel's promises, and cached documents."""

import io
from dataclasses import replace
from time import sleep

import numpy as np
import pytest
from helpers.screens import screenshot
from rich.cells import cell_len
from rich.console import Console

from specsot.engine.record.metrics import Meter
from specsot.engine.record.recorder import Recorder
from specsot.engine.record.run_view import (
    BRANCH,
    FREE,
    OUTLINE,
    PICKED,
    PREFIX,
    REUSED,
    TREE,
    BranchView,
    Move,
    PoolView,
    RequestView,
    Scene,
    Snapshot,
    draft_tree,
    slot_codes,
)
from specsot.engine.terminal import usable
from specsot.engine.view.panels import (
    LIT,
    STATUS_STYLES,
    branches_text,
    cell_of,
    downsample,
    histogram_bars,
    layers_line,
    states_text,
    strip_text,
    trace_text,
)
from specsot.engine.view.tui import FRAMES, LiveView
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import LayerStatus
from specsot.states.blend import Reused
from specsot.states.request import Branch, Request
from specsot.states.round import BlendSummary, VerifiedTree

STATES = [
    "skeleton",
    "expand_root",
    "grow_tree",
    "verify",
    "parse",
    "parallel_prefill",
    "continuous_decode",
    "merge",
    "done",
]


# the root 9; 11 and 12 below it, 13 and 14 below 11, 15 below 12: 11 and 14 are accepted
TREE_OF_ONE = VerifiedTree(
    "1/1", 30, 9, (-1, 11, 12, 13, 14, 15), (0, 0, 0, 1, 1, 2), (0, 1, 4), 77, 3
)
CHAIN_OF_TWO = VerifiedTree("1/2", 40, 8, (-1, 21, 22, 23, -1), (0, 0, 1, 2, 0), (0, 1), 66, 2)


def branch(index: int, stage: str = "running", text: str = "word " * 40) -> BranchView:
    finish = "stop" if stage == "done" else ""
    return BranchView("1", index, f"Title {index}", stage, finish, 12, 256, text)


def picture(branches: int = 5) -> Snapshot:
    codes = np.array(
        [PREFIX] * 60 + [BRANCH + i for i in range(5) for _ in range(20)] + [TREE] * 20 + [0] * 3916
    ).astype(np.int16)
    moves = [
        Move("parse", "parallel_prefill", "branches_ready", 0.4, 0),
        Move("continuous_decode", "parallel_prefill", "none_running", 12.3, 14),
        Move("verify", "expand_root", None, 8.1, 9),
    ] * 5
    meter = Meter(forwards=42, rounds=34, tokens=412, drafted=100, accepted=34)
    meter.lengths.update({1: 8, 2: 20, 3: 30, 4: 16, 5: 6})
    for i, name in enumerate(STATES):
        meter.visits[name], meter.nanos[name] = i * 3, i * 10_000_000
    return Snapshot(
        "expand_root",
        "verify",
        tuple(moves),
        tuple(branch(i) for i in range(branches)),
        PoolView(codes, 180, 4096, 1_200_000, 150, 4200),
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


@pytest.mark.parametrize("width, height", [(80, 24), (100, 30), (140, 50), (60, 20)])
def test_fits_its_terminal(width: int, height: int) -> None:
    lines = screen(width, height, picture())
    assert len(lines) == height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width, height", [(80, 24), (100, 30)])
def test_everything_asked_for_is_on_the_screen(width: int, height: int) -> None:
    text = "\n".join(screen(width, height, picture()))
    for name in STATES:
        assert name in text
    for wanted in (
        "bim_eagle",
        "eagle3",
        "round 34",
        "8.1 ms +9",
        "How do bees make honey?",
        "✓ accepted ✗ rejected ★ bonus ◆ own ! forced",
        "✗ refused ■ halted",
        "◦ open",
        "★77",
        "Title 4",
        "12/256",
        "KV 180/4096 4 %",
        "127 tok/s",
        "9.81 tok/forward",
        "2.90",
        "prefix",
        "tree",
    ):
        assert wanted in text, wanted


def test_a_small_terminal_shows_five_branches_side_by_side() -> None:
    console = screenshot(replace(scene(), states=("schedule", *STATES, "idle")), picture(), 80, 24)
    lines = console.export_text(styles=False).split("\n")
    found = [line.index("Title") for line in lines if "Title" in line]
    assert len(found) == 5 and len(set(found)) == 1
    assert not any("idle" in line for line in lines), "nobody waits there in a run"


def test_the_current_state_is_lit_and_the_last_move_is_an_arrow() -> None:
    text = states_text(scene(), picture(), times=False)
    lines = [line.plain for line in text.split("\n")]
    assert lines[1].startswith("╭▶ expand_root")
    assert lines[2].startswith("│ ◦grow_tree")
    assert lines[3].startswith("╰╴ verify")
    lit = [s for s in text.spans if s.style == LIT]
    assert [text.plain[s.start : s.end].strip() for s in lit] == ["expand_root"]


def test_a_trace_line_holds_guard_milliseconds_and_tokens() -> None:
    text = trace_text(picture().moves, 60, 3).plain
    assert "parse → parallel_prefill branches_ready" in text
    assert "none_running  12.3  +14" in text
    assert len(text.split("\n")) == 3


def test_many_branches_show_those_that_run() -> None:
    views = [branch(i, "done") for i in range(6)] + [branch(6), branch(7), branch(8, "waiting")]
    lines = branches_text(views, False, 80, 4).plain.split("\n")
    assert [line[3:5].strip() for line in lines[:3]] == ["7", "8", "9"]
    assert lines[3].strip() == "… and 6 more"


def test_text_of_a_model_cannot_touch_the_terminal() -> None:
    view = branch(0, text="ok \x1b[2J[bold]x[/bold] \u202e\x07 end")
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    console.print(branches_text([view], False, 100, 1))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in shown and "\x07" not in shown and "\u202e" not in shown
    assert "[bold]x[/bold]" in shown


def test_the_end_of_a_long_text_fills_its_lines() -> None:
    text = " ".join(f"word{i}" for i in range(60))
    (line,) = branches_text([branch(0, text=text)], False, 80, 1).plain.split("\n")
    assert line.endswith("word58 word59") and len(line) > 72
    lines = branches_text([branch(0, text=text)], False, 80, 3).plain.split("\n")
    assert len(lines) == 3 and lines[-1].endswith("word59")
    short = branches_text([branch(0, text="just this")], False, 80, 3).plain
    assert short.endswith("just this")


def test_wide_characters_keep_the_columns() -> None:
    snap = picture(1)
    wide = replace(snap, branches=(branch(0, text="漢字かな交じり文 " * 30),))
    console = screenshot(scene(), wide, 80, 24)
    text = console.export_text(styles=False)
    assert "漢字" in text
    assert max(cell_len(line) for line in text.split("\n")) <= 80


def test_strip_covers_what_is_used() -> None:
    text, step = strip_text(picture().pool, 40, 2)
    assert step == 3
    assert [len(row) for row in text.plain.split("\n")] == [40, 40]
    assert text.plain.count("█") == 20 and "1" in text.plain and "5" in text.plain


def test_downsampling_prefers_what_is_used() -> None:
    codes = np.array([FREE, FREE, PREFIX, TREE, TREE, PREFIX, FREE, FREE, FREE, 7], np.int16)
    assert downsample(codes, 3).tolist() == [PREFIX, TREE, FREE, 7]
    assert downsample(np.zeros(4, np.int16), 2).tolist() == [FREE, FREE]


def test_codes_follow_the_slot_table() -> None:
    kv = KVCache(1, 1, 2, 8)
    request = Request("1", 0, "?", [], [], frozenset(), 5, 5, prefix_owner=0)
    request.root = Branch(request, -1, 1, 5)
    request.branches = [Branch(request, 0, 2, 5), Branch(request, 1, 3, 5)]
    for owner in (0, 1, 2, 3):
        kv.commit_(kv.append_([owner], [0]), [0])
    kv.append_([3, 3], [1, 2])
    found = slot_codes(kv, [request]).tolist()
    assert found == [PREFIX, OUTLINE, BRANCH, BRANCH + 1, TREE, TREE, FREE, FREE]


def test_histogram_has_a_column_per_length() -> None:
    lines = histogram_bars({1: 4, 3: 2}, 4, 18).plain.split("\n")
    assert lines[-1] == "  1  2  3  4"
    assert [line[1:3] for line in lines[:4]] == ["██"] * 4
    assert [line[7:9] for line in lines[:4]] == ["  ", "  ", "██", "██"]


@pytest.mark.parametrize(
    "environ, wanted",
    [({}, True), ({"NO_COLOR": "1"}, False), ({"CI": "true"}, False), ({"CI": "false"}, True)],
)
def test_when_a_live_view_is_used(environ: dict[str, str], wanted: bool) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    assert usable(terminal, environ) is wanted
    assert not usable(Console(file=io.StringIO(), _environ={}), environ)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert not usable(dumb, environ)


def test_the_view_only_asks_and_reads() -> None:
    recorder = Recorder(lambda ids: "")
    recorder.snapshot = picture()
    console = Console(
        file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"}
    )
    with LiveView(recorder, scene(), console):
        sleep(0.5)
    assert recorder.snapshot_requested and FRAMES <= 8
    assert "bim_eagle" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [10, 24, 40, 79, 96, 300])
@pytest.mark.parametrize("height", [3, 12, 27, 28, 90])
def test_odd_sizes_draw_something(width: int, height: int) -> None:
    assert len(screen(width, height, picture(9), requests=3)) == height


# -- cached documents -----------------------------------------------------------------------------

BLENDED = BlendSummary((0, 1, 2, 2), (370, 370, 97, 97), (47,), 320, 0, 50, ((320, 50),))


def test_every_layer_has_a_cell_with_its_rows() -> None:
    line = layers_line(BLENDED, 100)
    assert line.plain == "layers F370 C370 A97 A97  cached 320 · picked 47 · fresh 50"
    styles = [str(span.style) for span in line.spans]
    wanted = [STATUS_STYLES[LayerStatus(status)] for status in BLENDED.plan]
    assert [style for style in styles if style in wanted] == wanted


def test_a_deep_model_shows_letters_alone() -> None:
    deep = replace(BLENDED, plan=(0, 1, *[2] * 38), live=(370, 370, *[97] * 38))
    line = layers_line(deep, 60)
    assert line.plain == "layers FC" + "A" * 38 and line.cell_len <= 60
    assert layers_line(deep, 20).cell_len == 20


@pytest.mark.parametrize(("width", "height"), [(110, 34), (80, 24)])
def test_layers_are_shown_where_rows_were_cached(width: int, height: int) -> None:
    snap = picture()
    before = screenshot(scene(), snap, width, height).export_text()
    after = screenshot(scene(), replace(snap, blend=BLENDED), width, height).export_text()
    assert "layers" not in before and "F370 C370 A97" in after
    assert len(after.splitlines()) == len(before.splitlines())


def test_cached_rows_are_told_from_recomputed_ones() -> None:
    pool = KVCache(1, 1, 2, 16)
    pool.commit_(pool.append_([4] * 6, list(range(6))), list(range(6)))
    request = Request("1", 0, "", [], [], frozenset(), 1, 0, prefix_owner=3)
    request.branches = [Branch(request, 0, 4, 1)]
    codes = slot_codes(pool, [request], {4: Reused({1, 2, 3, 4}, {2})})
    wanted = [BRANCH, REUSED, PICKED, REUSED, REUSED, BRANCH]
    assert codes[:6].tolist() == wanted and not codes[6:].any()
    assert slot_codes(pool, [request], {9: Reused({1}, {1})})[:6].tolist() == [BRANCH] * 6
    assert np.unique([cell_of(code)[0] for code in (BRANCH, REUSED, PICKED)]).size == 3
