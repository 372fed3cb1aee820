"""docs/tui.svg and docs/screens are what the views draw today, of a run of the graph as it is."""

import re
from html import unescape

from specsot.engine.prepare.files import open_graph
from specsot.engine.record.replay import Replay
from specsot.engine.record.run_folder import SavedRun
from tools.pictures.tui import GRAPH, PICTURE, RUN, SCREENS, STEP, even, picture, screens, shown

AGAIN = "it is not what the view draws: python -m tools.pictures.tui"
OTHER = f"{GRAPH} has changed: python -m tools.pictures.tui --record"


def seen(svg: str) -> list[tuple[str, str, str]]:
    """The texts, their colours, and the frames that have them."""
    styles = dict(re.findall(r"\.(s\d+)\{([^}]*)\}", svg))
    pieces = re.findall(r'<text class="(s\d+) ?([\w-]*)"[^>]*>([^<]*)</text>', svg)
    return [(unescape(text), styles[style], frames) for style, frames, text in pieces]


def test_the_picture_is_current() -> None:
    kept, drawn = seen(PICTURE.read_text(encoding="utf-8")), seen(picture())
    assert len(kept) > 100 and kept == drawn, AGAIN


def test_the_screens_are_current_and_small() -> None:
    drawn = screens()
    assert {file.name for file in SCREENS.glob("*.svg")} == {*drawn}
    for name, svg in drawn.items():
        kept = (SCREENS / name).read_text(encoding="utf-8")
        assert seen(kept) == seen(svg) and len(kept) < 60_000, f"{name}: {AGAIN}"
        assert "?\xa0help" in "".join(text for text, *_ in seen(kept)), name


def test_its_run_is_of_the_graph_as_it_is() -> None:
    resolved = open_graph(GRAPH).graph.model_dump(by_alias=True, exclude_none=True, mode="json")
    kept = SavedRun(RUN).manifest["graph"]["resolved"]
    assert {k: v for k, v in kept.items() if k != "doc"} == {
        k: v for k, v in resolved.items() if k != "doc"
    }, OTHER


def test_it_shows_the_method() -> None:
    found = Replay(SavedRun(RUN))
    assert found.missing == [] and found.snapshot(STEP - 1).state == "verify"
    marks = {node.mark for tree in found.snapshot(STEP - 1).trees for node in tree.nodes}
    assert {"accepted", "rejected", "bonus", "own"} <= marks


def test_times_are_made_even() -> None:
    def move(source: str, ns: int) -> dict[str, object]:
        return {"kind": "move", "from": source, "to": "x", "ns": ns, "t": 1}

    records = [move("start", 5), move("a", 12_345), move("b", 70_000), {"kind": "op", "op": "?"}]
    records += [{"kind": "round", "t": 7}, move("a", 38_000)]
    told = list(even(records))
    assert [one.get("ns") for one in told] == [0, 30_000, 70_000, None, 30_000]
    assert [one["t"] for one in told] == [0, 30_000, 100_000, 100_000, 130_000]


def test_it_is_a_recording() -> None:
    svg = PICTURE.read_text(encoding="utf-8")
    frames = re.findall(r"@keyframes (f\d+-\d+)\{", svg)
    assert len(frames) > 100 and {f".{name}{{" in svg for name in frames} == {True}
    steps = shown(Replay(SavedRun(RUN)))
    assert {f"f{number}-{number + 1}" for number in range(len(steps))} <= {*frames}
    still = [text for text, _, name in seen(svg) if f".{name}{{visibility:hidden" not in svg]
    assert "need" in "".join(still), "the tokens of the frame without animation"


def test_a_change_is_seen() -> None:
    svg = PICTURE.read_text(encoding="utf-8")
    (color, *_) = re.findall(r"\{fill: (#\w{6})", svg)
    assert seen(svg.replace("drafts", "draughts")) != seen(svg) != seen(svg.replace(color, "#000"))
