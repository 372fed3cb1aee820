"""Acceptance of drafts on held-out prompts, by kind of text and by depth.

    python -m tools.smollm2.acceptance --graph eagle --graph bim_eagle --prompts questions.jsonl

Prompts are drawn by `--seed` and answered many at once, which changes no token and no acceptance.
`tau` is tokens per branch and round; column d is the share of rounds in which d drafts or more were
accepted, one behind another.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from random import Random

import torch

from specsot.engine.bench.command import read_side
from specsot.engine.prepare.inputs import read_file
from specsot.engine.run.api import open_session
from specsot.engine.run.runner import perform
from specsot.states.requests.branch import Branch


def kind_of(branch: Branch) -> str:
    """What a branch writes."""
    return "outline" if branch.is_root else "answer" if branch.point is None else "part"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", action="append", required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--model", default=None)
    parser.add_argument("--drafter-model", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args()
    items = [prompt for file in args.prompts for prompt in read_file(file).items]
    prompts = Random(args.seed).sample(items, args.count)
    room = [f"layout.max_active={args.at_once}", f"layout.capacity={args.at_once * 1200}"]
    print("| graph | text | rounds | tau | 1 | 2 | 3 | 4 | 5 | 6 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for side in args.graph:
        graph, sets = read_side(side)
        session = open_session(
            graph,
            profile=args.profile,
            model=args.model,
            drafter_model=args.drafter_model,
            dtype=args.dtype,
            threads=args.threads,
            max_new_tokens=args.tokens,
            sets=[*room, *sets],
        )
        with torch.inference_mode():
            run, _, _ = perform(session, prompts)
        accepted: dict[str, list[int]] = defaultdict(list)
        for request in run.board["branches"].requests:
            for branch in request.all_branches():
                accepted[kind_of(branch)] += branch.accepted
        for kind, counts in sorted(accepted.items()):
            tau = 1 + sum(counts) / max(len(counts), 1)
            shares = (sum(n >= d for n in counts) / max(len(counts), 1) for d in range(1, 7))
            depths = " | ".join(f"{share:.2f}" for share in shares)
            print(f"| {side} | {kind} | {len(counts)} | {tau:.2f} | {depths} |", flush=True)
        run.close()


if __name__ == "__main__":
    main()
