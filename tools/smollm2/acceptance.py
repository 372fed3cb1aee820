"""Acceptance of drafts on held-out prompts, by kind of text and by depth.

    python -m tools.smollm2.acceptance --graph eagle --graph bim_eagle --prompts questions.jsonl

Prompts are drawn by `--seed` and answered many at once, which changes no token and no acceptance.
`tau` is tokens per branch and round; column d is the share of rounds in which d drafts or more were
accepted, one behind another.
"""

from collections import defaultdict

import torch

from specsot.engine.run.runner import perform
from specsot.states.request import Branch

from .asked import arguments, drawn, session

AT_ONCE = 8  # requests


def kind_of(branch: Branch) -> str:
    """What a branch writes."""
    return "outline" if branch.is_root else "answer" if branch.point is None else "part"


def main() -> None:
    args = arguments(__doc__, count=16)
    prompts = drawn(args)
    room = (f"layout.max_num_branches={AT_ONCE}", f"layout.kv_slots={AT_ONCE * 1200}")
    print("| graph | text | rounds | tau | 1 | 2 | 3 | 4 | 5 | 6 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for side in args.graph:
        with torch.inference_mode():
            run, _, _ = perform(session(args, side, *room), prompts)
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
