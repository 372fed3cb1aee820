"""Many requests at once: what a token costs beside strangers, under ``bim`` and ``batching``.

    python -m tools.bench.bench_requests --threads 1

Prompts of as many random tokens, all submitted at the start, decoded without a drafter. Tokens per
second count the whole run, prefill included; seconds are those of the processor. The layouts' runs
stand side by side and take their steps in turn, so that a busy neighbour slows both; figures are
medians of `--repeats` runs, the ratio is the median of the pairs'. The masks' bytes are the most of
any forward.
"""

import argparse
import random
from dataclasses import replace
from statistics import median
from time import process_time

import torch

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session
from specsot.engine.run.session import Session
from specsot.states.request import Request
from specsot.states.text.tokens import PromptTokens
from specsot.states.trace import OpRan

LAYOUTS = ("bim", "batching")


def requests(session: Session, count: int, tokens: int, budget: int) -> list[Request]:
    """Requests whose prompts are random tokens, and whose answers end by the budget alone."""
    draw = random.Random(count)
    size = session.models.target.vocab_size
    made = []
    for number in range(count):
        one = session.request(Prompt(str(number), "?"))
        ids = tuple(draw.randrange(10, size) for _ in range(tokens))
        one = replace(one, prefix=PromptTokens(), tail=PromptTokens(ids))
        made.append(replace(one, stop_ids=frozenset(), budget=budget))
    return made


class Measured:
    """One layout's run, and what its steps took.

    Attributes:
        seconds: processor time of all steps; rounds: of each decoding round; masks: bytes of the
            largest forward's.
    """

    def __init__(self, layout: str, count: int, args: argparse.Namespace) -> None:
        room = args.tokens + args.new + 64
        sets = [f"layout.kind={layout}", f"layout.max_num_branches={count}", *args.sets]
        sets.append(f"layout.kv_slots={room * (count if layout == 'bim' else 1)}")
        session = open_session("autoregressive", sets=sets, threads=args.threads)
        self.seconds, self.rounds, self.masks = 0.0, list[float](), 0
        self.tokens = count * args.new
        self.run = session.start([], self._see)
        for request in requests(session, count, args.tokens, args.new):
            self.run.board["branches"].submit(request)

    def _see(self, event: object) -> None:
        if isinstance(event, OpRan) and event.op == "mask.build":
            groups = self.run.board["attention"].groups
            self.masks = max(self.masks, sum(group.mask_GqK.numel() for group in groups))

    def step(self) -> None:
        """One phase further."""
        before = process_time()
        self.run.advance()
        self.seconds += (took := process_time() - before)
        if self.run.state in ("verify", "continuous_decode"):
            self.rounds.append(took)


def pair(count: int, args: argparse.Namespace, turn: int) -> list[Measured]:
    """Both layouts, in the order of `LAYOUTS`, step by step beside each other."""
    both = [Measured(layout, count, args) for layout in LAYOUTS]
    while not both[0].run.finished:
        turn += 1
        for one in both if turn % 2 else both[::-1]:
            one.step()
    for one in both:
        assert one.run.finished, "the layouts take the same steps"
        one.run.close()
    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=580)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 24, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    args = parser.parse_args()
    with torch.inference_mode():
        pair(1, args, 0)  # the first run of a process is slower
        for count in args.counts:
            show(count, [pair(count, args, turn) for turn in range(args.repeats)])


def show(count: int, pairs: list[list[Measured]]) -> None:
    """A line for each layout, and one for both."""
    for layout, runs in zip(LAYOUTS, zip(*pairs, strict=True), strict=True):
        speed = median(one.tokens / one.seconds for one in runs)
        round_time = median(median(one.rounds) for one in runs)
        print(
            f"{count:3} requests {layout:8} {speed:7.1f} tokens/s, "
            f"{round_time * 1e3:7.2f} ms per round, masks {runs[0].masks / 2**20:6.1f} MiB"
        )
    ratio = median(batching.seconds / bim.seconds for bim, batching in pairs)
    print(f"{count:3} requests bim / batching {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
