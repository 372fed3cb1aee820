"""What a fork takes: branches start behind a long shared prefix, in every layout.

    python -m tools.bench.bench_fork --threads 1

A request with a given outline; its parts start behind its prefix in the op `branch.fork_`. Host
time by the branch: of the fork, which writes tables, and of the whole op, which also lays out the
rows of the parts' prompts; medians of `--repeats`. Bytes are those that the pool counts; the shared
rows are compared with what they were before.
"""

import argparse
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from specsot.engine.models import load_models
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.run.session import Session
from specsot.states.batch import Placer
from specsot.states.manager import BranchStateManager
from specsot.states.request import Request
from specsot.states.text.outline import Outline, Point
from specsot.states.text.tokens import PromptTokens
from specsot.states.trace import Event, OpRan

LAYOUTS = ("bim", "paged", "batching")


@dataclass(frozen=True, slots=True)
class Fork:
    """Of one run: microseconds by the branch of the fork and of the whole op, bytes counted, and
    whether the rows and the pool's address are what they were."""

    fork: float
    placed: float
    moved: int
    untouched: bool


def request_of(session: Session, rows: int, parts: int) -> Request:
    """One whose parts stand behind so many rows, each with a short prompt of its own."""
    ids = PromptTokens(tuple(10 + n * 7 % 900 for n in range(rows)))
    empty = PromptTokens()
    given = Outline(
        "plan", tuple(Point(n + 1, 4, None, (), "part") for n in range(parts)), (), "ok"
    )
    one = Request("1", 0, "?", ids, empty, frozenset(), 4, 1, session.sampling)
    one.given = given
    return one


def forked(graph: str, models: object, args: argparse.Namespace) -> Fork:
    """One run up to the fork, and the fork."""
    ops = list[int]()

    def see(event: Event) -> None:
        if isinstance(event, OpRan) and event.op == "branch.fork_":
            ops.append(event.nanos)

    sets = [
        "skeleton.share=prompt",
        f"layout.max_num_branches={args.parts}",
        "layout.kv_slots=4096",
    ]
    session = Session(open_graph(graph, sets=sets), models, max_new_tokens=4)
    run = session.start([], see)
    branches: BranchStateManager = run.board["branches"]
    branches.submit(request_of(session, args.rows, args.parts))
    while run.state != "parse":
        run.advance()
    pool = branches.kv
    before, where = pool.data.clone(), pool.data.data_ptr()
    slots = torch.from_numpy(np.flatnonzero(pool.owner >= 0))
    start, nanos = branches.placer.start_, list[int]()

    def start_(self: Placer, *words: Any) -> Any:
        begun = perf_counter_ns()
        found = start(*words)
        nanos.append(perf_counter_ns() - begun)
        return found

    with patch.object(Placer, "start_", start_):
        while not ops:
            run.advance()
    same = torch.equal(pool.data[:, :, :, slots], before[:, :, :, slots])
    untouched = same and pool.data.data_ptr() == where
    micros = [one / 1e3 / args.parts for one in (nanos[-1], ops[0])]
    return Fork(*micros, pool.ledger.bytes["fork"], untouched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1950, help="of the shared prefix")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    for layout in LAYOUTS:
        runs = [forked(f"{layout}_eagle", models, args) for _ in range(args.repeats)]
        fork, placed = median(one.fork for one in runs), median(one.placed for one in runs)
        said = "as they were" if all(one.untouched for one in runs) else "CHANGED"
        print(
            f"{layout:9} {args.parts} branches behind {args.rows} rows: {fork:7.1f} us a branch, "
            f"{placed:7.1f} with the rows of its prompt, {max(one.moved for one in runs)} bytes "
            f"moved, rows and address {said}",
            flush=True,
        )


if __name__ == "__main__":
    main()
