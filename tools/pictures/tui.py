"""docs/tui.svg: a recording of the live view of a kept run, whose times are made even; and
docs/screens/*.svg: single screens of the live view, a pause and a replay, with their keys.

The run is drawn frame by frame; an element that several frames share is drawn once. A viewer that
shows no animation shows the frame of one round. The pause is one of a run that is made for it.

python -m tools.pictures.tui             draw the pictures again, from tools/pictures/run
python -m tools.pictures.tui --record    make that run anew first (some seconds)"""

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from rich.console import Console, RenderableType

from specsot.engine.cli.run_command import run_command
from specsot.engine.prepare.options import RunOptions
from specsot.engine.record.replay import Replay
from specsot.engine.record.run_folder import SavedRun
from specsot.engine.run.api import Prompt, Recorder, open_session
from specsot.engine.view.keys import Pages
from specsot.engine.view.step import PAGES, STEP_KEYS, Inspector
from specsot.engine.view.tui import LIVE_KEYS, Player, frame, screen

ROOT = Path(__file__).parents[2]
RUN = Path(__file__).parent / "run"
PICTURE = ROOT / "docs" / "tui.svg"
SCREENS = ROOT / "docs" / "screens"
SMALL, LARGE = (80, 24), (120, 40)
GRAPH, STEP, SIZE = "bim_eagle", 94, (100, 30)
SLOW = 20  # steps after the start of the parts that are all drawn
SECONDS = {"parse": 1.2, "parallel_prefill": 1.2, "expand_root": 0.8, "grow_tree": 0.8}
FAST, LAST = 0.3, 3.0  # seconds of a round, and of the end
PARSE = "outline.parse_"  # the one op whose record a replay needs
GRAIN = 10_000  # nanoseconds


def still(replay: Replay, number: int, width: int, height: int) -> Console:
    """A console with the picture after one frame, for export as text or SVG."""
    return printed(frame(replay.scene, replay.snapshot(number), width, height), width, height)


def printed(shown: RenderableType, width: int, height: int) -> Console:
    settings: Any = {"color_system": "truecolor", "legacy_windows": False, "_environ": {}}
    settings |= {"record": True, "force_terminal": True, "file": io.StringIO()}
    console = Console(width=width, height=height, **settings)
    console.print(shown, height=height)
    return console


def exported(console: Console, command: str) -> str:
    return console.export_svg(title=f"specsot {command}", unique_id="t")


def screens() -> dict[str, str]:
    """The SVG of each file of docs/screens."""
    replay = Replay(SavedRun(RUN))
    snap = replay.snapshot(STEP - 1)
    player = Player(replay)
    for _ in range(STEP - 1):
        player.press("right")
    bar = player.bar(LARGE[0])
    command = f"run {GRAPH}"
    shown = {
        "live_80x24": (screen(replay.scene, snap, *SMALL, pages=Pages(LIVE_KEYS)), SMALL, command),
        "live_120x40": (screen(replay.scene, snap, *LARGE, pages=Pages(LIVE_KEYS)), LARGE, command),
        "pause_80x24": (pause(replay, *SMALL), SMALL, f"{command} --step"),
        "replay_120x40": (
            screen(replay.scene, snap, *LARGE, pages=player.pages, bar=bar),
            LARGE,
            "replay",
        ),
    }
    return {
        f"{name}.svg": drawn([exported(printed(picture, *size), words)], [1.0], 0)
        for name, (picture, size, words) in shown.items()
    }


def pause(replay: Replay, width: int, height: int) -> RenderableType:
    """A pause with the drafts that a round offers, of a run with the prompt of the kept one."""
    session = open_session(GRAPH, threads=1)
    recorder = Recorder(session.prompts.decode)
    run = session.start([Prompt("1", replay.requests[0].question)], recorder)
    recorder.attach(run)
    inspector = Inspector(session.program, recorder, run)
    while run.steps < STEP - 1:
        run.advance()
    pages = Pages(STEP_KEYS, PAGES, inspector.pages(width - 4), page=[*PAGES].index("tree"))
    pages.note = f"‖ step {run.steps} {run.state} → verify"
    return screen(replay.scene, replay.snapshot(STEP - 2), width, height, pages=pages)


