"""An engine under mixed requests that are cancelled at any moment: memory, slots, integrity.

    python -m tools.bench.soak_served --requests 500

Requests of every kind come while others run; some are cancelled, some run out of time. Pools, radix
tree and request table are checked as it goes and at the end, when no slot may be needed and all
that are in use must be those of kept segments. The exit code is 1 if memory has grown by more than
`MOST` KB per request over the last two thirds."""

import argparse
import gc
import random
from itertools import cycle, islice
from time import perf_counter

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.engine import Engine, Handle

from .soak import MOST, anonymous, mixed, slope

CHECKED = 16  # steps between two checks
SETS = (
    "scheduler.admission=optimistic",
    "scheduler.max_num_batched_tokens=64",
    "layout.kv_slots=700",
)


def check(engine: Engine) -> None:
    """Raise AssertionError unless everything adds up."""
    branches = engine.manager
    for pool in branches.pools:
        pool.check_integrity()
    if branches.prefixes is not None:
        branches.prefixes.check_integrity()


def soak(engine: Engine, questions: list[str], at_once: int, seed: int) -> list[int]:
    """Serve them all; KB of memory after each request that has ended."""
    chance, live, noted, steps = random.Random(seed), list[Handle](), list[int](), 0
    waiting = iter(questions)
    while True:
        while len(live) < at_once and (question := next(waiting, None)) is not None:
            budget, seconds = chance.choice((4, 16, 48)), chance.choice((None, None, None, 0.2))
            prompt = Prompt(str(len(noted) + len(live)), question, None, budget)
            live.append(engine.submit(prompt.text, max_new_tokens=budget, timeout=seconds))
        if live and chance.random() < 0.01:
            engine.cancel(chance.choice(live))
        if not engine.step():
            break
        steps += 1
        if steps % CHECKED == 0:
            check(engine)
        if ended := [one for one in live if one.done]:
            live = [one for one in live if one not in ended]
            gc.collect()
            noted += [anonymous()] * len(ended)
    return noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--graph", default="bim_eagle")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=None)
    args = parser.parse_args()
    sets = SETS if args.sets is None else args.sets
    engine, began = Engine(args.graph, threaded=False, threads=1, sets=sets), perf_counter()
    questions = [*islice(cycle(mixed(args.requests, args.seed)), args.requests)]
    noted = soak(engine, questions, args.at_once, args.seed)
    check(engine)
    found, kept = engine.stats(), engine.manager.prefixes
    held = 0 if kept is None else kept.idle + kept.pinned
    assert found.slots == 0, f"{found.slots} slots are in use after the last request"
    assert engine.manager.kv.current_length == held, "slots are not accounted for"
    ends = ", ".join(f"{count} {name}" for name, count in sorted(found.ended.items()))
    growth = slope(noted)
    print(
        f"{args.graph}: {found.submitted} requests in {perf_counter() - began:.0f} s, {ends}; "
        f"{found.steps} steps, {found.preempted} preemptions, {found.tokens} tokens\n"
        f"  0 slots needed at the end, {held} kept; RssAnon {noted[0]} -> {noted[-1]} KB, "
        f"slope {growth:+.2f} KB per request (at most {MOST:.0f})"
    )
    engine.close()
    raise SystemExit(growth > MOST)


if __name__ == "__main__":
    main()
