"""docs/tui.svg: the live view of a kept run, whose times are made even.

python -m tools.pictures.tui             draw the picture again, from tools/pictures/run
python -m tools.pictures.tui --record    make that run anew first (needs torch, some seconds)"""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from specsot.engine.cli.run_command import run_command
from specsot.engine.prepare.options import RunOptions
from specsot.engine.record.replay import Replay
from specsot.engine.record.run_folder import SavedRun
from specsot.engine.view.tui import frame

ROOT = Path(__file__).parents[2]
RUN = Path(__file__).parent / "run"
PICTURE = ROOT / "docs" / "tui.svg"
GRAPH, STEP, SIZE = "bim_eagle", 94, (100, 30)
PARSE = "outline.parse_"  # the one op whose record a replay needs
GRAIN = 10_000  # nanoseconds


def still(replay: Replay, number: int, width: int, height: int) -> Console:
    """A console with the picture after one frame, for export as text or SVG."""
    settings: Any = {"color_system": "truecolor", "legacy_windows": False, "_environ": {}}
    settings |= {"record": True, "force_terminal": True, "file": io.StringIO()}
    console = Console(width=width, height=height, **settings)
    console.print(frame(replay.scene, replay.snapshot(number), width, height), height=height)
    return console


def picture() -> str:
    """The SVG of the kept run."""
    console = still(Replay(SavedRun(RUN)), STEP - 1, *SIZE)
    return console.export_svg(title=f"specsot run {GRAPH}")


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