class Element(NamedTuple):
    """A rectangle or a text of a frame: its attributes, its style, and its characters."""

    tag: str
    attributes: tuple[tuple[str, str], ...]
    style: str
    text: str

    def svg(self, words: str) -> str:
        """Its element, with these classes."""
        pairs = "".join(f" {name}={quoteattr(value)}" for name, value in self.attributes)
        named = f' class="{words}"' if words else ""
        return f"<{self.tag}{named}{pairs}>{escape(self.text)}</{self.tag}>"


def picture() -> str:
    """The SVG of the kept run: the window of one frame, and in it the elements of all."""
    replay = Replay(SavedRun(RUN))
    steps = shown(replay)
    exports = [exported(still(replay, step, *SIZE), f"run {GRAPH}") for step in steps]
    times = [SECONDS.get(replay.snapshot(step).state, FAST) for step in steps]
    times[-1] = LAST
    return drawn(exports, times, steps.index(STEP - 1))


def drawn(exports: Sequence[str], times: Sequence[float], stays: int) -> str:
    """A recording of exported frames, in the window of the one that stays without animation."""
    head = exports[stays].partition('<g transform="translate(9, 41)"')[0]
    window = re.sub(
        r"\n *\.t-r\d+ \{[^}]*\}|<clipPath id=\"t-line-.*?</clipPath>", "", head, flags=re.S
    )
    opening = '<g transform="translate(9, 41)" clip-path="url(#t-clip-terminal)">'
    css, body = animated([elements(svg) for svg in exports], times, stays)
    return f"{window.replace('</style>', f'{css}</style>')}{opening}\n{body}</g>\n</svg>\n"


def shown(replay: Replay) -> list[int]:
    """The steps of the recording: all of the first rounds of the parts, the ends of the rounds of
    the outline, and of every second round after the first ones."""
    states = [replay.snapshot(step).state for step in range(len(replay))]
    parts = states.index("parallel_prefill")
    last = parts + SLOW
    ends = [step for step, state in enumerate(states) if state == "verify"]
    late = [step for step in ends if step > last]
    kept = {step for step in ends if step <= last} | {*late[::2], STEP - 1}
    kept |= {step for step, state in enumerate(states) if state in ("parse", "merge")}
    kept |= {step for step in range(parts, last) if states[step] != "schedule"}
    return sorted(kept)


def elements(svg: str) -> list[Element]:
    """The rectangles and texts inside the window of an exported frame."""
    styles = dict(re.findall(r"\.t-(r\d+) \{([^}]*)\}", svg))
    root = ElementTree.fromstring(svg)
    found = []
    for one in root.iter():
        tag = one.tag.rpartition("}")[2]
        words = one.get("class", "").removeprefix("t-")
        if (tag == "text" and words in styles) or (tag == "rect" and one.get("shape-rendering")):
            kept = [
                (k, v) for k, v in one.items() if k not in ("class", "clip-path", "shape-rendering")
            ]
            found.append(Element(tag, tuple(kept), styles.get(words, "").strip(), one.text or ""))
    return found


