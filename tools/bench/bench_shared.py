"""Many requests over one document: what sharing its rows gains, and whether tokens are the same.

    python -m tools.bench.bench_shared --threads 1

Requests of one long document and a question each arrive together. `paged` and `bim` hold the
document once; ``batching``, which keeps nothing here, computes it for each request. Tokens per
second count the whole run, the reading of the document included; seconds are those of the
processor, the ratios medians of `--repeats` runs that are taken in turn.
"""

import argparse
import random
from dataclasses import dataclass, replace
from statistics import median
from time import process_time

import torch

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session
from specsot.engine.run.session import Session
from specsot.states.request import Request
from specsot.states.text.tokens import PromptTokens

LAYOUTS = ("bim", "paged", "batching")
QUESTION = 8  # tokens


@dataclass(frozen=True, slots=True)
class Ran:
    """Of one run: tokens per second, most slots in use, each request's tokens."""

    speed: float
    slots: int
    answers: list[list[int]]


def requests(session: Session, count: int, args: argparse.Namespace) -> list[Request]:
    """Requests that begin with the same document, and end by the budget alone."""
    draw, size = random.Random(1), session.models.target.vocab_size
    document = tuple(draw.randrange(10, size) for _ in range(args.tokens))
    made = []
    for number in range(count):
        question = tuple(draw.randrange(10, size) for _ in range(QUESTION))
        one = session.request(Prompt(str(number), "?"))
        texts = {"prefix": PromptTokens(), "tail": PromptTokens(document + question)}
        made.append(replace(one, **texts, stop_ids=frozenset(), budget=args.new))
    return made


def serve(layout: str, count: int, args: argparse.Namespace) -> Ran:
    """So many requests under a layout."""
    own = QUESTION + args.new + 8
    rows = args.tokens + own if layout == "batching" else 2 * args.tokens + count * own
    sets = [f"layout.kind={layout}", f"layout.max_num_branches={count}", f"layout.kv_slots={rows}"]
    sets += ["scheduler.prefix_cache=false"] if layout == "batching" else []
    session = open_session("autoregressive", sets=[*sets, *args.sets], threads=args.threads)
    run = session.start([], lambda event: None)
    branches = run.board["branches"]
    for request in requests(session, count, args):
        branches.submit(request)
    begun = process_time()
    while not run.finished:
        run.advance()
    seconds = process_time() - begun
    answers = [one.branches[0].tokens for one in branches.requests]
    slots = branches.kv.peak_length
    run.close()
    return Ran(sum(map(len, answers)) / seconds, slots, answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="of the document")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    args = parser.parse_args()
    sides = [("bim", 1), *((layout, args.count) for layout in LAYOUTS)]
    found: dict[tuple[str, int], list[Ran]] = {side: [] for side in sides}
    with torch.inference_mode():
        serve("bim", 1, args)  # the first run of a process is slower
        for _ in range(args.repeats):
            for side in sides:
                found[side].append(serve(*side, args))
    alone, copied = found[sides[0]], found["batching", args.count]
    for (layout, count), runs in found.items():
        same = runs[0].answers == copied[0].answers[:count]
        beside = [
            median(one.speed / other.speed for one, other in zip(runs, others, strict=True))
            for others in (alone, copied)
        ]
        print(
            f"{layout:9} {count:3} requests {median(one.speed for one in runs):8.1f} tokens/s, "
            f"{beside[0]:6.2f} x one request, {beside[1]:6.2f} x batching, "
            f"{runs[0].slots:7} slots, tokens {'equal' if same else 'DIFFERENT'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
