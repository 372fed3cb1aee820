"""Many requests at once: what a token costs beside strangers, under ``bim`` and ``batching``.

    python -m tools.bench.bench_requests --threads 1

Prompts of as many random tokens, all submitted at the start, decoded without a drafter. Tokens per
second count the whole run, prefill included; seconds are those of the processor, so that a busy
neighbour counts little. The layouts take turns `--repeats` times, each first every other time;
figures are medians, the ratio is the median of the pairs'. The masks' bytes are the most of any
forward.
"""

import argparse
import random
from dataclasses import replace
from statistics import median
from time import process_time

import torch

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session
from specsot.states.requests.branch import Request
from specsot.states.text.prompt_tokens import PromptTokens
from specsot.states.trace import OpRan

LAYOUTS = ("bim", "batching")


def requests(session: object, count: int, tokens: int, budget: int) -> list[Request]:
    draw = random.Random(count)
    size = session.models.target.vocab_size  # type: ignore[attr-defined]
    made = []
    for number in range(count):
        one = session.request(Prompt(str(number), "?"))  # type: ignore[attr-defined]
        ids = tuple(draw.randrange(10, size) for _ in range(tokens))
        one = replace(one, prefix=PromptTokens(), tail=PromptTokens(ids))
        made.append(replace(one, stop_ids=frozenset(), budget=budget))
    return made


def measure(layout: str, count: int, args: argparse.Namespace) -> tuple[float, float, int]:
    """(tokens per second, seconds per decoding round, largest mask in bytes)."""
    room = args.tokens + args.new + 64
    sets = [f"layout.kind={layout}", f"layout.max_active={count}", *args.sets]
    sets.append(f"layout.capacity={room * (count if layout == 'bim' else 1)}")
    session = open_session("autoregressive", sets=sets, threads=args.threads)
    sizes: list[int] = []

    def sink(event: object) -> None:
        if isinstance(event, OpRan) and event.op == "mask.build":
            groups = run.board["attention"].groups
            sizes.append(sum(group.mask_GqK.numel() for group in groups))

    run = session.start([], sink)
    for request in requests(session, count, args.tokens, args.new):
        run.board["branches"].submit(request)
    masks, rounds, begun = 0, list[float](), process_time()
    with torch.inference_mode():
        while not run.finished:
            before = process_time()
            run.advance()
            masks = max(masks, sizes.pop() if sizes else 0)
            if run.state in ("verify", "continuous_decode"):
                rounds.append(process_time() - before)
    seconds = process_time() - begun
    run.close()
    rounds.sort()
    return count * args.new / seconds, rounds[len(rounds) // 2], masks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=580)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 24, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    args = parser.parse_args()
    measure("bim", 1, args)  # the first run of a process is slower
    for count in args.counts:
        pairs = []
        for turn in range(args.repeats):
            order = LAYOUTS if turn % 2 else LAYOUTS[::-1]
            pair = {layout: measure(layout, count, args) for layout in order}
            pairs.append([pair[layout] for layout in LAYOUTS])
        for at, layout in enumerate(LAYOUTS):
            speed, round_time, masks = map(median, zip(*(pair[at] for pair in pairs), strict=True))
            print(
                f"{count:3} requests {layout:8} {speed:7.1f} tokens/s, "
                f"{round_time * 1e3:7.2f} ms per round, masks {masks / 2**20:6.1f} MiB"
            )
        ratio = median(bim[0] / batching[0] for bim, batching in pairs)
        print(f"{count:3} requests bim / batching {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
