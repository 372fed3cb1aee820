"""Questions that a chat model asks itself: the user's turns of its own chat format, drawn from it.

    python -m tools.smollm2.user_turns --model smollm2 --count 4000 --out turns.jsonl

Prompts of this kind are what its drafters are trained on: no instruction set of anybody's is
needed, and the texts lie where the model's own distribution does (the idea is Magpie's, arXiv
2406.08464).
Turns that did not end, that are very short, that came before, or that a file of `--without` has are
left out."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from specsot.engine.prepare.inputs import Prompt, read_file
from specsot.engine.run.api import open_session
from specsot.engine.run.session import Session
from specsot.states.request import Finish
from specsot.states.text.tokens import PromptTokens

MARK = "HereTheUserSpeaks"
LEAST = 12  # characters of a question


def turns(session: Session) -> Iterator[str]:
    """User turns without end, many at a time."""
    tokenizer = session.models.tokenizer
    asked = [{"role": "user", "content": MARK}]
    head = str(tokenizer.apply_chat_template(asked, tokenize=False)).split(MARK)[0]
    tail = PromptTokens(tuple(tokenizer.encode(head, add_special_tokens=False)))
    run = session.start([], lambda event: None)
    manager, most = run.board["branches"], session.program.graph.layout.max_num_branches
    for number in count():
        if len(manager.table.unfinished) < 2 * most:
            one = session.request(Prompt(str(number), "?"))
            manager.lifecycle.submit(replace(one, prefix=PromptTokens(), tail=tail))
            continue
        run.advance()
        for request in manager.table.forget_finished():
            branch = request.branches[0]
            if branch.finish is Finish.STOP:
                yield session.prompts.decode(branch.tokens).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=Path, action="append", default=[])
    args = parser.parse_args()
    room = [f"layout.max_num_branches={args.at_once}", f"layout.kv_slots={args.at_once * 160}"]
    session = open_session(
        "autoregressive",
        model=args.model,
        dtype="bfloat16",
        seed=args.seed,
        max_new_tokens=args.budget,
        sets=[*room, "sampling.temperature=0.9"],
    )
    seen = {p.text.casefold() for file in args.without for p in read_file(file).items}
    kept = 0
    with args.out.open("w", encoding="utf-8") as file, torch.inference_mode():
        for text in turns(session):
            if len(text) >= LEAST and text.casefold() not in seen:
                seen.add(text.casefold())
                file.write(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
                file.flush()
                kept += 1
                if kept % 100 == 0:
                    print(f"{kept} questions", flush=True)
            if kept == args.count:
                return


if __name__ == "__main__":
    main()