def animated(
    frames: Sequence[Sequence[Element]], times: Sequence[float], stays: int
) -> tuple[str, str]:
    """The CSS and the elements of a recording: an element is drawn once for each run of frames that
    have it. times: seconds of each frame; stays: the frame without animation."""
    total = sum(times)
    starts = [100 * sum(times[:number]) / total for number in range(len(frames) + 1)]
    spans: dict[Element, list[list[int]]] = {}
    for number, frame_elements in enumerate(frames):
        for one in dict.fromkeys(frame_elements):
            runs = spans.setdefault(one, [])
            if runs and runs[-1][1] == number:
                runs[-1][1] = number + 1
            else:
                runs.append([number, number + 1])
    styles: dict[str, str] = {}
    rules: dict[str, str] = {}
    lines: dict[str, list[str]] = {"rect": [], "text": []}
    for one, runs in spans.items():
        style = styles.setdefault(one.style, f"s{len(styles)}") if one.style else ""
        for first, last in runs:
            words = [style] if style else []
            if (first, last) != (0, len(frames)):
                name = f"f{first}-{last}"
                words.append(name)
                seen = "visible" if first <= stays < last else "hidden"
                hides = f"{starts[last]:.2f}%{{visibility:hidden}}" if last < len(frames) else ""
                begins = f"0%{{visibility:hidden}}{starts[first]:.2f}%" if first else "0%"
                rules[name] = (
                    f".{name}{{visibility:{seen};animation:{name} {total:.1f}s step-end infinite}}"
                    f"@keyframes {name}{{{begins}{{visibility:visible}}{hides}}}"
                )
            lines[one.tag].append(one.svg(" ".join(words)))
    css = "\n".join([*(f".{name}{{{style}}}" for style, name in styles.items()), *rules.values()])
    still_css = "@media(prefers-reduced-motion){text,rect{animation:none!important}}"
    group = '<g class="t-matrix">'
    body = "\n".join([*lines["rect"], group, *lines["text"], "</g>"])
    return f"\n{css}\n{still_css}\n", f"{body}\n"


def record() -> None:
    """Run the graph with its defaults and keep what a replay needs, which is little."""
    with TemporaryDirectory() as folder:
        options = RunOptions(GRAPH, threads=1, quiet=True, runs_dir=Path(folder))
        assert run_command(options) == 0
        made = SavedRun((Path(folder) / "latest").resolve())
        records = [json.loads(line) for line in made.text("trace.jsonl").splitlines()]
        graph = made.manifest["graph"]
        manifest = {
            "graph": {name: graph[name] for name in ("name", "hash", "resolved")},
            "models": {"target": {"name": "embedded"}},
            "requests": 1,
            "digest": made.manifest["digest"],
        }
        outputs = [_without(line, "context_ids") for line in made.outputs.values()]
        kv = {name: made.metrics["kv"][name] for name in ("target", "drafter")}
    RUN.mkdir(exist_ok=True)
    _write("manifest.json", json.dumps(manifest, indent=1) + "\n")
    _write("metrics.json", json.dumps({"kv": kv}) + "\n")
    _write("outputs.jsonl", _lines(outputs))
    _write("trace.jsonl", _lines(even(records)))


def even(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records with each state taking as long as it did in the median."""
    moves = [one for one in records if one["kind"] == "move"]
    states = {one["from"] for one in moves}
    took = {s: median(one["ns"] for one in moves if one["from"] == s) for s in states}
    now = 0
    for one in records:
        if one["kind"] == "move":
            nanos = round(took[one["from"]] / GRAIN) * GRAIN if one["from"] != "start" else 0
            now += nanos
            yield {**one, "ns": nanos, "t": now}
        elif one["kind"] == "op" and one["op"] == PARSE:
            yield {**one, "ns": 0, "t": now, "shapes": {}}
        elif one["kind"] in ("round", "texts"):
            yield {**one, "t": now}


def _without(value: Any, *endings: str) -> Any:
    """A document without the keys that end so, which are long."""
    if isinstance(value, list):
        return [_without(one, *endings) for one in value]
    if not isinstance(value, dict):
        return value
    return {k: _without(v, *endings) for k, v in value.items() if not k.endswith(endings)}


def _lines(records: Any) -> str:
    return "".join(f"{json.dumps(one, separators=(',', ':'))}\n" for one in records)


def _write(name: str, text: str) -> None:
    (RUN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record()
    PICTURE.write_text(picture(), encoding="utf-8")
    for name, svg in screens().items():
        (SCREENS / name).write_text(svg, encoding="utf-8")
