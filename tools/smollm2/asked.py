"""What the measurements of this folder have in common: their options, prompts and sessions."""

import argparse
from pathlib import Path
from random import Random
from typing import Any

from specsot.engine.bench.experiment import read_side
from specsot.engine.prepare.inputs import Prompt, read_file
from specsot.engine.run.api import open_session
from specsot.engine.run.session import Session


def arguments(description: str | None, count: int) -> argparse.Namespace:
    """Of the command line; `count` prompts unless it says otherwise."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--graph", action="append", required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--model")
    parser.add_argument("--drafter-model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, or of each branch")
    parser.add_argument("--stay", action="store_true", help="graphs are engines that stay")
    return parser.parse_args()


def drawn(args: argparse.Namespace, more: int = 0) -> list[Prompt]:
    """As many prompts of all files as asked for, and some more, drawn by the seed."""
    items = [prompt for file in args.prompts for prompt in read_file(file).items]
    return Random(args.seed).sample(items, args.count + more)


def session(args: argparse.Namespace, side: str, *sets: str) -> Session:
    """Of GRAPH or GRAPH@SET,SET..."""
    graph, own = read_side(side)
    given: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("profile", "model", "drafter_model", "dtype", "threads")
    }
    return open_session(graph, sets=[*sets, *own], max_new_tokens=args.tokens, **given)
