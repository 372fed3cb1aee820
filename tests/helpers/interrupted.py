"""A training that is killed at random moments and resumed, and one that is not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import specsot
from helpers.tiny import write_tiny_target

EMBEDDED = Path(specsot.__file__).parent / "models" / "embedded" / "target"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SMALL = "--batch-tokens 256 --length 128 --threads 1 --save-minutes 0.001 --measure-minutes 0.005"
KINDS = {
    "eagle2": "--intermediate 32 --unroll 2",
    "eagle3": "--draft-vocabulary 256 --intermediate 32 --unroll 2",
    "dflash": "--layers 1 --intermediate 32 --num-anchors 8 --block-size 4",
    "medusa": "--heads 2 --blocks 1",
    "vanilla": "--layers 1 --hidden 32 --intermediate 32 --heads 2",
}

RUNNER = """
import os, random, signal, sys, time
from pathlib import Path
from specsot.engine.train import dflash as train_dflash
from specsot.engine.train import eagle as train_eagle
from specsot.engine.train import vanilla as train_vanilla
from specsot.engine.cli.main import main

kind, folder, steps, kills, seed, *rest = sys.argv[1:]
draw = random.Random(int(seed))

def start(name):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        out = os.path.join(folder, name)
        main(["train", kind, "--out", out, "--steps", steps, "--resume", *rest])
    return pid

def lines(name):
    log = Path(folder, name + ".run", "log.jsonl")
    return log.read_bytes().count(b"\\n") if log.exists() else 0

os.waitpid(start("whole"), 0)
for moment in sorted(draw.sample(range(int(steps)), int(kills))):
    pid = start("broken")
    while lines("broken") < moment and os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.02))
    os.kill(pid, signal.SIGKILL)
    print(lines("broken"), os.waitpid(pid, 0)[1])
os.waitpid(start("broken"), 0)
"""


def write_inputs(folder: Path) -> list[str]:
    """A tiny target with the embedded tokenizer, conversations for it, and the options for both."""
    target = write_tiny_target(folder / "target", "qwen3", seed=3, vocab=4096)
    for name in TOKENIZER:
        shutil.copy(EMBEDDED / name, target)
    asked = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} and {number}?"},
                {"role": "assistant", "content": f"Twice {number} makes {2 * number}, no more."},
            ]
        }
        for number in range(30)
    ]
    file = folder / "asked.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in asked))
    return ["--target", str(target), "--prompts", str(file)]


def train_twice(kind: str, folder: Path, steps: int = 60, kills: int = 5, seed: int = 1) -> str:
    """Train in ``folder``/whole and, killed again and again, in ``folder``/broken; a line per
    kill."""
    options = [*write_inputs(folder), *SMALL.split(), *KINDS[kind].split()]
    words = [kind, str(folder), str(steps), str(kills), str(seed), *options]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return "".join(line + "\n" for line in done.stdout.split("\n") if line[:1].isdigit())


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def check_equal(folder: Path, kind: str, steps: int, kills: str, count: int = 5) -> None:
    """Every child was killed; the two logs tell the same steps, and the drafters are the same."""
    assert [int(line.split()[1]) for line in kills.splitlines()] == [9] * count, kills
    whole, broken = log_of(folder / "whole.run"), log_of(folder / "broken.run")
    assert [line["step"] for line in whole] == list(range(1, steps + 1))
    assert [line["step"] for line in broken] == list(range(1, steps + 1))
    for one, other in zip(whole, broken, strict=True):
        assert abs(one["loss"] - other["loss"]) <= 1e-6, (kind, one, other)
        assert one["accuracy"] == other["accuracy"]
    assert whole[-1]["held_tau"] == broken[-1]["held_tau"] >= 1.0
    assert len({line["loss"] for line in whole}) > steps // 2
    for file in ("model.safetensors", "config.json"):
        assert (folder / "whole" / file).read_bytes() == (folder / "broken" / file).read_bytes()
